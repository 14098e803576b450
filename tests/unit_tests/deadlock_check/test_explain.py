"""What people and programs are told of an outcome."""

import json

from tests.unit_tests.deadlock_check.small_traces import (
    BATCHES,
    ONE_BY_ONE,
    meeting_of_two_stages,
    ring,
)
from tools.deadlock_check import explain, model
from tools.deadlock_check.machine import GLOO
from tools.deadlock_check.outcome import Issued
from tools.deadlock_check.trace import Group, Trace, Transfer, Wait
from tools.deadlock_check.wording import Wording


def explained(trace, machine):
    outcome = model.run(trace, machine)
    return explain.as_text(trace, outcome, machine), explain.as_json(trace, outcome, machine)


def test_a_cycle_is_told_in_terms_of_the_schedule():
    text, _ = explained(meeting_of_two_stages(), ONE_BY_ONE)
    assert text.splitlines()[0].endswith("in a circle. 2 of 2 ranks never finish.")
    cycle = text.split("\n\n")[1]
    assert (
        "rank 0 (stage 0): isend of the shape of microbatch 3's activations to the next stage "
        "(rank 1)\n    [steady, chunk 1; schedules.py:11 forward; P]\n    moves no byte until"
    ) in cycle
    assert (
        "rank 0 (stage 0): irecv of the shape of microbatch 2's gradients from the next stage "
        "(rank 1)\n    [cooldown, chunk 0; schedules.py:22 backward; P]\n    stands in the same "
        "stream behind"
    ) in cycle
    assert cycle.count("rank 0 (stage 0):") == cycle.count("rank 1 (stage 1):") == 2


def test_advice_is_given_only_where_it_helps():
    assert "TORCH_DISTRIBUTED_DEBUG" in explained(meeting_of_two_stages(), ONE_BY_ONE)[0]
    assert "TORCH_DISTRIBUTED_DEBUG" not in explained(meeting_of_two_stages(), BATCHES)[0]
    assert "TORCH_DISTRIBUTED_DEBUG" not in explained(ring(4), ONE_BY_ONE)[0]


def test_stages_are_those_of_the_pipeline_and_not_the_ranks():
    text, data = explained(meeting_of_two_stages(stage_ranks=(1, 0)), ONE_BY_ONE)
    assert "rank 1 (stage 0)" in text
    assert {(issued["rank"], issued["stage"]) for issued in data["stuck"]} == {(0, 1), (1, 0)}


def test_two_pipelines_are_told_apart():
    programs = [
        [Transfer(True, "W", 2, role="send_next")],
        [Transfer(True, "W", 3, role="send_next")],
        [Transfer(False, "W", 0, role="recv_prev")],
        [Transfer(False, "W", 1, role="recv_prev")],
    ]
    trace = Trace({"W": Group("W", (0, 1, 2, 3))}, programs)
    assert Wording(trace).pipelines == [[0, 2], [1, 3]]


def test_the_text_of_a_long_cycle_stays_short():
    text, data = explained(ring(64), ONE_BY_ONE)
    assert text.count("\n") <= 45
    shown = [line for line in text.split("\n\n")[1].splitlines() if line.endswith("W]")]
    assert 4 <= len(shown) <= 10
    assert f"... {len(data['cycle']) - len(shown)} more of them ..." in text


def test_data_holds_the_whole_cycle_closed():
    _, data = explained(ring(64), ONE_BY_ONE)
    assert {waits["waiter"]["rank"] for waits in data["cycle"]} == set(range(64))
    targets = [waits["target"] for waits in data["cycle"]]
    assert [waits["waiter"] for waits in data["cycle"]] == [targets[-1], *targets[:-1]]


def test_data_is_strict_json_with_a_version():
    for machine in (ONE_BY_ONE, BATCHES, GLOO):
        _, data = explained(meeting_of_two_stages(), machine)
        assert json.loads(json.dumps(data, allow_nan=False)) == data
        assert data["version"] == explain.JSON_VERSION
        assert data["is_safe"] == (data["verdict"] == "PASS") == (machine is not ONE_BY_ONE)


def test_a_wait_names_what_it_waits_for():
    trace = ring(3)
    words = Wording(trace).operation(Issued(1, 2))
    assert words == (
        "wait for isend of a message (8 bytes) to rank 2, irecv of a message (8 bytes) from rank 0"
    )
    trace.programs[1][2] = Wait((2,))
    assert (
        Wording(trace)
        .operation(Issued(1, 2))
        .endswith("for irecv of a message (8 bytes) from rank 0")
    )


def test_what_arrives_in_the_wrong_place_is_shown_with_both_ends():
    swapped = [
        [Transfer(True, "W", 1, 8, "send_next", message="activations"), Wait(())],
        [Transfer(False, "W", 0, 8, "recv_next"), Wait(())],
    ]
    text, _ = explained(Trace({"W": Group("W", (0, 1))}, swapped), BATCHES)
    assert text.startswith("CROSSED")
    assert "rank 0 (stage 0): isend" in text
    assert "rank 1 (stage 1): irecv" in text
