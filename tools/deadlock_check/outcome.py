"""What the model found, as plain data."""

import dataclasses
import enum
from typing import NamedTuple

from .trace import Operation, Trace, Transfer


class Verdict(enum.Enum):
    """The outcome of a trace on a machine."""

    PASS = "PASS"
    DEADLOCK = "DEADLOCK"
    CROSSED = "CROSSED"
    SIZE = "SIZE"
    UNMATCHED = "UNMATCHED"
    FIRST_USE = "FIRST USE"
    SLOW = "SLOW"

    @property
    def is_safe(self) -> bool:
        """Whether the job ends with the right results; FIRST USE and SLOW are remarks."""
        return self in (Verdict.PASS, Verdict.FIRST_USE, Verdict.SLOW)


class Issued(NamedTuple):
    """One operation in the program of a rank.

    Attributes:
        rank: Global rank.
        index: Position in the rank's program; its length for the end of the program.
        part: Position in the batch, for a transfer of a batch; ``None`` for the whole operation.
    """

    rank: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    part: int | None = None

    def operation(self, trace: Trace) -> Operation | Transfer | None:
        """Return what was issued; ``None`` for the end of the program."""
        program = trace.programs[self.rank]
        if self.index == len(program):
            return None
        operation = program[self.index]
        return operation if self.part is None else operation.transfers[self.part]  # type: ignore[union-attr]


class Reason(enum.Enum):
    """Why one operation waits for another; ``{waiter} REASON {target}`` is a sentence."""

    WAITS_FOR_WORK = "waits on the host for"
    WAITS_FOR_STREAM = "waits on the device, as the wait before it says, for"
    BEHIND_IN_STREAM = "stands in the same stream behind"
    BEHIND_IN_QUEUE = "stands in the one hardware queue behind"
    BEHIND_RESIDENT = "finds no free kernel slot before the end of"
    NEEDS_PARTNER = "moves no byte until its partner starts:"
    NEEDS_POSTED = "moves no byte until its partner is issued; that rank is at"
    NEEDS_WHOLE_BATCH = "completes only together with"
    NEEDS_MEMBER = "needs every member, and one of them is still at"
    CREATES_COMMUNICATOR = (
        "creates a communicator, which blocks its host until a rank joins that is still at"
    )
    CONNECTS = (
        "connects to its peer for the first time, which blocks its host until the matching "
        "operation is issued; that rank is at"
    )
    MEETS = "waits through the store for a rank that is still at"


@dataclasses.dataclass(frozen=True)
class Dependence:
    """One edge of the wait-for graph."""

    waiter: Issued
    reason: Reason
    target: Issued


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something about one place of the trace.

    Attributes:
        verdict: What it amounts to.
        where: The operations that show it: the two ends of a message for CROSSED and SIZE, the
            operation without partner for UNMATCHED, the first joiner for FIRST USE, an operation
            and the one that it stands behind for SLOW.
        detail: One sentence with the figures or names.
    """

    verdict: Verdict
    where: tuple[Issued, ...]
    detail: str


@dataclasses.dataclass(frozen=True)
class Span:
    """An operation on the logical clock: a forward takes 1, a backward 2, a message little.

    Attributes:
        begin: When it could start, in its stream.
        end: When it was done; infinity for one that never is.
    """

    issued: Issued
    begin: float
    end: float


@dataclasses.dataclass
class Statistics:
    """Counts over all ranks.

    Attributes:
        messages: Transfers sent.
        batches: Coalesced launches.
        device_synchronisations: ``torch.cuda.synchronize`` calls.
        communicators_in_schedule: Communicators and connections made after the start-up.
        head_of_line_waits: Transfers that were ready and stood behind another peer's in a stream.
        operations: Host operations that were run.
        duration: End of the last operation on the logical clock.
    """

    messages: int = 0
    batches: int = 0
    device_synchronisations: int = 0
    communicators_in_schedule: int = 0
    head_of_line_waits: int = 0
    operations: int = 0
    duration: float = 0.0


@dataclasses.dataclass
class Outcome:
    """The result of one trace on one machine.

    Attributes:
        verdict: The worst: DEADLOCK, CROSSED, SIZE, UNMATCHED, else PASS.
        findings: All CROSSED, SIZE, UNMATCHED, FIRST USE and SLOW places, at most
            ``matching.MAX_FINDINGS`` of each kind.
        cycle: The wait-for cycle, each target the next waiter; empty without a deadlock.
        stuck: For each rank that did not finish, by rank: where its host is, or the first device
            work that never ends when the host got through.
        statistics: Counts.
        spans: The timeline, if it was asked for.
    """

    verdict: Verdict
    findings: list[Finding]
    cycle: list[Dependence]
    stuck: dict[int, Issued]
    statistics: Statistics
    spans: list[Span]
