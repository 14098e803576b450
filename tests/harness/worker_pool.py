"""Runs functions on several real ranks at once, under a deadline that names who is stuck where.

    with WorkerPool.for_fork() as pool:
        outcome = pool.run(case_function, world_size=4, arguments={"virtual_size": 2})
        losses = outcome.values()

``case_function`` is a module-level function that every rank calls with the same arguments, in a
fresh process with ``RANK``, ``WORLD_SIZE`` and a store set up as by torchrun (see
``rank_runtime`` for what it can use). The pool knows nothing of any test framework.
"""

import multiprocessing
import os
import pickle
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from tests.harness.case_protocol import (
    Case,
    CaseFunction,
    CaseOutcome,
    PackageOrigin,
    receive,
    send,
)
from tools.base_release import unpacked_base

FORK_VERSION_MARK = "+p2p."
_REPOSITORY = Path(__file__).parents[2]
_TEMPLATE_MODULE = "tests.harness.worker_template"
_TEMPLATE_EXIT_LIMIT_S = 10.0

_WORKER_ENVIRONMENT = {
    # Cases are for CPUs: a template that touched a GPU could not fork.
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    # More threads than cores only slow the ranks down, and OpenMP's do not survive a fork.
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    # pyarrow's allocator otherwise starts a thread, beside which the template must not fork.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # Importing the base otherwise asks git for a version.
    "NO_VCS_VERSION": "1",
}


class WrongPackage(Exception):
    """The workers import another ``megatron.core`` than the pool is for."""


class WorkerPool:
    """Ranks that share one installation of ``megatron-core``.

    The pool keeps a single idle template process; ranks exist only while a case runs. Use
    ``for_fork`` or ``for_base`` to make one.

    Args:
        expected_version: The exact ``megatron-core`` version, or the part of it that tells the
            fork from a base release (``FORK_VERSION_MARK``).
        package_folder: Put before everything else on the workers' module search path; ``None``
            for the package that is installed in this interpreter.
        emulate_cuda: Whether the ranks run under ``tools.cpu_emulation``.
        transformer_engine: Whether the emulation includes its stand-in for Transformer Engine.
        preload: Modules that the template imports, in this order, beside those that every case
            needs: what takes long to import is imported once instead of on each rank of each case.
    """

    def __init__(
        self,
        *,
        expected_version: str,
        package_folder: Path | None = None,
        emulate_cuda: bool = False,
        transformer_engine: bool = False,
        preload: Sequence[str] = (),
    ) -> None:
        self._expected_version = expected_version
        self._template_options = [
            *(["emulate"] if emulate_cuda else []),
            *(["transformer-engine"] if transformer_engine else []),
            *(f"preload={module}" for module in preload),
        ]
        self._package_folder = package_folder
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @classmethod
    def for_fork(
        cls,
        *,
        emulate_cuda: bool = False,
        transformer_engine: bool = False,
        preload: Sequence[str] = (),
    ) -> Self:
        """Returns a pool whose ranks import the installed fork.

        Args:
            emulate_cuda: Whether the ranks run under ``tools.cpu_emulation``. The fork's own
                communication does without; the base's schedules and training loop do not.
            transformer_engine: Whether the emulation includes its stand-in for Transformer Engine.
            preload: Further modules for the template to import.
        """
        return cls(
            expected_version=FORK_VERSION_MARK,
            emulate_cuda=emulate_cuda,
            transformer_engine=transformer_engine,
            preload=preload,
        )

    @classmethod
    def for_base(
        cls, version: str, *, transformer_engine: bool = False, preload: Sequence[str] = ()
    ) -> Self:
        """Returns a pool whose ranks import the unmodified base release ``version``.

        They run under ``tools.cpu_emulation``, without which the base communicates on CUDA only.

        Args:
            version: One of the supported releases.
            transformer_engine: Whether the emulation includes its stand-in for Transformer Engine.
            preload: Further modules for the template to import.
        """
        return cls(
            expected_version=version,
            package_folder=unpacked_base(version),
            emulate_cuda=True,
            transformer_engine=transformer_engine,
            preload=preload,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self,
        function: CaseFunction,
        *,
        world_size: int,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        deadline_s: float = 120.0,
        stall_s: float | None = 10.0,
        grace_s: float = 5.0,
    ) -> CaseOutcome:
        """Runs ``function(**arguments)`` on ``world_size`` ranks and waits for all of them.

        Args:
            function: A module-level function of a module that is importable here.
            world_size: Number of ranks, each a process of its own.
            arguments: Keyword arguments, the same on every rank; picklable.
            environment: Variables to set in the ranks.
            deadline_s: Seconds after which ranks still running are stuck: their stacks are
                recorded and they are killed.
            stall_s: The same, after so many seconds in which no rank did anything; ``None`` for
                cases in which waiting idly is right, a start-up that times out for instance.
            grace_s: Seconds that the other ranks get once a rank raised or died.

        Returns:
            The outcome on every rank; nothing is raised for a rank that failed (see
            ``CaseOutcome.values``).

        Raises:
            WrongPackage: The workers would not test what this pool is for.
            RuntimeError: The template process could not import the package, or ended.
        """
        case = Case(
            call=pickle.dumps((function, dict(arguments or {}))),
            world_size=world_size,
            environment=dict(environment or {}),
            deadline_s=deadline_s,
            stall_s=stall_s,
            grace_s=grace_s,
        )
        connection = self._connection or self._start()
        try:
            send(connection, case)
            return receive(connection)
        except (EOFError, OSError) as error:
            self.close()
            raise RuntimeError("the template process of the worker pool ended") from error
        except BaseException:
            # An interrupted wait leaves an answer on its way; only a new template is in step.
            self.close()
            raise

    def close(self) -> None:
        """Ends the template process, and with it any rank. A later ``run`` starts a new one."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            try:
                self._process.wait(_TEMPLATE_EXIT_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._connection = self._process = None

    def _start(self) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    _TEMPLATE_MODULE,
                    str(theirs.fileno()),
                    *self._template_options,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    **_WORKER_ENVIRONMENT,
                    "PYTHONPATH": os.pathsep.join(self._search_path()),
                },
                # A Ctrl-C is for the parent alone: the template ends when the pipe closes.
                start_new_session=True,
            )
        self._connection = ours
        try:
            origin = receive(ours)
        except EOFError as error:
            self.close()
            raise RuntimeError("the template process ended before it was ready") from error
        if not isinstance(origin, PackageOrigin):
            self.close()
            raise RuntimeError(f"the template process could not be prepared:\n{origin}")
        self._check_origin(origin)
        return ours

    def _search_path(self) -> list[str]:
        """Returns the workers' extra search path: the package, then what the parent can import."""
        interpreter_paths = set(sysconfig.get_paths().values())
        own = [path for path in sys.path if path and path not in interpreter_paths]
        package = [str(self._package_folder)] if self._package_folder else []
        return list(dict.fromkeys([*package, *own, str(_REPOSITORY)]))

    def _check_origin(self, origin: PackageOrigin) -> None:
        found = f"megatron-core {origin.version} from {origin.path}"
        if self._package_folder is None:
            right = self._expected_version in origin.version
            remedy = "install the fork into this environment (pip install .)"
        else:
            inside = Path(origin.path).is_relative_to(self._package_folder)
            right = inside and origin.version == self._expected_version
            remedy = f"remove {self._package_folder}, it will be unpacked anew"
        if not right:
            self.close()
            raise WrongPackage(f"expected {self._expected_version}, found {found}; {remedy}")
