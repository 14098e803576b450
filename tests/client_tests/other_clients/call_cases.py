"""Case functions that call schedules and communicators as public projects do.

Each entry of ``TRAINING`` and ``FORWARD_ONLY`` repeats one project's call: which arguments it gives
and leaves out, whether the model is a list, how iterators and communicators are made, what the
loss function returns. The projects' files are named in ``docs/clients.md``. Values are compared
with plain autograd on one rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.inference.communication_utils import (
    recv_from_prev_pipeline_rank_,
    send_to_next_pipeline_rank,
)
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from tests.harness.rank_runtime import model_parallel_groups, report_progress
from tests.unit_tests.pipeline_parallel.schedule_cases import Microbatch, ModelChunk

_HIDDEN_SIZE = 8
_MICRO_BATCH_SIZE = 2
_FIXED_LENGTH = 6
_LONGEST = 13


@dataclass(frozen=True)
class Pipeline:
    """This rank's part of a model, and the microbatches of one step.

    Attributes:
        config: What the schedule reads.
        chunks: This rank's model chunks.
        microbatches: The step's microbatches, the same on every rank.
    """

    config: TransformerConfig
    chunks: list[ModelChunk]
    microbatches: list[Microbatch]

    @property
    def iterators(self) -> list[Iterator[Microbatch]]:
        """One fresh iterator over the microbatches for each chunk."""
        return [iter(self.microbatches) for _ in self.chunks]


Call = Callable[[Pipeline], list[Any]]


def train_as_clients(
    clients: tuple[str, ...],
    pipeline_size: int,
    chunks_per_rank: int,
    is_variable: bool,
    overlap: bool,
) -> list[str]:
    """Trains two steps as each client on the same groups, the second with twice the microbatches.

    Args:
        clients: Keys of ``TRAINING``.
        pipeline_size: Number of pipeline stages; equal to the world size.
        chunks_per_rank: Model chunks per stage; 1 for the schedule without interleaving.
        is_variable: Whether the microbatches have different lengths, as with packing.
        overlap: Whether communication overlaps; interleaved schedules only.

    Returns:
        The differences from one rank's autograd that this rank saw, one line each.
    """
    problems: list[str] = []
    virtual_size = chunks_per_rank if chunks_per_rank > 1 else None
    with model_parallel_groups(pipeline_size, virtual_size) as group:
        stage = group.rank()
        for client, count in product(clients, (pipeline_size, 2 * pipeline_size)):
            step = f"{client}, {count} microbatches"
            report_progress(step)
            pipeline = _pipeline(stage, pipeline_size, chunks_per_rank, count, is_variable, overlap)
            reported = TRAINING[client](pipeline)
            expected_chunks, expected_losses, _ = _reference(pipeline, pipeline_size)
            if stage == pipeline_size - 1:
                problems += _difference(f"{step}: losses", torch.stack(reported), expected_losses)
            elif reported:
                problems.append(f"{step}: stage {stage} is not the last and reports losses")
            for chunk in pipeline.chunks:
                for name, parameter in chunk.named_parameters():
                    expected = expected_chunks[chunk.index].get_parameter(name).grad
                    what = f"{step}: the gradient of {name} in chunk {chunk.index}"
                    problems += _difference(what, parameter.grad, expected)
    return problems


def evaluate_as_clients(
    clients: tuple[str, ...],
    pipeline_size: int,
    chunks_per_rank: int,
    is_variable: bool,
    overlap: bool,
) -> list[str]:
    """Runs two forward-only passes as each client and compares the last stage's outputs.

    The arguments and the result are those of ``train_as_clients``; ``clients`` are keys of
    ``FORWARD_ONLY``.
    """
    problems: list[str] = []
    virtual_size = chunks_per_rank if chunks_per_rank > 1 else None
    with model_parallel_groups(pipeline_size, virtual_size) as group:
        stage = group.rank()
        for client, count in product(clients, (pipeline_size, 2 * pipeline_size)):
            step = f"{client}, {count} microbatches, forward only"
            report_progress(step)
            pipeline = _pipeline(stage, pipeline_size, chunks_per_rank, count, is_variable, overlap)
            with torch.no_grad():
                outputs = FORWARD_ONLY[client](pipeline)
            _, _, expected = _reference(pipeline, pipeline_size)
            wanted_count = count if stage == pipeline_size - 1 else 0
            if len(outputs) != wanted_count:
                problems.append(f"{step}: {len(outputs)} outputs on stage {stage}")
            for index, (actual, wanted) in enumerate(zip(outputs, expected, strict=False)):
                problems += _difference(f"{step}: output {index}", actual, wanted)
    return problems


def generate_between_steps(pipeline_size: int) -> list[str]:
    """Trains a step, passes activations as the inference wrappers do, and trains another step.

    Args:
        pipeline_size: Number of pipeline stages; equal to the world size.

    Returns:
        The differences that this rank saw, one line each.
    """
    problems: list[str] = []
    with model_parallel_groups(pipeline_size) as group:
        stage = group.rank()
        for _ in range(2):
            pipeline = _pipeline(stage, pipeline_size, 1, pipeline_size, True, False)
            _verl_training(pipeline)
            (chunk,) = pipeline.chunks
            _, _, expected = _reference(pipeline, pipeline_size)
            with torch.inference_mode():
                for microbatch, wanted in zip(pipeline.microbatches, expected, strict=True):
                    received = None
                    if stage > 0:
                        received = torch.empty_like(microbatch.inputs)
                        recv_from_prev_pipeline_rank_(received, group)
                    chunk.set_input_tensor([received])
                    output = chunk(microbatch.inputs)
                    if stage < pipeline_size - 1:
                        send_to_next_pipeline_rank(output, group)
                    else:
                        problems += _difference("the generated output", output, wanted)
    return problems


def _pipeline(
    stage: int,
    pipeline_size: int,
    chunks_per_rank: int,
    num_microbatches: int,
    is_variable: bool,
    overlap: bool,
) -> Pipeline:
    virtual_size = chunks_per_rank if chunks_per_rank > 1 else None
    config = TransformerConfig(
        num_layers=pipeline_size * chunks_per_rank,
        hidden_size=_HIDDEN_SIZE,
        num_attention_heads=1,
        pipeline_model_parallel_size=pipeline_size,
        virtual_pipeline_model_parallel_size=virtual_size,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=is_variable,
        moe_token_dispatcher_type="alltoall",
        overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap,
        deallocate_pipeline_outputs=True,
    )
    chunks = [
        ModelChunk(config, position * pipeline_size + stage, position if virtual_size else None)
        for position in range(chunks_per_rank)
    ]
    return Pipeline(config, chunks, _microbatches(num_microbatches, is_variable))


def _microbatches(count: int, is_variable: bool) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(11)
    microbatches = []
    for index in range(count):
        length = 3 + 5 * index % (_LONGEST - 2) if is_variable else _FIXED_LENGTH
        inputs, targets = torch.randn(
            2, length, _MICRO_BATCH_SIZE, _HIDDEN_SIZE, generator=generator
        )
        microbatches.append(Microbatch(inputs, targets))
    return microbatches


def _reference(
    pipeline: Pipeline, pipeline_size: int
) -> tuple[list[ModelChunk], torch.Tensor, list[torch.Tensor]]:
    """Returns all chunks with their gradients, the losses and the outputs, from one rank."""
    count = pipeline_size * len(pipeline.chunks)
    chunks = [ModelChunk(pipeline.config, index, None) for index in range(count)]
    losses, outputs = [], []
    with torch.enable_grad():
        for microbatch in pipeline.microbatches:
            hidden = microbatch.inputs
            for chunk in chunks:
                hidden = chunk.apply_layers(hidden)
            loss = _mean_squared_error(microbatch.targets, hidden)
            (loss / len(pipeline.microbatches)).backward()
            losses.append(loss.detach())
            outputs.append(hidden.detach())
    return chunks, torch.stack(losses), outputs


def _difference(
    what: str, actual: torch.Tensor | None, expected: torch.Tensor | None
) -> Iterator[str]:
    try:
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    except AssertionError as error:
        yield f"{what}: {' '.join(str(error).split())}"


def _mean_squared_error(targets: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs, targets)


def _forward_step(
    loss_function: Callable[[torch.Tensor, torch.Tensor], Any],
    iterator: Iterator[Microbatch],
    model: ModelChunk,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    microbatch = next(iterator)
    return model(microbatch.inputs), partial(loss_function, microbatch.targets)


def _loss_and_metrics(
    targets: torch.Tensor, outputs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = _mean_squared_error(targets, outputs)
    return loss, {"loss": loss.detach().clone()}


def _loss_tokens_and_values(
    targets: torch.Tensor, outputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    loss = _mean_squared_error(targets, outputs)
    tokens = torch.tensor(targets.shape[0], dtype=torch.int)
    return loss * tokens, tokens, {"loss": loss.detach().clone()}


def _outputs_as_metrics(
    targets: torch.Tensor, outputs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return torch.tensor(0.0), {"outputs": outputs.clone()}


def _outputs_as_non_loss_data(
    targets: torch.Tensor, outputs: torch.Tensor, non_loss_data: bool = False
) -> torch.Tensor:
    assert non_loss_data
    return outputs.clone()


def _values(metrics: list[dict[str, torch.Tensor]], key: str = "loss") -> list[torch.Tensor]:
    return [entry[key] for entry in metrics]


def _verl(pipeline: Pipeline, loss_function: Callable[..., Any], forward_only: bool) -> list[Any]:
    # The lengths of 1 are verl's: shapes come with the messages.
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, loss_function),
        data_iterator=pipeline.iterators if len(pipeline.chunks) > 1 else pipeline.iterators[0],
        model=pipeline.chunks,
        num_microbatches=len(pipeline.microbatches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _verl_training(pipeline: Pipeline) -> list[Any]:
    return _values(_verl(pipeline, _loss_and_metrics, forward_only=False))


def _verl_log_probabilities(pipeline: Pipeline) -> list[Any]:
    return _values(_verl(pipeline, _outputs_as_metrics, forward_only=True), "outputs")


def _nemo_rl(
    pipeline: Pipeline, loss_function: Callable[..., Any], forward_only: bool
) -> list[Any]:
    (model,) = pipeline.chunks
    (iterator,) = pipeline.iterators
    length = _LONGEST if pipeline.config.variable_seq_lengths else _FIXED_LENGTH
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, loss_function),
        data_iterator=iterator,
        model=model,
        num_microbatches=len(pipeline.microbatches),
        seq_length=length,
        micro_batch_size=_MICRO_BATCH_SIZE,
        decoder_seq_length=length,
        forward_only=forward_only,
    )


def _nemo_rl_training(pipeline: Pipeline) -> list[Any]:
    return _values(_nemo_rl(pipeline, _loss_and_metrics, forward_only=False))


def _nemo_rl_log_probabilities(pipeline: Pipeline) -> list[Any]:
    return _values(_nemo_rl(pipeline, _outputs_as_metrics, forward_only=True), "outputs")


def _slime(pipeline: Pipeline, loss_function: Callable[..., Any], **options: Any) -> list[Any]:
    length = _LONGEST if pipeline.config.variable_seq_lengths else _FIXED_LENGTH
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, loss_function),
        data_iterator=pipeline.iterators,
        model=pipeline.chunks,
        num_microbatches=len(pipeline.microbatches),
        seq_length=length,
        micro_batch_size=_MICRO_BATCH_SIZE,
        **options,
    )


def _slime_training(pipeline: Pipeline) -> list[Any]:
    return _values(
        _slime(pipeline, _loss_tokens_and_values, decoder_seq_length=None, forward_only=False)
    )


def _slime_log_probabilities(pipeline: Pipeline) -> list[Any]:
    return _values(_slime(pipeline, _outputs_as_metrics, forward_only=True), "outputs")


def _megatron_bridge(
    pipeline: Pipeline,
    loss_function: Callable[..., Any],
    communicator: Any = None,
    **options: Any,
) -> list[Any]:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    length = _LONGEST if pipeline.config.variable_seq_lengths else _FIXED_LENGTH
    return get_forward_backward_func(
        pp_size=groups.pp.size(), vp_size=pipeline.config.virtual_pipeline_model_parallel_size
    )(
        forward_step_func=partial(_forward_step, loss_function),
        data_iterator=pipeline.iterators if len(pipeline.chunks) > 1 else pipeline.iterators[0],
        model=pipeline.chunks,
        num_microbatches=len(pipeline.microbatches),
        seq_length=length,
        micro_batch_size=_MICRO_BATCH_SIZE,
        p2p_communicator=communicator
        or P2PCommunicator(pp_group=groups.pp, config=pipeline.config),
        pg_collection=groups,
        **options,
    )


def _megatron_bridge_training(pipeline: Pipeline) -> list[Any]:
    length = _LONGEST if pipeline.config.variable_seq_lengths else _FIXED_LENGTH
    return _values(
        _megatron_bridge(
            pipeline,
            _loss_and_metrics,
            decoder_seq_length=length,
            forward_only=False,
            adjust_tensor_shapes_fn=None,
        )
    )


def _megatron_bridge_evaluation(pipeline: Pipeline) -> list[Any]:
    return _values(
        _megatron_bridge(
            pipeline, _outputs_as_metrics, forward_only=True, adjust_tensor_shapes_fn=None
        ),
        "outputs",
    )


def _megatron_bridge_non_loss_data(pipeline: Pipeline) -> list[Any]:
    return _megatron_bridge(
        pipeline, _outputs_as_non_loss_data, forward_only=True, collect_non_loss_data=True
    )


class _CountingCommunicator:
    """Passes everything on to a communicator and counts what starts with send or recv."""

    def __init__(self, communicator: P2PCommunicator) -> None:
        self._communicator = communicator
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("send", "recv")):
            self.calls += 1
        return getattr(self._communicator, name)


def _art_training(pipeline: Pipeline) -> list[Any]:
    pipeline.config.batch_p2p_sync = False
    groups = ProcessGroupCollection.use_mpu_process_groups()
    communicator = _CountingCommunicator(
        P2PCommunicator(pp_group=groups.pp, config=pipeline.config)
    )
    metrics = _megatron_bridge(
        pipeline,
        _loss_and_metrics,
        communicator=communicator,
        forward_only=False,
        collect_non_loss_data=False,
    )
    assert communicator.calls > 0
    return _values(metrics)


def _megatron_lm_non_loss_data(pipeline: Pipeline) -> list[Any]:
    length = _LONGEST if pipeline.config.variable_seq_lengths else _FIXED_LENGTH
    return _slime(
        pipeline,
        _outputs_as_non_loss_data,
        decoder_seq_length=length,
        forward_only=True,
        collect_non_loss_data=True,
    )


def _mindspeed_training(pipeline: Pipeline) -> list[Any]:
    calls = 0

    def batch(
        *,
        tensor_send_prev: torch.Tensor | None,
        tensor_recv_prev: torch.Tensor | None,
        tensor_send_next: torch.Tensor | None,
        tensor_recv_next: torch.Tensor | None,
        group: dist.ProcessGroup,
        prev_pipeline_rank: int,
        next_pipeline_rank: int,
    ) -> list[dist.Work]:
        nonlocal calls
        calls += 1
        wanted = (
            (dist.isend, tensor_send_prev, prev_pipeline_rank),
            (dist.irecv, tensor_recv_prev, prev_pipeline_rank),
            (dist.irecv, tensor_recv_next, next_pipeline_rank),
            (dist.isend, tensor_send_next, next_pipeline_rank),
        )
        operations = [
            dist.P2POp(operation, tensor, peer, group)
            for operation, tensor, peer in wanted
            if tensor is not None
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    with mock.patch.object(p2p_communication, "_batched_p2p_ops", batch):
        losses = _nemo_rl_training(pipeline)
    assert calls > 0
    return losses


TRAINING: dict[str, Call] = {
    "verl": _verl_training,
    "NeMo-RL": _nemo_rl_training,
    "slime": _slime_training,
    "Megatron-Bridge": _megatron_bridge_training,
    "ART": _art_training,
    "MindSpeed-LLM": _mindspeed_training,
}

FORWARD_ONLY: dict[str, Call] = {
    "verl": _verl_log_probabilities,
    "NeMo-RL": _nemo_rl_log_probabilities,
    "slime": _slime_log_probabilities,
    "Megatron-Bridge": _megatron_bridge_evaluation,
    "Megatron-Bridge, non-loss data": _megatron_bridge_non_loss_data,
    "Megatron-LM, non-loss data": _megatron_lm_non_loss_data,
}
