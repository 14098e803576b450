"""Half-fixes: each undoes one rule of the fork, or takes a simpler set of groups, on this rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from megatron.core import parallel_state
from tests.harness.strict_rendezvous import strict_rendezvous
from tests.unit_tests.pipeline_parallel.schedule_cases import Step, run_steps


def run_under_strict_rendezvous(
    pipeline_size: int,
    chunks_per_rank: int,
    transport: str,
    step: Step,
    coalesces: bool,
    half_fix: str | None = None,
) -> list[str]:
    """Runs one step of a real schedule on groups that are ordered like NCCL communicators.

    Args:
        pipeline_size: Number of pipeline stages; equal to the world size.
        chunks_per_rank: Model chunks per stage.
        transport: One of ``schedule_cases.TRANSPORTS``.
        step: What to run.
        coalesces: Whether a batch is one.
        half_fix: Key of ``HALF_FIXES``; ``None`` for the package as it is.

    Returns:
        The differences from one rank's autograd.
    """
    with strict_rendezvous(coalesces):
        if half_fix is None:
            return run_steps(pipeline_size, chunks_per_rank, transport, (step,))
        with _after_group_creation(HALF_FIXES[half_fix]):
            return run_steps(pipeline_size, chunks_per_rank, transport, (step,))


@contextmanager
def _after_group_creation(change: Callable[[], None]) -> Iterator[None]:
    initialize = parallel_state.initialize_model_parallel

    def initialize_then_change(**arguments: object) -> None:
        initialize(**arguments)
        change()

    with mock.patch.object(parallel_state, "initialize_model_parallel", initialize_then_change):
        yield


def _registered_groups():
    from megatron.core.pipeline_parallel import even_odd_groups

    (groups,) = even_odd_groups._groups_of_pipeline.values()
    return even_odd_groups, groups


def _await_shape_sends() -> None:
    from megatron.core.pipeline_parallel import p2p_communication

    post = p2p_communication._post

    def post_and_await_shape_sends(tensors, groups, group_of_channel, *order_and_ranks):
        requests = post(tensors, groups, group_of_channel, *order_and_ranks)
        if group_of_channel is groups.shapes:
            for role, request in requests.items():
                if role.startswith("send"):
                    request.wait()
        return requests

    mock.patch.object(p2p_communication, "_post", post_and_await_shape_sends).start()


def _take_channels(
    names: tuple[str, ...], channel_of: Callable, post_order_by_parity: bool
) -> None:
    """Replaces the channels by others: ``channel_of(groups, role)`` names the one of a role."""
    even_odd_groups, groups = _registered_groups()
    ranks = list(groups.ranks)
    groups.data = {name: dist.new_group(ranks) for name in names}
    groups.shapes = {name: dist.new_group(ranks, backend="gloo") for name in names}
    if post_order_by_parity:
        groups.data_order = groups.shape_order = (
            even_odd_groups.ODD_STAGE_ORDER
            if groups.stage % 2
            else even_odd_groups.EVEN_STAGE_ORDER
        )
    mock.patch.object(even_odd_groups.EvenOddGroups, "channel", channel_of).start()


def _channels_by_own_parity() -> None:
    _take_channels(
        ("even sends", "odd sends"),
        lambda groups, role: (
            "even sends" if role.is_send == (groups.stage % 2 == 0) else "odd sends"
        ),
        post_order_by_parity=True,
    )


def _channel_per_direction() -> None:
    _take_channels(
        ("forward", "backward"), lambda groups, role: role.direction, post_order_by_parity=False
    )


def _one_channel_sends_first() -> None:
    _take_channels(("all",), lambda groups, role: "all", post_order_by_parity=False)


HALF_FIXES: dict[str, Callable[[], None]] = {
    "shape sends awaited": _await_shape_sends,
    "groups by own parity": _channels_by_own_parity,
    "one group per direction": _channel_per_direction,
    "one group, sends first": _one_channel_sends_first,
}
