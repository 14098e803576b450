"""Which transfer meets which, and when the two complete.

NCCL has no tags: between two ranks of a communicator the first send meets the first receive, in the
order in which they were posted (NCCL documentation, point-to-point communication). Here the ends of
messages are matched when they are posted, and completed when the work that carries them has begun.
"""

import collections
from collections.abc import Hashable, Iterator

from .events import Agenda, Gate, Waiter
from .outcome import Finding, Issued, Verdict
from .trace import SENDS_TO_RECEIVES, Transfer

DATA_DURATION = 0.05
SHAPE_DURATION = 0.01

MAX_FINDINGS = 20
"""Of each verdict; a defect in a schedule repeats itself in every microbatch."""


class Findings:
    """Collects findings, a limited number of each verdict."""

    def __init__(self) -> None:
        self.counts: collections.Counter[Verdict] = collections.Counter()
        self.kept: list[Finding] = []

    def add(self, verdict: Verdict, where: tuple[Issued, ...], detail: str) -> None:
        """Note a finding."""
        self.counts[verdict] += 1
        if self.counts[verdict] <= MAX_FINDINGS:
            self.kept.append(Finding(verdict, where, detail))


class Work(Waiter):
    """Something that a rank launched: a kernel, or a host message. Fires when it can start.

    Attributes:
        started: Opens when it starts.
        done: Opens when it ends.
        ends: Its ends of messages; empty for computations and collectives.
        left: Number of ends that are not complete.
        latest_end: When the last complete end completed.
        component: With batches that complete only together: what it completes together with.
    """

    __slots__ = ("component", "done", "ends", "latest_end", "left", "started")

    def __init__(self, issued: Issued, time: float) -> None:
        super().__init__(issued, time)
        self.started = Gate(self)
        self.done = Gate(self)
        self.ends: list[End] = []
        self.left = 0
        self.latest_end = 0.0
        self.component: Component | None = None

    def finish(self, agenda: Agenda, time: float) -> None:
        """End at ``time``."""
        agenda.open(self.done, time)
        # Nothing leads on from finished work, or all work of the run would stay in memory.
        self.ends = []
        self.behind = None
        self.component = None


class End:
    """One end of a message; ``is_buffered`` if it is a send that completes without its receive."""

    __slots__ = ("is_buffered", "is_complete", "issued", "partner", "transfer", "work")

    def __init__(self, work: Work, transfer: Transfer, issued: Issued) -> None:
        self.work = work
        self.transfer = transfer
        self.issued = issued
        self.partner: End | None = None
        self.is_buffered = False
        self.is_complete = False


class Component:
    """Works that complete only together, because batches matched with one another tie them.

    Attributes:
        works: Its members.
        missing: Ends without a partner, plus members that have not started.
        time: The latest start.
    """

    __slots__ = ("missing", "time", "works")

    def __init__(self, work: Work) -> None:
        self.works = [work]
        self.missing = 1
        self.time = 0.0


