"""Gives gloo groups the ordering of NCCL communicators, in their strictest reading.

Within ``strict_rendezvous()`` the point-to-point operations of a process group run one after the
other in the order in which they were posted, and a send runs until its receive runs: one stream
per communicator, no buffering. A batch is one entry whose operations run together, and
``torch.cuda.synchronize`` waits for all that this rank has posted. Groups that were made with
``backend="gloo"`` explicitly are host groups, as on a GPU machine, and stay as they are; so does
everything that is not point-to-point.

What this does not show: that NCCL buffers small messages (so some of what hangs here passes there),
several streams behind one hardware queue, and the blocking creation of communicators.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


@contextmanager
def strict_rendezvous(coalesces: bool) -> Iterator[None]:
    """Orders the point-to-point operations of this rank; entered before groups are made.

    Args:
        coalesces: Whether ``batch_isend_irecv`` makes one entry of a batch, which backends then
            say to whoever asks. Else it issues the operations one by one, as torch 2.7 to 2.10 do
            under TORCH_DISTRIBUTED_DEBUG=DETAIL.
    """
    streams = _Streams()
    backend = SimpleNamespace(supports_coalescing=coalesces)
    post = {"isend": dist.isend, "irecv": dist.irecv}
    new_group = dist.new_group

    def recording_new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        group = new_group(*args, backend=backend, **kwargs)
        if backend == "gloo":
            streams.host_groups.add(group)
        return group

    def single(name: str) -> Callable[..., Any]:
        def operation(tensor: Any, peer: Any = None, group: Any = None, **kwargs: Any) -> Any:
            peer = kwargs.pop("dst", kwargs.pop("src", peer))
            start = (post[name], tensor, peer, group)
            if group in streams.host_groups:
                return _start(start)
            return streams.of(group).post([start])

        return operation

    strict = {name: single(name) for name in post}

    def batch(operations: list[Any]) -> list[Any]:
        starts = [(strict_or_real(op.op), op.tensor, op.peer, op.group) for op in operations]
        if coalesces and operations[0].group not in streams.host_groups:
            return [streams.of(operations[0].group).post(starts)]
        return [strict[real.__name__](tensor, peer, group) for real, tensor, peer, group in starts]

    def strict_or_real(function: Any) -> Callable[..., Any]:
        return post["isend"] if function in (post["isend"], strict["isend"]) else post["irecv"]

    with (
        mock.patch.object(torch.cuda, "synchronize", streams.synchronize),
        mock.patch.object(dist.ProcessGroup, "_get_backend", return_value=backend),
        mock.patch.object(dist, "new_group", recording_new_group),
        mock.patch.object(dist, "isend", strict["isend"]),
        mock.patch.object(dist, "irecv", strict["irecv"]),
        mock.patch.object(dist, "batch_isend_irecv", batch),
        mock.patch.object(dist.distributed_c10d, "isend", strict["isend"]),
        mock.patch.object(dist.distributed_c10d, "irecv", strict["irecv"]),
    ):
        yield


def _start(start: tuple[Callable[..., Any], Any, Any, Any]) -> Any:
    function, tensor, peer, group = start
    return function(tensor, peer, group=group)


class _Streams:
    def __init__(self) -> None:
        self.host_groups: set[Any] = set()
        self._streams: dict[Any, _Stream] = {}

    def of(self, group: Any) -> "_Stream":
        if group not in self._streams:
            self._streams[group] = _Stream()
        return self._streams[group]

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.latest.done.wait()


class _Stream:
    """Runs entries of started-together operations one after the other."""

    def __init__(self) -> None:
        self.latest: _StreamWork
        self._entries: queue.SimpleQueue[tuple[list[Any], _StreamWork]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def post(self, starts: list[Any]) -> "_StreamWork":
        self.latest = _StreamWork()
        self._entries.put((starts, self.latest))
        return self.latest

    def _run(self) -> None:
        while True:
            starts, work = self._entries.get()
            try:
                for request in [_start(start) for start in starts]:
                    request.wait()
            except Exception as error:
                work.error = error
            work.done.set()


class _StreamWork:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.done.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"timed out after {timeout.total_seconds():g} s")
        if self.error is not None:
            raise self.error
        return True
