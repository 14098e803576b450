"""Observes the point-to-point operations that this rank posts."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist


@contextmanager
def observed_operations(observe: Callable[[str, int, Any], None]) -> Iterator[None]:
    """Calls ``observe`` before every ``isend`` and ``irecv``.

    Args:
        observe: Takes the name of the operation, the peer's global rank and the process group.
    """

    def observed(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def operation(tensor: Any, peer: Any = None, group: Any = None, **keywords: Any) -> Any:
            peer = keywords.pop("dst", keywords.pop("src", peer))
            observe(real.__name__, peer, group)
            return real(tensor, peer, group=group)

        return operation

    replaced = {"isend": observed(dist.isend), "irecv": observed(dist.irecv)}
    with (
        mock.patch.multiple(dist, **replaced),
        mock.patch.multiple(dist.distributed_c10d, **replaced),
    ):
        yield