class Matching:
    """Pairs ends and completes them.

    Args:
        agenda: Where completed work opens its gates.
        findings: Where ends that do not fit together are noted.
        buffered_send_bytes: See ``Machine``.
        is_all_or_nothing: Whether tied batches complete only together.
    """

    def __init__(
        self, agenda: Agenda, findings: Findings, buffered_send_bytes: int, is_all_or_nothing: bool
    ) -> None:
        self._agenda = agenda
        self._findings = findings
        self._buffered_send_bytes = buffered_send_bytes
        self._is_all_or_nothing = is_all_or_nothing
        self._waiting: dict[Hashable, collections.deque[End]] = {}

    def post(self, end: End, communicator: Hashable, is_on_host: bool) -> None:
        """Match ``end`` with the first waiting one from the other side, or let it wait."""
        rank, transfer, work = end.issued.rank, end.transfer, end.work
        source, target = (rank, transfer.peer) if transfer.is_send else (transfer.peer, rank)
        # Between hosts (gloo) even the smallest send waits for its receive.
        end.is_buffered = transfer.is_send and not is_on_host and self._is_small(transfer)
        work.ends.append(end)
        work.left += 1
        if self._is_all_or_nothing and not is_on_host:
            if work.component is None:
                work.component = Component(work)
            if not end.is_buffered:
                work.component.missing += 1
        waiting = self._waiting.setdefault((communicator, source, target), collections.deque())
        if waiting and waiting[0].transfer.is_send != transfer.is_send:
            partner = waiting.popleft()
            end.partner, partner.partner = partner, end
            if transfer.is_send:
                self._match(end, partner)
            else:
                self._match(partner, end)
        else:
            waiting.append(end)

    def start(self, work: Work) -> None:
        """Complete what only waited for ``work`` to start."""
        start = work.started.time
        assert start is not None
        if work.component is not None:
            self._start_tied(work, work.component, start)
            return
        for end in work.ends:
            partner = end.partner
            if partner is not None and partner.work.started.time is not None:
                both_started = max(start, partner.work.started.time)
                if not partner.is_complete:
                    self._complete(partner, both_started)
                if not end.is_complete:
                    self._complete(end, both_started)
            elif end.is_buffered:
                self._complete(end, start)

    def left_over(self) -> Iterator[End]:
        """Yield the ends that never met another."""
        for waiting in self._waiting.values():
            yield from waiting

    def _start_tied(self, work: Work, component: Component, start: float) -> None:
        for end in work.ends:
            if end.partner is not None and end.is_buffered:
                self._reduce(end.partner.work.component, 1, start)
        self._reduce(component, 1, start)

    def _is_small(self, transfer: Transfer) -> bool:
        return transfer.size is not None and transfer.size <= self._buffered_send_bytes

    def _match(self, send: End, receive: End) -> None:
        self._compare(send, receive)
        ours, theirs = send.work.component, receive.work.component
        if theirs is None:
            return
        if send.is_buffered:
            if send.work.started.time is not None:
                self._reduce(theirs, 1, send.work.started.time)
            return
        assert ours is not None
        if ours is not theirs:
            if len(ours.works) < len(theirs.works):
                ours, theirs = theirs, ours
            for work in theirs.works:
                work.component = ours
            ours.works += theirs.works
            ours.missing += theirs.missing
            ours.time = max(ours.time, theirs.time)
        self._reduce(ours, 2, 0.0)

    def _reduce(self, component: Component | None, count: int, time: float) -> None:
        assert component is not None
        component.missing -= count
        component.time = max(component.time, time)
        if component.missing == 0:
            for work in component.works:
                for end in work.ends:
                    self._complete(end, component.time)

    def _complete(self, end: End, time: float) -> None:
        end.is_complete = True
        work = end.work
        time += SHAPE_DURATION if end.transfer.content == "shape" else DATA_DURATION
        work.latest_end = max(work.latest_end, time)
        work.left -= 1
        if work.left == 0:
            work.finish(self._agenda, work.latest_end)
        partner = end.partner
        if partner is not None and partner.is_complete:
            end.partner = partner.partner = None

    def _compare(self, send: End, receive: End) -> None:
        sent, received = send.transfer, receive.transfer
        where = (send.issued, receive.issued)
        difference = _difference(sent, received)
        if difference is not None:
            self._findings.add(Verdict.CROSSED, where, difference)
        if sent.size is not None and received.size is not None and sent.size != received.size:
            self._findings.add(
                Verdict.SIZE, where, f"{sent.size} bytes are sent and {received.size} received"
            )


def _difference(sent: Transfer, received: Transfer) -> str | None:
    """Say why a receive is not the one that a send was meant for, as far as both tell."""
    if sent.role and received.role and SENDS_TO_RECEIVES[sent.role] != received.role:
        return f"what was sent as {sent.role} is received as {received.role}"
    if sent.content and received.content and sent.content != received.content:
        return f"what was sent as {sent.content} is received as {received.content}"
    if sent.message and received.message and sent.message != received.message:
        return f"what was sent as {sent.message} is received as {received.message}"
    ours, theirs = sent.place.microbatch, received.place.microbatch
    if ours is not None and theirs is not None and ours != theirs:
        return f"microbatch {ours} is received as microbatch {theirs}"
    return None
