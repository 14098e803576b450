"""The configurations that are run live, and what is known of each.

The base's defects and the half-fixes are negative controls of the live tests and of the model: both
see what the fork does not do.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tools.deadlock_check.outcome import Verdict

PASS, DEADLOCK, CROSSED = Verdict.PASS, Verdict.DEADLOCK, Verdict.CROSSED
FIXED, VARIABLE = False, True


class Schedule(NamedTuple):
    pipeline_size: int
    chunks_per_rank: int
    num_microbatches: int
    is_variable: bool
    transport: str


class Configuration(NamedTuple):
    """A schedule of a package on a backend.

    Attributes:
        package: ``base`` or ``fork``.
        backend: Key of ``live_cases.BACKENDS``.
        half_fix: Key of ``half_fixes.HALF_FIXES``; ``None`` for the package as it is.
    """

    package: str
    schedule: Schedule
    backend: str
    half_fix: str | None = None

    def __str__(self) -> str:
        stages, chunks, microbatches, is_variable, transport = self.schedule
        lengths = "variable" if is_variable else "fixed"
        return (
            f"{self.half_fix or self.package}, PP={stages} VPP={chunks}, {microbatches} "
            f"microbatches, {lengths} lengths, {transport}, on {self.backend}"
        )


BASE_VERDICTS = {
    # A batch that is none, in the base's fixed order, ...
    Schedule(2, 1, 4, FIXED, "batched"): (PASS, PASS, DEADLOCK),
    Schedule(4, 1, 8, FIXED, "batched"): (PASS, PASS, DEADLOCK),
    Schedule(4, 1, 8, VARIABLE, "batched"): (PASS, PASS, DEADLOCK),
    Schedule(4, 2, 4, FIXED, "batched"): (PASS, PASS, DEADLOCK),
    Schedule(4, 2, 8, VARIABLE, "batched"): (PASS, PASS, DEADLOCK),
    # ... and the usual workarounds, which do not reach the shapes.
    Schedule(4, 1, 8, FIXED, "unbatched"): (PASS, PASS, PASS),
    Schedule(4, 1, 8, VARIABLE, "unbatched"): (PASS, PASS, DEADLOCK),
    Schedule(3, 3, 3, FIXED, "overlapped"): (PASS, PASS, PASS),
    Schedule(4, 2, 8, VARIABLE, "overlapped"): (PASS, PASS, DEADLOCK),
    # A shape that stands behind data which is received ahead of time.
    Schedule(3, 2, 3, VARIABLE, "overlapped with warm-up and flush"): (PASS, DEADLOCK, DEADLOCK),
    # Shapes, then data, each awaited in both directions: a cycle of its own on an even ring.
    Schedule(2, 2, 2, VARIABLE, "batched"): (DEADLOCK, DEADLOCK, DEADLOCK),
    Schedule(4, 2, 4, VARIABLE, "batched"): (DEADLOCK, DEADLOCK, DEADLOCK),
    Schedule(4, 2, 4, VARIABLE, "unbatched"): (DEADLOCK, DEADLOCK, DEADLOCK),
    Schedule(6, 3, 6, VARIABLE, "batched"): (DEADLOCK, DEADLOCK, DEADLOCK),
    Schedule(5, 2, 5, VARIABLE, "unbatched"): (PASS, PASS, DEADLOCK),
    # Both neighbours are one rank, and get what was meant for each other.
    Schedule(2, 2, 4, FIXED, "batched"): (CROSSED, CROSSED, DEADLOCK),
    Schedule(2, 2, 4, VARIABLE, "batched"): (CROSSED, CROSSED, DEADLOCK),
    Schedule(2, 2, 4, VARIABLE, "unbatched"): (CROSSED, CROSSED, DEADLOCK),
}
"""What the base does on gloo, with batches, and with operations one by one; the fork passes."""

HALF_FIXED = {
    "shape sends awaited": [(2, 2, 2), (4, 2, 4)],
    "groups by own parity": [(3, 2, 3), (5, 2, 5)],
    "one group per direction": [(2, 2, 2), (4, 2, 4)],
    "one group, sends first": [(2, 1, 4), (4, 1, 4)],
}
"""Stages, chunks and microbatches with which a half-fix deadlocks, and the fork passes."""


def _verdicts() -> Iterator[tuple[Configuration, Verdict]]:
    for schedule, verdicts in BASE_VERDICTS.items():
        for backend, verdict in zip(("gloo", "batches", "one by one"), verdicts, strict=True):
            yield Configuration("base", schedule, backend), verdict
            yield Configuration("fork", schedule, backend), PASS
    for half_fix, sizes in HALF_FIXED.items():
        for stages, chunks, microbatches in sizes:
            schedule = Schedule(stages, chunks, microbatches, VARIABLE, "unbatched")
            yield Configuration("fork", schedule, "one by one", half_fix), DEADLOCK
            yield Configuration("fork", schedule, "one by one"), PASS


VERDICTS = dict(_verdicts())
