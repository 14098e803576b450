"""What the model adds to pairing operations: first use, slots, splits, the clock, the cycle."""

import math

import pytest

from tools.deadlock_check.machine import Machine
from tools.deadlock_check.model import run
from tools.deadlock_check.outcome import Issued, Outcome, Reason, Verdict
from tools.deadlock_check.pattern import parse_pattern
from tools.deadlock_check.trace import Compute, Group, Operation, Place, Trace, Transfer, Wait

LAZY = Machine(communicators="lazy", pair_communicators=True)
EAGER = Machine(communicators="eager")


def outcome_of(text: str, machine: Machine, with_timeline: bool = False) -> Outcome:
    return run(parse_pattern(text, "a test"), machine, with_timeline=with_timeline)


def details(outcome: Outcome, verdict: Verdict) -> list[str]:
    return [finding.detail for finding in outcome.findings if finding.verdict is verdict]


class TestFirstUse:
    def test_first_batch_of_a_lazy_group_blocks_until_every_member_comes(self):
        outcome = outcome_of("0: {s1}\n1: {r0}\n2: {s3}\n3: {r2}", LAZY)
        assert outcome.verdict is Verdict.PASS
        assert any(
            "communicator of group W" in detail and "[0, 1, 2, 3]" in detail
            for detail in details(outcome, Verdict.FIRST_USE)
        )
        assert outcome_of("0: {s1}\n1: {r0}\n2:\n3:", LAZY).verdict is Verdict.UNMATCHED

    def test_an_eager_group_needs_its_two_ends_only(self):
        outcome = outcome_of("0: {s1}\n1: {r0}\n2:", EAGER)
        assert outcome.verdict is Verdict.PASS
        assert details(outcome, Verdict.FIRST_USE) == [
            "the connection from rank 0 to rank 1 is made here, which blocks the hosts of both "
            "until the matching operation is issued"
        ]

    def test_an_eager_group_that_inherited_no_device_is_lazy(self):
        trace = parse_pattern("groups: P = 0 1 2\n0: {s1}(P)\n1: {r0}(P)\n2:", "a test")
        trace.groups["P"] = Group("P", (0, 1, 2), is_device_bound=False)
        assert run(trace, EAGER).verdict is Verdict.UNMATCHED

    def test_nothing_is_reported_of_the_start_up(self):
        def programs(phase: str) -> list[list[Operation]]:
            place = Place(phase)
            return [
                [Transfer(True, "W", 1, place=place)],
                [Transfer(False, "W", 0, place=place)],
            ]

        groups = {"W": Group("W", (0, 1))}
        in_start_up = run(Trace(groups, programs("startup")), LAZY)
        in_schedule = run(Trace(groups, programs("warmup")), LAZY)
        assert in_start_up.statistics.communicators_in_schedule == 0
        assert in_schedule.statistics.communicators_in_schedule == 2


class TestGroupCreation:
    def test_creation_under_a_bound_device_needs_every_rank(self):
        without_rank_2 = "groups: P = 0 1\n0: new(P); s1(P)\n1: new(P); r0(P)\n2:"
        assert outcome_of(without_rank_2, LAZY).verdict is Verdict.PASS
        assert outcome_of(without_rank_2, EAGER).stuck.keys() == {0, 1}
        assert outcome_of(f"{without_rank_2} new(P)", EAGER).verdict is Verdict.PASS

    def test_a_gloo_group_leaves_others_alone_in_the_split(self):
        text = "groups: H = host 0 1\n0: new(H)\n1: new(H)\n2: new(H)"
        assert outcome_of(text, EAGER).stuck == {2: Issued(2, 0)}
        unbound = parse_pattern(text, "a test")
        unbound.groups["H"] = Group("H", (0, 1), on_host=True, is_device_bound=False)
        assert run(unbound, EAGER).verdict is Verdict.PASS


class TestResidentKernels:
    EXCHANGE = "0: s1(P); r1(Q); w\n1: s0(Q); r0(P); w"
    GROUPS = "groups: P = 0 1; Q = 0 1\n"

    @pytest.mark.parametrize(
        ("slots", "verdict"), [(1, Verdict.DEADLOCK), (2, Verdict.PASS), (None, Verdict.PASS)]
    )
    def test_two_streams_need_two_slots(self, slots: int | None, verdict: Verdict):
        machine = Machine(max_resident_kernels=slots)
        assert outcome_of(self.GROUPS + self.EXCHANGE, machine).verdict is verdict


class TestCycle:
    def test_every_target_is_the_next_waiter(self):
        text = "0: s1; r3; w\n1: s2; r0; w\n2: s3; r1; w\n3: s0; r2; w"
        cycle = outcome_of(text, Machine()).cycle
        assert len(cycle) == 8
        assert {dependence.waiter.rank for dependence in cycle} == {0, 1, 2, 3}
        for dependence, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            assert dependence.target == following.waiter
        assert {dependence.reason for dependence in cycle} == {
            Reason.NEEDS_PARTNER,
            Reason.BEHIND_IN_STREAM,
        }

    def test_a_host_that_ended_closes_no_cycle(self):
        outcome = outcome_of("0: r1; w; sync\n1:", Machine())
        assert outcome.verdict is Verdict.UNMATCHED
        assert outcome.cycle == []
        assert outcome.stuck == {0: Issued(0, 2)}

    def test_a_host_that_waits_for_nothing_can_end_before_its_device(self):
        outcome = outcome_of("0: s1\n1:", Machine())
        assert outcome.stuck == {0: Issued(0, 0)}
        assert [finding.where for finding in outcome.findings] == [(Issued(0, 0),)]


class TestClock:
    def test_a_stage_computes_when_its_input_is_there(self):
        def transfer(is_send: bool, peer: int) -> Transfer:
            return Transfer(is_send, "W", peer, request=0, content="data")

        trace = Trace(
            {"W": Group("W", (0, 1))},
            [
                [Compute("forward"), transfer(True, 1), Wait((0,))],
                [transfer(False, 0), Wait((0,)), Compute("backward")],
            ],
        )
        outcome = run(trace, Machine(), with_timeline=True)
        spans = {span.issued: (span.begin, span.end) for span in outcome.spans}
        forward, backward = spans[Issued(0, 0)], spans[Issued(1, 2)]
        assert forward == (0.0, 1.0)
        assert backward[0] == spans[Issued(1, 0)][1] > 1.0
        assert backward[1] == backward[0] + 2.0
        assert outcome.statistics.duration == backward[1]

    def test_what_never_ends_reaches_to_infinity(self):
        outcome = outcome_of("0: s1\n1:", Machine(), with_timeline=True)
        assert [math.isinf(span.end) for span in outcome.spans] == [True]


class TestOperationsOfAllKindsAreCounted:
    def test_counts(self):
        outcome = outcome_of("0: {s1, r1}; w; sync\n1: {r0, s0}; w; sync", Machine())
        statistics = outcome.statistics
        assert (statistics.messages, statistics.batches) == (2, 2)
        assert statistics.device_synchronisations == 2
        assert statistics.operations == 6
