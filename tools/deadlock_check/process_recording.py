"""Switches recording on in a process of a command that is being recorded."""

from pathlib import Path

from tools.cpu_emulation.import_hook import after_import

OUTPUT_VARIABLE = "DEADLOCK_CHECK_OUTPUT"
"""Environment variable with the folder for the files, in the processes of a recorded command."""

COMMAND_VARIABLE = "DEADLOCK_CHECK_COMMAND"
"""Environment variable with the recorded command."""


def rank_file(folder: Path, rank: int | str) -> Path:
    """Return where a rank is recorded; ``*`` gives a pattern for all of them."""
    return folder / f"rank{rank}.jsonl"


def record_with_torch() -> None:
    """Record this process if it ever imports torch and uses torch.distributed."""
    after_import("torch", _record)


def _record() -> None:
    # Most Python processes of a command get by without torch, which is slow to import.
    from .rank_recording import record_this_process

    record_this_process()
