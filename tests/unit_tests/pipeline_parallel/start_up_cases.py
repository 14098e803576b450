"""Start-ups in which one rank misbehaves, and recordings of what a start-up and a step do."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from tests.harness.observed_operations import observed_operations
from tests.harness.rank_runtime import init_process_group, model_parallel_groups
from tests.unit_tests.pipeline_parallel.schedule_cases import Step, run_steps

# What ms-swift gives every process group by default.
MS_SWIFT_TIMEOUT = timedelta(seconds=18_000_000)


def start_with_a_bad_rank(bad_rank: int, misbehaviour: str) -> float:
    """Initialises model parallelism with PP=4 while one rank does not play along.

    Args:
        bad_rank: The rank that misbehaves.
        misbehaviour: Key of ``MISBEHAVIOURS``.

    Returns:
        Seconds until the bad rank itself came through. Every other rank must raise.
    """
    init_process_group(MS_SWIFT_TIMEOUT)
    pipeline_size = 4
    started = time.monotonic()
    if dist.get_rank() == bad_rank:
        pipeline_size = MISBEHAVIOURS[misbehaviour]()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pipeline_size,
        distributed_timeout_minutes=int(MS_SWIFT_TIMEOUT.total_seconds() / 60),
    )
    return time.monotonic() - started


def _never_arrive() -> int:
    signal.pause()
    raise AssertionError("nothing signals this rank")


def _die() -> int:
    os._exit(13)


def _come_with_another_pipeline_size() -> int:
    return 2


def _die_before_the_warm_up() -> int:
    from megatron.core.pipeline_parallel import even_odd_groups

    even_odd_groups._warm = lambda *arguments: os._exit(13)
    return 4


def _raise_before_the_warm_up() -> int:
    from megatron.core.pipeline_parallel import even_odd_groups

    def refuse(*arguments: object) -> None:
        raise RuntimeError("out of device memory")

    even_odd_groups._warm = refuse
    return 4


MISBEHAVIOURS: dict[str, Callable[[], int]] = {
    "never arrives": _never_arrive,
    "dies": _die,
    "has another pipeline size": _come_with_another_pipeline_size,
    "dies before the warm-up": _die_before_the_warm_up,
    "raises before the warm-up": _raise_before_the_warm_up,
}


def record_contacts(
    virtual_size: int, transport: str, is_variable: bool, use_gloo: bool
) -> dict[str, list[tuple[str, ...]]]:
    """Records by whom a link is used during start-up and during a step after it.

    Args:
        virtual_size: Model chunks per stage.
        transport: One of ``schedule_cases.TRANSPORTS``.
        is_variable: Whether the microbatches have different lengths.
        use_gloo: Whether shapes go on gloo groups of their own.

    Returns:
        For ``start-up`` and for ``step``: the operations ``(function, group, peer)`` and the
        creations ``("new_group",)``, in order.
    """
    recordings: dict[str, list[tuple[str, ...]]] = {"start-up": [], "step": []}
    phase = "start-up"

    def observe(name, peer, group):
        recordings[phase].append((name, group.group_name, str(peer)))

    def recorded_new_group(*arguments, **keywords):
        recordings[phase].append(("new_group",))
        return new_group(*arguments, **keywords)

    def recorded_initialize(**arguments):
        nonlocal phase
        initialize(**arguments, create_gloo_process_groups=use_gloo)
        phase = "step"

    new_group = dist.new_group
    initialize = parallel_state.initialize_model_parallel
    with (
        observed_operations(observe),
        mock.patch.object(dist, "new_group", recorded_new_group),
        mock.patch.object(parallel_state, "initialize_model_parallel", recorded_initialize),
    ):
        problems = run_steps(
            int(os.environ["WORLD_SIZE"]),
            virtual_size,
            transport,
            (Step(2 * int(os.environ["WORLD_SIZE"]), is_variable),),
        )
    assert not problems, problems
    return recordings


def record_group_creations(pipeline_size: int) -> list[list[int]]:
    """Returns the ranks of every group that this rank had a part in creating, in order."""
    created = []
    new_group = dist.new_group

    def recorded_new_group(ranks, *arguments, **keywords):
        assert not keywords.get("use_local_synchronization")
        created.append(list(ranks))
        return new_group(ranks, *arguments, **keywords)

    with (
        mock.patch.object(dist, "new_group", recorded_new_group),
        model_parallel_groups(pipeline_size),
    ):
        pass
    return created


def initialise_twice() -> list[int]:
    """Returns how many groups exist before, during and after each of two initialisations."""
    counts = []
    init_process_group()
    for _ in range(2):
        counts.append(_count_even_odd_groups())
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        counts.append(_count_even_odd_groups())
        parallel_state.destroy_model_parallel()
        counts.append(_count_even_odd_groups())
    dist.destroy_process_group()
    return counts


def _count_even_odd_groups() -> int:
    descriptions = [group.group_desc for group in dist.distributed_c10d._world.pg_map]
    return sum("PIPELINE_FORWARD" in d or "PIPELINE_BACKWARD" in d for d in descriptions)


def initialise_with_bound_device(fails: bool) -> tuple[list[str | None], str | None]:
    """Initialises with a device bound to the default group.

    Args:
        fails: Whether the creation of the even/odd groups raises.

    Returns:
        The bound device at each creation of an even/odd group, and the one afterwards.
    """
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    bound = []
    create_group = parallel_state.create_group

    def recorded_create_group(ranks, **keywords):
        bound.append(str(world.bound_device_id))
        if fails:
            raise RuntimeError("no group today")
        return create_group(ranks, **keywords)

    from megatron.core.pipeline_parallel import even_odd_groups

    pipeline = list(range(dist.get_world_size()))
    pp_group = dist.new_group(pipeline)
    world.bound_device_id = torch.device("cuda:0")
    with mock.patch.object(even_odd_groups, "create_group", recorded_create_group):
        expected_error = pytest.raises(RuntimeError, match="no group today")
        with expected_error if fails else contextlib.nullcontext():
            even_odd_groups.create_even_odd_groups([pipeline], pp_group=pp_group)
    afterwards = str(world.bound_device_id)
    world.bound_device_id = None
    return bound, afterwards
