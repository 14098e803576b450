"""Negative controls: what the unmodified base release does where the fork works.

Without them a green suite could mean that the tests cannot see the defects. Each test runs the
same case on both packages. The deadlocks are in ``deadlock_check/live_configurations.py``.
"""

import pytest

from tests.unit_tests.pipeline_parallel.exchange_cases import run_exchanges
from tests.unit_tests.pipeline_parallel.schedule_cases import Step, run_steps

STALL_S = 4.0


def _run_on_both(base_pool, fork_pool, function, pipeline_size, **arguments):
    arguments["pipeline_size"] = pipeline_size
    return tuple(
        pool.run(function, world_size=pipeline_size, arguments=arguments, stall_s=STALL_S)
        for pool in (base_pool, fork_pool)
    )


def _train_two_interleaved_stages(base_pool, fork_pool, is_variable):
    return _run_on_both(
        base_pool,
        fork_pool,
        run_steps,
        2,
        chunks_per_rank=2,
        transport="batched",
        steps=(Step(4, is_variable),),
    )


def _problems(outcome) -> list[str]:
    return [problem for problems in outcome.values() for problem in problems]


def test_two_interleaved_stages_train_on_wrong_values_without_an_error(base_pool, fork_pool):
    base, fork = _train_two_interleaved_stages(base_pool, fork_pool, is_variable=False)
    problems = _problems(base)
    assert any("the losses: " in problem for problem in problems), problems
    assert any("the gradient of " in problem for problem in problems), problems
    assert fork.values() == [[]] * 2


def test_two_interleaved_stages_with_variable_lengths_fail_in_autograd(base_pool, fork_pool):
    base, fork = _train_two_interleaved_stages(base_pool, fork_pool, is_variable=True)
    errors = [report.error for report in base.with_status("raised").values()]
    assert any("shape" in error or "size of tensor" in error for error in errors), base.describe()
    assert fork.values() == [[]] * 2


def test_two_stages_in_a_ring_get_each_others_messages(base_pool, fork_pool):
    base, fork = _run_on_both(
        base_pool, fork_pool, run_exchanges, 2, transport="batched", is_variable=False
    )
    problems = _problems(base)
    ring_of_all_roles = "send_forward_backward_recv_forward_backward, ring"
    assert problems
    assert all(problem.startswith(ring_of_all_roles) for problem in problems), problems
    assert fork.values() == [[]] * 2


@pytest.mark.parametrize("tensor_rank", [1, 2, 4, 5])
def test_variable_shapes_have_three_dimensions_on_the_base(base_pool, fork_pool, tensor_rank):
    base, fork = _run_on_both(
        base_pool,
        fork_pool,
        run_exchanges,
        3,
        transport="unbatched",
        is_variable=True,
        tensor_ranks=(tensor_rank,),
    )
    returned = base.with_status("returned")
    arrived = len(returned) == 3 and all(report.value == [] for report in returned.values())
    assert not arrived
    assert fork.values() == [[]] * 3
