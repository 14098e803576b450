"""Hooks on torch that record what a rank asks of torch.distributed.

An operation is recorded before it is run, so that one which never returns is in the trace. Not seen
is what goes past the functions of ``torch.distributed``: methods of process groups, functional
collectives, and waits on the future of a work object. A host that reads a tensor is seen where the
tensor itself was sent or received.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .errors import UsageError
from .recorder import MOVED_ON_DEVICE, RecordedWork, Recorder, is_device_bound
from .trace import Batch, Collective, CreateGroup, Synchronize, Wait

Function = Callable[..., Any]
Hook = Callable[[Recorder, Function], Function]


def hook_torch(recorder: Recorder) -> None:
    """Put the hooks in place, for good; before anything keeps a function that is hooked."""
    for name, hook in _HOOKS.items():
        # Both modules must get one object: P2POp accepts only the functions that torch knows.
        hooked = functools.cache(functools.partial(hook, recorder))
        for module in (dist, distributed_c10d):
            # Not every release of torch has all of them.
            if hasattr(module, name):
                setattr(module, name, hooked(getattr(module, name)))
    torch.cuda.synchronize = _synchronize(recorder, torch.cuda.synchronize)
    for name in ("tolist", "item", "__int__"):
        setattr(torch.Tensor, name, _read(recorder, getattr(torch.Tensor, name)))


def _transfer(recorder: Recorder, original: Function) -> Function:
    is_send = original.__name__ == "isend"

    @functools.wraps(original)
    def post(tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        peer, group = _peer_and_group(*args, **keywords)
        if recorder.thread.is_inside or _is_foreign(group):
            return original(tensor, *args, **keywords)
        (transfer,), requests = recorder.transfers([(is_send, tensor, peer)], group)
        recorder.emit(transfer)
        return RecordedWork(recorder, original(tensor, *args, **keywords), requests)

    return post


def _blocking_transfer(recorder: Recorder, original: Function) -> Function:
    is_send = original.__name__ == "send"

    @functools.wraps(original)
    def post_and_wait(tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        peer, group = _peer_and_group(*args, **keywords)
        if recorder.thread.is_inside or _is_foreign(group):
            return original(tensor, *args, **keywords)
        (transfer,), requests = recorder.transfers([(is_send, tensor, peer)], group)
        recorder.emit(transfer)
        recorder.emit(Wait(tuple(requests), place=transfer.place))
        return recorder.run(original, tensor, *args, **keywords)

    return post_and_wait


def _batch(recorder: Recorder, original: Function) -> Function:
    @functools.wraps(original)
    def post_batch(p2p_op_list: Sequence[dist.P2POp]) -> Any:
        posts = [(op.op.__name__ == "isend", op.tensor, op.peer) for op in p2p_op_list]
        transfers, requests = recorder.transfers(posts, p2p_op_list[0].group)
        recorder.emit(Batch(transfers[0].group, transfers, transfers[0].place))
        works = recorder.run(original, p2p_op_list)
        if len(works) != len(requests):
            # A batch that is coalesced has one work object for all of its transfers.
            return [RecordedWork(recorder, work, requests) for work in works]
        return [
            RecordedWork(recorder, work, (request,))
            for work, request in zip(works, requests, strict=True)
        ]

    return post_batch


def _new_group(recorder: Recorder, original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_group(*args: Any, **keywords: Any) -> Any:
        given = signature.bind(*args, **keywords).arguments
        is_local = given.get("use_local_synchronization", False)
        ranks = given.get("ranks")
        ranks = range(dist.get_world_size()) if ranks is None else sorted(ranks)
        if is_local and dist.get_rank() not in ranks:
            return original(*args, **keywords)
        name = recorder.declare_new(
            ranks,
            given.get("group_desc"),
            is_local,
            on_host=given.get("backend") == "gloo",
            is_device_bound=is_device_bound() or given.get("device_id") is not None,
        )
        recorder.emit(CreateGroup(name, is_local, recorder.place()))
        group = recorder.run(original, *args, **keywords)
        if not _is_foreign(group):
            recorder.set_name(group, name)
        return group

    return new_group


def _collective(recorder: Recorder, original: Function) -> Function:
    name = _COLLECTIVES[original.__name__]
    parameters = list(inspect.signature(original).parameters)
    positions = {parameter: position for position, parameter in enumerate(parameters)}

    @functools.wraps(original)
    def run(*args: Any, **keywords: Any) -> Any:
        def given(parameter: str) -> Any:
            position = positions[parameter]
            return args[position] if position < len(args) else keywords.get(parameter)

        group = given("group")
        if recorder.thread.is_inside or _is_foreign(group):
            return original(*args, **keywords)
        coalesced = recorder.thread.coalesced
        is_async = coalesced is not None or bool(given("async_op"))
        request = next(recorder.requests) if is_async else None
        size = _size(given(parameters[0]))
        recorder.emit(
            Collective(name, recorder.name(group), is_async, size, request, recorder.place())
        )
        work = recorder.run(original, *args, **keywords)
        if request is None:
            return work
        if coalesced is not None:
            coalesced.append(request)
            return work
        return RecordedWork(recorder, work, (request,))

    return run


def _coalescing_manager(recorder: Recorder, original: Function) -> Function:
    @functools.wraps(original)
    @contextlib.contextmanager
    def coalescing_manager(
        group: Any = None, device: Any = None, async_ops: bool = False
    ) -> Iterator[Any]:
        with original(group, device, async_ops) as manager:
            if recorder.thread.is_inside or not async_ops:
                yield manager
                return
            requests: list[int] = []
            recorder.thread.coalesced = requests
            try:
                yield RecordedWork(recorder, manager, requests)
            finally:
                recorder.thread.coalesced = None

    return coalescing_manager


def _synchronize(recorder: Recorder, original: Function) -> Function:
    @functools.wraps(original)
    def synchronize(*args: Any, **keywords: Any) -> Any:
        recorder.emit(Synchronize("device", recorder.place()))
        return original(*args, **keywords)

    return synchronize


def _read(recorder: Recorder, original: Function) -> Function:
    @functools.wraps(original)
    def read(tensor: torch.Tensor) -> Any:
        if hasattr(tensor, MOVED_ON_DEVICE):
            recorder.emit(Synchronize("stream", recorder.place()))
        return original(tensor)

    return read


def _is_foreign(group: Any) -> bool:
    """Return whether ``group`` stands for one that the calling rank is not in."""
    return group is dist.GroupMember.NON_GROUP_MEMBER


def _peer_and_group(
    peer: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_peer: int | None = None,
    *,
    src: int | None = None,
    dst: int | None = None,
    group_src: int | None = None,
    group_dst: int | None = None,
) -> tuple[int, Any]:
    """Return the peer's global rank, and the group, of a call of ``isend`` or its like."""
    for rank in (peer, src, dst):
        if rank is not None:
            return rank, group
    for rank in (group_peer, group_src, group_dst):
        if rank is not None:
            in_group = group or distributed_c10d._get_default_group()
            return dist.get_global_rank(in_group, rank), group
    raise UsageError("a receive from any rank cannot be recorded; name its source")


def _size(payload: Any) -> int | None:
    if isinstance(payload, torch.Tensor):
        return payload.nbytes
    if isinstance(payload, Sequence):
        return sum(_size(part) or 0 for part in payload)
    return None


_COLLECTIVES = {
    "all_gather": "all_gather",
    "all_gather_coalesced": "all_gather_coalesced",
    "all_gather_into_tensor": "all_gather_into_tensor",
    "_all_gather_base": "all_gather_into_tensor",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce_coalesced",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "scatter": "scatter",
}
"""Functions of torch.distributed, and the names of what they do."""

_HOOKS: dict[str, Hook] = {
    "isend": _transfer,
    "irecv": _transfer,
    "send": _blocking_transfer,
    "recv": _blocking_transfer,
    "batch_isend_irecv": _batch,
    "new_group": _new_group,
    "_coalescing_manager": _coalescing_manager,
    **dict.fromkeys(_COLLECTIVES, _collective),
}
"""Functions of torch.distributed, and what records them."""
