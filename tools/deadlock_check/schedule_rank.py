"""Runs a real schedule of megatron.core as one rank, in a process of its own, and records it.

Nothing is sent: the operations of ``torch.distributed`` are stand-ins that are done at once. What
would be on the GPU is on torch's ``meta`` device, which has sizes but no memory. Functions of torch
and megatron are replaced for good, so the process has to be made for it.
"""

import functools
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

import megatron.core.pipeline_parallel.schedules as schedules

# Schedules import it when they run, which would be in every rank.
import megatron.core.transformer.multi_token_prediction  # noqa: F401
import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron.core.pipeline_parallel.p2p_communication as p2p_communication
from megatron.core import parallel_state

from .annotate import annotate
from .pipeline_hooks import hook_schedules, hook_start_up
from .record_schedule import ScheduleOptions
from .recorder import Recorder
from .torch_hooks import hook_torch
from .trace import Group, Operation

SEQUENCE_LENGTH, MICRO_BATCH_SIZE, HIDDEN_SIZE = 4096, 1, 1024

_DEVICE = torch.device("meta")


def record_rank(options: ScheduleOptions, rank: int) -> tuple[list[Group], list[Operation]]:
    """Start up and run one step, as one rank of the pipeline.

    Args:
        options: What to run.
        rank: Global rank.

    Returns:
        The process groups and the operations of the rank.
    """
    groups: list[Group] = []
    program: list[Operation] = []
    recorder = Recorder(program.append, groups.append)
    _stand_in_for_device()
    _stand_in_for_communication()
    hook_torch(recorder)
    hook_schedules(recorder, schedules)
    # The fork's p2p_communication has imported it; an unmodified base has none.
    even_odd_groups = sys.modules.get("megatron.core.pipeline_parallel.even_odd_groups")
    if even_odd_groups is not None:
        _stand_in_for_start_up(even_odd_groups, options.coalesces)
        hook_start_up(recorder, even_odd_groups)
    if options.ms_swift_world_group:
        _batch_on_world()
    _initialize(options, rank, recorder)
    _run_schedule(options)
    annotate({rank: program})
    return groups, program


def _initialize(options: ScheduleOptions, rank: int, recorder: Recorder) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=options.pipeline_size)
    # As ``init_process_group(device_id=...)`` does, so that it shows which groups inherit it.
    distributed_c10d._get_default_group().bound_device_id = torch.device("cuda", 0)
    recorder.declare_world()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=options.pipeline_size,
        virtual_pipeline_model_parallel_size=options.virtual_size,
        create_gloo_process_groups=options.use_gloo,
    )
    # Training scripts use the default group before the first step; Megatron's all-reduces when
    # each rank was started (training.py, pretrain). So its communicator is there.
    dist.all_reduce(torch.empty(1))


def _run_schedule(options: ScheduleOptions) -> None:
    num_chunks = options.virtual_size or 1
    config = TransformerConfig(
        num_layers=options.pipeline_size * num_chunks,
        hidden_size=HIDDEN_SIZE,
        num_attention_heads=1,
        pipeline_model_parallel_size=options.pipeline_size,
        virtual_pipeline_model_parallel_size=options.virtual_size,
        microbatch_group_size_per_vp_stage=options.microbatch_group_size_per_vp_stage,
        pipeline_dtype=torch.bfloat16,
        overlap_p2p_comm=options.overlap_p2p_comm,
        overlap_p2p_comm_warmup_flush=options.overlap_p2p_comm_warmup_flush,
        batch_p2p_comm=options.batch_p2p_comm,
        variable_seq_lengths=options.variable_seq_lengths,
        # Others refuse variable lengths; it has no effect without experts.
        moe_token_dispatcher_type="alltoall",
    )
    schedules.get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=[None] * num_chunks,
        model=[_Chunk(config) for _ in range(num_chunks)],
        num_microbatches=options.num_microbatches,
        seq_length=SEQUENCE_LENGTH,
        micro_batch_size=MICRO_BATCH_SIZE,
        forward_only=options.forward_only,
    )


