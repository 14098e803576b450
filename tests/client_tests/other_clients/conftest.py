"""Ranks for the tests of other clients of the pipeline."""

import pytest

from tests.harness.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def fork_pool():
    """Ranks with the installed fork, under the CUDA emulation."""
    with WorkerPool.for_fork(emulate_cuda=True) as pool:
        yield pool
