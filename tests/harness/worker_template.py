"""The template process of a worker pool: imports the stack once, then forks ranks on request.

A rank forked from here starts in some 20 ms with ``torch`` and ``megatron.core`` imported and
shares their memory with its siblings, so each case gets fresh processes: nothing a case leaves
behind, not even a hang, reaches the next one. That works while the template has one thread, no
process group and no CUDA context; hence it only imports, and checks.

Started by ``worker_pool.WorkerPool`` as ``python -m tests.harness.worker_template FD [OPTION]...``:
FD is the inherited end of a ``multiprocessing`` pipe, ``emulate`` switches the CUDA emulation on,
``transformer-engine`` adds its stand-in for that, ``preload=MODULE`` imports one module more.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.metadata
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from tests.harness.case_protocol import (
    Case,
    CaseOutcome,
    Ending,
    PackageOrigin,
    RankReport,
    receive,
    send,
)
from tests.harness.rank_runtime import PROGRESS_FILE_VARIABLE

PRELOADED_MODULES = (
    "torch.distributed",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.transformer_config",
)

_LOOPBACK = "127.0.0.1"
_SAMPLE_INTERVAL_S = 0.25
_STACK_DUMP_LIMIT_S = 3.0
_LOG_TAIL_BYTES = 4000
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serves cases from the pool until it closes its end of the pipe."""
    descriptor, *options = sys.argv[1:]
    pool = Connection(int(descriptor))
    send(pool, _preload(options))
    while True:
        try:
            case: Case = receive(pool)
        except EOFError:
            return
        with tempfile.TemporaryDirectory(prefix="worker-case-") as folder:
            outcome = _CaseRun(case, Path(folder), pool).supervise()
        if outcome is None:
            return
        send(pool, outcome)


def _preload(options: list[str]) -> PackageOrigin | str:
    """Imports what every rank needs; returns where it came from, or the traceback."""
    prefix = "preload="
    chosen = [option.removeprefix(prefix) for option in options if option.startswith(prefix)]
    modules = (*PRELOADED_MODULES, *chosen)
    try:
        if "emulate" in options:
            stand_in = {"transformer_engine": True} if "transformer-engine" in options else {}
            importlib.import_module("tools.cpu_emulation").enable(**stand_in)
        for module in modules:
            importlib.import_module(module)
        package = importlib.import_module("megatron.core")
    except Exception:
        return traceback.format_exc()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"importing {modules} started {threads - 1} threads: forking is not safe"
    # Frozen objects are never visited by the collector, so ranks do not copy their pages.
    gc.freeze()
    version = importlib.metadata.version("megatron-core")
    return PackageOrigin(version=version, path=str(package.__file__))


class _CaseRun:
    """The processes of one case, and the files in which they leave results.

    Args:
        case: What to run.
        folder: An empty folder for the files of this case.
        pool: The pipe to the parent; when it closes the case is given up.
    """

    def __init__(self, case: Case, folder: Path, pool: Connection) -> None:
        self._case = case
        self._folder = folder
        self._pool = pool
        self._started = time.monotonic()
        self._exit_codes: dict[int, int] = {}
        self._ended_at: dict[int, float] = {}
        # A store that outlives the ranks, as torchrun's does: a rank that dies leaves it intact.
        with socket.create_server((_LOOPBACK, 0), backlog=256) as listener:
            self._store_pid = self._fork(lambda: _serve_store(listener))
            port = listener.getsockname()[1]
        self._pids = [
            self._fork(lambda rank=rank: _run_rank(case, rank, port, folder))
            for rank in range(case.world_size)
        ]
        self._pidfds = {rank: os.pidfd_open(pid) for rank, pid in enumerate(self._pids)}

    def supervise(self) -> CaseOutcome | None:
        """Waits for the ranks, ends those that are stuck, and collects the reports.

        Returns:
            The outcome; ``None`` when the parent has gone.
        """
        try:
            ending = self._wait_for_ranks()
            if ending is None:
                return None
            stuck = self._running()
            for rank in stuck:
                os.kill(self._pids[rank], signal.SIGUSR1)
            self._await_stack_dumps(stuck)
            seconds = time.monotonic() - self._started
        finally:
            self._kill_everything()
        reports = tuple(self._report(rank, rank in stuck) for rank in range(self._case.world_size))
        return CaseOutcome(ranks=reports, ended_by=ending, seconds=seconds)

    def _fork(self, body: Any) -> int:
        template_pid = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            # A group of its own, so that what a rank starts can be ended with it.
            os.setpgid(0, 0)
            _die_with(template_pid)
            self._pool.close()
            body()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)

    def _running(self) -> list[int]:
        return [rank for rank in self._pidfds if rank not in self._exit_codes]

    def _wait_for_ranks(self) -> Ending | None:
        case = self._case
        deadline = self._started + case.deadline_s
        limit: tuple[float, Ending] = (deadline, "deadline")
        progress = _ProgressWatch()
        while running := self._running():
            ready = wait(
                [self._pool, *(self._pidfds[rank] for rank in running)], _SAMPLE_INTERVAL_S
            )
            now = time.monotonic()
            if self._pool in ready:
                return None
            for rank in running:
                if self._pidfds[rank] in ready:
                    self._reap(rank)
                    failed = not self._returned(rank)
                    if failed and now + case.grace_s < limit[0]:
                        limit = (now + case.grace_s, "peer failure")
            running = self._running()
            if running and now > limit[0]:
                return limit[1]
            idle_s = progress.idle_seconds([self._pids[rank] for rank in running], now)
            if running and case.stall_s is not None and idle_s > case.stall_s:
                return "stall"
        return "completed"

    def _reap(self, rank: int) -> None:
        _, status = os.waitpid(self._pids[rank], 0)
        self._exit_codes[rank] = os.waitstatus_to_exitcode(status)
        self._ended_at[rank] = time.monotonic()

    def _returned(self, rank: int) -> bool:
        return self._exit_codes[rank] == 0

    def _await_stack_dumps(self, ranks: list[int]) -> None:
        """Waits until the stack files have stopped growing."""
        limit = time.monotonic() + _STACK_DUMP_LIMIT_S
        previous: list[int] = []
        while ranks and time.monotonic() < limit:
            sizes = [len(_text(_file(self._folder, "stack", rank))) for rank in ranks]
            if all(sizes) and sizes == previous:
                return
            previous = sizes
            time.sleep(0.1)

    def _kill_everything(self) -> None:
        running = self._running()
        # All at once: a rank that saw a peer die could still go on, and not be where it was found.
        for rank in running:
            os.kill(self._pids[rank], signal.SIGKILL)
        for rank in running:
            self._reap(rank)
        os.kill(self._store_pid, signal.SIGKILL)
        os.waitpid(self._store_pid, 0)
        for rank_pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank_pid, signal.SIGKILL)
        for descriptor in self._pidfds.values():
            os.close(descriptor)

    def _report(self, rank: int, stuck: bool) -> RankReport:
        report = RankReport(
            rank=rank,
            status="died",
            exit_code=self._exit_codes[rank],
            ended_at=self._ended_at[rank],
            progress=_text(_file(self._folder, "progress", rank)).rstrip(),
            log=_text(_file(self._folder, "log", rank)),
        )
        if stuck:
            stack = _text(_file(self._folder, "stack", rank), tail_bytes=None)
            return replace(report, status="stuck", stack=stack)
        result = _file(self._folder, "result", rank)
        return replace(report, **pickle.loads(result.read_bytes())) if result.exists() else report


