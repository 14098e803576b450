"""Traces survive the way through files; files that no recorder writes are refused by line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.deadlock_check.errors import UsageError
from tools.deadlock_check.trace import (
    Batch,
    Collective,
    Compute,
    CreateGroup,
    Group,
    Meet,
    Place,
    Synchronize,
    Trace,
    Transfer,
    Wait,
)
from tools.deadlock_check.trace_file import (
    group_to_json,
    header,
    operation_to_json,
    read_traces,
    write_trace,
)

HEADER = header(2, "a run")
WORLD = group_to_json(Group("W", (0, 1)))
BATCH = {"rank": 0, "op": "batch", "group": "W"}
SEND = {"rank": 0, "op": "send", "group": "W", "peer": 1, "request": 0}


def job() -> Trace:
    """Every kind of operation, and every field with a value that is not its default."""

    def place() -> Place:
        return Place("warmup", 3, 1, "schedules.py:10 forward_step")

    def part() -> Transfer:
        return Transfer(
            True, "W", 1, 24, "send_next", "shape", message="shape 3", request=1, place=place()
        )

    first = [
        CreateGroup("P", members_only=True, place=place()),
        Meet((0, 1), "start-up", place()),
        Transfer(False, "W", 1, request=0),
        Batch("W", [part(), Transfer(False, "W", 1, request=1)], place()),
        Collective("all_reduce", "W", is_async=True, size=8, request=2, place=place()),
        Wait((0, 1, 2), blocks_host=True, place=place()),
        Synchronize("stream", place()),
        Compute("backward", place()),
    ]
    second = [Synchronize("device"), Collective("broadcast", "P"), Compute("forward")]
    groups = [Group("W", (0, 1)), Group("P", (1,), on_host=True, is_device_bound=False)]
    return Trace({group.name: group for group in groups}, [first, second], "a run")


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_rank(folder: Path, trace: Trace, rank: int) -> Path:
    lines = [header(trace.world_size, trace.description, [rank])]
    lines += [group_to_json(group) for group in trace.groups.values()]
    lines += [{"rank": rank, **operation_to_json(o)} for o in trace.programs[rank]]
    return write(folder / f"{rank}.jsonl", lines)


def test_trace_comes_back_as_it_was(tmp_path: Path):
    write_trace(job(), tmp_path / "trace.jsonl")
    assert read_traces([tmp_path / "trace.jsonl"]) == job()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


def test_defaults_are_not_written(tmp_path: Path):
    write_trace(Trace({}, [[Compute("forward")]]), tmp_path / "trace.jsonl")
    assert [json.loads(line) for line in (tmp_path / "trace.jsonl").open()] == [
        header(1),
        {"rank": 0, "op": "compute", "direction": "forward"},
    ]


def test_files_of_single_ranks_are_merged(tmp_path: Path):
    paths = [write_rank(tmp_path, job(), rank) for rank in (1, 0)]
    assert read_traces(paths) == job()


def test_equal_places_become_one_object(tmp_path: Path):
    write_trace(job(), tmp_path / "trace.jsonl")
    program = read_traces([tmp_path / "trace.jsonl"]).programs[0]
    assert program[0].place is program[1].place is program[3].transfers[0].place


def test_last_line_of_a_killed_process_is_left_out(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    write_trace(job(), path)
    path.write_text(path.read_text()[:-10])
    expected = job()
    expected.programs[1].pop()
    assert read_traces([path]) == expected


def test_failed_writing_leaves_what_was_there(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text("precious")
    broken = job()
    broken.programs[1].append(Synchronize(object()))
    with pytest.raises(TypeError):
        write_trace(broken, path)
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("lines", "number", "message"),
    [
        ([], 0, "no header"),
        ([WORLD], 1, "'format' 'pipeline-communication-trace'"),
        ([{**HEADER, "version": 2}], 1, "'version' is 2, and this tool reads 1; record"),
        ([{**HEADER, "world_size": "2"}], 1, "'world_size' is '2'; it must be a whole number"),
        ([{**HEADER, "ranks": [2]}], 1, "rank 2 is beyond the last of the 2 ranks"),
        ([HEADER, {"rank": 0}], 2, "neither 'op' nor 'group'"),
        ([HEADER, {"group": "W"}], 2, "group 'W' lacks 'ranks'"),
        ([HEADER, {**WORLD, "backend": "nccl"}], 2, "a group has no field 'backend'"),
        ([HEADER, {**WORLD, "ranks": [0, 2]}], 2, "rank 2 is beyond"),
        ([HEADER, {**WORLD, "ranks": [0, 0]}], 2, "group 'W' has a rank twice"),
        ([HEADER, WORLD, {**WORLD, "ranks": [1, 0]}], 3, "group 'W' was declared otherwise"),
        ([HEADER, SEND], 2, "group 'W' was not declared before; declared are none"),
        ([HEADER, WORLD, {**SEND, "op": "isend"}], 3, "unknown operation 'isend'; known are send"),
        ([HEADER, WORLD, {**SEND, "op": []}], 3, "unknown operation []"),
        ([HEADER, WORLD, {**SEND, "tag": 1}], 3, "'send' has no field 'tag'; it may have group"),
        ([HEADER, WORLD, {**SEND, "peer": True}], 3, "'peer' is True; it must be a whole number"),
        ([HEADER, WORLD, {**SEND, "peer": 2}], 3, "peer 2 is no member of group 'W'"),
        ([HEADER, WORLD, {**SEND, "role": "next"}], 3, "'role' is 'next'; it must be send_next or"),
        ([HEADER, WORLD, {**SEND, "rank": 2}], 3, "'rank' is 2, which the header does not"),
        ([HEADER, WORLD, {"rank": 0, "op": "send"}], 3, "'send' lacks 'group' and 'peer'"),
        ([HEADER, WORLD, SEND, SEND], 4, "rank 0 issued request 0 before; number it anew"),
        (
            [HEADER, {"rank": 0, "op": "wait", "requests": [7]}],
            2,
            "waits for request 7, which rank 0 has not issued",
        ),
        (
            [HEADER, {"rank": 0, "op": "meet", "ranks": [1], "name": "x"}],
            2,
            "rank 0 is not among those that it meets, 1",
        ),
        (
            [
                HEADER,
                WORLD,
                {**BATCH, "transfers": [{"op": "wait"}]},
            ],
            3,
            "'wait' lacks 'requests'",
        ),
        (
            [HEADER, WORLD, {**BATCH, "transfers": [3]}],
            3,
            "3 in a batch is neither a 'send' nor a 'recv'",
        ),
        (
            [HEADER, WORLD, {**BATCH, "group": "V", "transfers": [SEND]}],
            3,
            "a batch on group 'V' has a part on 'W'",
        ),
    ],
)
def test_wrong_line_is_named(
    lines: list[dict[str, Any]], number: int, message: str, tmp_path: Path
):
    path = write(tmp_path / "trace.jsonl", lines)
    with pytest.raises(UsageError) as raised:
        read_traces([path])
    assert str(raised.value).startswith(f"{path}:{number}: ")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "not valid JSON"), ("[1]", "must be a JSON object, not '[1]'"), ("[" * 99999, "not")],
)
def test_line_that_is_no_object_is_named(line: str, message: str, tmp_path: Path):
    path = write(tmp_path / "trace.jsonl", [HEADER])
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UsageError) as raised:
        read_traces([path])
    assert f"{path}:2: " in str(raised.value)
    assert message in str(raised.value)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path):
    zero, one = (write_rank(tmp_path, job(), rank) for rank in (0, 1))
    other = write(tmp_path / "other.jsonl", [header(2, "another run", [1])])
    with pytest.raises(UsageError, match=r"no trace file given"):
        read_traces([])
    with pytest.raises(UsageError, match=r"no file holds rank 1 of 2; name the files of all"):
        read_traces([zero])
    with pytest.raises(UsageError, match=r"1\.jsonl:1: rank 1 has a program already"):
        read_traces([zero, one, one])
    with pytest.raises(UsageError, match=r"other\.jsonl:1: from a run .* 'another run'"):
        read_traces([zero, other])


def test_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match=r"absent: .*No such file"):
        read_traces([tmp_path / "absent"])
    (tmp_path / "picture").write_bytes(b"\x89PNG")
    with pytest.raises(UsageError, match=r"picture: .*codec"):
        read_traces([tmp_path / "picture"])
