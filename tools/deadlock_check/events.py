"""What a run is made of: gates that open once, and waiters that fire when theirs are open.

Every wait is for *all* of some gates, and no gate ever closes, so the order in which waiters fire
changes neither what fires in the end nor the time of anything: time is the maximum over the gates.
"""

from typing import Any

from .outcome import Issued, Reason


class Gate:
    """Opens once, at a time on the logical clock.

    Attributes:
        time: When it opened; ``None`` until then.
        waiters: Who waits for it.
        owner: Whose end, start or arrival it stands for, while it is shut; the wait-for graph asks
            it why.
    """

    __slots__ = ("owner", "time", "waiters")

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.time: float | None = None
        self.waiters: list[Waiter] | None = None


class Waiter:
    """Fires once all gates that it was told to await are open.

    Attributes:
        issued: The operation that waits.
        pending: Number of gates that are still shut.
        time: The latest opening among the others.
        behind: The work before it in its stream, whose end is kept out of ``time``: so that one can
            tell who is late only because of the stream.
        awaited: The gates that were shut when they were awaited, and why they matter.
    """

    __slots__ = ("awaited", "behind", "issued", "pending", "time")

    def __init__(self, issued: Issued, time: float) -> None:
        self.issued = issued
        self.time = time
        self.pending = 0
        self.behind: Any = None
        self.awaited: list[tuple[Gate, Reason]] = []

    def wait_for(self, gate: Gate, reason: Reason) -> None:
        """Hold back until ``gate`` is open."""
        if gate.time is None:
            if gate.waiters is None:
                gate.waiters = []
            gate.waiters.append(self)
            self.pending += 1
            self.awaited.append((gate, reason))
        elif gate.time > self.time:
            self.time = gate.time

    def fire(self) -> None:
        """Go on; called once, by the run."""
        raise NotImplementedError


class Agenda:
    """Waiters that may fire."""

    def __init__(self) -> None:
        self._ready: list[Waiter] = []

    def add(self, waiter: Waiter) -> None:
        """Let ``waiter`` fire as soon as nothing is pending for it."""
        if waiter.pending == 0:
            self._ready.append(waiter)

    def open(self, gate: Gate, time: float) -> None:
        """Open ``gate`` and make those ready that waited for nothing else."""
        gate.time = time
        owner, gate.owner = gate.owner, None
        waiters = gate.waiters
        if waiters is None:
            return
        gate.waiters = None
        ready = self._ready
        for waiter in waiters:
            waiter.pending -= 1
            if time > waiter.time and waiter.behind is not owner:
                waiter.time = time
            if waiter.pending == 0:
                ready.append(waiter)

    def run(self) -> None:
        """Fire until nothing is ready."""
        ready = self._ready
        while ready:
            ready.pop().fire()
