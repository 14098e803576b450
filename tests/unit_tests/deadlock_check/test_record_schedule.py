"""What is recorded of the real schedules: messages, roles, places, groups, and errors."""

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterator
from itertools import groupby

import pytest

from tools.base_release import unpacked_base
from tools.deadlock_check.annotate import annotate
from tools.deadlock_check.errors import UsageError
from tools.deadlock_check.record_schedule import INSTALLED, ScheduleOptions, record
from tools.deadlock_check.trace import (
    NOWHERE,
    SENDS_TO_RECEIVES,
    Batch,
    Compute,
    Group,
    Meet,
    Operation,
    Synchronize,
    Trace,
    Transfer,
    Wait,
)

OVERLAPPED = {
    "batch_p2p_comm": False,
    "overlap_p2p_comm": True,
    "overlap_p2p_comm_warmup_flush": True,
}
PIPELINE_GROUP = "PIPELINE_MODEL_PARALLEL_GROUP"


@pytest.fixture(scope="module")
def base():
    return str(unpacked_base("0.19.2"))


def test_base_sends_once_per_link_and_synchronises_once_per_exchange(base):
    fixed = record(ScheduleOptions(4, 8), base)
    variable = record(ScheduleOptions(4, 8, variable_seq_lengths=True), base)
    # 3 links, 8 microbatches, 2 directions; 60 exchanges, as some carry two messages.
    assert (sends(fixed), device_synchronisations(fixed)) == ({"data": 48}, 60)
    assert sends(variable) == {"shape": 48, "data": 48}
    assert device_synchronisations(variable) == 120


@pytest.mark.parametrize("is_variable", [False, True])
def test_fork_sends_the_same_messages_and_never_synchronises_with_the_device(is_variable):
    trace = record(ScheduleOptions(4, 8, variable_seq_lengths=is_variable))
    assert sends(trace) == ({"shape": 48, "data": 48} if is_variable else {"data": 48})
    assert device_synchronisations(trace) == 0


def test_base_program_of_a_last_stage_in_full(base):
    trace = record(ScheduleOptions(2, 1), base)
    (group,) = (name for name in trace.groups if name.startswith(PIPELINE_GROUP))
    size = 4096 * 1 * 1024 * 2
    received = Transfer(False, group, 0, size, "recv_prev", "data", request=0)
    sent = Transfer(True, group, 0, size, "send_prev", "data", request=1)
    assert [bare(operation) for operation in schedule(trace.programs[1])] == [
        Batch(group, [received]),
        Wait((0,)),
        Synchronize("device"),
        Compute("forward"),
        Compute("backward"),
        Batch(group, [sent]),
        Wait((1,)),
        Synchronize("device"),
    ]


@pytest.mark.parametrize("implementation", [INSTALLED, "base"])
@pytest.mark.parametrize("exchange", [{}, {"batch_p2p_comm": False}, OVERLAPPED])
def test_roles_tell_the_neighbours_apart_that_are_one_rank(implementation, exchange, base):
    options = ScheduleOptions(2, 4, virtual_size=2, variable_seq_lengths=True, **exchange)
    trace = record(options, base if implementation == "base" else implementation)
    for role, arrives_in in SENDS_TO_RECEIVES.items():
        for content in ("shape", "data"):
            for sender in (0, 1):
                sent = places_of_messages(trace, sender, role, content)
                received = places_of_messages(trace, 1 - sender, arrives_in, content)
                # The link that wraps round joins chunk 1 of the first stage to chunk 0 of the last.
                wraps = sender == (1 if role == "send_next" else 0)
                step = {"send_next": 1, "send_prev": -1}[role] if wraps else 0
                assert len(sent) == (4 if wraps else 8)
                assert [(microbatch, chunk + step) for microbatch, chunk in sent] == received


def test_every_operation_of_a_schedule_has_a_place():
    trace = record(ScheduleOptions(3, 6, virtual_size=2, variable_seq_lengths=True))
    for program in trace.programs:
        for operation in parts(schedule(program)):
            assert None not in operation.place
    (source,) = {
        operation.place.source
        for operation in parts(schedule(trace.programs[0]))
        if isinstance(operation, Transfer)
    }
    assert source.startswith("megatron/core/pipeline_parallel/p2p_communication.py:")
    assert source.endswith(" _post")


