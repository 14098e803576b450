"""Point-to-point exchanges between pipeline stages, on any number of ranks, on GPUs or CPUs.

    torchrun --nproc-per-node 4 -m pytest tests/unit_tests/pipeline_parallel/test_even_odd_groups.py

Messages spell out who sent them, in which direction and as which tensor, so that one that reaches
the wrong role is told from the right one even when the shapes agree.
"""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import even_odd_groups
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

FORWARD, BACKWARD = 1, 2


@pytest.fixture(scope="module", autouse=True)
def default_group():
    if "WORLD_SIZE" not in os.environ:
        pytest.skip("start with torchrun --nproc-per-node N -m pytest ...")
    if not dist.is_initialized():
        has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        if has_gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # Long enough for a slow machine, short enough for a hang to end as an error.
        dist.init_process_group("nccl" if has_gpus else "gloo", timeout=timedelta(minutes=1))


@pytest.fixture(scope="module", params=[2, 3, 4, 8], ids=lambda size: f"PP{size}")
def pp_group(request):
    if dist.get_world_size() % request.param:
        pytest.skip(f"{dist.get_world_size()} ranks do not form pipelines of {request.param}")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=request.param, virtual_pipeline_model_parallel_size=2
    )
    yield parallel_state.get_pipeline_model_parallel_group()
    dist.barrier()
    parallel_state.destroy_model_parallel()


@pytest.fixture(params=["fixed", "variable"])
def is_variable(request):
    return request.param == "variable"


def make_communicator(pp_group, is_variable, transport="unbatched", virtual_size=None):
    config = ModelParallelConfig(
        pipeline_model_parallel_size=pp_group.size(),
        virtual_pipeline_model_parallel_size=virtual_size,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=transport == "batched",
        batch_p2p_sync=torch.cuda.is_available(),
        overlap_p2p_comm=transport == "overlapped",
        variable_seq_lengths=is_variable,
    )
    return P2PCommunicator(pp_group, config)


class Stage:
    """The messages of one stage of a pipeline whose ends are joined, or not."""

    def __init__(self, communicator, is_variable, is_ring=True, num_dimensions=3):
        group = communicator.pp_group
        self.index, self.num_stages = group.rank(), group.size()
        self.is_first = not is_ring and self.index == 0
        self.is_last = not is_ring and self.index == self.num_stages - 1
        self.is_variable, self.num_dimensions = is_variable, num_dimensions
        self.device = even_odd_groups.communication_device(group)

    def message(self, direction, offset=0, item=0):
        sender = (self.index + offset) % self.num_stages
        length = 5 + (3 * sender + 7 * direction + 2 * item if self.is_variable else 0)
        shape = (length, 2, 1, 3, 1, 1, 2, 1)[: self.num_dimensions]
        number = 100 * sender + 10 * direction + item
        return torch.full(shape, float(number), device=self.device)

    def shape(self, item=0):
        # With variable lengths the shape of no message: it must not be used.
        return (1,) if self.is_variable else tuple(self.message(FORWARD, item=item).shape)

    def check(self, from_prev, from_next, item=0):
        for received, direction, offset, is_missing in (
            (from_prev, FORWARD, -1, self.is_first),
            (from_next, BACKWARD, 1, self.is_last),
        ):
            if is_missing:
                assert received is None
            else:
                torch.testing.assert_close(
                    received.detach(), self.message(direction, offset, item), rtol=0, atol=0
                )


@pytest.mark.parametrize("transport", ["batched", "unbatched"])
@pytest.mark.parametrize("num_dimensions", [1, 3, 8])
def test_all_roles_at_once(pp_group, is_variable, transport, num_dimensions):
    """With two stages both neighbours are one rank, and messages must not get crossed."""
    communicator = make_communicator(pp_group, is_variable, transport, virtual_size=2)
    stage = Stage(communicator, is_variable, num_dimensions=num_dimensions)
    from_prev, from_next = communicator.send_forward_backward_recv_forward_backward(
        stage.message(FORWARD),
        stage.message(BACKWARD),
        recv_prev=True,
        recv_next=True,
        tensor_shape=stage.shape(),
    )
    stage.check(from_prev, from_next)


def test_both_directions_in_flight(pp_group, is_variable):
    communicator = make_communicator(pp_group, is_variable, "overlapped", virtual_size=2)
    stage = Stage(communicator, is_variable)
    from_prev, forward = communicator.send_forward_recv_forward(
        stage.message(FORWARD), True, stage.shape(), overlap_p2p_comm=True
    )
    from_next, backward = communicator.send_backward_recv_backward(
        stage.message(BACKWARD), True, stage.shape(), overlap_p2p_comm=True
    )
    for request in (*backward.values(), *forward.values()):
        request.wait()
    stage.check(from_prev, from_next)


@pytest.mark.parametrize("transport", ["batched", "unbatched"])
def test_stages_in_a_row(pp_group, is_variable, transport):
    """The calls of the schedule without interleaving, with two tensors each."""
    communicator = make_communicator(pp_group, is_variable, transport)
    stage = Stage(communicator, is_variable, is_ring=False)
    shapes = [stage.shape(item) for item in (0, 1)]
    activations = [stage.message(FORWARD, item=item) for item in (0, 1)]
    gradients = [stage.message(BACKWARD, item=item) for item in (0, 1)]
    from_prev = communicator.recv_forward(shapes, stage.is_first)
    communicator.send_forward(activations, stage.is_last)
    from_next = communicator.recv_backward(shapes, stage.is_last)
    communicator.send_backward(gradients, stage.is_first)
    for item in (0, 1):
        stage.check(from_prev[item], from_next[item], item)
    from_prev = communicator.send_backward_recv_forward(gradients, shapes, stage.is_first)
    from_next = communicator.send_forward_recv_backward(activations, shapes, stage.is_last)
    for item in (0, 1):
        stage.check(from_prev[item], from_next[item], item)


def test_shapes_that_are_known_to_be_fixed_are_not_exchanged(pp_group, monkeypatch):
    communicator = make_communicator(pp_group, is_variable=True)
    if not hasattr(communicator.config, "pipeline_p2p_fixed_shape"):
        pytest.skip("this version has no pipeline_p2p_fixed_shape")
    communicator.config.pipeline_p2p_fixed_shape = True
    monkeypatch.setattr(communicator, "_communicate_shapes", None)
    stage = Stage(communicator, is_variable=False)
    from_prev = communicator.send_forward_recv_forward(stage.message(FORWARD), True, stage.shape())
    from_next = communicator.send_backward_recv_backward(
        stage.message(BACKWARD), True, stage.shape()
    )
    stage.check(from_prev, from_next)


def test_stages_share_a_channel_with_one_neighbour_only(pp_group):
    communicator = make_communicator(pp_group, is_variable=True)
    groups = even_odd_groups.get_even_odd_groups(
        pp_group, communicator.prev_rank, communicator.next_rank
    )
    assert groups.is_dedicated
    roles = even_odd_groups.SENDS_FIRST
    channels = {role: groups.channel(role) for role in roles}
    assert len({channels[role] for role in roles}) == len(roles)
    assert set(groups.data.values()).isdisjoint(groups.shapes.values())


def test_ranks_that_disagree_are_named(monkeypatch):
    if dist.get_world_size() < 3:
        pytest.skip("takes three ranks to tell the one that deviates")
    parallel_state.destroy_model_parallel()
    monkeypatch.setenv(even_odd_groups.STARTUP_TIMEOUT_VARIABLE, "20")
    with pytest.raises(RuntimeError, match=r"Global rank\(s\) \[1\] have"):
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=3 if dist.get_rank() == 1 else 2
        )
