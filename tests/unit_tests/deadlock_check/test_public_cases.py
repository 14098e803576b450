"""The public cases, written as patterns, have the outcomes that their reports tell or imply."""

from pathlib import Path

import pytest

from tools.deadlock_check.machine import GLOO, SMALL_SEND_BYTES, Machine
from tools.deadlock_check.model import run
from tools.deadlock_check.outcome import Issued, Outcome, Verdict
from tools.deadlock_check.pattern import read_pattern

PATTERNS = Path(__file__).resolve().parents[3] / "examples" / "deadlock_patterns"

MACHINES = {
    "one communicator": Machine(),
    "one communicator, batches as a whole": Machine(batch_progress="all-or-nothing"),
    "one communicator, one by one": Machine(coalesces=False),
    "one communicator, one hardware queue": Machine(hardware_queues="one"),
    "one communicator, small sends buffered": Machine(buffered_send_bytes=SMALL_SEND_BYTES),
    "one communicator, one kernel at a time": Machine(max_resident_kernels=1),
    "pair communicators": Machine(pair_communicators=True),
    "eager": Machine(communicators="eager"),
    "lazy": Machine(communicators="lazy", pair_communicators=True),
    "lazy, one by one": Machine(communicators="lazy", pair_communicators=True, coalesces=False),
    "gloo": GLOO,
}
ONE_BY_ONE = {"one communicator, one by one", "lazy, one by one"}
TWO_KERNELS_CANNOT_MEET = {"lazy", "lazy, one by one", "one communicator, one kernel at a time"}

PASS, DEADLOCK, CROSSED, SIZE = (
    Verdict.PASS,
    Verdict.DEADLOCK,
    Verdict.CROSSED,
    Verdict.SIZE,
)
OUTCOMES: dict[str, tuple[Verdict, dict[Verdict, set[str]]]] = {
    "01_steady_exchange": (PASS, {DEADLOCK: ONE_BY_ONE}),
    "03_two_stages_one_peer": (CROSSED, {DEADLOCK: ONE_BY_ONE}),
    "03_two_stages_two_groups": (PASS, {}),
    "06_shape_and_data_on_two_groups": (PASS, {DEADLOCK: {"lazy"}}),
    "09_two_sources_of_one_shape": (SIZE, {}),
    "10_pair_communicators_in_a_ring": (DEADLOCK, {}),
    "12_exchange": (DEADLOCK, {PASS: {"gloo"}}),
    "12_exchange_of_shapes": (
        DEADLOCK,
        {PASS: {"gloo", "one communicator, small sends buffered"}},
    ),
    "12_exchange_in_batches": (PASS, {DEADLOCK: ONE_BY_ONE}),
    "14_one_queue_for_two_links": (PASS, {}),
    "30_two_links_of_one_rank": (PASS, {}),
    "33_collective_before_send": (DEADLOCK, {}),
    "33_collective_beside_send": (PASS, {DEADLOCK: TWO_KERNELS_CANNOT_MEET}),
    "36_synchronize_between_groups": (DEADLOCK, {PASS: {"gloo"}}),
    "36_no_synchronize_between_groups": (PASS, {DEADLOCK: TWO_KERNELS_CANNOT_MEET}),
    "37_same_count_other_type": (SIZE, {}),
    "41_ring": (DEADLOCK, {PASS: {"pair communicators", "gloo"}}),
    "41_ring_by_parity": (PASS, {}),
}
"""By pattern: the verdict on most machines, and the machines with another one."""


def outcome_of(pattern: str, machine: str) -> Outcome:
    return run(read_pattern(PATTERNS / f"{pattern}.txt"), MACHINES[machine])


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("pattern", OUTCOMES)
def test_verdict(pattern: str, machine: str):
    expected, others = OUTCOMES[pattern]
    for verdict, machines in others.items():
        if machine in machines:
            expected = verdict
    outcome = outcome_of(pattern, machine)
    assert outcome.verdict is expected
    assert bool(outcome.cycle) == bool(outcome.stuck) == (expected is DEADLOCK)


def test_every_pattern_is_checked_and_listed():
    files = {path.stem for path in PATTERNS.glob("*.txt")}
    assert files == set(OUTCOMES)
    readme = (PATTERNS / "README.md").read_text(encoding="utf-8")
    assert files == {name for name in files if f"`{name}.txt`" in readme}


def slow_at(outcome: Outcome) -> set[tuple[Issued, ...]]:
    return {finding.where for finding in outcome.findings if finding.verdict is Verdict.SLOW}


def test_receive_from_one_rank_waits_for_another_on_one_communicator_only():
    receive_of_b, send_of_a = Issued(0, 1), Issued(0, 0)
    shared = slow_at(outcome_of("30_two_links_of_one_rank", "eager"))
    assert (receive_of_b, send_of_a) in shared
    assert slow_at(outcome_of("30_two_links_of_one_rank", "pair communicators")) == set()


def test_two_links_in_one_queue_wait_for_each_other():
    assert slow_at(outcome_of("14_one_queue_for_two_links", "one communicator"))
    assert not slow_at(outcome_of("14_one_queue_for_two_links", "pair communicators"))


def test_crossed_messages_are_those_whose_roles_differ():
    outcome = outcome_of("03_two_stages_one_peer", "one communicator")
    crossed = [finding.where for finding in outcome.findings]
    # Both ranks list send_prev, recv_prev, send_next, recv_next: sends are parts 0 and 2.
    assert set(crossed) == {
        (Issued(sender, 0, part), Issued(1 - sender, 0, part + 1))
        for sender in (0, 1)
        for part in (0, 2)
    }


def test_circle_of_hosts_names_every_rank_once():
    outcome = outcome_of("10_pair_communicators_in_a_ring", "one communicator")
    assert sorted(dependence.waiter.rank for dependence in outcome.cycle) == [0, 1, 2, 3]
