"""verl's Megatron engine on the fork: the results do not depend on how the model is split."""

import pytest

from tests.client_tests.other_clients.verl_cases import Results, train_with_engine
from tests.harness.worker_pool import WorkerPool

_STEPS = 2
# Every rank takes part in the sums of loss and gradient, in an order that depends on the sizes.
_RELATIVE = 1e-5


@pytest.fixture(scope="module")
def verl_pool():
    """Ranks with verl, the fork, and the stand-in for Transformer Engine."""
    with WorkerPool.for_fork(
        emulate_cuda=True,
        transformer_engine=True,
        preload=("verl.workers.engine.megatron.transformer_impl",),
    ) as pool:
        yield pool


@pytest.fixture(scope="module")
def one_rank(verl_pool) -> Results:
    """What one rank computes."""
    (results,) = _run(verl_pool, 1, None)
    return results


def _run(pool: WorkerPool, pipeline_size: int, virtual_size: int | None) -> list[Results]:
    arguments = {
        "pipeline_size": pipeline_size,
        "virtual_size": virtual_size,
        "num_steps": _STEPS,
    }
    return pool.run(train_with_engine, world_size=pipeline_size, arguments=arguments).values()


@pytest.mark.parametrize(("pipeline_size", "virtual_size"), [(2, None), (2, 2), (4, None)])
def test_packed_training_equals_that_of_one_rank(verl_pool, one_rank, pipeline_size, virtual_size):
    for results in _run(verl_pool, pipeline_size, virtual_size):
        # verl overlaps whenever there are virtual stages.
        assert results.is_overlapped == (virtual_size is not None)
        assert results.log_probabilities == pytest.approx(one_rank.log_probabilities, rel=_RELATIVE)
        assert results.gradient_norms == pytest.approx(one_rank.gradient_norms, rel=_RELATIVE)
        assert len(results.losses) == _STEPS
        for losses, expected in zip(results.losses, one_rank.losses, strict=True):
            assert losses == pytest.approx(expected, rel=_RELATIVE)


def test_the_loss_falls(one_rank):
    first, second = one_rank.losses
    assert sum(second) < 0.99 * sum(first)
