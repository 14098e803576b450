"""The communicators that a rank has made, from NCCL's own log."""

import os
import re
from pathlib import Path

_MADE = re.compile(r"comm 0x[0-9a-f]+ rank \d+ nranks (\d+) .*- Init COMPLETE")


def write_log(path: Path) -> None:
    """Make NCCL log the creation of communicators in this process; before NCCL starts.

    Args:
        path: The log; of this process alone.
    """
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT", NCCL_DEBUG_FILE=str(path))


def communicator_sizes(path: Path) -> list[int]:
    """Return the number of ranks of every communicator in a log, in the order of creation.

    The line is NCCL's ``... comm 0x... rank 0 nranks 2 ... - Init COMPLETE`` (init.cc, 2.27 to
    2.30), which it writes for a communicator that was split off another one as well.

    Args:
        path: What ``write_log`` was given. No file means that NCCL has not started.
    """
    if not path.exists():
        return []
    return [int(size) for size in _MADE.findall(path.read_text(errors="replace"))]
