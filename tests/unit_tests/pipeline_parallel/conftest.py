"""Worker pools, shared by the tests of this folder."""

import importlib.metadata

import pytest

from tests.harness.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def fork_pool():
    """Ranks with the installed fork, under the CUDA emulation that the base's schedules need."""
    with WorkerPool.for_fork(emulate_cuda=True) as pool:
        yield pool


@pytest.fixture(scope="session")
def plain_fork_pool():
    """Ranks with the installed fork and nothing emulated."""
    with WorkerPool.for_fork() as pool:
        yield pool


@pytest.fixture(scope="session")
def base_pool():
    """Ranks with the unmodified release that the installed fork was built over."""
    base_version, _, _ = importlib.metadata.version("megatron-core").partition("+")
    with WorkerPool.for_base(base_version) as pool:
        yield pool