class _ProgressWatch:
    """Tells for how long a set of processes has done nothing at all.

    A rank that waits for a peer sleeps in one system call: its main thread is not switched in or
    out meanwhile. A rank that computes, or that is kept waiting by a busy machine, is runnable or
    gets switched. So a set of ranks in which nothing moves for seconds waits for itself.
    """

    def __init__(self) -> None:
        self._signature: Any = None
        self._since = 0.0

    def idle_seconds(self, pids: list[int], now: float) -> float:
        """Returns for how many seconds ``pids`` have been asleep without a switch up to ``now``."""
        signature = [_main_thread_activity(pid) for pid in pids]
        asleep = all(state in ("S", "D") for state, _ in signature)
        if not asleep or signature != self._signature:
            self._signature = signature
            self._since = now
        return now - self._since


def _main_thread_activity(pid: int) -> tuple[str, int]:
    """Returns the state letter and the number of context switches of a process's main thread."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    switches = int(fields["voluntary_ctxt_switches"]) + int(fields["nonvoluntary_ctxt_switches"])
    return fields["State"].split()[0], switches


def _run_rank(case: Case, rank: int, port: int, folder: Path) -> NoReturn:
    """Runs the case function as ``rank`` and leaves the result in ``folder``; never returns."""
    log = _create(_file(folder, "log", rank))
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack = _create(_file(folder, "stack", rank))
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(case.world_size),
            "LOCAL_WORLD_SIZE": str(case.world_size),
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            PROGRESS_FILE_VARIABLE: str(_file(folder, "progress", rank)),
            **case.environment,
        }
    )
    report: dict[str, Any]
    try:
        function, arguments = pickle.loads(case.call)
        value = function(**arguments)
        report = {"status": "returned", "pickled_value": pickle.dumps(value)}
    except BaseException as error:
        report = {
            "status": "raised",
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
    report["ended_at"] = time.monotonic()
    unfinished = folder / f"unfinished.{rank}"
    unfinished.write_bytes(pickle.dumps(report))
    unfinished.rename(_file(folder, "result", rank))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if report["status"] == "returned" else 1)


def _serve_store(listener: socket.socket) -> None:
    from torch.distributed import TCPStore

    host, port = listener.getsockname()
    store = TCPStore(  # noqa: F841 - the server lives as long as this object
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=os.dup(listener.fileno()),
    )
    while True:
        signal.pause()


def _die_with(parent_pid: int) -> None:
    """Makes the kernel kill this process when its parent ends, however the parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(70)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _file(folder: Path, kind: str, rank: int) -> Path:
    return folder / f"{kind}.{rank}"


def _text(path: Path, tail_bytes: int | None = _LOG_TAIL_BYTES) -> str:
    if not path.exists():
        return ""
    content = path.read_bytes()
    return content[-tail_bytes if tail_bytes else 0 :].decode(errors="replace")


if __name__ == "__main__":
    main()
