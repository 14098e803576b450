"""Case functions that train one step of a small model with the base's real pipeline schedules.

They run on the ranks of a worker pool. Losses and gradients are compared with those of the same
chunks and microbatches in plain autograd on one rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.harness.rank_runtime import case_device, model_parallel_groups, report_progress

TRANSPORTS = ("batched", "unbatched", "overlapped", "overlapped with warm-up and flush")
OVERLAPPED_TRANSPORTS = TRANSPORTS[2:]

_HIDDEN_SIZE = 8
_MICRO_BATCH_SIZE = 2
_FIXED_LENGTH = 6


@dataclass(frozen=True)
class Step:
    """One training or evaluation step.

    Attributes:
        num_microbatches: Number of microbatches of the step.
        is_variable: Whether the microbatches have different lengths, as with packing.
        is_forward_only: Whether there is no backward pass.
        group_size: Microbatches that a model chunk takes in a row; ``None`` for one per stage.
        frees_outputs: Whether the schedule frees an activation as soon as it believes it sent, as
            in training. Where it does not, it never asks whether the last one has left.
    """

    num_microbatches: int
    is_variable: bool
    is_forward_only: bool = False
    group_size: int | None = None
    frees_outputs: bool = True


@dataclass(frozen=True)
class Microbatch:
    """Inputs and targets, both of shape (length, microbatch size, hidden size)."""

    inputs: torch.Tensor
    targets: torch.Tensor


class ModelChunk(torch.nn.Module):
    """Some consecutive layers of the model, as a schedule expects them.

    Args:
        config: What the schedule reads.
        index: Position among all chunks of the model; 0 takes its input from the data.
        vp_stage: Position among the chunks of this rank, ``None`` without interleaving.
    """

    def __init__(self, config: TransformerConfig, index: int, vp_stage: int | None) -> None:
        super().__init__()
        self.config = config
        self.model_type = ModelType.encoder_or_decoder
        self.index = index
        self.vp_stage = vp_stage
        generator = torch.Generator().manual_seed(1000 + index)
        self.weight = torch.nn.Parameter(
            torch.randn(_HIDDEN_SIZE, _HIDDEN_SIZE, generator=generator) / _HIDDEN_SIZE**0.5
        )
        self.bias = torch.nn.Parameter(torch.randn(_HIDDEN_SIZE, generator=generator) / 10)
        self._received: Any = None
        self.to(case_device())

    def set_input_tensor(self, input_tensor: list[torch.Tensor | None]) -> None:
        """Takes what the previous chunk sent; called by the schedule before ``forward``."""
        (self._received,) = input_tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Applies the layers to ``inputs`` in the first chunk, else to what was received."""
        return self.apply_layers(inputs if self.index == 0 else self._received)

    def apply_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        """Applies the layers to ``hidden``; any leading dimensions."""
        return hidden + torch.tanh(hidden @ self.weight + self.bias)


def run_steps(
    pipeline_size: int, chunks_per_rank: int, transport: str, steps: tuple[Step, ...]
) -> list[str]:
    """Runs steps one after the other on the same process groups.

    Args:
        pipeline_size: Number of pipeline stages; equal to the world size.
        chunks_per_rank: Model chunks per stage; 1 for the schedule without interleaving.
        transport: One of ``TRANSPORTS``.
        steps: What to run.

    Returns:
        The differences from one rank's autograd that this rank saw, one line each.
    """
    problems = []
    virtual_size = chunks_per_rank if chunks_per_rank > 1 else None
    with model_parallel_groups(pipeline_size, virtual_size) as group:
        for step in steps:
            report_progress(f"{step}")
            config = _config(pipeline_size, virtual_size, transport, step)
            for problem in _run_step(config, group.rank(), chunks_per_rank, step):
                problems.append(f"{step}: {problem}")
    return problems


