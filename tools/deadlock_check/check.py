"""One trace on all machines that it may meet."""

import contextlib
import dataclasses
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from tqdm import tqdm

from . import model
from .machine import Machine
from .outcome import Outcome
from .trace import Trace

BAR_DELAY_S = 3.0
LOG_INTERVAL_S = 10.0
BIG = 100_000
"""Operations of a trace from which on a second process is worth its start."""

SCALED_UNIT = 10_000
"""Total from which on a progress bar counts in thousands."""


@dataclasses.dataclass(frozen=True)
class Checked:
    """The outcome on one machine."""

    machine: Machine
    outcome: Outcome


def check(
    trace: Trace, machines: Sequence[Machine], progress: Callable[[int], None] = lambda count: None
) -> list[Checked]:
    """Run a trace on every machine, a big one on as many at a time as there are cores.

    Args:
        trace: What the ranks issue.
        machines: Where it may run.
        progress: Called with the number of operations run since the last call, on all machines.
    """
    operations = sum(map(len, trace.programs))
    if operations < BIG or len(machines) == 1:
        outcomes = [model.run(trace, machine, progress=progress) for machine in machines]
    else:
        outcomes = []
        # Forked, so that the trace is there without being sent.
        with multiprocessing.get_context("fork").Pool(
            min(len(machines), os.cpu_count() or 1), _inherit, (trace,)
        ) as pool:
            for outcome in pool.imap(_run_inherited, machines):
                outcomes.append(outcome)
                progress(operations)
    return [Checked(machine, outcome) for machine, outcome in zip(machines, outcomes, strict=True)]


_inherited_trace: Trace


def _inherit(trace: Trace) -> None:
    global _inherited_trace
    _inherited_trace = trace


def _run_inherited(machine: Machine) -> Outcome:
    return model.run(_inherited_trace, machine)


def is_safe(results: Sequence[Checked]) -> bool:
    """Return whether the trace is safe wherever it was checked."""
    return all(result.outcome.verdict.is_safe for result in results)


def most_telling(results: Sequence[Checked]) -> Checked:
    """Return the first unsafe result, or the first if all are safe."""
    return next((result for result in results if not result.outcome.verdict.is_safe), results[0])


@contextlib.contextmanager
def progress_bar(total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show on stderr how much is done, if it takes some seconds.

    Args:
        total: How much there is to do.
        unit: Of what.

    Yields:
        A function that is told how much more was done.
    """
    with tqdm(
        total=total,
        unit=unit,
        unit_scale=total > SCALED_UNIT,
        delay=BAR_DELAY_S,
        mininterval=0.2 if sys.stderr.isatty() else LOG_INTERVAL_S,
        leave=False,
    ) as bar:
        yield bar.update
