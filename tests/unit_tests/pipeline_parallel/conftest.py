"""Worker pools, shared by the tests of this folder."""

import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.harness.case_protocol import CaseFunction, CaseOutcome
from tests.harness.rank_runtime import BACKEND_VARIABLE
from tests.harness.worker_pool import WorkerPool

_NCCL_ENVIRONMENT = {
    BACKEND_VARIABLE: "nccl",
    # Workers otherwise see no GPU.
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7"),
    "NCCL_SOCKET_IFNAME": "lo",
}
_NEEDS_GPU = (
    "NCCL needs a GPU, one is enough: pytest tests/unit_tests/pipeline_parallel -k nccl there"
)


@dataclass(frozen=True)
class Ranks:
    """A worker pool whose cases use one backend.

    Attributes:
        pool: Where the ranks run.
        backend: ``gloo`` or ``nccl``.
    """

    pool: WorkerPool
    backend: str

    @property
    def start_up_deadline_s(self) -> int:
        """A deadline that a start-up meets if all ranks play along."""
        return 4 if self.backend == "gloo" else 40

    def run(
        self, function: CaseFunction, *, environment: dict[str, str] | None = None, **options: Any
    ) -> CaseOutcome:
        """Runs a case; the arguments are those of ``WorkerPool.run``."""
        of_backend = {} if self.backend == "gloo" else _NCCL_ENVIRONMENT
        if self.backend == "nccl":
            options = {"stall_s": 60.0, **options}
        return self.pool.run(function, environment={**of_backend, **(environment or {})}, **options)


@pytest.fixture(params=["gloo", "nccl"])
def backend(request):
    """Every test that uses it runs over gloo and CPU tensors, and over NCCL and CUDA tensors."""
    if request.param == "nccl" and torch.cuda.device_count() == 0:
        pytest.skip(_NEEDS_GPU)
    return request.param


@pytest.fixture
def plain_ranks(backend, plain_fork_pool):
    """Ranks with the installed fork and nothing emulated."""
    return Ranks(plain_fork_pool, backend)


@pytest.fixture
def schedule_ranks(backend, request):
    """Ranks that can run the base's schedules, which assume CUDA."""
    pool = "fork_pool" if backend == "gloo" else "plain_fork_pool"
    return Ranks(request.getfixturevalue(pool), backend)


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