def _config(
    pipeline_size: int, virtual_size: int | None, transport: str, step: Step
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=pipeline_size * (virtual_size or 1),
        hidden_size=_HIDDEN_SIZE,
        num_attention_heads=1,
        pipeline_model_parallel_size=pipeline_size,
        virtual_pipeline_model_parallel_size=virtual_size,
        microbatch_group_size_per_vp_stage=step.group_size,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=step.is_variable,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=transport == "batched",
        overlap_p2p_comm=transport in OVERLAPPED_TRANSPORTS,
        overlap_p2p_comm_warmup_flush=transport == OVERLAPPED_TRANSPORTS[1],
        deallocate_pipeline_outputs=step.frees_outputs,
    )


def _run_step(
    config: TransformerConfig, stage: int, chunks_per_rank: int, step: Step
) -> Iterator[str]:
    num_stages = config.pipeline_model_parallel_size
    virtual_size = config.virtual_pipeline_model_parallel_size
    indices = [chunk * num_stages + stage for chunk in range(chunks_per_rank)]
    chunks = [
        ModelChunk(config, index, None if virtual_size is None else chunk)
        for chunk, index in enumerate(indices)
    ]
    microbatches = _microbatches(step)
    schedule = get_forward_backward_func(pp_size=num_stages, vp_size=virtual_size)
    losses = schedule(
        forward_step_func=_forward_step,
        data_iterator=[iter(microbatches) for _ in chunks],
        model=chunks,
        num_microbatches=step.num_microbatches,
        seq_length=_FIXED_LENGTH,
        micro_batch_size=_MICRO_BATCH_SIZE,
        forward_only=step.is_forward_only,
    )
    expected_chunks, expected_losses = _reference(config, chunks_per_rank, microbatches, step)
    if stage == num_stages - 1:
        yield from _difference("the losses", _stacked(losses), _stacked(expected_losses))
    elif losses:
        yield f"stage {stage} is not the last and returned {len(losses)} losses"
    for chunk, index in zip(chunks, indices, strict=True):
        for name, parameter in chunk.named_parameters():
            expected = expected_chunks[index].get_parameter(name).grad
            yield from _difference(
                f"the gradient of {name} in chunk {index}", parameter.grad, expected
            )


def _microbatches(step: Step) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(7)
    microbatches = []
    for index in range(step.num_microbatches):
        length = 3 + 5 * index % 11 if step.is_variable else _FIXED_LENGTH
        inputs, targets = torch.randn(
            2, length, _MICRO_BATCH_SIZE, _HIDDEN_SIZE, generator=generator
        ).to(case_device())
        microbatches.append(Microbatch(inputs, targets))
    return microbatches


def _forward_step(
    data_iterator: Iterator[Microbatch], model: ModelChunk
) -> tuple[torch.Tensor, Any]:
    microbatch = next(data_iterator)
    return model(microbatch.inputs), partial(_loss, microbatch.targets)


def _loss(
    targets: torch.Tensor, outputs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = torch.nn.functional.mse_loss(outputs, targets)
    return loss, {"loss": loss.detach().clone()}


def _reference(
    config: TransformerConfig, chunks_per_rank: int, microbatches: list[Microbatch], step: Step
) -> tuple[list[ModelChunk], list[dict[str, torch.Tensor]]]:
    num_chunks = config.pipeline_model_parallel_size * chunks_per_rank
    chunks = [ModelChunk(config, index, None) for index in range(num_chunks)]
    losses = []
    for microbatch in microbatches:
        hidden = microbatch.inputs
        for chunk in chunks:
            hidden = chunk.apply_layers(hidden)
        loss, reported = _loss(microbatch.targets, hidden)
        losses.append(reported)
        if not step.is_forward_only:
            (loss / len(microbatches)).backward()
    return chunks, losses


def _stacked(losses: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([loss["loss"] for loss in losses])


def _difference(
    what: str, actual: torch.Tensor | None, expected: torch.Tensor | None
) -> Iterator[str]:
    if actual is None or expected is None:
        if actual is not expected:
            missing = "pipeline" if actual is None else "single-rank run"
            yield f"{what}: the {missing} has none"
        return
    try:
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    except AssertionError as error:
        reason = " ".join(str(error).split())
        yield f"{what}: {reason}"
