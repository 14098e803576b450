"""The notation of hand-written patterns: what each statement means, and what is refused where."""

from pathlib import Path

import pytest

from tools.deadlock_check.errors import UsageError
from tools.deadlock_check.pattern import parse_pattern, read_pattern
from tools.deadlock_check.trace import (
    Batch,
    Collective,
    CreateGroup,
    Group,
    Meet,
    Operation,
    Place,
    Synchronize,
    Transfer,
    Wait,
)

GROUPS = "groups: P = 0 1 2; H = host 0 1\n"


def at(column: int) -> Place:
    """The place of a statement in the second line, after the groups."""
    return Place(source=f"x:2:{column}")


def program(statements: str) -> list[Operation]:
    """What rank 0 does."""
    return parse_pattern(f"{GROUPS}0: {statements}", "x").programs[0]


@pytest.mark.parametrize(
    ("statements", "operations"),
    [
        ("s1", [Transfer(True, "W", 1, request=0, place=at(4))]),
        ("r2(P)", [Transfer(False, "P", 2, request=0, place=at(4))]),
        ("s1(64)", [Transfer(True, "W", 1, 64, request=0, place=at(4))]),
        ("s1 (P, int64[3])", [Transfer(True, "P", 1, 24, request=0, place=at(4))]),
        ("s1(bf16[100])", [Transfer(True, "W", 1, 200, request=0, place=at(4))]),
        (
            "s1(H)=grad0:send_prev",
            [Transfer(True, "H", 1, None, "send_prev", message="grad0", request=0, place=at(4))],
        ),
        (
            "r1:recv_next",
            [Transfer(False, "W", 1, None, "recv_next", request=0, place=at(4))],
        ),
        (
            "{s1(8)=x, r2}(P); w",
            [
                Batch(
                    "P",
                    [
                        Transfer(True, "P", 1, 8, message="x", request=0, place=at(5)),
                        Transfer(False, "P", 2, request=0, place=at(14)),
                    ],
                    at(4),
                ),
                Wait((0,), place=at(22)),
            ],
        ),
        (
            "s1; AR*(P, 4); w; r1; w",
            [
                Transfer(True, "W", 1, request=0, place=at(4)),
                Collective("all_reduce", "P", is_async=True, size=4, request=1, place=at(8)),
                Wait((0, 1), place=at(19)),
                Transfer(False, "W", 1, request=2, place=at(22)),
                Wait((2,), place=at(26)),
            ],
        ),
        (
            "A2A; AG(P); RS; BC",
            [
                Collective("all_to_all", "W", place=at(4)),
                Collective("all_gather", "P", place=at(9)),
                Collective("reduce_scatter", "W", place=at(16)),
                Collective("broadcast", "W", place=at(20)),
            ],
        ),
        ("sync; sync(stream)", [Synchronize("device", at(4)), Synchronize("stream", at(10))]),
        (
            "init(1, 0); init(0, 2); init(0, 1)",
            [
                Meet((0, 1), "init 1", at(4)),
                Meet((0, 2), "init 1", at(16)),
                Meet((0, 1), "init 2", at(28)),
            ],
        ),
        (
            "new(P); new(H, members)",
            [CreateGroup("P", place=at(4)), CreateGroup("H", members_only=True, place=at(12))],
        ),
        (" ;; ", []),
    ],
)
def test_statement_means(statements: str, operations: list[Operation]):
    assert program(statements) == operations


def test_groups_ranks_and_comments():
    trace = parse_pattern("# nothing\n\n 3 : s1 # last rank\ngroups:H=host 4 0;P = 1 2\n1: r3", "x")
    assert trace.groups == {
        "W": Group("W", (0, 1, 2, 3, 4)),
        "H": Group("H", (4, 0), on_host=True),
        "P": Group("P", (1, 2)),
    }
    assert [len(program) for program in trace.programs] == [0, 1, 0, 1, 0]
    assert trace.description == "pattern x"


@pytest.mark.parametrize("mention", ["s3", "{r3}", "init(0, 3)"])
def test_world_reaches_to_the_highest_rank_that_is_mentioned(mention: str):
    assert parse_pattern(f"0: {mention}", "x").world_size == 4


@pytest.mark.parametrize(
    ("statements", "column", "message"),
    [
        ("send 1", 4, "cannot read 'send 1'; write s1(P)"),
        ("s1; r1; what", 12, "cannot read 'what'"),
        ("s1(P))", 4, "cannot read 's1(P))'"),
        ("s1(64, P)", 11, "cannot read 'P'; write (P), (64), (P, 64) or (P, bf16[100])"),
        ("s1()", 7, "cannot read ''"),
        ("s1(P, float[2])", 10, "unknown type 'float'; known are int8"),
        ("s1(Q)", 4, "group 'Q' was not declared before; declared are W, P, H"),
        ("s2(H)", 4, "peer 2 is no member of group 'H'; its members, by global rank, are 0, 1"),
        ("s1:recv_prev", 4, "'recv_prev' is no role of it; write send_next or send_prev"),
        ("{s1, AR}", 9, "cannot read 'AR'; write parts such as s1"),
        ("{}", 5, "cannot read ''"),
        ("{s1, r1(P)}", 9, "the group of a batch is written behind it"),
        ("{s1}(P, 64)", 4, "a batch has no size; write it with each part"),
        ("w", 4, "no request is left to wait for; drop the w"),
        ("s1; w; w", 11, "no request is left to wait for; drop the w"),
        ("w(1)", 4, "'w(1)' has wrong arguments; write w, sync"),
        ("sync(host)", 4, "'sync(host)' has wrong arguments"),
        ("init(1, 2)", 4, "rank 0 is not among those that it meets, 1, 2; add it"),
        ("init", 4, "'init' has wrong arguments"),
        ("new(P, all)", 4, "'new(P, all)' has wrong arguments"),
    ],
)
def test_wrong_statement_is_named(statements: str, column: int, message: str):
    with pytest.raises(UsageError) as raised:
        program(statements)
    assert str(raised.value).startswith(f"x:2:{column}: ")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x: no rank has a program; write lines such as"),
        ("rank 0: s1", "x:1:1: cannot read 'rank 0: s1'; write '0: s1(P); w' for rank 0"),
        ("0: s1\n1: r0\n 0: r1", "x:3:2: rank 0 has a line already; continue that one"),
        ("groups: P = 0, 1", "x:1:9: cannot read 'P = 0, 1'; write 'P = 0 1 2'"),
        ("groups: W = 0 1", "x:1:9: W is the group of all ranks; take another name"),
        ("groups: P = 0 1; P = 1 0\n0:", "x:1:18: group 'P' was declared otherwise before"),
        ("groups: P = 0 0\n0:", "x:1:9: group 'P' has a rank twice"),
        ("groups: P = 0 1\n2: AR(P)", "x:2:4: rank 2 is no member of group 'P'"),
    ],
)
def test_wrong_line_is_named(text: str, message: str):
    with pytest.raises(UsageError) as raised:
        parse_pattern(text, "x")
    assert str(raised.value).startswith(message)


def test_files_are_read_or_named(tmp_path: Path):
    path = tmp_path / "exchange.txt"
    path.write_text("0: s1\n1: r0\n")
    assert read_pattern(path).programs[1][0].place.source == f"{path}:2:4"
    with pytest.raises(UsageError, match=r"absent: .*No such file"):
        read_pattern(tmp_path / "absent")
