"""Runs of ``megatron sft`` on real ranks, and what they log.

``train`` runs the command's main function on the ranks of a worker pool, which have imported
everything already; ``train_from_shell`` starts the real command, which starts torchrun, and takes
the imports of every rank longer.
"""

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.harness.case_protocol import CaseOutcome
from tests.harness.worker_pool import WorkerPool
from tools import cpu_emulation

Flags = Mapping[str, object]

_LOGGED_STEP = re.compile(r"\{'loss': [^}]*'iteration': [^}]*\}")
_LOG_TAIL_LINES = 40
_GRACE_S = 10.0


@dataclass(frozen=True)
class Training:
    """What a finished run has logged.

    Attributes:
        losses: The loss of every iteration.
        gradient_norms: The gradient's norm of every iteration.
        seconds: Wall-clock time of the run.
    """

    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    seconds: float


class TrainingFailed(AssertionError):
    """A run ended with an error, stalled, or took too long; the message shows where."""


def environment(cache: Path) -> dict[str, str]:
    """Returns the variables for a run that asks no model hub and caches in ``cache`` only."""
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(cache / "huggingface"),
        "MODELSCOPE_CACHE": str(cache / "modelscope"),
        "USE_HF": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "NO_VCS_VERSION": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def command_line(flags: Flags) -> list[str]:
    """Returns ``flags`` as ms-swift's parser takes them."""
    arguments = []
    for name, value in flags.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        arguments += [f"--{name}", text]
    return arguments


def run_in_pool(
    pool: WorkerPool,
    flags: Flags,
    *,
    ranks: int,
    folder: Path,
    deadline_s: float = 150.0,
    stall_s: float = 30.0,
) -> CaseOutcome:
    """Run ``megatron sft`` on the ranks of ``pool``, to whatever end.

    Args:
        pool: Where the ranks run.
        flags: The command line; without ``output_dir``, which is ``folder``.
        ranks: Number of ranks.
        folder: A new folder, for logs, outputs and caches.
        deadline_s: Seconds after which the ranks are ended.
        stall_s: Seconds in which no rank does anything, after which they are ended.
    """
    folder.mkdir(parents=True)
    return pool.run(
        _sft_on_this_rank,
        world_size=ranks,
        arguments={"arguments": command_line(_with_output(flags, folder)), "folder": folder},
        environment=environment(folder),
        deadline_s=deadline_s,
        stall_s=stall_s,
        grace_s=_GRACE_S,
    )


def train(pool: WorkerPool, flags: Flags, *, ranks: int, folder: Path) -> Training:
    """Run ``megatron sft`` on the ranks of ``pool`` to its end.

    Args:
        pool: Where the ranks run.
        flags: The command line; without ``output_dir``, which is ``folder``.
        ranks: Number of ranks.
        folder: A new folder, for logs, outputs and caches.

    Raises:
        TrainingFailed: A rank failed or hung.
    """
    outcome = run_in_pool(pool, flags, ranks=ranks, folder=folder)
    log = log_file(folder, ranks - 1).read_text()
    if len(outcome.with_status("returned")) < ranks:
        raise TrainingFailed(f"{outcome.describe()}\nThe last rank's log:\n{_tail(log)}")
    return _training(log, outcome.seconds)


def train_from_shell(flags: Flags, *, ranks: int, folder: Path, deadline_s: float) -> Training:
    """Run the command ``megatron sft`` to its end, in a session of its own.

    Args:
        flags: The command line; without ``output_dir``, which is ``folder``.
        ranks: ``NPROC_PER_NODE``.
        folder: A new folder, for the log, outputs and caches.
        deadline_s: Seconds after which the command and all that it started are killed.

    Raises:
        TrainingFailed: The command failed or took too long.
    """
    folder.mkdir(parents=True)
    started = time.monotonic()
    command = [str(Path(sys.executable).parent / "megatron"), "sft"]
    log_path = folder / "command.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [*command, *command_line(_with_output(flags, folder))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={
                **cpu_emulation.environment(transformer_engine=True),
                **environment(folder),
                "NPROC_PER_NODE": str(ranks),
            },
            start_new_session=True,
        )
        with _ended_at_exit(process):
            try:
                code = process.wait(deadline_s)
                ending = f"ended with exit code {code}"
            except subprocess.TimeoutExpired:
                code, ending = None, f"was still running after {deadline_s:g} s"
    if code != 0:
        raise TrainingFailed(f"megatron sft {ending}:\n{_tail(log_path.read_text())}")
    return _training(log_path.read_text(), time.monotonic() - started)


def log_file(folder: Path, rank: int) -> Path:
    """Returns the file with what ``rank`` of a run in ``folder`` has printed."""
    return folder / f"rank{rank}.log"


def logged_losses(log: str) -> tuple[float, ...]:
    """Returns the losses of the iterations that are logged in ``log``."""
    return tuple(step["loss"] for step in _steps(log))


def _sft_on_this_rank(arguments: list[str], folder: Path) -> None:
    with (
        log_file(folder, int(os.environ["RANK"])).open("w", buffering=1) as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        from swift.megatron import megatron_sft_main

        megatron_sft_main(arguments)


def _with_output(flags: Flags, folder: Path) -> Flags:
    return {**flags, "output_dir": folder / "output", "add_version": False}


@contextlib.contextmanager
def _ended_at_exit(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends the process and its session, torchrun's ranks included, however the body ends."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _training(log: str, seconds: float) -> Training:
    steps = _steps(log)
    if not steps:
        raise TrainingFailed(f"no iteration was logged:\n{_tail(log)}")
    return Training(
        losses=tuple(step["loss"] for step in steps),
        gradient_norms=tuple(step["grad_norm"] for step in steps),
        seconds=seconds,
    )


def _steps(log: str) -> list[dict[str, float]]:
    return [ast.literal_eval(step) for step in _LOGGED_STEP.findall(log)]


def _tail(log: str) -> str:
    return "\n".join(log.splitlines()[-_LOG_TAIL_LINES:])
