"""Runs this node's part of a job under a deadline: ``watch_node DEADLINE FOLDER COMMAND ...``.

``run`` calls it, through srun once per node where a case needs several. When the deadline passes,
the stacks of this node's ranks are in ``FOLDER/stacks``, and the exit status is 124.
"""

import os
import sys
from pathlib import Path

from tools.watched_processes import Command, WatchedProcesses

DEADLINE_STATUS = 124


def watch(deadline_s: float, folder: Path, command: list[str]) -> int:
    """Run a command to its end or its deadline.

    Args:
        deadline_s: Seconds.
        folder: For the command's log, and the stacks.
        command: Program and arguments.

    Returns:
        0, 1 for a command that failed, or 124.
    """
    node = os.environ.get("SLURM_NODEID", "0")
    commands = [Command(command, os.environ, folder / f"node{node}.log")]
    with WatchedProcesses(commands, folder / "stacks") as processes:
        ending = processes.wait(deadline_s)
    return {"completed": 0, "failed": 1}.get(ending, DEADLINE_STATUS)


if __name__ == "__main__":
    sys.exit(watch(float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
