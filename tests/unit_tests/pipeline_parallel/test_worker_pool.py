"""The worker pool tells apart how cases end; every other test here relies on that."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.case_protocol import CaseFailed
from tests.harness.worker_pool import WorkerPool, WrongPackage
from tests.unit_tests.pipeline_parallel import pool_cases

REPOSITORY = Path(__file__).parents[3]
PARENT_THAT_WAITS = """
import sys
from tests.harness.worker_pool import WorkerPool
from tests.unit_tests.pipeline_parallel.pool_cases import leave_process_id_and_wait

if __name__ == "__main__":
    with WorkerPool.for_fork() as pool:
        pool.run(leave_process_id_and_wait, world_size=2, arguments={"folder": sys.argv[1]},
                 stall_s=None)
"""


def test_each_case_runs_in_fresh_processes(plain_fork_pool):
    first, second = (
        plain_fork_pool.run(pool_cases.remember, world_size=2, arguments={"case": case}).values()
        for case in ("first", "second")
    )
    assert len({process_id for process_id, _, _ in first + second}) == 4
    assert [seen for _, seen, _ in second] == [["second"], ["second"]]
    assert [tensor.item() for _, _, tensor in second] == [0.0, 1.0]


def test_ranks_can_communicate(plain_fork_pool):
    outcome = plain_fork_pool.run(pool_cases.add_up, world_size=4)
    assert outcome.values() == [6.0] * 4
    assert outcome.ended_by == "completed"


def test_stall_reports_where_every_rank_waits(plain_fork_pool):
    outcome = plain_fork_pool.run(pool_cases.wait_in_a_circle, world_size=3, stall_s=1.0)
    assert outcome.ended_by == "stall"
    assert list(outcome.with_status("stuck")) == [0, 1, 2]
    for report in outcome.ranks:
        assert "in wait_in_a_circle" in report.stack
        assert report.progress == "about to wait in a circle"
    with pytest.raises(CaseFailed, match=r"rank 2 stuck in \[about to wait in a circle\]"):
        outcome.values()


def test_busy_ranks_end_by_the_deadline_and_not_as_a_stall(plain_fork_pool):
    outcome = plain_fork_pool.run(
        pool_cases.compute_for_ever, world_size=2, stall_s=0.5, deadline_s=3.0
    )
    assert outcome.ended_by == "deadline"
    assert all("in compute_for_ever" in report.stack for report in outcome.ranks)


def test_waiting_for_a_busy_peer_is_no_stall(plain_fork_pool):
    outcome = plain_fork_pool.run(
        pool_cases.wait_for_a_busy_peer, world_size=2, arguments={"seconds": 3.0}, stall_s=0.5
    )
    received, sent = outcome.values()
    assert received == sent


def test_first_rank_to_raise_is_reported_first(plain_fork_pool):
    outcome = plain_fork_pool.run(pool_cases.raise_in_rank_1, world_size=3)
    assert outcome.ranks[1].error == "ValueError: the cause"
    assert "in raise_in_rank_1" in outcome.ranks[1].traceback
    assert outcome.describe().splitlines()[1] == "rank 1 raised"


def test_rank_that_dies_ends_the_case_after_the_grace_period(plain_fork_pool):
    outcome = plain_fork_pool.run(
        pool_cases.die_in_rank_1_alone, world_size=3, stall_s=None, grace_s=1.0
    )
    assert outcome.ended_by == "peer failure"
    assert outcome.ranks[1].status == "died"
    assert outcome.ranks[1].exit_code == -signal.SIGSEGV
    assert list(outcome.with_status("stuck")) == [0, 2]


def test_result_that_cannot_be_sent_is_the_ranks_error(plain_fork_pool):
    outcome = plain_fork_pool.run(pool_cases.return_something_unpicklable, world_size=1)
    assert outcome.ranks[0].status == "raised"
    assert "pickle" in outcome.ranks[0].error


def test_fork_and_base_are_told_apart(plain_fork_pool, base_pool):
    assert plain_fork_pool.run(pool_cases.has_even_odd_groups, world_size=1).values() == [True]
    assert base_pool.run(pool_cases.has_even_odd_groups, world_size=1).values() == [False]
    with (
        WorkerPool(expected_version="0.0.0") as pool,
        pytest.raises(WrongPackage, match=r"expected 0\.0\.0, found megatron-core .*pip install"),
    ):
        pool.run(pool_cases.add_up, world_size=1)


def test_ranks_do_not_outlive_a_killed_parent(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT_THAT_WAITS, str(tmp_path)], cwd=REPOSITORY
    )
    try:
        _wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    finally:
        parent.kill()
        parent.wait()
    ranks = [Path("/proc", path.name) for path in tmp_path.iterdir()]
    _wait_until(lambda: not any(rank.exists() for rank in ranks))


def _wait_until(condition, limit_s=60.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.05)


def test_children_of_ranks_end_with_the_case(plain_fork_pool):
    for process_id in plain_fork_pool.run(pool_cases.leave_a_child_behind, world_size=2).values():
        with contextlib.suppress(ProcessLookupError):
            # The kill is on its way when the case ends; the descriptor is readable once it is done.
            child = os.pidfd_open(process_id)
            ended, _, _ = select.select([child], [], [], 30)
            assert ended
