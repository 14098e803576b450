"""Runs of ``pretrain_gpt.py`` on real ranks, and the losses that they log."""

import contextlib
import os
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.worker_pool import WorkerPool

SCRIPT = Path(__file__).parents[2] / "pretrain_gpt.py"

_DEADLINE_S = 180.0
# Saving a checkpoint is done by further processes, for which the ranks wait.
_STALL_S = 60.0
_LOG_TAIL_LINES = 30
_LOSS = re.compile(r" iteration +\d+/ +\d+ \|.* lm loss: (\S+) \|")
_MICROBATCHES = re.compile(r" iteration +\d+ tokens in documents: (.*)")


@dataclass(frozen=True)
class Training:
    """What a finished run has logged.

    Attributes:
        losses: The loss of every iteration.
        microbatch_lengths: For every iteration the numbers of tokens in its microbatches, as far
            as the last rank has read them; empty without ``--log-microbatch-lengths``.
    """

    losses: tuple[float, ...]
    microbatch_lengths: tuple[tuple[int, ...], ...]


def train(
    pool: WorkerPool,
    flags: Sequence[str],
    *,
    ranks: int,
    environment: Mapping[str, str],
    log_folder: Path,
) -> Training:
    """Run ``pretrain_gpt.py`` to its end.

    Args:
        pool: Where the ranks run.
        flags: The command line behind the script's name.
        ranks: Number of ranks.
        environment: Variables to set in the ranks.
        log_folder: A new folder, for one log per rank.

    Raises:
        AssertionError: A rank failed or hung; the message shows where, and the end of the log.
    """
    log_folder.mkdir(parents=True)
    outcome = pool.run(
        _run_script,
        world_size=ranks,
        arguments={"flags": list(flags), "log_folder": log_folder},
        environment=environment,
        deadline_s=_DEADLINE_S,
        stall_s=_STALL_S,
    )
    log = _log(log_folder, ranks - 1).read_text()
    if len(outcome.with_status("returned")) < ranks:
        tail = "\n".join(log.splitlines()[-_LOG_TAIL_LINES:])
        raise AssertionError(f"{outcome.describe()}\nEnd of the last rank's log:\n{tail}")
    return read_log(log)


def read_log(log: str) -> Training:
    """Return what the last rank has logged."""
    return Training(
        losses=_losses(log),
        microbatch_lengths=tuple(
            tuple(int(tokens) for tokens in re.findall(r"(\d+) in \d+", line))
            for line in _MICROBATCHES.findall(log)
        ),
    )


def _run_script(flags: list[str], log_folder: Path) -> None:
    """Run the script as the calling rank."""
    sys.argv = [str(SCRIPT), *flags]
    with (
        _log(log_folder, int(os.environ["RANK"])).open("w", buffering=1) as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as exit_request:
            # So the base leaves the loop at --exit-interval.
            if exit_request.code:
                raise


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def _losses(log: str) -> tuple[float, ...]:
    losses = [float(loss) for loss in _LOSS.findall(log)]
    if len(losses) > 1:
        # The base keeps a run's first loss and logs its mean with the second one.
        losses[1] = 2 * losses[1] - losses[0]
    return tuple(losses)
