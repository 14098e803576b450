"""A bare training loop over the base's GPT: the losses do not depend on the split."""

import pytest

from tests.client_tests.other_clients.simple_loop_cases import train_simple_loop


@pytest.fixture(scope="module")
def one_rank(fork_pool) -> list[float]:
    """The losses of one rank."""
    (losses,) = _run(fork_pool, 1, 1, False)
    return losses


def _run(pool, world_size: int, pipeline_size: int, overlap_grad_reduce: bool) -> list[list[float]]:
    arguments = {"pipeline_size": pipeline_size, "overlap_grad_reduce": overlap_grad_reduce}
    return pool.run(train_simple_loop, world_size=world_size, arguments=arguments).values()


@pytest.mark.parametrize("overlap_grad_reduce", [False, True])
@pytest.mark.parametrize(("world_size", "pipeline_size"), [(2, 2), (4, 4), (4, 2)])
def test_losses_equal_those_of_one_rank(
    fork_pool, one_rank, world_size, pipeline_size, overlap_grad_reduce
):
    for losses in _run(fork_pool, world_size, pipeline_size, overlap_grad_reduce):
        assert losses == pytest.approx(one_rank, rel=1e-5)


def test_the_loss_falls(one_rank):
    assert one_rank[0] > one_rank[1] > one_rank[2]