class _Chunk(torch.nn.Module):
    """A model chunk without layers, whose outputs and gradients are the same for all inputs."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.model_type = ModelType.encoder_or_decoder
        shape = SEQUENCE_LENGTH, MICRO_BATCH_SIZE, HIDDEN_SIZE
        self.output = torch.empty(shape, device=_DEVICE, dtype=config.pipeline_dtype)
        self._gradient = torch.empty_like(self.output)

    def set_input_tensor(self, input_tensor: list[torch.Tensor | None]) -> None:
        """Take what the previous chunk sent; the schedule calls this before the forward."""
        (received,) = input_tensor
        if received is not None:
            received.grad = self._gradient


def _forward(data_iterator: None, chunk: _Chunk) -> tuple[torch.Tensor, Any]:
    return chunk.output, lambda output: (torch.zeros(()), {})


def _replace(owner: Any, **stand_ins: Any) -> None:
    for name, stand_in in stand_ins.items():
        setattr(owner, name, stand_in)


def _stand_in_for_device() -> None:
    zeros = torch.zeros

    def zeros_without_cuda(*args: Any, **keywords: Any) -> torch.Tensor:
        if keywords.get("device") == "cuda":
            keywords["device"] = "cpu"
        return zeros(*args, **keywords)

    _replace(torch, zeros=zeros_without_cuda)
    _replace(torch.cuda, current_device=lambda: _DEVICE, synchronize=lambda: None)
    _replace(torch.Tensor, tolist=_shape_received, __int__=lambda number: 0)


def _shape_received(message: torch.Tensor) -> list[int]:
    """Read a shape message: three numbers of the base, or the fork's number of sizes and eight."""
    shape = [SEQUENCE_LENGTH, MICRO_BATCH_SIZE, HIDDEN_SIZE]
    if message.numel() == len(shape):
        return shape
    return [len(shape), *shape, *[0] * (message.numel() - len(shape) - 1)]


class _DoneWork:
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_DONE = _DoneWork()


def _stand_in_for_communication() -> None:
    host_groups = set()
    new_group = dist.new_group

    @functools.wraps(new_group)
    def new_fake_group(ranks: Any = None, backend: str | None = None, **keywords: Any) -> Any:
        group = new_group(ranks, backend="fake", **keywords)
        if backend == "gloo":
            host_groups.add(group)
        return group

    def isend(tensor: torch.Tensor, dst: int, group: Any = None) -> _DoneWork:
        return _DONE

    def irecv(tensor: torch.Tensor, src: int, group: Any = None) -> _DoneWork:
        return _DONE

    def get_backend(group: Any = None) -> str:
        return "gloo" if group in host_groups else "nccl"

    for module in (dist, distributed_c10d):
        _replace(
            module,
            new_group=new_fake_group,
            get_backend=get_backend,
            isend=isend,
            irecv=irecv,
            batch_isend_irecv=lambda p2p_op_list: [_DONE],
        )


def _stand_in_for_start_up(even_odd_groups: ModuleType, coalesces: bool) -> None:
    def communication_device(group: Any) -> torch.device:
        return torch.device("cpu") if dist.get_backend(group) == "gloo" else _DEVICE

    def batch_obstacle(group: Any, device: torch.device) -> str | None:
        return None if coalesces else "the backend is to be one that does not coalesce"

    for module in (even_odd_groups, p2p_communication):
        _replace(module, communication_device=communication_device, batch_obstacle=batch_obstacle)
    _replace(
        even_odd_groups,
        # It reads the numbers, for which the host waits; what they are is nothing to check here.
        _check_link_numbers=lambda links, numbers: [int(number) for number in numbers.values()],
    )
    _replace(
        even_odd_groups._StartUp,
        agree=lambda self, phase, plan=None: None,
        meet=lambda self, ranks, place: None,
    )


def _batch_on_world() -> None:
    """Do to the batched exchange what ms-swift does."""
    original = p2p_communication._batched_p2p_ops

    def batched_p2p_ops(**keywords: Any) -> Any:
        return original(**(keywords | {"group": None}))

    _replace(p2p_communication, _batched_p2p_ops=batched_p2p_ops)
