"""The state of a run: hosts, what they launched, and the points at which hosts must all arrive."""

import collections
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from .events import Agenda, Gate, Waiter
from .matching import Work
from .outcome import Issued
from .trace import Collective, Transfer


class Host(Waiter):
    """The host of a rank, and what it knows of its device.

    Attributes:
        rank: Global rank.
        resume: Its program; goes on to the next point at which the host blocks.
        is_finished: Whether the program has ended.
        current: Work that whatever is put on the current stream next must wait for.
        current_time: End of what was in ``current`` and has ended.
        stream_tail: By communicator, the kernel launched last on its stream.
        latest_launch: The kernel launched last on any stream.
        undone: Kernels that have not ended, in launch order.
        free_slots: How many more kernels can be resident; ``None`` for any number.
        slot_queue: Gates of kernels that wait for a slot.
        requests: By number, the work that a ``Wait`` on it waits for.
        collectives: By group, how many collectives were issued.
        splits: How often the communicator of WORLD was split.
    """

    def __init__(self, rank: int, free_slots: int | None) -> None:
        super().__init__(Issued(rank, 0), 0.0)
        self.rank = rank
        self.resume: Iterator[None]
        self.is_finished = False
        self.current: list[Work] = []
        self.current_time = 0.0
        self.stream_tail: dict[Hashable, Kernel] = {}
        self.latest_launch: Kernel | None = None
        self.undone: dict[Kernel, None] = {}
        self.free_slots = free_slots
        self.slot_queue: collections.deque[Gate] = collections.deque()
        self.requests: dict[int, list[Work]] = {}
        self.collectives: collections.Counter[str] = collections.Counter()
        self.splits = 0

    def fire(self) -> None:
        """Go on with the program."""
        self.awaited.clear()
        if next(self.resume, self) is self:
            self.is_finished = True


class Kernel(Work):
    """Work on the device; fires when its stream and the hardware queue let it start.

    Attributes:
        host: Of the rank that launched it.
        run: Starts and finishes it.
        transfer: When it is a single one.
        duration: Of a computation.
        rendezvous: Of a collective.
    """

    __slots__ = ("duration", "host", "rendezvous", "run", "transfer")

    def __init__(self, host: Host, run: Any) -> None:
        super().__init__(host.issued, max(host.time, host.current_time))
        self.host: Any = host
        self.run: Any = run
        self.transfer: Transfer | None = None
        self.duration: float | None = None
        self.rendezvous: Rendezvous | None = None

    def fire(self) -> None:
        """Start."""
        self.run.start(self)

    def finish(self, agenda: Agenda, time: float) -> None:
        """End at ``time`` and make room for others."""
        self.run.finish(self, time)
        super().finish(agenda, time)
        self.host = self.run = self.rendezvous = None


class HostMessage(Work):
    """A transfer or collective of a host group: it starts when it is issued."""

    __slots__ = ("rendezvous",)

    def __init__(self, host: Host) -> None:
        super().__init__(host.issued, host.time)
        self.started.time = host.time
        self.rendezvous: Rendezvous | None = None


class Assembly:
    """Hosts that must all come to one point: a communicator, a connection, a meeting, a group.

    Attributes:
        gate: Opens when the last one comes.
        absent: Ranks that have not come.
        time: The latest arrival.
    """

    __slots__ = ("absent", "gate", "time")

    def __init__(self, ranks: Sequence[int]) -> None:
        self.gate = Gate(self)
        self.absent = set(ranks)
        self.time = 0.0

    def arrive(self, host: Host, agenda: Agenda) -> None:
        """Let a host come; the second time it does nothing."""
        if host.rank in self.absent:
            self.absent.remove(host.rank)
            self.time = max(self.time, host.time)
            if not self.absent:
                agenda.open(self.gate, self.time)


class Rendezvous:
    """The parts of one collective.

    Attributes:
        ranks: Members of the group.
        parts: What was issued, by rank.
        unstarted: Number of members whose part has not started.
        time: The latest start.
    """

    __slots__ = ("parts", "ranks", "time", "unstarted")

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.parts: dict[int, tuple[Work, Collective]] = {}
        self.unstarted = len(ranks)
        self.time = 0.0

    def start(self, time: float, agenda: Agenda, duration: float) -> None:
        """Note that one more part starts; the last one ends them all."""
        self.unstarted -= 1
        self.time = max(self.time, time)
        if self.unstarted == 0:
            for work, _ in self.parts.values():
                work.finish(agenda, self.time + duration)
