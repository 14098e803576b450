"""Base against fork, side by side in one run: ``python -m tests.benchmarks.pipeline_step``.

Real 1F1B steps of a tiny model on gloo, PP=4, so that communication is most of the time. Gloo has
no device to synchronise: what the counts of device synchronisations cost on a GPU is not in the
seconds. No figure here was measured on a GPU.
"""

import importlib.metadata
import statistics

from tests.benchmarks.step_case import NUM_MICROBATCHES, PIPELINE_SIZE, STEPS, StepCounts, measure
from tests.harness.worker_pool import WorkerPool

RUNS = 5


def main() -> None:
    """Print the table."""
    fork_version = importlib.metadata.version("megatron-core")
    base_version = fork_version.partition("+")[0]
    with (
        WorkerPool.for_base(base_version) as base,
        WorkerPool.for_fork(emulate_cuda=True) as fork,
    ):
        print(f"PP={PIPELINE_SIZE}, {NUM_MICROBATCHES} microbatches, 1F1B, batch_p2p_comm, gloo")
        print("lengths   package         ms/step  ratio  messages  device syncs")
        for is_variable in (False, True):
            _print_rows({base_version: base, fork_version: fork}, is_variable)


def _print_rows(pools: dict[str, WorkerPool], is_variable: bool) -> None:
    runs: dict[str, list[list[StepCounts]]] = {version: [] for version in pools}
    # Alternating, so that a change in the machine's load meets both.
    for _ in range(RUNS):
        for version, pool in pools.items():
            outcome = pool.run(
                measure, world_size=PIPELINE_SIZE, arguments={"is_variable": is_variable}
            )
            runs[version].append(outcome.values())
    baseline = 0.0
    for version, of_version in runs.items():
        seconds = [s for ranks in of_version for s in ranks[0].seconds]
        milliseconds = 1000 * statistics.median(seconds)
        baseline = baseline or milliseconds
        ranks = of_version[0]
        print(
            f"{'variable' if is_variable else 'fixed':9} {version:14} {milliseconds:8.1f} "
            f"{milliseconds / baseline:6.2f} "
            f"{sum(rank.messages for rank in ranks) / STEPS:9.0f} "
            f"{sum(rank.synchronisations for rank in ranks) / STEPS:13.0f}"
        )


if __name__ == "__main__":
    main()
