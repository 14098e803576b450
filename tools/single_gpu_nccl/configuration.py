"""What ``verify`` runs, the most valuable first."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal

Implementation = Literal["base", "fork"]
Transport = Literal["batched", "overlapped"]

SCHEDULES: tuple[tuple[int, Transport], ...] = (
    (1, "batched"),
    (2, "overlapped"),
    (2, "batched"),
)
"""Model chunks per rank, and transport; without interleaving nothing can overlap."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One launch.

    Attributes:
        implementation: Whose communication runs.
        pipeline_size: Number of stages, of ranks, and of microbatches in a step: with as many
            microbatches as stages the base has most ways to hang.
        virtual_size: Model chunks per rank.
        transport: ``batched``, or ``overlapped``.
        is_variable: Whether the microbatches have different lengths.
        debug_detail: Whether ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` is set.
        binds_device: Whether ``init_process_group`` is given a ``device_id``.
    """

    implementation: Implementation
    pipeline_size: int
    virtual_size: int
    transport: Transport
    is_variable: bool
    debug_detail: bool
    binds_device: bool


def configurations() -> Iterator[Configuration]:
    """Yield all configurations.

    Variable lengths come first, as that is where users hang, and PP=4, where rings do not collapse
    into a pair. Base and fork stand side by side, so that a report cut short still compares them.
    """
    for (
        is_variable,
        binds_device,
        pipeline_size,
        schedule,
        detail,
        implementation,
    ) in itertools.product(
        (True, False), (False, True), (4, 2), SCHEDULES, (False, True), ("fork", "base")
    ):
        yield Configuration(
            implementation,  # type: ignore[arg-type]
            pipeline_size,
            *schedule,
            is_variable,
            debug_detail=detail,
            binds_device=binds_device,
        )


def dry_configurations() -> list[Configuration]:
    """Return the few that a dry run takes."""
    variable = [Configuration("fork", 2, *schedule, True, False, False) for schedule in SCHEDULES]
    fixed = Configuration("fork", 2, 1, "batched", False, debug_detail=True, binds_device=True)
    base = Configuration("base", 4, 1, "batched", True, debug_detail=True, binds_device=False)
    # It waits for shapes in a circle, over gloo as well: the other ending has to be tried, too.
    hanging = dataclasses.replace(base, virtual_size=2)
    return [hanging, base, *variable, fixed]
