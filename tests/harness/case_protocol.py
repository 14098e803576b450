"""What a worker pool and its template process tell each other about one case.

Everything here is picklable and imports nothing heavy: the parent may be a test run, a command
line tool, or anything else that has no use for ``torch`` itself.
"""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

RankStatus = Literal["returned", "raised", "died", "stuck"]
Ending = Literal["completed", "peer failure", "stall", "deadline"]


@dataclass(frozen=True)
class PackageOrigin:
    """Where a worker's ``megatron.core`` came from.

    Attributes:
        version: Version of the ``megatron-core`` distribution that the worker sees.
        path: ``megatron/core/__init__.py`` that was imported.
    """

    version: str
    path: str


@dataclass(frozen=True)
class Case:
    """One function to run on every rank.

    Attributes:
        call: The pickled pair (function, keyword arguments); unpickled in the ranks only, so that
            the modules it needs are imported there and nowhere else.
        world_size: Number of ranks.
        environment: Variables that are set in the ranks before anything else happens there.
        deadline_s: Seconds after which ranks that are still running count as stuck.
        stall_s: Seconds without any progress in any running rank after which they count as stuck;
            ``None`` leaves that to the deadline.
        grace_s: Seconds that the others get to finish once a rank raised or died.
    """

    call: bytes
    world_size: int
    environment: Mapping[str, str]
    deadline_s: float
    stall_s: float | None
    grace_s: float


@dataclass(frozen=True)
class RankReport:
    """How one rank ended.

    Attributes:
        rank: Global rank.
        status: ``returned``; ``raised`` (an exception left the function); ``died`` (the process
            ended without either); ``stuck`` (it was still running and has been killed).
        pickled_value: What the function returned, which must be picklable; see ``value``.
        error: ``Type: message`` of the exception.
        traceback: The exception's formatted traceback.
        exit_code: Exit code of the process, negative for a signal; of interest for ``died``.
        stack: The Python stacks of all threads of a ``stuck`` rank, innermost call first.
        ended_at: When the rank ended, raised or was found stuck, in seconds of the system's
            monotonic clock: among failed ranks the first one is the cause.
        progress: The label last given to ``rank_runtime.report_progress``.
        log: The end of what the rank wrote to stdout and stderr.
    """

    rank: int
    status: RankStatus
    pickled_value: bytes = field(default=b"", repr=False)
    error: str = ""
    traceback: str = ""
    exit_code: int = 0
    stack: str = ""
    ended_at: float = 0.0
    progress: str = ""
    log: str = ""

    @property
    def value(self) -> Any:
        """What the function returned; only a rank with status ``returned`` has a value."""
        return pickle.loads(self.pickled_value)

    def describe(self) -> str:
        """Returns the report as readable text: one line, or several for a rank that failed."""
        summary = f"rank {self.rank} {self.status}"
        if self.status == "died":
            summary += f" with exit code {self.exit_code}"
        if self.progress:
            summary += f" in [{self.progress}]"
        details = self.traceback or self.stack
        if self.status == "died":
            details = self.log
        return f"{summary}\n{_indented(details)}" if details else summary


@dataclass(frozen=True)
class CaseOutcome:
    """How a case ended on all of its ranks.

    Attributes:
        ranks: One report per rank, in rank order.
        ended_by: ``completed`` when every rank ended by itself, well or not; else what made the
            pool stop waiting for those that are ``stuck``.
        seconds: Wall-clock time from the start of the ranks to the last one's end.
    """

    ranks: tuple[RankReport, ...] = field(repr=False)
    ended_by: Ending
    seconds: float

    def with_status(self, status: RankStatus) -> dict[int, RankReport]:
        """Returns the reports of the ranks that ended with ``status``, by rank."""
        return {report.rank: report for report in self.ranks if report.status == status}

    def values(self) -> list[Any]:
        """Returns what the function returned on each rank.

        Raises:
            CaseFailed: A rank did not return.
        """
        if len(self.with_status("returned")) < len(self.ranks):
            raise CaseFailed(self)
        return [report.value for report in self.ranks]

    def describe(self) -> str:
        """Returns the outcome as readable text: failed ranks first, the first to fail on top."""
        reports = sorted(self.ranks, key=lambda r: (r.status == "returned", r.ended_at))
        header = f"case ended by {self.ended_by} after {self.seconds:.1f} s"
        return "\n".join([header, *(report.describe() for report in reports)])


class CaseFailed(Exception):
    """A case did not return on every rank; the message says which ranks are where.

    Attributes:
        outcome: The outcome with the reports of all ranks.
    """

    def __init__(self, outcome: CaseOutcome) -> None:
        super().__init__(outcome.describe())
        self.outcome = outcome


CaseFunction = Callable[..., Any]


def send(connection: Connection, message: Any) -> None:
    """Sends a message by value.

    ``Connection.send`` is not used because importing ``torch`` changes how it transports tensors:
    as shared memory, which does not outlive the sender.
    """
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Receives what ``send`` sent.

    Raises:
        EOFError: The other side has closed its end.
    """
    return pickle.loads(connection.recv_bytes())


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip().splitlines())
