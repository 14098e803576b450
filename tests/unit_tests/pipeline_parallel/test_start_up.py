"""Start-up of the pipeline's groups: deadlines, agreement, and that nothing is left for later."""

import pytest

from tests.unit_tests.pipeline_parallel import start_up_cases

DEADLINE_S = 4


@pytest.mark.parametrize("bad_rank", [0, 2])
@pytest.mark.parametrize(
    ("misbehaviour", "named"),
    [
        ("never arrives", "global rank(s) [{bad}]"),
        ("dies", "global rank(s) [{bad}]"),
        ("has another pipeline size", "Global rank(s) [{bad}]"),
        ("dies before the warm-up", "global rank(s) [{bad}]"),
        ("raises before the warm-up", "Global rank {bad} raised: out of device memory"),
    ],
)
def test_every_other_rank_names_the_bad_one(schedule_ranks, misbehaviour, named, bad_rank):
    deadline_s = schedule_ranks.start_up_deadline_s
    outcome = schedule_ranks.run(
        start_up_cases.start_with_a_bad_rank,
        world_size=4,
        arguments={"bad_rank": bad_rank, "misbehaviour": misbehaviour},
        environment={"MEGATRON_PIPELINE_STARTUP_TIMEOUT": str(deadline_s)},
        # Twice the deadline of the start-up, plus the time to tell the others.
        grace_s=2 * deadline_s + 5,
        deadline_s=2 * deadline_s + 10,
        stall_s=None,
    )
    for report in outcome.ranks:
        if report.rank != bad_rank:
            assert report.status == "raised", outcome.describe()
            assert named.format(bad=bad_rank) in report.error


def test_base_waits_for_a_rank_that_died(base_pool):
    """The negative control: without an agreement the timeout of 208 days is the only one."""
    outcome = base_pool.run(
        start_up_cases.start_with_a_bad_rank,
        world_size=4,
        arguments={"bad_rank": 2, "misbehaviour": "dies"},
        grace_s=DEADLINE_S + 5,
        stall_s=None,
    )
    assert outcome.with_status("stuck"), outcome.describe()


@pytest.mark.parametrize("value", ["soon", "0", "-5", "nan", ""])
def test_bad_deadline_is_refused_with_the_remedy(fork_pool, value):
    outcome = fork_pool.run(
        start_up_cases.initialise_twice,
        world_size=2,
        environment={"MEGATRON_PIPELINE_STARTUP_TIMEOUT": value},
    )
    for report in outcome.ranks:
        assert report.error.startswith(
            f"ValueError: MEGATRON_PIPELINE_STARTUP_TIMEOUT={value!r} is not"
        )
        assert "set it to" in report.error


@pytest.mark.parametrize("use_gloo", [True, False])
@pytest.mark.parametrize("pipeline_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("virtual_size", "transport", "is_variable"),
    [
        (1, "unbatched", True),
        (1, "unbatched", False),
        (2, "unbatched", True),
        (2, "overlapped", True),
        (2, "overlapped", False),
    ],
)
def test_nothing_is_contacted_or_created_for_the_first_time_in_a_step(
    schedule_ranks, pipeline_size, virtual_size, transport, is_variable, use_gloo
):
    recordings = schedule_ranks.run(
        start_up_cases.record_contacts,
        world_size=pipeline_size,
        arguments={
            "virtual_size": virtual_size,
            "transport": transport,
            "is_variable": is_variable,
            "use_gloo": use_gloo,
        },
    ).values()
    for recording in recordings:
        assert recording["step"]
        assert first_contacts(recording) == set()


def test_base_contacts_its_neighbours_in_the_step(base_pool):
    recordings = base_pool.run(
        start_up_cases.record_contacts,
        world_size=3,
        arguments={
            "virtual_size": 1,
            "transport": "unbatched",
            "is_variable": False,
            "use_gloo": True,
        },
    ).values()
    for recording in recordings:
        assert first_contacts(recording)


def first_contacts(recording):
    """Returns what the step did that the start-up had not done before."""
    return set(recording["step"]) - set(recording["start-up"]) | {
        event for event in recording["step"] if event == ("new_group",)
    }


def test_every_rank_creates_every_group_in_one_order(schedule_ranks):
    """First and last stages hold embedding groups that others lack; names must not depend on it."""
    creations = schedule_ranks.run(
        start_up_cases.record_group_creations, world_size=6, arguments={"pipeline_size": 3}
    ).values()
    assert creations[0]
    assert all(creation == creations[0] for creation in creations)


def test_groups_are_destroyed_and_made_anew(schedule_ranks):
    for counts in schedule_ranks.run(start_up_cases.initialise_twice, world_size=2).values():
        # A channel per direction and colour, once for data and once for shapes.
        assert counts == [0, 8, 0] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_default_group_is_unbound_only_while_groups_are_made(fork_pool, fails):
    outcomes = fork_pool.run(
        start_up_cases.initialise_with_bound_device, world_size=2, arguments={"fails": fails}
    ).values()
    for bound, afterwards in outcomes:
        assert bound
        assert set(bound) == {"None"}
        assert afterwards == "cuda:0"
