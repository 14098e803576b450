"""Tells which microbatch and model chunk each operation of a schedule serves.

While a rank records, it cannot know what a receive is for. Afterwards it is clear: the messages of
a link and direction are in the order of the computations that make and use them.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from .trace import Batch, Compute, Operation, Place, Transfer, Wait

_DIRECTIONS = {
    "send_next": "forward",
    "recv_prev": "forward",
    "send_prev": "backward",
    "recv_next": "backward",
}
"""By role: which computation makes or uses the message."""


class _Served(NamedTuple):
    microbatch: int | None = None
    chunk: int | None = None


_Orders = dict[str, list[_Served]]
"""By direction: what is computed, in order."""


def annotate(programs: Mapping[int, list[Operation]]) -> None:
    """Fill in the microbatch and chunk of the operations in schedules, where they have none.

    Args:
        programs: The operations of some or all ranks of a job by global rank, recorded with phases
            and computations. Pipelines have their stages in the order of ranks. What a rank did
            not come to compute is taken from the rank that came furthest.
    """
    orders = [_orders(program) for program in programs.values()]
    furthest = {
        direction: max((order[direction] for order in orders), key=len, default=[])
        for direction in ("forward", "backward")
    }
    for rank, program in programs.items():
        _Annotator(rank, furthest).annotate(program)


def _orders(program: Iterable[Operation]) -> _Orders:
    orders: _Orders = {"forward": [], "backward": []}
    for operation in program:
        if isinstance(operation, Compute):
            place = operation.place
            orders[operation.direction].append(_Served(place.microbatch, place.chunk))
    return orders


class _Annotator:
    """Annotates the program of one rank."""

    def __init__(self, rank: int, orders: _Orders) -> None:
        self._rank = rank
        self._orders = orders
        self._messages: dict[tuple[str, str | None], Iterator[_Served]] = {}
        self._of_request: dict[int | None, _Served] = {}
        self._place = functools.cache(_place)

    def annotate(self, program: Iterable[Operation]) -> None:
        latest = _Served()
        for operation in program:
            if operation.place.phase not in ("warmup", "steady", "cooldown"):
                continue
            if isinstance(operation, Compute):
                latest = _Served(operation.place.microbatch, operation.place.chunk)
                continue
            if isinstance(operation, Transfer):
                latest = self._serve(operation, latest)
            elif isinstance(operation, Batch):
                for part in operation.transfers:
                    latest = self._serve(part, latest)
            elif isinstance(operation, Wait) and operation.requests:
                latest = self._of_request.get(operation.requests[0], latest)
            operation.place = self._place(operation.place, latest)

    def _serve(self, transfer: Transfer, latest: _Served) -> _Served:
        """Annotate a transfer, which serves the same as ``latest`` if it has no role."""
        served = latest
        if transfer.role is not None:
            key = transfer.role, transfer.content
            if key not in self._messages:
                self._messages[key] = iter(self._computed(transfer.role, transfer.peer))
            served = next(self._messages[key], _Served())
        transfer.place = self._place(transfer.place, served)
        self._of_request[transfer.request] = served
        return served

    def _computed(self, role: str, peer: int) -> list[_Served]:
        """Return what the messages of a role serve, in order.

        Where the link wraps round from the last stage to the first, nothing leaves the last chunk
        or comes to the first.
        """
        order = self._orders[_DIRECTIONS[role]]
        is_to_next = role.endswith("next")
        if not (peer < self._rank if is_to_next else peer > self._rank):
            return order
        chunks = [served.chunk or 0 for served in order]
        outer = max(chunks, default=0) if is_to_next else 0
        return [served for served in order if served.chunk != outer]


def _place(place: Place, served: _Served) -> Place:
    if place.microbatch is not None or place.chunk is not None:
        return place
    return place._replace(microbatch=served.microbatch, chunk=served.chunk)
