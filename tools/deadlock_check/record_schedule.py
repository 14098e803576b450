"""Records the real schedules of a megatron.core, installed or unpacked, without running a job.

A *template* process imports one implementation, and forks a child for every rank of every
recording: what the recording replaces in torch and megatron ends with the child, and the import is
paid once.
"""

import dataclasses
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tools.cpu_emulation import put_first

from .errors import UsageError
from .garbage_collection import no_garbage_collection
from .trace import Group, Operation, Trace

INSTALLED = "installed"
"""The implementation that this Python imports."""

_ROOT = Path(__file__).resolve().parents[2]

_LINES_OF_LOG = 20
"""How much of its output is shown when the template process dies."""


@dataclasses.dataclass(frozen=True)
class ScheduleOptions:
    """What to record; the attributes of Megatron's configuration have its names and meanings.

    Attributes:
        pipeline_size: Number of pipeline stages, and of ranks.
        num_microbatches: Per step.
        virtual_size: Model chunks per rank; ``None`` for the schedule without interleaving.
        variable_seq_lengths: Whether every message is preceded by its shape.
        batch_p2p_comm: Exchange in batches.
        overlap_p2p_comm: Exchange while computing.
        overlap_p2p_comm_warmup_flush: Overlap in warmup and cooldown, too.
        microbatch_group_size_per_vp_stage: Microbatches that a chunk takes in a row; ``None`` for
            ``pipeline_size``.
        forward_only: Whether the step is one of evaluation.
        use_gloo: Whether gloo groups may be made.
        ms_swift_world_group: Whether batches go to the default group, as ms-swift has it.
        coalesces: Whether the backend says that it can make one of a batch, for those who ask.
    """

    pipeline_size: int
    num_microbatches: int
    virtual_size: int | None = None
    variable_seq_lengths: bool = False
    batch_p2p_comm: bool = True
    overlap_p2p_comm: bool = False
    overlap_p2p_comm_warmup_flush: bool = False
    microbatch_group_size_per_vp_stage: int | None = None
    forward_only: bool = False
    use_gloo: bool = True
    ms_swift_world_group: bool = False
    coalesces: bool = True

    def check(self) -> None:
        """Refuse what Megatron has no schedule for.

        Raises:
            UsageError: Names the option, its value, and the remedy.
        """
        for is_wrong, name, remedy in self._mistakes():
            if is_wrong:
                raise UsageError(f"{name}={getattr(self, name)}: {remedy}")

    def _mistakes(self) -> list[tuple[bool, str, str]]:
        size, microbatches = self.pipeline_size, self.num_microbatches
        group_size = self.microbatch_group_size_per_vp_stage or size
        remainder = microbatches % group_size if group_size > 0 else 0
        is_interleaved = self.virtual_size is not None
        return [
            (size < 2, "pipeline_size", "a pipeline has at least 2 stages"),
            (microbatches < 1, "num_microbatches", "a step has at least 1 microbatch"),
            (
                self.virtual_size is not None and self.virtual_size < 2,
                "virtual_size",
                "interleaving needs at least 2 chunks per rank; leave it out for none",
            ),
            (
                not is_interleaved and self.microbatch_group_size_per_vp_stage is not None,
                "microbatch_group_size_per_vp_stage",
                "only interleaved schedules have it; give virtual_size, or leave it out",
            ),
            (
                is_interleaved and group_size < size,
                "microbatch_group_size_per_vp_stage",
                f"it must be at least pipeline_size={size}",
            ),
            (
                is_interleaved and microbatches < group_size,
                "num_microbatches",
                f"an interleaved schedule needs at least {group_size}, a group of microbatches",
            ),
            (
                is_interleaved and 0 < remainder < size,
                "num_microbatches",
                f"in groups of {group_size} the last one has {remainder}; let it be none or at "
                f"least pipeline_size={size}",
            ),
            (
                self.overlap_p2p_comm and not is_interleaved,
                "overlap_p2p_comm",
                "only interleaved schedules overlap; give virtual_size, or set it to False",
            ),
            (
                self.overlap_p2p_comm and self.batch_p2p_comm,
                "overlap_p2p_comm",
                "batch_p2p_comm=True excludes it; set one of them to False",
            ),
            (
                self.overlap_p2p_comm_warmup_flush and not self.overlap_p2p_comm,
                "overlap_p2p_comm_warmup_flush",
                "it extends overlap_p2p_comm; set that to True as well",
            ),
        ]


def record(
    options: ScheduleOptions,
    implementation: str = INSTALLED,
    progress: Callable[[int], None] = lambda count: None,
) -> Trace:
    """Record one step of every rank.

    Args:
        options: What to record.
        implementation: ``installed``, or the folder of an unpacked wheel of megatron-core.
        progress: Called with the number of ranks that have been recorded since the last call.

    Returns:
        The trace. Communication at start-up is in it as far as the implementation has any.

    Raises:
        UsageError: The options are not legal, or the folder holds no megatron-core.
        RuntimeError: The implementation cannot be imported or its schedule failed; names the rank.
    """
    options.check()
    # A forked process must not talk to the template of the one that it comes from.
    key = os.getpid(), implementation
    template = _templates.get(key)
    if template is None:
        template = _templates[key] = _Template(_folder(implementation))
    try:
        with no_garbage_collection():
            trace = template.record(options, progress)
    finally:
        if not template.is_in_step:
            del _templates[key]
            template.close()
    trace.description = f"{options}, {implementation}"
    return trace


_templates: dict[tuple[int, str], "_Template"] = {}


def _folder(implementation: str) -> Path | None:
    if implementation == INSTALLED:
        return None
    folder = Path(implementation).resolve()
    if not (folder / "megatron" / "core" / "__init__.py").is_file():
        raise UsageError(
            f"implementation {implementation!r} is no folder with megatron/core in it; give the "
            f"folder of an unpacked megatron-core wheel, or {INSTALLED!r}"
        )
    return folder


class _Template:
    """The process that has imported an implementation, from ``folder`` if given.

    Attributes:
        is_in_step: Whether it has answered all that it was asked, and can be asked more.
    """

    def __init__(self, folder: Path | None) -> None:
        # Megatron would run git, and compile functions that are never called.
        environment = os.environ | {"NO_VCS_VERSION": "1", "TORCHDYNAMO_DISABLE": "1"}
        put_first(environment, "PYTHONPATH", str(_ROOT))
        if folder is not None:
            put_first(environment, "PYTHONPATH", str(folder))
        self.is_in_step = True
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._connection, theirs = multiprocessing.Pipe()
        module = f"{__package__}.schedule_template"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(folder or "")],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                # An interrupt is for the caller alone; the template ends when the pipe closes.
                start_new_session=True,
            )

    def record(self, options: ScheduleOptions, progress: Callable[[int], None]) -> Trace:
        """See the function of this name."""
        groups: dict[str, Group] = {}
        programs: list[list[Operation]] = [[] for _ in range(options.pipeline_size)]
        self.is_in_step = False
        try:
            self._connection.send(options)
            for _ in programs:
                answer = self._connection.recv()
                if isinstance(answer, str):
                    self.is_in_step = True
                    raise RuntimeError(answer)
                rank, result = answer
                rank_groups, programs[rank] = pickle.loads(result)
                groups |= {group.name: group for group in rank_groups}
                progress(1)
        except (OSError, EOFError) as error:
            raise RuntimeError(f"the recording process ended: {self._end_of_log()}") from error
        self.is_in_step = True
        return Trace(groups, programs)

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _end_of_log(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LINES_OF_LOG:])
