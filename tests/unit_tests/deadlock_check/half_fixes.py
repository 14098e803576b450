"""Half-fixes: each undoes one rule of the fork, or takes a simpler set of groups, on this rank."""

from collections.abc import Callable
from unittest import mock

import torch.distributed as dist


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
