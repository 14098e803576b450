"""Case functions that drive verl's Megatron engine, its model and its loss over the pipeline.

They run on ranks that have verl and the stand-in for Transformer Engine. Everything between the
batch and the schedule is verl's: configuration, model, packing, forward step, loss. Only what needs
a checkpoint, an optimizer or Megatron-Bridge is left out of the engine.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.client_tests.other_clients.split_weights import set_weights
from tests.harness.rank_runtime import report_progress

_LAYERS = 4
_VOCABULARY = 64
_DOCUMENTS = 8
_DOCUMENTS_PER_MICROBATCH = 2
_LONGEST_DOCUMENT = 12
_LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Results:
    """What the engine reported, the same on every rank.

    Attributes:
        log_probabilities: Of every token, from a forward-only pass before the first step.
        losses: For every step the loss of each microbatch.
        gradient_norms: For every step the norm of the whole model's gradient.
        is_overlapped: Whether verl chose overlapped communication.
    """

    log_probabilities: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    gradient_norms: tuple[float, ...]
    is_overlapped: bool


def train_with_engine(pipeline_size: int, virtual_size: int | None, num_steps: int) -> Results:
    """Computes log-probabilities of packed documents, then trains on them, all by the engine.

    Args:
        pipeline_size: Number of pipeline stages; equal to the world size.
        virtual_size: Model chunks per stage, None for no interleaving.
        num_steps: Number of training steps, with plain gradient descent.

    Returns:
        The results, which depend on neither size.
    """
    from verl.workers.utils.losses import sft_loss

    dist.init_process_group("gloo")
    engine = _engine(pipeline_size, virtual_size)
    report_progress("log-probabilities")
    with torch.no_grad():
        output = engine.forward_backward_batch(_batch(), None, forward_only=True)
    log_probabilities = None
    if output:
        log_probabilities = tuple(output["model_output"]["log_probs"].values().tolist())
    losses, norms = [], []
    for step in range(num_steps):
        report_progress(f"step {step}")
        loss_function = partial(sft_loss, SimpleNamespace())
        output = engine.forward_backward_batch(_batch(), loss_function, forward_only=False)
        losses.append(tuple(output["loss"]) if output else None)
        norms.append(_apply_gradients(engine.module))
    results: list[Any] = [log_probabilities, losses]
    dist.broadcast_object_list(results, src=pipeline_size - 1)
    return Results(
        log_probabilities=results[0],
        losses=tuple(results[1]),
        gradient_norms=tuple(norms),
        is_overlapped=engine.tf_config.overlap_p2p_comm,
    )


def _engine(pipeline_size: int, virtual_size: int | None) -> Any:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from transformers import Qwen2Config
    from verl.models.mcore import hf_to_mcore_config, init_mcore_model
    from verl.workers.config import McoreEngineConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    from megatron.core import parallel_state

    hf_config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        num_hidden_layers=_LAYERS,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=_VOCABULARY,
        max_position_embeddings=128,
    )
    engine = MegatronEngineWithLMHead(
        model_config=SimpleNamespace(
            hf_config=hf_config,
            model_type="language_model",
            mtp=SimpleNamespace(enable=False, enable_train=False),
            tokenizer=SimpleNamespace(pad_token_id=0),
        ),
        engine_config=McoreEngineConfig(
            pipeline_model_parallel_size=pipeline_size,
            virtual_pipeline_model_parallel_size=virtual_size,
            sequence_parallel=False,
            use_remove_padding=True,
        ),
        optimizer_config=None,
        checkpoint_config=None,
    )
    model_parallel_cuda_manual_seed(1)
    engine.tf_config = hf_to_mcore_config(
        hf_config, torch.float32, gradient_accumulation_fusion=False, bias_dropout_fusion=False
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    count = virtual_size or 1
    engine.module = [
        init_mcore_model(
            engine.tf_config,
            hf_config,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == pipeline_size - 1 and chunk == count - 1,
            vp_stage=chunk if virtual_size else None,
        )
        for chunk in range(count)
    ]
    for chunk in engine.module:
        set_weights(chunk)
    return engine


def _batch() -> Any:
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    generator = torch.Generator().manual_seed(100)
    lengths = torch.randint(3, _LONGEST_DOCUMENT + 1, (_DOCUMENTS,), generator=generator).tolist()
    tokens = [torch.randint(_VOCABULARY, (length,), generator=generator) for length in lengths]
    data = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
            "loss_mask": torch.nested.as_nested_tensor(
                [torch.ones(length, dtype=torch.long) for length in lengths], layout=torch.jagged
            ),
            "temperature": torch.ones(_DOCUMENTS),
        },
        batch_size=[_DOCUMENTS],
    )
    tensordict_utils.assign_non_tensor(
        data, use_dynamic_bsz=False, micro_batch_size_per_gpu=_DOCUMENTS_PER_MICROBATCH
    )
    return data


def _apply_gradients(chunks: list[torch.nn.Module]) -> float:
    """Takes a step of gradient descent and returns the norm over the chunks of all ranks."""
    squares = torch.zeros((), dtype=torch.float64)
    for chunk in chunks:
        for parameter in chunk.parameters():
            squares += parameter.grad.double().square().sum()
            parameter.data -= _LEARNING_RATE * parameter.grad
            parameter.grad = None
    dist.all_reduce(squares)
    return float(squares.sqrt())
