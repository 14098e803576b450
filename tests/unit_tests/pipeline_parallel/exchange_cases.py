"""Case functions that drive every call of ``P2PCommunicator`` and check every received tensor.

They run on the ranks of a worker pool. A message is a small tensor whose values spell out who
sent it, in which direction, for which microbatch and as which tensor of a list, so a message that
reaches the wrong role is told from the right one even when the shapes agree.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from tests.harness.rank_runtime import case_device, model_parallel_groups, report_progress

TRANSPORTS = ("batched", "unbatched", "overlapped", "ring_exchange")
TENSOR_RANKS = (1, 2, 3, 4, 5, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MICROBATCHES = 2

_FORWARD, _BACKWARD = 1, 2
_ROLE_OF_DIRECTION = {_FORWARD: "recv_prev", _BACKWARD: "recv_next"}


@dataclass(frozen=True)
class Message:
    """What one stage sends to a neighbour in one direction.

    Attributes:
        pipeline: Global rank of the first stage of the pipeline.
        sender: Position of the sending stage in the pipeline.
        direction: 1 for activations (to the next stage), 2 for gradients (to the previous one).
        microbatch: Index of the microbatch.
        item: Index in a list of tensors.
        tensor_rank: Number of dimensions.
        is_variable: Whether the shape depends on everything else.
    """

    pipeline: int
    sender: int
    direction: int
    microbatch: int
    item: int
    tensor_rank: int
    is_variable: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the message, ``tensor_rank`` dimensions, at least five elements."""
        if not self.is_variable:
            return (5 + self.item, 2, 3, 2, 1, 2, 1, 2)[: self.tensor_rank]
        mixed = 5 * self.sender + 3 * self.microbatch + 7 * self.direction + 2 * self.item
        dimensions = (5 + mixed % 11, 1 + mixed % 3, 1 + mixed % 4, 1 + mixed % 2, 2, 1, 2, 1)
        return dimensions[: self.tensor_rank]

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the message; small whole numbers, so every dtype holds them exactly."""
        digits = torch.tensor(
            [self.pipeline, self.sender, self.direction, self.microbatch, self.item]
        )
        size = torch.Size(self.shape).numel()
        return (
            digits.repeat(size // len(digits) + 1)[:size]
            .reshape(self.shape)
            .to(case_device(), dtype)
        )


@dataclass
class Stage:
    """One stage of the pipeline under test, and what it exchanges for one microbatch.

    Attributes:
        communicator: What is under test.
        dtype: Dtype of all messages.
        tensor_rank: Number of dimensions of all messages.
        is_variable: Whether shapes differ by link, direction and microbatch.
        microbatch: Index of the microbatch.
        is_ring: Whether the last stage is linked to the first, as in interleaved schedules.
        sends_lists: Whether two tensors of different shapes are sent at a time, as a list.
    """

    communicator: P2PCommunicator
    dtype: torch.dtype
    tensor_rank: int
    is_variable: bool
    microbatch: int
    is_ring: bool = False
    sends_lists: bool = False

    @property
    def index(self) -> int:
        """Position of this stage."""
        return self.communicator.pp_group.rank()

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline."""
        return self.communicator.pp_group.size()

    @property
    def is_first(self) -> bool:
        """Whether nothing lies before this stage."""
        return not self.is_ring and self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether nothing lies behind this stage."""
        return not self.is_ring and self.index == self.num_stages - 1

    def message(self, direction: int, sender_offset: int = 0, item: int = 0) -> Message:
        """Returns the message that the stage at ``sender_offset`` from this one sends."""
        return Message(
            pipeline=dist.get_global_rank(self.communicator.pp_group, 0),
            sender=(self.index + sender_offset) % self.num_stages,
            direction=direction,
            microbatch=self.microbatch,
            item=item,
            tensor_rank=self.tensor_rank,
            is_variable=self.is_variable,
        )

    def activation(self) -> torch.Tensor | list[torch.Tensor]:
        """Returns what this stage sends to the next one."""
        return self._each_item(lambda item: self.message(_FORWARD, item=item).tensor(self.dtype))

    def gradient(self) -> torch.Tensor | list[torch.Tensor]:
        """Returns what this stage sends to the previous one."""
        return self._each_item(lambda item: self.message(_BACKWARD, item=item).tensor(self.dtype))

    def shape(self) -> tuple[int, ...] | list[tuple[int, ...]]:
        """Returns the shape to announce to a call that receives.

        With variable lengths it is that of no message: it must not be used.
        """
        return self._each_item(
            lambda item: (1,) if self.is_variable else self.message(_FORWARD, item=item).shape
        )

    def _each_item(self, make: Callable[[int], Any]) -> Any:
        return [make(0), make(1)] if self.sends_lists else make(0)

    def problems(self, received: dict[str, Any]) -> Iterator[str]:
        """Compares what was received with what the roles should have got.

        Args:
            received: ``recv_prev`` and ``recv_next``, each a tensor, ``None``, or a list of them.
        """
        for direction, peer_offset, is_missing in (
            (_FORWARD, -1, self.is_first),
            (_BACKWARD, +1, self.is_last),
        ):
            role = _ROLE_OF_DIRECTION[direction]
            if role not in received:
                continue
            items = received[role] if self.sends_lists else [received[role]]
            if not isinstance(items, list) or len(items) != 1 + self.sends_lists:
                yield f"{role} should get a list of two and got {items!r}"
                continue
            for item, tensor in enumerate(items):
                if is_missing:
                    if tensor is not None:
                        yield f"{role} has no peer but got a tensor"
                    continue
                expected = self.message(direction, peer_offset, item)
                problem = _difference(tensor, expected.tensor(self.dtype))
                if problem:
                    yield f"{role} should get {expected}: {problem}"


def _difference(tensor: Any, expected: torch.Tensor) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"got {tensor!r}"
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        return f"got {tensor.dtype} {tuple(tensor.shape)}"
    if not torch.equal(tensor, expected):
        return f"got the values {tensor.flatten()[:5].tolist()}"
    if not (tensor.requires_grad and tensor.is_leaf):
        return "got a tensor that is no leaf that requires a gradient"
    return ""


def _forward(stage: Stage) -> dict[str, Any]:
    received = stage.communicator.recv_forward(stage.shape(), stage.is_first)
    stage.communicator.send_forward(stage.activation(), stage.is_last)
    return {"recv_prev": received}


def _backward(stage: Stage) -> dict[str, Any]:
    received = stage.communicator.recv_backward(stage.shape(), stage.is_last)
    stage.communicator.send_backward(stage.gradient(), stage.is_first)
    return {"recv_next": received}


def _one_forward_one_backward(stage: Stage) -> dict[str, Any]:
    from_previous = stage.communicator.send_backward_recv_forward(
        stage.gradient(), stage.shape(), stage.is_first
    )
    from_next = stage.communicator.send_forward_recv_backward(
        stage.activation(), stage.shape(), stage.is_last
    )
    return {"recv_prev": from_previous, "recv_next": from_next}


def _forward_transfer(stage: Stage) -> dict[str, Any]:
    return {
        "output_tensor": None if stage.is_last else stage.activation(),
        "recv_prev": not stage.is_first,
        "tensor_shape": stage.shape(),
    }


def _backward_transfer(stage: Stage) -> dict[str, Any]:
    return {
        "input_tensor_grad": None if stage.is_first else stage.gradient(),
        "recv_next": not stage.is_last,
        "tensor_shape": stage.shape(),
    }


def _forward_everywhere(stage: Stage) -> dict[str, Any]:
    received = stage.communicator.send_forward_recv_forward(**_forward_transfer(stage))
    return {"recv_prev": received}


def _backward_everywhere(stage: Stage) -> dict[str, Any]:
    received = stage.communicator.send_backward_recv_backward(**_backward_transfer(stage))
    return {"recv_next": received}


def _everything_at_once(stage: Stage) -> dict[str, Any]:
    transfers = _forward_transfer(stage) | _backward_transfer(stage)
    from_previous, from_next = stage.communicator.send_forward_backward_recv_forward_backward(
        **transfers
    )
    return {"recv_prev": from_previous, "recv_next": from_next}


def _start_forward(stage: Stage) -> tuple[torch.Tensor | None, dict[str, Any]]:
    tensor, handles = stage.communicator.send_forward_recv_forward(
        **_forward_transfer(stage), overlap_p2p_comm=True
    )
    _check_handles(handles, recv_prev=not stage.is_first, send_next=not stage.is_last)
    return tensor, handles


def _start_backward(stage: Stage) -> tuple[torch.Tensor | None, dict[str, Any]]:
    tensor, handles = stage.communicator.send_backward_recv_backward(
        **_backward_transfer(stage), overlap_p2p_comm=True
    )
    _check_handles(handles, recv_next=not stage.is_last, send_prev=not stage.is_first)
    return tensor, handles


def _check_handles(handles: dict[str, Any], **is_expected: bool) -> None:
    expected = {role for role, is_role_expected in is_expected.items() if is_role_expected}
    if set(handles) != expected:
        raise AssertionError(f"the call returned handles for {set(handles)}, not for {expected}")


def _overlapped_forward(stage: Stage) -> dict[str, Any]:
    tensor, handles = _start_forward(stage)
    for handle in handles.values():
        handle.wait()
    return {"recv_prev": tensor}


def _overlapped_backward(stage: Stage) -> dict[str, Any]:
    tensor, handles = _start_backward(stage)
    for handle in handles.values():
        handle.wait()
    return {"recv_next": tensor}


def _both_directions_in_flight(stage: Stage) -> dict[str, Any]:
    from_previous, forward_handles = _start_forward(stage)
    from_next, backward_handles = _start_backward(stage)
    for handle in (*backward_handles.values(), *forward_handles.values()):
        handle.wait()
    return {"recv_prev": from_previous, "recv_next": from_next}


Exchange = Callable[[Stage], dict[str, Any]]

CHAIN_EXCHANGES: dict[str, Exchange] = {
    "recv_forward, send_forward": _forward,
    "recv_backward, send_backward": _backward,
    "send_backward_recv_forward, send_forward_recv_backward": _one_forward_one_backward,
}
"""Calls for stages in a row, each of which moves one tensor per link."""

RING_EXCHANGES: dict[str, Exchange] = {
    "send_forward_recv_forward": _forward_everywhere,
    "send_backward_recv_backward": _backward_everywhere,
    "send_forward_backward_recv_forward_backward": _everything_at_once,
}
"""Calls that all stages make at once; they work in a row and in a ring."""

OVERLAPPED_EXCHANGES: dict[str, Exchange] = {
    "send_forward_recv_forward": _overlapped_forward,
    "send_backward_recv_backward": _overlapped_backward,
    "both directions in flight": _both_directions_in_flight,
}
"""Calls that return handles; they work in a row and in a ring."""


def exchanges_of(transport: str) -> dict[str, tuple[Exchange, bool]]:
    """Returns what to run over a transport: by name, the exchange and whether it is a ring."""
    both = OVERLAPPED_EXCHANGES if transport == "overlapped" else RING_EXCHANGES
    chain = {} if transport == "overlapped" else CHAIN_EXCHANGES
    return {
        **{f"{name}, row": (exchange, False) for name, exchange in (chain | both).items()},
        **{f"{name}, ring": (exchange, True) for name, exchange in both.items()},
    }


def run_exchanges(
    pipeline_size: int,
    transport: str,
    is_variable: bool,
    tensor_ranks: tuple[int, ...] = TENSOR_RANKS,
) -> list[str]:
    """Runs every exchange of a transport over every kind of tensor.

    Args:
        pipeline_size: Number of stages; a larger world holds several pipelines.
        transport: One of ``TRANSPORTS``.
        is_variable: Whether shapes differ by link, direction and microbatch.
        tensor_ranks: Numbers of dimensions to try, each with all of ``DTYPES``.

    Returns:
        The problems that this rank saw, one line each.
    """
    with model_parallel_groups(pipeline_size, virtual_size=2) as group:
        return exchange_on(group, transport, is_variable, tensor_ranks)


def exchange_on(
    group: dist.ProcessGroup,
    transport: str,
    is_variable: bool,
    tensor_ranks: tuple[int, ...] = TENSOR_RANKS,
    virtual_size: int | None = None,
) -> list[str]:
    """Runs every exchange on a given pipeline group; see ``run_exchanges``.

    Those of interleaved schedules among them, whether or not ``virtual_size`` says that it is one.
    """
    problems = []
    for name, (exchange, is_ring) in exchanges_of(transport).items():
        for dtype in DTYPES:
            communicator = _communicator(group, transport, dtype, is_variable, virtual_size)
            for tensor_rank in tensor_ranks:
                label = f"{name}, {dtype}, {tensor_rank} dimensions"
                stage = Stage(communicator, dtype, tensor_rank, is_variable, 0, is_ring)
                problems += _run_exchange(label, exchange, stage)
    return problems


def run_list_exchanges(pipeline_size: int, transport: str, is_variable: bool) -> list[str]:
    """Runs the calls that take lists of tensors; see ``run_exchanges``."""
    problems = []
    with model_parallel_groups(pipeline_size) as group:
        communicator = _communicator(group, transport, torch.float32, is_variable)
        for name, exchange in CHAIN_EXCHANGES.items():
            stage = Stage(communicator, torch.float32, 3, is_variable, 0, sends_lists=True)
            problems += _run_exchange(name, exchange, stage)
    return problems


def run_mtp_standalone(pipeline_size: int, transport: str) -> list[str]:
    """Runs all exchanges with ``mtp_standalone`` and no variable lengths in the configuration.

    The shapes differ all the same, as they do between a stage of its own for multi-token
    prediction and its neighbours.
    """
    problems = []
    with model_parallel_groups(pipeline_size, virtual_size=2) as group:
        communicator = _communicator(group, transport, torch.float32, is_variable=False)
        communicator.config.mtp_standalone = True
        for name, (exchange, is_ring) in exchanges_of(transport).items():
            stage = Stage(communicator, torch.float32, 3, True, 0, is_ring)
            problems += _run_exchange(name, exchange, stage)
    return problems


def receive_without(field: str) -> dict[str, str]:
    """Makes every kind of receiving call with something missing.

    Args:
        field: ``pipeline_dtype`` or ``tensor_shape``.

    Returns:
        By call, ``Type: message`` of what it raised; empty where it returned.
    """
    raised = {}
    with model_parallel_groups(2, virtual_size=2) as group:
        communicator = _communicator(group, "unbatched", torch.float32, is_variable=False)
        shape = None if field == "tensor_shape" else (2, 1, 4)
        if field == "pipeline_dtype":
            communicator.config.pipeline_dtype = None
        calls: dict[str, Callable[[], Any]] = {
            "recv_forward": lambda: communicator.recv_forward([shape], is_first_stage=False),
            "recv_backward": lambda: communicator.recv_backward([shape], is_last_stage=False),
            "send_forward_recv_forward": lambda: communicator.send_forward_recv_forward(
                None, recv_prev=True, tensor_shape=shape
            ),
            "send_backward_recv_backward": lambda: communicator.send_backward_recv_backward(
                None, recv_next=True, tensor_shape=shape
            ),
        }
        for name, call in calls.items():
            report_progress(name)
            try:
                call()
            except Exception as error:
                raised[name] = f"{type(error).__name__}: {error}"
            else:
                raised[name] = ""
    return raised


def _communicator(
    group: dist.ProcessGroup,
    transport: str,
    dtype: torch.dtype,
    is_variable: bool,
    virtual_size: int | None = None,
) -> P2PCommunicator:
    if transport == "ring_exchange":
        # Only NVIDIA's own builds of torch have this collective.
        dist.ring_exchange = _ring_exchange  # type: ignore[attr-defined]
    config = ModelParallelConfig(
        pipeline_model_parallel_size=group.size(),
        virtual_pipeline_model_parallel_size=virtual_size,
        pipeline_dtype=dtype,
        batch_p2p_comm=transport == "batched",
        overlap_p2p_comm=transport == "overlapped",
        use_ring_exchange_p2p=transport == "ring_exchange",
        variable_seq_lengths=is_variable,
    )
    return P2PCommunicator(group, config)


def _run_exchange(label: str, exchange: Exchange, stage: Stage) -> list[str]:
    problems = []
    for microbatch in range(MICROBATCHES):
        report_progress(f"{label}, microbatch {microbatch}")
        stage = replace(stage, microbatch=microbatch)
        problems += [f"{label}: {problem}" for problem in stage.problems(exchange(stage))]
    return problems


def _ring_exchange(
    *,
    tensor_send_prev: torch.Tensor | None,
    tensor_recv_prev: torch.Tensor | None,
    tensor_send_next: torch.Tensor | None,
    tensor_recv_next: torch.Tensor | None,
    group: dist.ProcessGroup,
) -> None:
    """Does over gloo what the collective of that name does: all four transfers, then return."""
    size = group.size()
    next_rank = dist.get_global_rank(group, (group.rank() + 1) % size)
    previous_rank = dist.get_global_rank(group, (group.rank() - 1) % size)
    transfers: tuple[tuple[Callable[..., Any], torch.Tensor | None, int, int], ...] = (
        (dist.isend, tensor_send_next, next_rank, _FORWARD),
        (dist.isend, tensor_send_prev, previous_rank, _BACKWARD),
        (dist.irecv, tensor_recv_prev, previous_rank, _FORWARD),
        (dist.irecv, tensor_recv_next, next_rank, _BACKWARD),
    )
    works = [
        operation(tensor, peer, group=group, tag=direction)
        for operation, tensor, peer, direction in transfers
        if tensor is not None
    ]
    for work in works:
        work.wait()
