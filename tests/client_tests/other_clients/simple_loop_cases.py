"""A case function in the manner of Megatron-LM's ``examples/run_simple_mcore_train_loop.py``.

The base's GPT model in its DDP wrapper, one module and one iterator, gradients finalised by the
loop or by the schedule, and no training framework around them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.core import parallel_state
from tests.client_tests.other_clients.split_weights import set_weights
from tests.harness.rank_runtime import model_parallel_groups, report_progress

_LAYERS = 4
_VOCABULARY = 64
_LENGTH = 16
_MICRO_BATCH_SIZE = 2
_MICROBATCHES = 8
_STEPS = 3
_LEARNING_RATE = 0.1

Tokens = torch.Tensor


def train_simple_loop(pipeline_size: int, overlap_grad_reduce: bool) -> list[float]:
    """Trains three steps of eight microbatches, shared out to the data-parallel replicas.

    Args:
        pipeline_size: Number of pipeline stages; the rest of the world becomes data-parallel.
        overlap_grad_reduce: Whether the schedule keeps gradients unsynchronised until the last
            microbatch (``no_sync_func``) and finalises them itself; else the loop does that.

    Returns:
        The mean loss of every step, on every rank.
    """
    losses = []
    with model_parallel_groups(pipeline_size) as group:
        model_parallel_cuda_manual_seed(1)
        model = _model(pipeline_size, group.rank(), overlap_grad_reduce)
        replicas = parallel_state.get_data_parallel_world_size()
        forward_backward = get_forward_backward_func()
        for step in range(_STEPS):
            report_progress(f"step {step}")
            model.zero_grad_buffer()
            reported = forward_backward(
                forward_step_func=_forward_step,
                data_iterator=iter(
                    _microbatches()[parallel_state.get_data_parallel_rank() :: replicas]
                ),
                model=model,
                num_microbatches=_MICROBATCHES // replicas,
                seq_length=_LENGTH,
                micro_batch_size=_MICRO_BATCH_SIZE,
                decoder_seq_length=_LENGTH,
                forward_only=False,
            )
            if not overlap_grad_reduce:
                finalize_model_grads([model])
            for parameter in model.parameters():
                parameter.data -= _LEARNING_RATE * parameter.main_grad
            total = sum((entry["lm loss"] for entry in reported), torch.zeros(()))
            dist.all_reduce(total)
            losses.append(float(total) / _MICROBATCHES)
    return losses


def _model(pipeline_size: int, stage: int, overlap_grad_reduce: bool) -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=_LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        pipeline_model_parallel_size=pipeline_size,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=_VOCABULARY,
        max_sequence_length=_LENGTH,
        pre_process=stage == 0,
        post_process=stage == pipeline_size - 1,
    )
    set_weights(gpt)
    model = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(overlap_grad_reduce=overlap_grad_reduce),
        module=gpt,
    )
    if overlap_grad_reduce:
        config.no_sync_func = model.no_sync
        config.finalize_model_grads_func = finalize_model_grads
    return model


def _microbatches() -> list[Tokens]:
    generator = torch.Generator().manual_seed(3)
    shape = (_MICROBATCHES, _MICRO_BATCH_SIZE, _LENGTH + 1)
    return list(torch.randint(_VOCABULARY, shape, generator=generator))


def _forward_step(iterator: Iterator[Tokens], model: torch.nn.Module) -> tuple[Any, Any]:
    tokens = next(iterator)
    positions = torch.arange(_LENGTH).expand(_MICRO_BATCH_SIZE, _LENGTH)
    # True where a position must not look.
    mask = torch.ones(1, 1, _LENGTH, _LENGTH, dtype=torch.bool).triu(1)
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, partial(_loss, torch.ones(_MICRO_BATCH_SIZE, _LENGTH))


def _loss(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (output.float() * loss_mask).sum() / loss_mask.sum()
    return loss, {"lm loss": loss.detach().clone()}
