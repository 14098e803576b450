"""Each trap on the way to the fix, run for real: the half-fix stalls where the fork finishes."""

import pytest

from tests.unit_tests.pipeline_parallel.schedule_cases import Step
from tests.unit_tests.pipeline_parallel.trap_cases import run_under_strict_rendezvous

STALL_S = 4.0


def run_strictly(pool, pipeline_size, **arguments):
    """Runs one step under strict rendezvous, on as many ranks as the pipeline has stages."""
    return pool.run(
        run_under_strict_rendezvous,
        world_size=pipeline_size,
        arguments={"pipeline_size": pipeline_size, **arguments},
        stall_s=STALL_S,
    )


@pytest.mark.parametrize(
    ("half_fix", "pipeline_size", "chunks_per_rank", "num_microbatches"),
    [
        ("shape sends awaited", 2, 2, 2),
        ("shape sends awaited", 4, 2, 4),
        ("groups by own parity", 3, 2, 3),
        ("groups by own parity", 5, 2, 5),
        ("one group per direction", 2, 2, 2),
        ("one group per direction", 4, 2, 4),
        ("one group, sends first", 2, 1, 4),
        ("one group, sends first", 4, 1, 4),
    ],
)
def test_half_fix_stalls_where_the_fork_finishes(
    fork_pool, half_fix, pipeline_size, chunks_per_rank, num_microbatches
):
    arguments = {
        "pipeline_size": pipeline_size,
        "chunks_per_rank": chunks_per_rank,
        "transport": "unbatched",
        "step": Step(num_microbatches, is_variable=True),
        "coalesces": False,
    }
    half_fixed = run_strictly(fork_pool, **arguments, half_fix=half_fix)
    assert half_fixed.ended_by == "stall", half_fixed.describe()
    stuck = half_fixed.with_status("stuck")
    assert all("_communicate" in report.stack for report in stuck.values())

    fixed = run_strictly(fork_pool, **arguments)
    assert fixed.values() == [[]] * pipeline_size


@pytest.mark.parametrize(
    ("chunks_per_rank", "transport", "coalesces", "is_variable", "num_microbatches"),
    [
        # Reports 1 and 2: a batch that is none, in its fixed order.
        (1, "batched", False, True, 8),
        (1, "batched", False, False, 8),
        (2, "batched", False, True, 8),
        # The usual workaround does not reach the shapes.
        (1, "unbatched", False, True, 8),
        # Shapes, then data, each awaited in both directions, is a cycle of its own.
        (2, "batched", True, True, 4),
    ],
)
def test_base_stalls_where_the_fork_finishes(
    base_pool, fork_pool, chunks_per_rank, transport, coalesces, is_variable, num_microbatches
):
    arguments = {
        "pipeline_size": 4,
        "chunks_per_rank": chunks_per_rank,
        "transport": transport,
        "step": Step(num_microbatches, is_variable=is_variable),
        "coalesces": coalesces,
    }
    base = run_strictly(base_pool, **arguments)
    assert base.ended_by == "stall", base.describe()
    fork = run_strictly(fork_pool, **arguments)
    assert fork.values() == [[]] * 4


@pytest.mark.parametrize(
    ("chunks_per_rank", "transport", "coalesces", "is_variable", "num_microbatches"),
    [
        (1, "batched", True, True, 8),
        (2, "batched", True, True, 8),
        (2, "batched", True, False, 4),
        (1, "unbatched", False, False, 8),
    ],
)
def test_base_finishes_with_real_batches_or_fixed_lengths(
    base_pool, chunks_per_rank, transport, coalesces, is_variable, num_microbatches
):
    """The rendezvous model is not so strict that everything stalls."""
    outcome = run_strictly(
        base_pool,
        pipeline_size=4,
        chunks_per_rank=chunks_per_rank,
        transport=transport,
        step=Step(num_microbatches, is_variable=is_variable),
        coalesces=coalesces,
    )
    assert outcome.values() == [[]] * 4
