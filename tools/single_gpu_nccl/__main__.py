"""``python -m tools.single_gpu_nccl --ranks N SCRIPT ...``: NCCL ranks that share device 0."""

import argparse
import sys
from pathlib import Path

from tools.watched_processes import Command, WatchedProcesses

from .rank_environment import free_port, nccl_version, rank_environment, sharing_variables

DEADLINE_STATUS = 124
WHAT_IT_TESTS = """\
It tests: order and matching of operations, creation of communicators, what blocks the host, with
the real ProcessGroupNCCL. It does not test: NVLink and shared memory (every rank counts as a node
and talks over sockets), InfiniBand, speed, as the ranks take turns on the GPU. NCCL calls this
experimental or does not support it."""


def main(arguments: list[str]) -> int:
    """Run the command line.

    Args:
        arguments: What follows the module's name.

    Returns:
        The exit status: 0, 1 for a rank that failed, 2 for bad usage, 124 after the deadline.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.single_gpu_nccl",
        description=f"Run N ranks of a script on one GPU, with NCCL. {WHAT_IT_TESTS}",
    )
    parser.add_argument("--ranks", type=int, required=True, metavar="N")
    parser.add_argument("--deadline", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument(
        "--logs",
        type=Path,
        default=Path("single_gpu_nccl"),
        metavar="FOLDER",
        help="for logs, and the stacks of all ranks when the deadline passes",
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        parser.error(f"--ranks {options.ranks}: give at least 1")
    if not options.script.is_file():
        parser.error(f"script {options.script}: there is no such file")
    try:
        version = nccl_version()
    except RuntimeError as error:
        parser.error(str(error))
    port = free_port()
    commands = [
        Command(
            [sys.executable, str(options.script), *options.script_arguments],
            rank_environment(rank, options.ranks, port) | sharing_variables(rank, version),
            options.logs / f"rank{rank}.log",
        )
        for rank in range(options.ranks)
    ]
    with WatchedProcesses(commands, options.logs / "stacks") as processes:
        ending = processes.wait(options.deadline)
    print(f"{ending}; logs are in {options.logs}")
    return {"completed": 0, "failed": 1}.get(ending, DEADLINE_STATUS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
