"""What the even/odd groups cost at start-up: ``python -m tests.benchmarks.start_up``.

Base against fork. First real ranks over gloo, which compete for the cores of this machine; then one
rank of many by PyTorch's fake backend, which shows how the host's work grows; then the store.
docs/cost.md has the formulas. No figure here was measured on a GPU.
"""

import statistics
from typing import Any

from tests.benchmarks.start_up_case import (
    StartUpCosts,
    measure,
    measure_one_rank_of_many,
    measure_store,
)
from tests.harness.worker_pool import WorkerPool

BASE_VERSION = "0.19.2"
RUNS = 3
WORLD_SIZES = (8, 16, 32, 64)
PIPELINE_SIZES = (4, 8)
VIRTUAL_SIZE = 2
LARGE_WORLD_SIZES = (128, 1024, 4096, 10240)
TENSOR_SIZE = 4
STORE_CLIENTS = 8
STORE_REQUESTS = 2000
DEADLINE_S = 300.0


def main() -> None:
    """Prints the tables."""
    with WorkerPool.for_base(BASE_VERSION) as base, WorkerPool.for_fork(emulate_cuda=True) as fork:
        print(f"real ranks, VPP={VIRTUAL_SIZE}; seconds until the last rank is through")
        print("ranks  PP  base s  fork s  store operations per rank: base  fork")
        for world_size in WORLD_SIZES:
            for pipeline_size in PIPELINE_SIZES:
                arguments = {"pipeline_size": pipeline_size, "virtual_size": VIRTUAL_SIZE}
                of_base, of_fork = _alternate((base, fork), measure, world_size, arguments)
                print(
                    f"{world_size:5} {pipeline_size:3} {of_base.seconds:7.2f} "
                    f"{of_fork.seconds:7.2f} {of_base.store_operations:31} "
                    f"{of_fork.store_operations:5}"
                )
        print(f"\none rank of many, TP={TENSOR_SIZE}, PP=4, VPP={VIRTUAL_SIZE}, no communication")
        print("ranks  base s  fork s")
        for world_size in LARGE_WORLD_SIZES:
            arguments = {
                "world_size": world_size,
                "tensor_size": TENSOR_SIZE,
                "pipeline_size": 4,
                "virtual_size": VIRTUAL_SIZE,
            }
            of_base, of_fork = _alternate((base, fork), measure_one_rank_of_many, 1, arguments)
            print(f"{world_size:5} {of_base.seconds:7.2f} {of_fork.seconds:7.2f}")
        rates = fork.run(
            measure_store, world_size=STORE_CLIENTS, arguments={"requests": STORE_REQUESTS}
        ).values()
        print(f"\nthe store takes {min(rates):.0f} requests/s from {STORE_CLIENTS} ranks")


def _alternate(
    pools: tuple[WorkerPool, WorkerPool], function: Any, world_size: int, arguments: dict[str, int]
) -> list[StartUpCosts]:
    """Returns for each pool the median over runs of the slowest rank and the busiest rank."""
    runs: dict[WorkerPool, list[StartUpCosts]] = {pool: [] for pool in pools}
    # Alternating, so that a change in the machine's load meets both.
    for _ in range(RUNS):
        for pool, costs in runs.items():
            ranks = pool.run(
                function,
                world_size=world_size,
                arguments=arguments,
                deadline_s=DEADLINE_S,
                stall_s=None,
            ).values()
            costs.append(
                StartUpCosts(
                    max(rank.seconds for rank in ranks),
                    max(rank.store_operations for rank in ranks),
                )
            )
    return [
        StartUpCosts(
            statistics.median(run.seconds for run in costs),
            statistics.median_high(run.store_operations for run in costs),
        )
        for costs in runs.values()
    ]


if __name__ == "__main__":
    main()
