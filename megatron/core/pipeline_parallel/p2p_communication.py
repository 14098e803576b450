"""Point-to-point communication between pipeline stages that cannot deadlock.

Two rules carry it. The operations of an exchange go to even/odd process groups, on which no message
queues behind another link's (see ``even_odd_groups``), unless the backend launches a whole batch at
once. And a stage never waits until its shape messages are received: it waits for the shapes that it
needs itself and for nothing else, so no cycle of waiting stages can close.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.utils import nvtx_decorator

from megatron.core.pipeline_parallel.even_odd_groups import (
    RECV_NEXT,
    RECV_PREV,
    SEND_NEXT,
    SEND_PREV,
    SENDS_FIRST,
    Channel,
    EvenOddGroups,
    Role,
    batch_obstacle,
    communication_device,
    get_even_odd_groups,
)

logger = logging.getLogger(__name__)

Shape = list[int] | torch.Size
Tensors = torch.Tensor | list[torch.Tensor | None] | None

MAX_DIMENSIONS = 8


def _batched_p2p_ops(
    *,
    tensor_send_prev: torch.Tensor | None,
    tensor_recv_prev: torch.Tensor | None,
    tensor_send_next: torch.Tensor | None,
    tensor_recv_next: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
) -> list[dist.Work]:
    """Post the given operations as one batch, or as ``_p2p_ops`` does where no batch is possible.

    Args:
        tensor_send_prev: Sent to the previous stage unless ``None``.
        tensor_recv_prev: Filled by the previous stage unless ``None``.
        tensor_send_next: Sent to the next stage unless ``None``.
        tensor_recv_next: Filled by the next stage unless ``None``.
        group: Pipeline group; ``None`` for the pipeline in which the rank has these neighbours.
        prev_pipeline_rank: Global rank of the previous stage.
        next_pipeline_rank: Global rank of the next stage.

    Returns:
        The requests to wait for.
    """
    tensors = {
        SEND_PREV: tensor_send_prev,
        RECV_PREV: tensor_recv_prev,
        SEND_NEXT: tensor_send_next,
        RECV_NEXT: tensor_recv_next,
    }
    given = {role: tensor for role in SENDS_FIRST if (tensor := tensors[role]) is not None}
    if not given:
        return []
    groups = get_even_odd_groups(group, prev_pipeline_rank, next_pipeline_rank)
    obstacle = batch_obstacle(groups.pp_group, next(iter(given.values())).device)
    if obstacle is not None:
        _report_batch_obstacle(groups, obstacle)
        return list(_post_data(tensors, groups, prev_pipeline_rank, next_pipeline_rank).values())
    peers = {1: next_pipeline_rank, -1: prev_pipeline_rank}
    return dist.batch_isend_irecv(
        [
            dist.P2POp(role.operation, tensor, peers[role.peer_offset], groups.pp_group)
            for role, tensor in given.items()
        ]
    )


def _p2p_ops(
    *,
    tensor_send_prev: torch.Tensor | None,
    tensor_recv_prev: torch.Tensor | None,
    tensor_send_next: torch.Tensor | None,
    tensor_recv_next: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
) -> dict[str, dist.Work]:
    """Post the given operations one by one, each on the even/odd group of its link.

    Takes the arguments of ``_batched_p2p_ops``.

    Returns:
        The request of each operation by the name of its role: ``send_next``, ``recv_prev``, ...
    """
    tensors = {
        SEND_PREV: tensor_send_prev,
        RECV_PREV: tensor_recv_prev,
        SEND_NEXT: tensor_send_next,
        RECV_NEXT: tensor_recv_next,
    }
    groups = get_even_odd_groups(group, prev_pipeline_rank, next_pipeline_rank)
    return _post_data(tensors, groups, prev_pipeline_rank, next_pipeline_rank)


def _post_data(
    tensors: Mapping[Role, torch.Tensor | None],
    groups: EvenOddGroups,
    prev_rank: int,
    next_rank: int,
) -> dict[str, dist.Work]:
    return _post(tensors, groups, groups.data, groups.data_order, prev_rank, next_rank)


def _post(
    tensors: Mapping[Role, torch.Tensor | None],
    groups: EvenOddGroups,
    group_of_channel: Mapping[Channel, dist.ProcessGroup],
    order: tuple[Role, ...],
    prev_rank: int,
    next_rank: int,
) -> dict[str, dist.Work]:
    peers = {1: next_rank, -1: prev_rank}
    requests = {}
    for role in order:
        tensor = tensors[role]
        if tensor is None:
            continue
        # Schedules free what they have sent by resetting ``data``; an alias keeps it until then.
        request = role.operation(
            tensor.detach() if role.is_send else tensor,
            peers[role.peer_offset],
            group=group_of_channel[groups.channel(role)],
        )
        if role.is_send:
            groups.keep_send(role, request, is_host_message=tensor.device.type == "cpu")
        requests[role.name] = request
    return requests


def _report_batch_obstacle(groups: EvenOddGroups, obstacle: str) -> None:
    if not groups.is_batch_obstacle_reported and groups.stage == 0:
        logger.warning(
            "batch_p2p_comm is set, but the exchanges of the pipeline %s cannot be batched: %s. "
            "They are posted one by one on even/odd process groups instead.",
            list(groups.ranks),
            obstacle,
        )
    groups.is_batch_obstacle_reported = True


def is_single_shape(x) -> bool:
    """Tell one tensor shape (a ``torch.Size`` or a non-empty sequence of ints) from a list."""
    if isinstance(x, torch.Size):
        return True
    return isinstance(x, (list, tuple)) and len(x) > 0 and all(isinstance(d, int) for d in x)


class P2PCommunicator:
    """Sends activations and gradients to the neighbours of a pipeline stage and receives theirs.

    Every rank of the pipeline makes one, and the ranks at both ends of a link call matching
    methods in the order of the schedule.

    Args:
        pp_group: The pipeline group, its ranks in stage order.
        config: ``pipeline_dtype`` and the communication flags are read.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: ModelParallelConfig):
        self.pp_group = pp_group
        self.config = config
        stage, num_stages = pp_group.rank(), pp_group.size()
        self.next_rank = dist.get_global_rank(pp_group, (stage + 1) % num_stages)
        self.prev_rank = dist.get_global_rank(pp_group, (stage - 1) % num_stages)
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether the calling rank holds the first stage."""
        return is_pp_first_stage(self.pp_group)

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether the calling rank holds the last stage."""
        return is_pp_last_stage(self.pp_group)

    @property
    def total_stages(self) -> int:
        """Number of pipeline stages."""
        return self.pp_group.size()

    @property
    def current_stage(self) -> int:
        """Position of the calling rank in the pipeline, from 0."""
        return self.pp_group.rank()

    def _groups(self) -> EvenOddGroups:
        return get_even_odd_groups(self.pp_group, self.prev_rank, self.next_rank)

    def _communicate_shapes(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next):
        """Exchange the shapes of the tensors that the neighbours are about to exchange.

        Args:
            tensor_send_next: Tensor whose shape goes to the next stage, or ``None``.
            tensor_send_prev: Tensor whose shape goes to the previous stage, or ``None``.
            recv_prev: Whether a shape comes from the previous stage.
            recv_next: Whether a shape comes from the next stage.

        Returns:
            The shapes from the previous and the next stage, ``None`` where none was wanted.

        Raises:
            ValueError: A tensor has more than 8 dimensions.
            RuntimeError: A neighbour sent no shape within the timeout of the pipeline group.
        """
        groups = self._groups()
        is_ring_exchange = self.config.use_ring_exchange_p2p
        on_host = groups.shapes_on_host and not is_ring_exchange
        device = torch.device("cpu") if on_host else communication_device(self.pp_group)
        messages = {
            RECV_PREV: _blank_shape_message(device) if recv_prev else None,
            RECV_NEXT: _blank_shape_message(device) if recv_next else None,
            SEND_PREV: _shape_message(tensor_send_prev, device),
            SEND_NEXT: _shape_message(tensor_send_next, device),
        }
        if is_ring_exchange:
            _ring_exchange(
                **{f"tensor_{role.name}": message for role, message in messages.items()},
                group=self.pp_group,
            )
        else:
            requests = _post(
                messages, groups, groups.shapes, groups.shape_order, self.prev_rank, self.next_rank
            )
            for role in (RECV_PREV, RECV_NEXT):
                if role.name in requests:
                    self._await_shape(role, requests[role.name], groups)
        return _shape_in(messages[RECV_PREV]), _shape_in(messages[RECV_NEXT])

    def _await_shape(self, role: Role, request: dist.Work, groups: EvenOddGroups) -> None:
        # A host message is all that the host waits for; on the device it would have to wait for the
        # stream as well if it named a timeout (ProcessGroupNCCL.cpp, WorkNCCL::wait).
        timeout = groups.timeout if groups.shapes_on_host else timedelta(0)
        try:
            request.wait(timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"pipeline stage {self.current_stage} (global rank {dist.get_rank()}) got no shape "
                f"for {role.name} from global rank {groups.peer(role)}; look for the first error "
                "in the log of that rank"
            ) from error

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape | None,
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, list | dict | None]:
        """Exchange one tensor with each neighbour that a flag or tensor names.

        Args:
            tensor_send_next: Sent to the next stage unless ``None``.
            tensor_send_prev: Sent to the previous stage unless ``None``.
            recv_prev: Whether a tensor comes from the previous stage.
            recv_next: Whether a tensor comes from the next stage.
            tensor_shape: Shape of what is received. With variable lengths the neighbours tell.
            wait_on_reqs: Wait for the operations (on CUDA: make the current stream wait).

        Returns:
            The tensor from the previous stage, the one from the next stage, and the requests by
            role, or ``None`` if they have been waited for.

        Raises:
            RuntimeError: A tensor is to be received and its dtype or shape is not known.
            ValueError: Requests are to be returned from a batch.
        """
        config = self.config
        for name, is_wanted in (("recv_prev", recv_prev), ("recv_next", recv_next)):
            if is_wanted and config.pipeline_dtype is None:
                raise RuntimeError(f"config.pipeline_dtype is None; set it, as {name} is True")
            if is_wanted and tensor_shape is None:
                raise RuntimeError(
                    f"tensor_shape is None; pass (sequence length, microbatch size, hidden size), "
                    f"as {name} is True"
                )

        exchanges_shapes = config.variable_seq_lengths or config.mtp_standalone
        shape_from_prev = shape_from_next = tensor_shape
        if exchanges_shapes:
            shape_from_prev, shape_from_next = self._communicate_shapes(
                tensor_send_next, tensor_send_prev, recv_prev, recv_next
            )
        tensor_recv_prev = self._receive_buffer(shape_from_prev) if recv_prev else None
        tensor_recv_next = self._receive_buffer(shape_from_next) if recv_next else None

        exchange: Callable[..., Any]
        if config.use_ring_exchange_p2p:
            exchange = _ring_exchange
        elif config.batch_p2p_comm and not wait_on_reqs:
            raise ValueError("batch_p2p_comm=True excludes overlap_p2p_comm=True; set one to False")
        elif (
            config.batch_p2p_comm
            and not exchanges_shapes
            and self.virtual_pipeline_model_parallel_size is None
        ):
            exchange = _batched_p2p_ops
        else:
            exchange = _p2p_ops
        requests: Any = exchange(
            tensor_send_prev=tensor_send_prev,
            tensor_recv_prev=tensor_recv_prev,
            tensor_send_next=tensor_send_next,
            tensor_recv_next=tensor_recv_next,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        if wait_on_reqs:
            for request in requests.values() if isinstance(requests, dict) else requests:
                request.wait()
            requests = None
        return tensor_recv_prev, tensor_recv_next, requests

    def _receive_buffer(self, shape: Any) -> torch.Tensor:
        return torch.empty(
            shape,
            requires_grad=True,
            device=communication_device(self.pp_group),
            dtype=self.config.pipeline_dtype,
        )

    def _exchange(
        self,
        timer: str,
        tensor_shape: Shape | None = None,
        send_next: torch.Tensor | None = None,
        send_prev: torch.Tensor | None = None,
        recv_prev: bool = False,
        recv_next: bool = False,
        wait_on_reqs: bool = True,
    ):
        timers = self.config.timers
        if timers is not None:
            timers(timer, log_level=2).start()
        received = self._communicate(
            tensor_send_next=send_next,
            tensor_send_prev=send_prev,
            recv_prev=recv_prev,
            recv_next=recv_next,
            tensor_shape=tensor_shape,
            wait_on_reqs=wait_on_reqs,
        )
        if timers is not None:
            timers(timer).stop()
        return received

    @nvtx_decorator()
    def recv_forward(self, tensor_shapes, is_first_stage: bool) -> Tensors:
        """Receive activations from the previous stage, which calls a method that sends them.

        Args:
            tensor_shapes: One shape, or a list of shapes to be received one after the other.
            is_first_stage: Nothing is received.

        Returns:
            One tensor for one shape, else a list; ``None`` in place of each on the first stage.
        """
        received = [
            None if is_first_stage else self._exchange("forward-recv", shape, recv_prev=True)[0]
            for shape in _as_shapes(tensor_shapes)
        ]
        return received[0] if is_single_shape(tensor_shapes) else received

    @nvtx_decorator()
    def recv_backward(self, tensor_shapes, is_last_stage: bool) -> Tensors:
        """Receive gradients from the next stage, which calls a method that sends them.

        Args:
            tensor_shapes: One shape, or a list of shapes to be received one after the other.
            is_last_stage: Nothing is received.

        Returns:
            One tensor for one shape, else a list; ``None`` in place of each on the last stage.
        """
        received = [
            None if is_last_stage else self._exchange("backward-recv", shape, recv_next=True)[1]
            for shape in _as_shapes(tensor_shapes)
        ]
        return received[0] if is_single_shape(tensor_shapes) else received

    @nvtx_decorator()
    def send_forward(self, output_tensors, is_last_stage: bool) -> None:
        """Send activations (one tensor or a list) to the next stage; no-op on the last stage."""
        if not is_last_stage:
            for tensor in _as_list(output_tensors):
                self._exchange("forward-send", send_next=tensor)

    @nvtx_decorator()
    def send_backward(self, input_tensor_grads, is_first_stage: bool) -> None:
        """Send gradients (one tensor or a list) to the previous stage; no-op on the first stage."""
        if not is_first_stage:
            for tensor in _as_list(input_tensor_grads):
                self._exchange("backward-send", send_prev=tensor)

    @nvtx_decorator()
    def send_forward_recv_backward(
        self, output_tensors, tensor_shapes, is_last_stage: bool
    ) -> Tensors:
        """Send activations to the next stage and receive gradients from it.

        Args:
            output_tensors: One tensor or a list.
            tensor_shapes: Shape of the gradient of each.
            is_last_stage: Nothing is sent or received.

        Returns:
            One gradient for one tensor, else a list; ``None`` for each on the last stage.
        """
        received = [
            None
            if is_last_stage
            else self._exchange(
                "forward-send-backward-recv", shape, send_next=tensor, recv_next=True
            )[1]
            for tensor, shape in _pairs(output_tensors, tensor_shapes)
        ]
        return received if isinstance(output_tensors, list) else received[0]

    @nvtx_decorator()
    def send_backward_recv_forward(
        self, input_tensor_grads, tensor_shapes, is_first_stage: bool
    ) -> Tensors:
        """Send gradients to the previous stage and receive activations from it.

        Args:
            input_tensor_grads: One tensor or a list.
            tensor_shapes: Shape of the activations that answer each.
            is_first_stage: Nothing is sent or received.

        Returns:
            One tensor for one gradient, else a list; ``None`` for each on the first stage.
        """
        received = [
            None
            if is_first_stage
            else self._exchange(
                "backward-send-forward-recv", shape, send_prev=tensor, recv_prev=True
            )[0]
            for tensor, shape in _pairs(input_tensor_grads, tensor_shapes)
        ]
        return received if isinstance(input_tensor_grads, list) else received[0]

    @nvtx_decorator()
    def send_forward_recv_forward(
        self,
        output_tensor: torch.Tensor | None,
        recv_prev: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | None, dict[str, dist.Work]] | None:
        """Send activations to the next stage and receive activations from the previous one.

        Args:
            output_tensor: Sent unless ``None``.
            recv_prev: Whether activations are received.
            tensor_shape: Shape of what is received.
            overlap_p2p_comm: Do not wait; return the requests by role as well.

        Returns:
            The activations received, or ``None``.
        """
        received, _, requests = self._exchange(
            "forward-send-forward-recv",
            tensor_shape,
            send_next=output_tensor,
            recv_prev=recv_prev,
            wait_on_reqs=not overlap_p2p_comm,
        )
        return (received, requests) if overlap_p2p_comm else received

    @nvtx_decorator()
    def send_backward_recv_backward(
        self,
        input_tensor_grad: torch.Tensor | None,
        recv_next: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | None, dict[str, dist.Work]] | None:
        """Send gradients to the previous stage and receive gradients from the next one.

        Args:
            input_tensor_grad: Sent unless ``None``.
            recv_next: Whether gradients are received.
            tensor_shape: Shape of what is received.
            overlap_p2p_comm: Do not wait; return the requests by role as well.

        Returns:
            The gradients received, or ``None``.
        """
        _, received, requests = self._exchange(
            "backward-send-backward-recv",
            tensor_shape,
            send_prev=input_tensor_grad,
            recv_next=recv_next,
            wait_on_reqs=not overlap_p2p_comm,
        )
        return (received, requests) if overlap_p2p_comm else received

    @nvtx_decorator()
    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor_grad: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Exchange activations and gradients with both neighbours.

        Args:
            output_tensor: Activations sent to the next stage unless ``None``.
            input_tensor_grad: Gradients sent to the previous stage unless ``None``.
            recv_prev: Whether activations are received from the previous stage.
            recv_next: Whether gradients are received from the next stage.
            tensor_shape: Shape of each tensor that is received.

        Returns:
            The activations and the gradients received, ``None`` where none were wanted.
        """
        return self._exchange(
            "forward-backward-send-forward-backward-recv",
            tensor_shape,
            send_next=output_tensor,
            send_prev=input_tensor_grad,
            recv_prev=recv_prev,
            recv_next=recv_next,
        )[:2]


def _as_list(tensors: Tensors) -> list[torch.Tensor | None]:
    return tensors if isinstance(tensors, list) else [tensors]


def _as_shapes(shapes: Any) -> list[Shape]:
    return [shapes] if shapes is None or is_single_shape(shapes) else shapes


def _pairs(tensors: Tensors, shapes: Any) -> Iterator[tuple[torch.Tensor | None, Shape]]:
    return zip(_as_list(tensors), _as_shapes(shapes), strict=False)


def _shape_message(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    if tensor is None:
        return None
    if tensor.dim() > MAX_DIMENSIONS:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} has {tensor.dim()} dimensions; the pipeline "
            f"sends at most {MAX_DIMENSIONS}: flatten some of them"
        )
    padding = [0] * (MAX_DIMENSIONS - tensor.dim())
    return torch.tensor([tensor.dim(), *tensor.shape, *padding], device=device)


def _blank_shape_message(device: torch.device) -> torch.Tensor:
    return torch.zeros(1 + MAX_DIMENSIONS, dtype=torch.int64, device=device)


def _shape_in(message: torch.Tensor | None) -> list[int] | None:
    if message is None:
        return None
    num_dimensions, *sizes = message.tolist()
    return sizes[:num_dimensions]


def _ring_exchange(**arguments) -> list[dist.Work]:
    """Call the exchange that some builds of PyTorch add; it waits by itself."""
    ring_exchange_arguments = {
        name: value for name, value in arguments.items() if not name.endswith("pipeline_rank")
    }
    dist.ring_exchange(  # type: ignore[attr-defined]
        **ring_exchange_arguments
    )
    return []
