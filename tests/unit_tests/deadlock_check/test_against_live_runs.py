"""What the model says of real schedules, real processes do: pass, stall and where, or go wrong.

Each configuration runs on as many processes as the pipeline has stages, on gloo as it is and on
gloo under ``strict_rendezvous``, and is recorded and decided for the machine that this amounts to.
"""

import contextlib
import functools
import importlib.metadata
import queue
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import pytest

from tests.harness.case_protocol import CaseOutcome, RankReport
from tests.harness.worker_pool import WorkerPool
from tests.unit_tests.deadlock_check import protocol_variants as variants
from tests.unit_tests.deadlock_check.live_cases import passes_label, run_step_on_backend
from tests.unit_tests.deadlock_check.live_configurations import (
    CROSSED,
    DEADLOCK,
    PASS,
    VERDICTS,
    Configuration,
    Schedule,
)
from tests.unit_tests.pipeline_parallel.schedule_cases import OVERLAPPED_TRANSPORTS, Step
from tools.base_release import unpacked_base
from tools.deadlock_check import model
from tools.deadlock_check.machine import GLOO, Machine
from tools.deadlock_check.outcome import Issued, Verdict
from tools.deadlock_check.record_schedule import INSTALLED, ScheduleOptions, record
from tools.deadlock_check.trace import Compute, Trace

BASE_VERSION = importlib.metadata.version("megatron-core").partition("+")[0]
STALL_S = 2.0
# A stalled run takes time and no processor, so several run at once.
POOL_COUNTS = {"base": 3, "fork": 2}

MACHINES = {
    "gloo": GLOO,
    "batches": Machine(coalesces=True, communicators="premade", blocking_wait=True),
    "one by one": Machine(coalesces=False, communicators="premade", blocking_wait=True),
}
PROTOCOLS = {
    "shape sends awaited": variants.Protocol(awaits_shape_sends=True),
    "groups by own parity": variants.Protocol(
        variants.group_by_own_parity, variants.by_parity, variants.by_parity
    ),
    "one group per direction": variants.Protocol(variants.group_per_direction),
    "one group, sends first": variants.Protocol(variants.one_group),
}


@pytest.fixture(scope="module")
def live_runs() -> Iterator[Mapping[Configuration, Future[CaseOutcome]]]:
    """Every configuration's outcome, as soon as it is known."""
    runs = {}
    with contextlib.ExitStack() as stack:
        for package, count in POOL_COUNTS.items():
            idle_pools: queue.SimpleQueue[WorkerPool] = queue.SimpleQueue()
            for _ in range(count):
                idle_pools.put(stack.enter_context(_pool(package)))
            executor = ThreadPoolExecutor(count)
            stack.callback(executor.shutdown, cancel_futures=True)
            for configuration in VERDICTS:
                if configuration.package == package:
                    runs[configuration] = executor.submit(_run, configuration, idle_pools)
        yield runs


def _pool(package: str) -> WorkerPool:
    if package == "base":
        return WorkerPool.for_base(BASE_VERSION)
    return WorkerPool.for_fork(emulate_cuda=True)


def _run(configuration: Configuration, idle_pools: queue.SimpleQueue[WorkerPool]) -> CaseOutcome:
    schedule = configuration.schedule
    pool = idle_pools.get()
    try:
        return pool.run(
            run_step_on_backend,
            world_size=schedule.pipeline_size,
            arguments={
                "pipeline_size": schedule.pipeline_size,
                "chunks_per_rank": schedule.chunks_per_rank,
                "transport": schedule.transport,
                "step": Step(schedule.num_microbatches, schedule.is_variable),
                "backend": configuration.backend,
                "half_fix": configuration.half_fix,
            },
            stall_s=STALL_S,
            grace_s=1.0,
        )
    finally:
        idle_pools.put(pool)


@pytest.mark.parametrize(("configuration", "verdict"), VERDICTS.items(), ids=str)
def test_model_and_live_run_agree(live_runs, configuration, verdict):
    trace = _trace(configuration)
    predicted = model.run(trace, MACHINES[configuration.backend])
    assert predicted.verdict is verdict
    live = live_runs[configuration].result()
    assert _live_verdict(live) is verdict, live.describe()
    if verdict is DEADLOCK:
        places = {rank: _live_place(report) for rank, report in live.with_status("stuck").items()}
        predicted_places = {rank: _place(trace, at) for rank, at in predicted.stuck.items()}
        if configuration.half_fix is not None:
            # Half-fixes are rewritten traces of the fork: what is awaited has moved to other calls.
            places, predicted_places = map(_without_calls, (places, predicted_places))
        assert places == predicted_places, live.describe()


def _trace(configuration: Configuration) -> Trace:
    is_coalescing = MACHINES[configuration.backend].coalesces
    trace = _recorded(configuration.package, configuration.schedule, is_coalescing)
    if configuration.half_fix is None:
        return trace
    return variants.rewritten(trace, PROTOCOLS[configuration.half_fix])


@functools.cache
def _recorded(package: str, schedule: Schedule, coalesces: bool) -> Trace:
    chunks = schedule.chunks_per_rank
    options = ScheduleOptions(
        pipeline_size=schedule.pipeline_size,
        num_microbatches=schedule.num_microbatches,
        virtual_size=chunks if chunks > 1 else None,
        variable_seq_lengths=schedule.is_variable,
        batch_p2p_comm=schedule.transport == "batched",
        overlap_p2p_comm=schedule.transport in OVERLAPPED_TRANSPORTS,
        overlap_p2p_comm_warmup_flush=schedule.transport == OVERLAPPED_TRANSPORTS[1],
        coalesces=coalesces,
    )
    return record(options, str(unpacked_base(BASE_VERSION)) if package == "base" else INSTALLED)


def _live_verdict(live: CaseOutcome) -> Verdict | None:
    if live.ended_by in ("stall", "deadline"):
        return DEADLOCK if live.ended_by == "stall" else None
    returned = live.with_status("returned").values()
    is_right = len(returned) == len(live.ranks) and not any(report.value for report in returned)
    return PASS if is_right else CROSSED


class Place(NamedTuple):
    """Where the host of a rank waits: after how many passes through chunks, and in which call."""

    passes: str
    call: str


def _live_place(report: RankReport) -> Place:
    frame = re.search(r'File "\S*/(megatron/core/\S+)", line (\d+) in (\w+)', report.stack)
    assert frame, report.stack
    file, line, function = frame.groups()
    return Place(report.progress, f"{file}:{line} {function}")


def _place(trace: Trace, issued: Issued) -> Place:
    operation = issued.operation(trace)
    assert operation is not None
    assert operation.place.source is not None
    line, qualified_name = operation.place.source.split()
    passes = Counter(
        earlier.direction
        for earlier in trace.programs[issued.rank][: issued.index]
        if isinstance(earlier, Compute)
    )
    return Place(passes_label(passes), f"{line} {qualified_name.rpartition('.')[2]}")


def _without_calls(places: Mapping[int, Place]) -> dict[int, str]:
    return {rank: place.passes for rank, place in places.items()}
