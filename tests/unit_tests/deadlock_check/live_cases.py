"""Runs one step of a real schedule on a backend that the model has a machine for.

``run_step_on_backend`` is a case function for the ranks of a worker pool.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from tests.harness.rank_runtime import report_progress
from tests.harness.strict_rendezvous import strict_rendezvous
from tests.unit_tests.deadlock_check.half_fixes import HALF_FIXES
from tests.unit_tests.pipeline_parallel import schedule_cases
from tests.unit_tests.pipeline_parallel.schedule_cases import Step, run_steps

BACKENDS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "gloo": contextlib.nullcontext,
    "batches": lambda: strict_rendezvous(coalesces=True),
    "one by one": lambda: strict_rendezvous(coalesces=False),
}


def run_step_on_backend(
    pipeline_size: int,
    chunks_per_rank: int,
    transport: str,
    step: Step,
    backend: str,
    half_fix: str | None,
) -> list[str]:
    """Runs one step; its progress says how many passes through chunks have begun.

    Args:
        pipeline_size: Number of pipeline stages; equal to the world size.
        chunks_per_rank: Model chunks per stage.
        transport: One of ``schedule_cases.TRANSPORTS``.
        step: What to run.
        backend: Key of ``BACKENDS``.
        half_fix: Key of ``HALF_FIXES``; ``None`` for the package as it is.

    Returns:
        The differences from one rank's autograd.
    """
    change = (lambda: None) if half_fix is None else HALF_FIXES[half_fix]
    with BACKENDS[backend](), _after_group_creation(change), _passes_reported():
        return run_steps(pipeline_size, chunks_per_rank, transport, (step,))


@contextmanager
def _after_group_creation(change: Callable[[], None]) -> Iterator[None]:
    initialize = parallel_state.initialize_model_parallel

    def initialize_then_change(**arguments: object) -> None:
        initialize(**arguments)
        change()

    with mock.patch.object(parallel_state, "initialize_model_parallel", initialize_then_change):
        yield


@contextmanager
def _passes_reported() -> Iterator[None]:
    passes: Counter[str] = Counter()

    def report(step: str) -> None:
        report_progress(passes_label(passes))

    def counted(direction: str) -> Any:
        real = getattr(schedules, f"{direction}_step")

        def run_pass(*arguments: Any, **keywords: Any) -> Any:
            passes[direction] += 1
            report(direction)
            return real(*arguments, **keywords)

        return mock.patch.object(schedules, f"{direction}_step", run_pass)

    with (
        mock.patch.object(schedule_cases, "report_progress", report),
        counted("forward"),
        counted("backward"),
    ):
        yield


def passes_label(passes: Counter[str]) -> str:
    """Names a place in a schedule by how many forward and backward passes have begun."""
    return f"{passes['forward']} forward, {passes['backward']} backward"
