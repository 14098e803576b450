"""How the deadlock checker's cost grows: ``python -m tests.benchmarks.checker_scale``.

The fork's schedule with variable lengths, PP=64 and VPP=4, with up to 512 microbatches: recorded,
then decided on one machine. The last column shows whether the cost per operation stays the same.
"""

import resource
import time

from tools.deadlock_check import model
from tools.deadlock_check.machine import nccl_machines
from tools.deadlock_check.record_schedule import ScheduleOptions, record

PIPELINE_SIZE = 64
CHUNKS = 4
MICROBATCHES = (64, 128, 256, 512)


def main() -> None:
    """Print the table."""
    machine = next(nccl_machines((2, 10), debug_detail=False))
    print(f"PP={PIPELINE_SIZE}, VPP={CHUNKS}, variable lengths; {machine.name}")
    print("microbatches  operations  record s  decide s  verdict   peak GiB  s/operation, ratio")
    first_cost = 0.0
    for num_microbatches in MICROBATCHES:
        options = ScheduleOptions(
            pipeline_size=PIPELINE_SIZE,
            virtual_size=CHUNKS,
            num_microbatches=num_microbatches,
            variable_seq_lengths=True,
            overlap_p2p_comm=True,
            batch_p2p_comm=False,
        )
        start = time.monotonic()
        trace = record(options)
        recorded = time.monotonic()
        outcome = model.run(trace, machine)
        decided = time.monotonic()
        operations = outcome.statistics.operations
        cost = (decided - start) / operations
        first_cost = first_cost or cost
        print(
            f"{num_microbatches:12} {operations:11} {recorded - start:9.1f} "
            f"{decided - recorded:9.1f}  {outcome.verdict.value:8} {_peak_gibibytes():9.2f} "
            f"{cost / first_cost:19.2f}"
        )


def _peak_gibibytes() -> float:
    """Return the peak of this process plus the largest of its children so far."""
    kibibytes = sum(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return kibibytes / 2**20


if __name__ == "__main__":
    main()
