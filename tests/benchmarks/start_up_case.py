"""The case functions of the benchmark of the start-up."""

import collections
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_STORE_METHODS = (
    "add",
    "append",
    "check",
    "compare_set",
    "delete_key",
    "get",
    "multi_get",
    "multi_set",
    "set",
    "wait",
)


@dataclass
class StartUpCosts:
    """What ``initialize_model_parallel`` took on one rank.

    Attributes:
        seconds: From the moment when all ranks were ready until this rank was through.
        store_operations: Requests that this rank made of the store meanwhile.
    """

    seconds: float
    store_operations: int


class _CountingStore(dist.Store):
    """Hands every request on to another store, and counts it, gloo's own ones too."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()
        for name in _STORE_METHODS:
            setattr(self, name, self._counted(name, getattr(store, name)))

    def has_extended_api(self) -> bool:
        return False

    def _counted(self, name: str, method: Any) -> Any:
        def request(*arguments: Any, **keywords: Any) -> Any:
            self.counts[name] += 1
            return method(*arguments, **keywords)

        return request


def measure(pipeline_size: int, virtual_size: int | None) -> StartUpCosts:
    """Initialises model parallelism over gloo; called on every rank of a worker pool."""
    from megatron.core import parallel_state

    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timedelta(minutes=5))))
    counting_store = _CountingStore(store)
    dist.init_process_group("gloo", store=counting_store, rank=rank, world_size=world_size)
    dist.barrier()
    counting_store.counts.clear()
    started = time.perf_counter()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pipeline_size,
        virtual_pipeline_model_parallel_size=virtual_size,
    )
    seconds = time.perf_counter() - started
    operations = counting_store.counts.total()
    dist.barrier()
    return StartUpCosts(seconds, operations)


def measure_store(requests: int) -> float:
    """Returns the requests per second that the store took from all ranks; called on every rank."""
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timedelta(minutes=5))))
    store.add("ready", 1)
    while store.add("ready", 0) < world_size:
        pass
    started = time.perf_counter()
    for _ in range(requests):
        # Unlike `set`, this waits for the answer.
        store.add(f"counter of {rank}", 1)
    store.add("done", 1)
    while store.add("done", 0) < world_size:
        pass
    return requests * world_size / (time.perf_counter() - started)


def measure_one_rank_of_many(
    world_size: int, tensor_size: int, pipeline_size: int, virtual_size: int
) -> StartUpCosts:
    """Initialises rank 0 of ``world_size`` ranks that are not there; called on one rank.

    PyTorch's fake backend stands in for the others, so this is the host's work of making groups,
    without any communication.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.core import parallel_state

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    started = time.perf_counter()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_size,
        pipeline_model_parallel_size=pipeline_size,
        virtual_pipeline_model_parallel_size=virtual_size,
        create_gloo_process_groups=False,
    )
    return StartUpCosts(time.perf_counter() - started, 0)
