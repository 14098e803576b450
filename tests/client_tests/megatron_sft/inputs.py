"""Tiny models with random weights, their tokenizer, and datasets, all made here.

The folders carry the names of public models: ms-swift recognises a local model by that name. A rank
of a worker pool calls ``make_model``, as it takes ``transformers``; the datasets need nothing.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODEL_NAMES = {
    "qwen3": "Qwen3-0.6B-Base",
    "qwen3_moe": "Qwen3-30B-A3B-Base",
    "glm4_moe": "GLM-4.5-Air",
    "glm_moe_dsa": "GLM-5.1",
}
"""For every model type the public model that it is a tiny version of."""

_SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
]
_VOCABULARY = 288
_LETTERS = "abcdefghijklmnopqrstuvwxyz "

_ATTENTION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    # Large enough that a loss depends visibly on every layer: after crossed messages it is another.
    "initializer_range": 0.15,
    "dtype": "bfloat16",
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_SHARED_EXPERTS = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "qwen3": _ATTENTION,
    "qwen3_moe": {**_ATTENTION, **_EXPERTS, "num_experts": 4},
    "glm4_moe": {**_ATTENTION, **_SHARED_EXPERTS, "num_nextn_predict_layers": 0},
    "glm_moe_dsa": {
        **_ATTENTION,
        **_SHARED_EXPERTS,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 16,
    },
}


def make_model(model_type: str, layers: int, folder: Path) -> None:
    """Writes configuration, random weights and tokenizer as ``from_pretrained`` reads them.

    Args:
        model_type: A key of ``MODEL_NAMES``.
        layers: Number of transformer layers.
        folder: Where to write; made if it does not exist.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {**_CONFIGURATIONS[model_type], "num_hidden_layers": layers}
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(folder)
    _save_tokenizer(folder)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL_TOKENS)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)


def write_dataset(path: Path, answer_lengths: Sequence[int], samples: int) -> None:
    """Writes conversations of random letters in the format ``messages`` of ms-swift.

    Args:
        path: A ``.jsonl`` file.
        answer_lengths: Every answer has one of these lengths, in letters; one token each.
        samples: Number of conversations.
    """
    generator = random.Random(0)

    def text(length: int) -> str:
        return "".join(generator.choices(_LETTERS, k=length))

    with path.open("w") as file:
        for _ in range(samples):
            messages = [
                {"role": "user", "content": text(8)},
                {"role": "assistant", "content": text(generator.choice(answer_lengths))},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