def test_phases_follow_the_computations():
    trace = record(ScheduleOptions(4, 8))
    phases = [
        {
            phase: Counter(o.direction for o in operations if isinstance(o, Compute))
            for phase, operations in groupby(program, lambda operation: operation.place.phase)
        }
        for program in trace.programs
    ]
    for rank, of_rank in enumerate(phases):
        assert list(of_rank) == ["startup", "warmup", "steady", "cooldown"]
        warmup = 4 - rank
        assert of_rank["startup"] == {}
        assert of_rank["warmup"] == {"forward": warmup}
        assert of_rank["steady"] == {"forward": 8 - warmup, "backward": 8 - warmup}
        assert of_rank["cooldown"] == {"backward": warmup}


def test_a_step_without_backward_warms_up_throughout():
    trace = record(ScheduleOptions(2, 2, forward_only=True))
    for program in trace.programs:
        assert {operation.place.phase for operation in program} == {"startup", "warmup"}


def test_annotation_of_a_hung_job_takes_what_is_missing_from_the_rank_that_came_furthest(base):
    whole = record(ScheduleOptions(4, 4, virtual_size=2, **OVERLAPPED), base).programs
    hung = [program[: len(program) - 30 * rank] for rank, program in enumerate(whole)]
    blank = {rank: [without_served(o) for o in program] for rank, program in enumerate(hung)}
    annotate(blank)
    assert list(blank.values()) == hung


def test_start_up_of_the_fork_is_recorded():
    trace = record(ScheduleOptions(2, 2))
    start_up = [o for o in trace.programs[0] if o.place.phase == "startup"]
    names = [operation.name for operation in start_up if isinstance(operation, Meet)]
    assert names[0] == "initialize_model_parallel"
    assert names[-1] == "the end of the warm-up of the pipeline links"
    (batch,) = (operation for operation in start_up if isinstance(operation, Batch))
    assert [transfer.role for transfer in batch.transfers] == ["send_next", "recv_next"]
    # What the host checks after the warm-up it has to wait for.
    assert Synchronize("stream") in map(bare, start_up)


def test_groups_of_the_fork_do_not_inherit_the_device_of_the_default_group():
    trace = record(ScheduleOptions(2, 2))
    data, shapes, pipeline = (
        groups_described(trace, description)
        for description in ("_DATA_GROUP", "_SHAPES_GROUP", PIPELINE_GROUP)
    )
    assert trace.groups["W"] == Group("W", (0, 1))
    assert [(g.ranks, g.on_host, g.is_device_bound) for g in data] == [((0, 1), False, False)] * 4
    assert [(g.ranks, g.on_host, g.is_device_bound) for g in shapes] == [((0, 1), True, False)] * 4
    assert [(g.ranks, g.on_host, g.is_device_bound) for g in pipeline] == [((0, 1), False, True)]


@pytest.mark.parametrize("use_gloo", [True, False])
def test_host_waits_for_a_shape_by_the_group_that_carries_it(use_gloo):
    trace = record(ScheduleOptions(2, 1, variable_seq_lengths=True, use_gloo=use_gloo))
    assert {g.on_host for g in groups_described(trace, "_SHAPES_GROUP")} == {use_gloo}
    shape, wait, *rest = (bare(operation) for operation in schedule(trace.programs[1]))
    assert shape.content == "shape"
    assert wait == Wait((shape.request,), blocks_host=use_gloo)
    assert (rest[0] == Synchronize("stream")) is not use_gloo


def test_wrapper_of_ms_swift_moves_batches_of_the_base_to_the_default_group(base):
    options = ScheduleOptions(2, 2, variable_seq_lengths=True, ms_swift_world_group=True)
    groups = {(m.content, m.group.split(" ")[0]) for m in messages(record(options, base))}
    assert groups == {("shape", PIPELINE_GROUP), ("data", "W")}
    fixed = dataclasses.replace(options, variable_seq_lengths=False)
    assert {m.group.split(" ")[0] for m in messages(record(fixed))} == {PIPELINE_GROUP}


