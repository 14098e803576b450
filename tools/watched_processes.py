"""Runs the processes of a distributed job under a deadline, and keeps evidence of a hang.

A host that hangs inside NCCL, before there is a work object, is seen by no timeout and no watchdog
of its own. So the deadline is kept from outside, and ``py-spy`` reads the stacks of all ranks from
outside, too, native frames included.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Self

import psutil

Ending = Literal["completed", "failed", "deadline", "stall"]

_POLL_S = 0.05
_PY_SPY_LIMIT_S = 30.0
_EXIT_LIMIT_S = 10.0


@dataclass(frozen=True)
class Command:
    """One process of a job.

    Attributes:
        arguments: Program and arguments.
        environment: The whole environment.
        log: File for stdout and stderr.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: Path


class WatchedProcesses:
    """The running processes of one job, and whatever they start.

    Leaving the context ends all of them.

    Args:
        commands: What to start, all at once.
        stack_folder: Where stacks go on expiry, one ``rank<rank>.<pid>.txt`` for every process
            with ``RANK`` in its environment. Made when there is something to write.
    """

    def __init__(self, commands: Sequence[Command], stack_folder: Path) -> None:
        self._stack_folder = stack_folder
        self._processes: list[subprocess.Popen[bytes]] = []
        for command in commands:
            command.log.parent.mkdir(parents=True, exist_ok=True)
            with command.log.open("wb") as log:
                process = subprocess.Popen(
                    command.arguments,
                    env=dict(command.environment),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # A group of its own, which can be ended as a whole.
                    start_new_session=True,
                )
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def send_line(self, line: str) -> None:
        """Write a line to the standard input of every process and close it."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{line}\n".encode())
                process.stdin.close()
            except BrokenPipeError:
                # It has ended, which `wait` reports.
                process.stdin = None

    def wait(
        self,
        deadline_s: float,
        *,
        stall_s: float | None = None,
        progress_files: Sequence[Path] = (),
        grace_s: float = 5.0,
    ) -> Ending:
        """Wait for the end of the job; write stacks when it does not come.

        Args:
            deadline_s: Seconds from now on.
            stall_s: Seconds in which none of ``progress_files`` was written to, after the first
                write to one, when the job counts as hung although its deadline has not come;
                ``None`` for no such limit.
            progress_files: What the processes write to as they advance.
            grace_s: Seconds that the others get when a process has failed.

        Returns:
            ``completed`` when every process ended with status 0; ``failed`` when one ended with
            another; else which limit passed first.
        """
        limit = time.monotonic() + deadline_s
        progress, progress_at = _sizes(progress_files), time.monotonic()
        has_failed = False
        while any(process.poll() is None for process in self._processes):
            now = time.monotonic()
            if not has_failed and any(process.poll() for process in self._processes):
                has_failed = True
                limit = min(limit, now + grace_s)
            if (sizes := _sizes(progress_files)) != progress:
                progress, progress_at = sizes, now
            if now > limit:
                self.dump_stacks()
                return "failed" if has_failed else "deadline"
            if stall_s is not None and any(progress) and now - progress_at > stall_s:
                self.dump_stacks()
                return "failed" if has_failed else "stall"
            time.sleep(_POLL_S)
        return "failed" if any(process.poll() for process in self._processes) else "completed"

    def dump_stacks(self) -> None:
        """Write the stacks of all ranks, at the same time so that they fit together."""
        dumps = []
        self._stack_folder.mkdir(parents=True, exist_ok=True)
        for process in self._tree():
            try:
                rank = process.environ().get("RANK")
            except psutil.Error:
                continue
            if rank is not None:
                output = (self._stack_folder / f"rank{rank}.{process.pid}.txt").open("wb")
                dumps.append((_start_dump(process.pid, output), output))
        limit = time.monotonic() + _PY_SPY_LIMIT_S
        for dump, output in dumps:
            if dump is not None:
                try:
                    dump.wait(max(0.0, limit - time.monotonic()))
                except subprocess.TimeoutExpired:
                    dump.kill()
                    dump.wait()
            output.close()

    def close(self) -> None:
        """End every process that is still running, and what it started."""
        tree = self._tree()
        for process in tree:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(tree, timeout=_EXIT_LIMIT_S)
        for started in self._processes:
            if started.stdin is not None:
                started.stdin.close()
            started.wait(_EXIT_LIMIT_S)

    def _tree(self) -> list[psutil.Process]:
        tree = []
        for started in self._processes:
            try:
                process = psutil.Process(started.pid)
                tree += [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
        return tree


def _start_dump(pid: int, output: IO[bytes]) -> subprocess.Popen[bytes] | None:
    beside_interpreter = Path(sys.executable).parent / "py-spy"
    py_spy = beside_interpreter if beside_interpreter.exists() else shutil.which("py-spy")
    if py_spy is None:
        output.write(b"py-spy is not installed: pip install py-spy\n")
        return None
    return subprocess.Popen(
        [py_spy, "dump", "--native", "--pid", str(pid)],
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def _sizes(files: Sequence[Path]) -> list[int]:
    return [os.path.getsize(file) if file.exists() else 0 for file in files]
