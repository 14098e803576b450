"""Puts traces together from what people and recorders wrote, refusing what no job can issue."""

from collections.abc import Sequence
from typing import Any

from .errors import UsageError
from .trace import Batch, Collective, Group, Meet, Operation, Trace, Transfer, Wait


class TraceBuilder:
    """Checks each part of a trace against the parts before it.

    Every method raises ``UsageError`` on what it refuses; the caller adds file and line.
    """

    def __init__(self, world_size: int, description: str) -> None:
        self.world_size = world_size
        self.description = description
        self._groups: dict[str, Group] = {}
        self._members: dict[str, frozenset[int]] = {}
        self._programs: dict[int, list[Operation]] = {}
        self._issued: dict[int, set[int | None]] = {}

    def trace(self) -> Trace:
        """Return the trace, once every rank is there."""
        missing = [str(rank) for rank in range(self.world_size) if rank not in self._programs]
        if missing:
            raise UsageError(
                f"no file holds rank {', '.join(missing)} of {self.world_size}; "
                "name the files of all ranks of the run"
            )
        programs = [self._programs[rank] for rank in range(self.world_size)]
        return Trace(self._groups, programs, self.description)

    def add_rank(self, rank: int) -> None:
        """Begin the program of a rank."""
        self._check_rank(rank)
        if rank in self._programs:
            raise UsageError(f"rank {rank} has a program already; give each rank once")
        self._programs[rank] = []
        self._issued[rank] = set()

    def add_group(self, group: Group) -> None:
        """Declare a process group, again if it is the same."""
        for rank in group.ranks:
            self._check_rank(rank)
        members = frozenset(group.ranks)
        if len(members) < len(group.ranks):
            raise UsageError(f"group {group.name!r} has a rank twice; name each member once")
        if self._groups.setdefault(group.name, group) != group:
            raise UsageError(f"group {group.name!r} was declared otherwise before; rename one")
        self._members[group.name] = members

    def add(self, rank: int, operation: Operation) -> None:
        """Append an operation to the program of a rank."""
        if isinstance(operation, Batch):
            for transfer in operation.transfers:
                if transfer.group != operation.group:
                    raise UsageError(
                        f"a batch on group {operation.group!r} has a part on {transfer.group!r}; "
                        "make it two batches"
                    )
                self._check_group(rank, transfer)
            self._issue(rank, operation.transfers)
        elif isinstance(operation, Meet):
            self._check_meeting(rank, operation)
        elif isinstance(operation, Wait):
            self._check_wait(rank, operation)
        elif hasattr(operation, "group"):
            self._check_group(rank, operation)
            self._issue(rank, (operation,))
        self._programs[rank].append(operation)

    def _check_rank(self, rank: int) -> None:
        if rank >= self.world_size:
            raise UsageError(f"rank {rank} is beyond the last of the {self.world_size} ranks")

    def _check_group(self, rank: int, operation: Any) -> None:
        members = self._members.get(operation.group)
        if members is None:
            known = ", ".join(self._groups)
            raise UsageError(
                f"group {operation.group!r} was not declared before; declared are {known or 'none'}"
            )
        if isinstance(operation, Transfer | Collective) and rank not in members:
            raise UsageError(
                f"rank {rank} is no member of group {operation.group!r}; its members are "
                f"{_listed(members)}"
            )
        if isinstance(operation, Transfer) and operation.peer not in members:
            raise UsageError(
                f"peer {operation.peer} is no member of group {operation.group!r}; its members, "
                f"by global rank, are {_listed(members)}"
            )

    def _check_meeting(self, rank: int, meet: Meet) -> None:
        for other in meet.ranks:
            self._check_rank(other)
        if rank not in meet.ranks:
            raise UsageError(
                f"rank {rank} is not among those that it meets, {_listed(meet.ranks)}; add it"
            )

    def _check_wait(self, rank: int, wait: Wait) -> None:
        issued = self._issued[rank]
        for number in wait.requests:
            if number not in issued:
                raise UsageError(f"waits for request {number}, which rank {rank} has not issued")

    def _issue(self, rank: int, operations: Sequence[Any]) -> None:
        issued = self._issued[rank]
        new = {getattr(operation, "request", None) for operation in operations} - {None}
        if not new.isdisjoint(issued):
            raise UsageError(
                f"rank {rank} issued request {_listed(new & issued)} before; number it anew"
            )
        issued.update(new)


def _listed(numbers: Sequence[int] | frozenset[int] | set[Any]) -> str:
    return ", ".join(map(str, sorted(numbers)))
