"""Records what the processes of any command communicate, each into a file of its own.

Every Python process that the command starts finds the ``sitecustomize`` in ``startup`` through its
environment, and writes down what it issues from ``init_process_group`` on.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from tools.cpu_emulation import put_first

from .errors import UsageError
from .process_recording import COMMAND_VARIABLE, OUTPUT_VARIABLE, rank_file

_STARTUP_DIRECTORY = Path(__file__).resolve().parent / "startup"


def record_command(command: Sequence[str], output: Path) -> int:
    """Run a command and record every rank of it.

    A rank's file holds all that it issued, however it ends: a hang may be ended by any signal.

    Args:
        command: Program and arguments; how it launches its ranks does not matter.
        output: Folder for the files, made if missing.

    Returns:
        The command's exit status, negative for the signal that ended it.

    Raises:
        UsageError: The command cannot be run or recorded nothing, or the folder cannot be used.
    """
    if not command:
        raise UsageError("no command to record; give one after --")
    _prepare(output)
    environment = os.environ | {
        OUTPUT_VARIABLE: str(output.resolve()),
        COMMAND_VARIABLE: shlex.join(command),
    }
    put_first(environment, "PYTHONPATH", str(_STARTUP_DIRECTORY))
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise UsageError(f"cannot run {command[0]!r}: {error.strerror}") from None
    with _signals_forwarded(process):
        status = process.wait()
    files = _recorded(output)
    if not files:
        raise UsageError(
            "nothing was recorded, as no Python process of the command used torch.distributed (it "
            f"ended with status {status}); record the command that launches the ranks"
        )
    print(f"deadlock_check: recorded {len(files)} ranks in {output}", file=sys.stderr)
    return status


def _prepare(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {output}: {error.strerror}") from None
    if _recorded(output):
        raise UsageError(f"{output} holds a recording already; name another folder, or empty it")


def _recorded(output: Path) -> list[Path]:
    return list(output.glob(rank_file(output, "*").name))


@contextlib.contextmanager
def _signals_forwarded(process: subprocess.Popen) -> Iterator[None]:
    """Leave it to the command what a signal does; the terminal sends it interrupts by itself."""

    def forward(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            process.send_signal(number)

    handlers = {
        number: signal.signal(number, forward)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
