"""What is recorded of the processes of a command."""

import dataclasses
import sys
from pathlib import Path

import pytest

from tests.unit_tests.deadlock_check.test_record_schedule import bare
from tools.deadlock_check.annotate import annotate
from tools.deadlock_check.errors import UsageError
from tools.deadlock_check.record_processes import record_command
from tools.deadlock_check.record_schedule import ScheduleOptions, record
from tools.deadlock_check.trace import (
    Batch,
    Collective,
    CreateGroup,
    Group,
    Operation,
    Synchronize,
    Trace,
    Transfer,
    Wait,
)
from tools.deadlock_check.trace_file import read_traces

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NO_VCS_VERSION", "1")


def test_every_call_is_recorded_up_to_the_one_in_which_the_process_is_killed(tmp_path):
    status = record_command(two_ranks("recorded_calls.py"), tmp_path)

    assert status == 9
    trace = recorded(tmp_path)
    assert trace.groups == {
        group.name: group
        for group in (
            Group("W", (0, 1), is_device_bound=False),
            Group("HOST #1", (0, 1), on_host=True, is_device_bound=False),
            Group("group #2", (0,), is_device_bound=False),
            Group("group of 0-1 #1", (0, 1), is_device_bound=False),
        )
    }
    sender, receiver = ([bare(operation) for operation in program] for program in trace.programs)
    assert sender == operations_of(rank=0)
    assert receiver == [*operations_of(rank=1), Transfer(False, "W", 0, 4, request=7)]
    batch = trace.programs[0][4]
    assert batch.place.source.startswith("recorded_calls.py:")
    assert batch.place.source.endswith(" exchange")


def operations_of(rank: int) -> list[Operation]:
    peer = 1 - rank
    is_sender = rank == 0
    return [
        Collective("barrier", "W"),
        CreateGroup("HOST #1"),
        CreateGroup("group of 0-1 #1", members_only=True),
        CreateGroup("group #2"),
        Batch(
            "W",
            [
                Transfer(True, "W", peer, 12, "send_next", "data", request=0),
                Transfer(False, "W", peer, 12, "recv_prev", "data", request=1),
            ],
        ),
        Wait((0,)),
        Wait((1,)),
        Synchronize("stream"),
        Transfer(is_sender, "group of 0-1 #1", peer, 4, request=2),
        Wait((2,)),
        Transfer(is_sender, "HOST #1", peer, 4, request=3),
        Wait((3,), blocks_host=True),
        Synchronize("stream"),
        Collective("all_reduce", "HOST #1", is_async=True, size=4, request=4),
        Wait((4,)),
        # An object is gathered in two parts: the sizes, then the bytes.
        Collective("all_gather", "W", size=16),
        Collective("all_gather", "W", size=48),
        Collective("all_reduce", "W", is_async=True, size=4, request=5),
        Collective("all_reduce", "W", is_async=True, size=4, request=6),
        Wait((5, 6)),
        Synchronize("device"),
        Collective("barrier", "W"),
    ]


def test_processes_under_the_cpu_emulation_issue_what_is_recorded_of_the_schedule(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("WORKER_PROGRESS_FILE", str(tmp_path / "progress"))
    emulated = [sys.executable, "-m", "tools.cpu_emulation", *two_ranks("recorded_step.py")]

    assert record_command(emulated, tmp_path / "files") == 0

    options = ScheduleOptions(2, 3, variable_seq_lengths=True)
    live, alone = recorded(tmp_path / "files"), record(options)
    for of_process, of_schedule in zip(live.programs, alone.programs, strict=True):
        assert in_schedule(of_process) == in_schedule(of_schedule)


def test_command_that_cannot_be_run_or_records_nothing_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot run 'no-such-program'"):
        record_command(["no-such-program"], tmp_path)
    with pytest.raises(UsageError, match=r"nothing was recorded.*ended with status 3"):
        record_command([sys.executable, "-c", "raise SystemExit(3)"], tmp_path)


def test_folder_with_a_recording_is_left_alone(tmp_path):
    (tmp_path / "rank0.jsonl").write_text("precious")
    with pytest.raises(UsageError, match="holds a recording already; name another folder"):
        record_command([sys.executable, "-c", ""], tmp_path)
    assert (tmp_path / "rank0.jsonl").read_text() == "precious"


def two_ranks(script: str) -> list[str]:
    return [sys.executable, str(HERE / "two_ranks.py"), str(HERE / script)]


def recorded(folder: Path) -> Trace:
    trace = read_traces(sorted(folder.glob("rank*.jsonl")))
    annotate(dict(enumerate(trace.programs)))
    return trace


def in_schedule(program: list[Operation]) -> list[Operation]:
    """The operations of the schedule, without what depends on the model and on the start-up."""
    operations = []
    for operation in program:
        if operation.place.phase in ("warmup", "steady", "cooldown"):
            if isinstance(operation, Transfer):
                operation = dataclasses.replace(operation, size=None, request=None)
            if isinstance(operation, Wait):
                operation = dataclasses.replace(operation, requests=())
            operations.append(operation)
    return operations
