"""The case function of the benchmark of a pipeline step."""

import time
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.unit_tests.pipeline_parallel import schedule_cases

PIPELINE_SIZE = 4
NUM_MICROBATCHES = 8
STEPS = 20


@dataclass
class StepCounts:
    """What the ranks of one run did.

    Attributes:
        seconds: Time of each step but the first.
        messages: Point-to-point messages sent in all steps.
        synchronisations: Calls that make the host wait for the whole device, in all steps.
    """

    seconds: list[float] = field(default_factory=list)
    messages: int = 0
    synchronisations: int = 0


def measure(is_variable: bool) -> StepCounts:
    """Runs steps on this rank; called on every rank of a worker pool."""
    counts = StepCounts()
    get_schedule = schedule_cases.get_forward_backward_func
    isend = dist.isend

    def counted_isend(*arguments: Any, **keywords: Any) -> Any:
        counts.messages += 1
        return isend(*arguments, **keywords)

    def timed_schedule(**sizes: Any) -> Any:
        schedule = get_schedule(**sizes)

        def step(**arguments: Any) -> Any:
            dist.barrier()
            patches = mock.patch.multiple(dist, isend=counted_isend)
            patches_c10d = mock.patch.multiple(dist.distributed_c10d, isend=counted_isend)
            with patches, patches_c10d, mock.patch.object(torch.cuda, "synchronize") as synchronize:
                started = time.perf_counter()
                losses = schedule(**arguments)
                counts.seconds.append(time.perf_counter() - started)
            counts.synchronisations += synchronize.call_count
            return losses

        return step

    with mock.patch.object(schedule_cases, "get_forward_backward_func", timed_schedule):
        step = schedule_cases.Step(NUM_MICROBATCHES, is_variable)
        problems = schedule_cases.run_steps(PIPELINE_SIZE, 1, "batched", (step,) * STEPS)
    if problems:
        raise RuntimeError(f"the steps went wrong: {problems}")
    del counts.seconds[0]
    return counts
