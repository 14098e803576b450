"""What the deadlock checker says of a configuration."""

import functools
from pathlib import Path
from typing import Literal

from tools.deadlock_check import record_schedule
from tools.deadlock_check.check import check
from tools.deadlock_check.machine import (
    GLOO,
    SMALL_SEND_BYTES,
    nccl_coalesces,
    nccl_machines,
    parse_torch_version,
)
from tools.deadlock_check.trace import Trace

from .configuration import Configuration

Prediction = Literal["finishes", "hangs", "either"]


def predict(
    configuration: Configuration, package_folder: Path, torch_version: str, *, on_gloo: bool
) -> Prediction:
    """Check a configuration on all machines that it may meet.

    Args:
        configuration: What to check.
        package_folder: The unpacked wheel whose communication it uses.
        torch_version: Of the ranks.
        on_gloo: Whether they communicate over gloo, as in a dry run.

    Returns:
        ``either`` when it depends on what nobody promises: whether NCCL buffers small sends,
        whether a batch advances in part.
    """
    version = parse_torch_version(torch_version)
    detail = configuration.debug_detail
    coalesces = not on_gloo and nccl_coalesces(version, detail)
    trace = _trace(
        record_schedule.ScheduleOptions(
            pipeline_size=configuration.pipeline_size,
            num_microbatches=configuration.pipeline_size,
            virtual_size=configuration.virtual_size if configuration.virtual_size > 1 else None,
            variable_seq_lengths=configuration.is_variable,
            batch_p2p_comm=configuration.transport == "batched",
            overlap_p2p_comm=configuration.transport == "overlapped",
            coalesces=coalesces,
        ),
        package_folder,
    )
    machines = [GLOO]
    if not on_gloo:
        machines = list(
            nccl_machines(
                version,
                detail,
                communicators=("eager" if configuration.binds_device else "lazy",),
                hardware_queues=("many",),
                buffered_send_bytes=(0, SMALL_SEND_BYTES),
            )
        )
    is_safe = {result.outcome.verdict.is_safe for result in check(trace, machines)}
    if len(is_safe) == 2:
        return "either"
    return "finishes" if is_safe.pop() else "hangs"


@functools.cache
def _trace(options: record_schedule.ScheduleOptions, package_folder: Path) -> Trace:
    return record_schedule.record(options, str(package_folder))
