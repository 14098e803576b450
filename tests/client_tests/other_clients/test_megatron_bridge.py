"""Megatron-Bridge's training loop on the fork, and on the base where that goes wrong."""

import pytest

from tests.client_tests.other_clients.bridge_cases import Results, train_with_bridge
from tests.harness.case_protocol import CaseOutcome
from tests.harness.worker_pool import WorkerPool

_BASE = "0.19.2"
_RELATIVE = 1e-5
_PRELOAD = (
    "megatron.bridge.training.setup",
    "megatron.bridge.training.train",
    "megatron.bridge.training.gpt_step",
)


@pytest.fixture(scope="module")
def bridge_pool():
    """Ranks with Megatron-Bridge, the fork, and the stand-in for Transformer Engine."""
    with WorkerPool.for_fork(emulate_cuda=True, transformer_engine=True, preload=_PRELOAD) as pool:
        yield pool


@pytest.fixture(scope="module")
def one_rank(bridge_pool) -> dict[int, Results]:
    """What one rank computes, by the number of microbatches."""
    return {count: _run(bridge_pool, 1, None, count).values()[0] for count in (2, 4)}


def _run(
    pool: WorkerPool,
    pipeline_size: int,
    virtual_size: int | None,
    num_microbatches: int,
    is_variable: bool = False,
    overlap: bool = False,
) -> CaseOutcome:
    return pool.run(
        train_with_bridge,
        world_size=pipeline_size,
        arguments={
            "pipeline_size": pipeline_size,
            "virtual_size": virtual_size,
            "num_microbatches": num_microbatches,
            "is_variable": is_variable,
            "overlap": overlap,
        },
    )


@pytest.mark.parametrize("is_variable", [False, True])
@pytest.mark.parametrize("num_microbatches", [2, 4])
@pytest.mark.parametrize(("virtual_size", "overlap"), [(None, False), (2, False), (2, True)])
def test_training_and_evaluation_equal_those_of_one_rank(
    bridge_pool, one_rank, virtual_size, overlap, num_microbatches, is_variable
):
    expected = one_rank[num_microbatches]
    first, last = _run(
        bridge_pool, 2, virtual_size, num_microbatches, is_variable, overlap
    ).values()

    assert last.losses == pytest.approx(expected.losses, rel=_RELATIVE)
    assert last.evaluation_loss == pytest.approx(expected.evaluation_loss, rel=_RELATIVE)
    for stage in (first, last):
        assert stage.gradient_norms == pytest.approx(expected.gradient_norms, rel=_RELATIVE)
    assert first.losses == ()


def test_the_base_trains_on_wrong_values_until_a_loss_is_nan(one_rank):
    with WorkerPool.for_base(_BASE, transformer_engine=True, preload=_PRELOAD) as pool:
        (alone,) = _run(pool, 1, None, 4).values()
        pipeline = _run(pool, 2, 2, 4)

    assert alone == one_rank[4]
    assert "found NaN in local forward loss calculation" in pipeline.describe()