def test_batches_of_the_fork_depend_on_the_backend():
    batched = record(ScheduleOptions(2, 2))
    unbatched = record(ScheduleOptions(2, 2, coalesces=False))
    assert any(isinstance(o, Batch) for o in schedule(batched.programs[0]))
    assert not any(isinstance(o, Batch) for o in unbatched.programs[0])
    assert sends(batched) == sends(unbatched)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_size": 1}, "pipeline_size=1: .*at least 2"),
        ({"num_microbatches": 0}, "num_microbatches=0: .*at least 1"),
        ({"virtual_size": 1}, "virtual_size=1: .*leave it out"),
        ({"virtual_size": 2, "num_microbatches": 3}, "num_microbatches=3: .*at least 4"),
        ({"virtual_size": 2, "num_microbatches": 6}, "num_microbatches=6: .* last one has 2"),
        (
            {"virtual_size": 2, "microbatch_group_size_per_vp_stage": 3},
            "microbatch_group_size_per_vp_stage=3: .*pipeline_size=4",
        ),
        ({"microbatch_group_size_per_vp_stage": 4}, "only interleaved .*virtual_size"),
        (
            {"overlap_p2p_comm": True, "batch_p2p_comm": False},
            "overlap_p2p_comm=True: .*virtual_size",
        ),
        ({"overlap_p2p_comm": True, "virtual_size": 2}, "overlap_p2p_comm=True: batch_p2p_comm"),
        (
            {"overlap_p2p_comm_warmup_flush": True},
            "overlap_p2p_comm_warmup_flush=True: .*overlap_p2p_comm",
        ),
    ],
)
def test_options_without_a_schedule_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        record(ScheduleOptions(**{"pipeline_size": 4, "num_microbatches": 8, **options}))


def test_folder_without_the_package_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is no folder with megatron/core in it"):
        record(ScheduleOptions(2, 2), str(tmp_path))


def test_package_that_cannot_be_imported_is_one_error(tmp_path):
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise OSError('half a wheel')")
    with pytest.raises(RuntimeError, match="cannot be imported: OSError: half a wheel"):
        record(ScheduleOptions(2, 2), str(tmp_path))


def test_exception_of_a_schedule_names_the_rank_and_spares_later_recordings(monkeypatch):
    illegal = ScheduleOptions(2, 2, virtual_size=2, overlap_p2p_comm=True)
    with monkeypatch.context() as patch:
        patch.setattr(ScheduleOptions, "check", lambda self: None)
        with pytest.raises(RuntimeError, match=r"recording rank [01] .* ValueError: Can not use"):
            record(illegal)
    assert len(record(ScheduleOptions(2, 2)).programs) == 2


def parts(operations: list[Operation]) -> Iterator[Operation]:
    """The operations, and the transfers of batches behind these."""
    for operation in operations:
        yield operation
        if isinstance(operation, Batch):
            yield from operation.transfers


def schedule(program: list[Operation]) -> list[Operation]:
    return [operation for operation in program if operation.place.phase != "startup"]


def messages(trace: Trace) -> list[Transfer]:
    """What is sent in the schedule."""
    return [
        operation
        for program in trace.programs
        for operation in parts(schedule(program))
        if isinstance(operation, Transfer) and operation.is_send
    ]


def sends(trace: Trace) -> Counter[str | None]:
    return Counter(message.content for message in messages(trace))


def device_synchronisations(trace: Trace) -> int:
    return sum(
        bare(operation) == Synchronize("device")
        for program in trace.programs
        for operation in program
    )


def places_of_messages(trace: Trace, rank: int, role: str, content: str) -> list[tuple[int, int]]:
    """Microbatch and chunk of the transfers of one role, in order."""
    return [
        (part.place.microbatch, part.place.chunk)
        for part in parts(schedule(trace.programs[rank]))
        if isinstance(part, Transfer) and (part.role, part.content) == (role, content)
    ]


def groups_described(trace: Trace, description: str) -> list[Group]:
    return [group for name, group in trace.groups.items() if description in name]


def bare(operation: Operation) -> Operation:
    """The operation without its place."""
    copied = copy.deepcopy(operation)
    for part in parts([copied]):
        part.place = NOWHERE
    return copied


def without_served(operation: Operation) -> Operation:
    """The operation as it is known while it is recorded."""
    copied = copy.deepcopy(operation)
    if not isinstance(copied, Compute):
        for part in parts([copied]):
            part.place = part.place._replace(microbatch=None, chunk=None)
    return copied
