"""Ranks and operations of a trace in the words of someone who trains models."""

import functools
from collections.abc import Sequence

from .outcome import Issued
from .trace import (
    NOWHERE,
    Batch,
    Collective,
    Compute,
    CreateGroup,
    Meet,
    Operation,
    Place,
    Synchronize,
    Trace,
    Transfer,
    Wait,
)

MAX_NAMED = 4
"""Transfers of a batch, requests of a wait or ranks of a meeting that are named one by one."""

_CARRIED = {
    "send_next": "activations",
    "recv_prev": "activations",
    "send_prev": "gradients",
    "recv_next": "gradients",
}
_PIPELINE_END = {"next": "next stage", "prev": "previous stage"}


class Wording:
    """Describes what a trace holds.

    Args:
        trace: Whose operations are described.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    @functools.cached_property
    def pipelines(self) -> list[list[int]]:
        """The ranks of each pipeline, in stage order."""
        return pipelines(self._trace)

    @functools.cached_property
    def stages(self) -> dict[int, int]:
        """The pipeline stage of each rank that has one."""
        return {rank: stage for ranks in self.pipelines for stage, rank in enumerate(ranks)}

    def rank(self, rank: int) -> str:
        """Return the rank with its pipeline stage."""
        stage = self.stages.get(rank)
        return f"rank {rank}" if stage is None else f"rank {rank} (stage {stage})"

    def operation(self, issued: Issued) -> str:
        """Return what was issued: a noun phrase without article."""
        operation = issued.operation(self._trace)
        if operation is None:
            return "end of its program"
        return self._phrase(operation, issued.rank)

    def label(self, issued: Issued) -> str:
        """Return what was issued in a few words, for a picture."""
        operation = issued.operation(self._trace)
        match operation:
            case Transfer():
                return _label(operation)
            case Batch():
                labels = [_label(transfer) for transfer in operation.transfers]
                return f"batch: {_listed(labels, 'transfers')}"
            case Wait():
                labels = [_label(part) for part in self._requested(operation, issued.rank)]
                return f"wait: {_listed(labels, 'operations')}"
            case Synchronize():
                return f"synchronize the {operation.scope}"
            case _:
                return self.operation(issued)

    def place(self, issued: Issued) -> Place:
        """Return where in the schedule and in the source something was issued."""
        operation = issued.operation(self._trace)
        return NOWHERE if operation is None else operation.place

    def group(self, issued: Issued) -> str | None:
        """Return the process group of what was issued, if it has one."""
        return getattr(issued.operation(self._trace), "group", None)

    def situation(self, issued: Issued) -> str:
        """Return phase, microbatch and chunk as far as ``operation`` leaves them out."""
        place = self.place(issued)
        operation = issued.operation(self._trace)
        named = {"microbatch": place.microbatch, "chunk": place.chunk}
        if isinstance(operation, Transfer) and operation.role is not None:
            del named["microbatch"]
        known = [f"{name} {number}" for name, number in named.items() if number is not None]
        return ", ".join([place.phase, *known] if place.phase else known)

    def _phrase(self, operation: Operation | Transfer, rank: int) -> str:
        match operation:
            case Transfer():
                return _transfer(operation)
            case Batch():
                parts = [_transfer(transfer) for transfer in operation.transfers]
                return f"batch of {_listed(parts, 'transfers')}"
            case Wait():
                return f"wait for {self._awaited(operation, rank)}"
            case Synchronize(scope="device"):
                return "wait of the host for all work on the device (torch.cuda.synchronize)"
            case Synchronize():
                return "wait of the host for the current stream (reading a value from the device)"
            case Collective():
                return operation.name
            case CreateGroup():
                return "new_group"
            case Meet():
                return f"meeting {operation.name!r} of ranks {_listed(operation.ranks, 'ranks')}"
            case Compute():
                return operation.direction

    def _awaited(self, wait: Wait, rank: int) -> str:
        phrases = [self._phrase(part, rank) for part in self._requested(wait, rank)]
        return _listed(phrases, "operations")

    def _requested(self, wait: Wait, rank: int) -> list[Transfer | Collective]:
        requests = set(wait.requests)
        return [
            part
            for operation in self._trace.programs[rank]
            for part in _parts(operation)
            if isinstance(part, Transfer | Collective) and part.request in requests
        ]


def pipelines(trace: Trace) -> list[list[int]]:
    """Return the ranks of each pipeline in stage order, as far as the roles of transfers tell.

    A ring, as interleaved schedules use it, begins with its lowest rank, as in Megatron's order.
    """
    next_of = _next_ranks(trace)
    heads = sorted(next_of.keys() - set(next_of.values())) + sorted(next_of)
    found: list[list[int]] = []
    placed: set[int] = set()
    for head in heads:
        ranks: list[int] = []
        rank: int | None = head
        while rank is not None and rank not in placed:
            placed.add(rank)
            ranks.append(rank)
            rank = next_of.get(rank)
        if ranks:
            found.append(ranks)
    return sorted(found)


def _next_ranks(trace: Trace) -> dict[int, int]:
    next_of: dict[int, int] = {}
    for rank, program in enumerate(trace.programs):
        for operation in program:
            for part in _parts(operation):
                if not isinstance(part, Transfer) or part.role is None:
                    continue
                if part.role.endswith("next"):
                    next_of[rank] = part.peer
                else:
                    next_of.setdefault(part.peer, rank)
            if rank in next_of:
                break
    return next_of


def _parts(operation: Operation) -> Sequence[Operation]:
    return operation.transfers if isinstance(operation, Batch) else (operation,)


def _transfer(transfer: Transfer) -> str:
    verb, preposition = ("isend", "to") if transfer.is_send else ("irecv", "from")
    peer = f"rank {transfer.peer}"
    if transfer.role is not None:
        peer = f"the {_PIPELINE_END[transfer.role[-4:]]} ({peer})"
    return f"{verb} of {_content(transfer)} {preposition} {peer}"


def _label(transfer: Transfer | Collective) -> str:
    if isinstance(transfer, Collective):
        return transfer.name
    verb, arrow = ("isend", "to") if transfer.is_send else ("irecv", "from")
    what = transfer.content or transfer.message or ""
    carried = _CARRIED.get(transfer.role or "", "")
    if transfer.place.microbatch is not None:
        carried += f" {transfer.place.microbatch}"
    return " ".join(f"{verb} {what} {carried} {arrow} {transfer.peer}".split())


def _content(transfer: Transfer) -> str:
    if transfer.role is None:
        what = f"{transfer.message!r}" if transfer.message else "a message"
        size = "" if transfer.size is None else f" ({transfer.size:,} bytes)"
        return f"{what}{size}"
    carried = _CARRIED[transfer.role]
    if transfer.place.microbatch is not None:
        carried = f"microbatch {transfer.place.microbatch}'s {carried}"
    return f"the shape of {carried}" if transfer.content == "shape" else carried


def _listed(items: Sequence[object], noun: str) -> str:
    """Return the items; past some, only the first and how many there are."""
    named = [str(item) for item in items]
    if len(named) > MAX_NAMED:
        return f"{len(named)} {noun} ({named[0]}, ...)"
    return ", ".join(named)
