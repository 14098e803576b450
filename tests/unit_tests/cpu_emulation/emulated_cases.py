"""What ranks do under the emulation; every function runs in a process of its own."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def devices_of_created_tensors() -> set[str]:
    plain = torch.ones(2)
    tensors = [
        torch.empty(2, device="cuda"),
        torch.zeros(2, device=torch.device("cuda", 1)),
        torch.tensor([1], device=torch.cuda.current_device()),
        torch.rand(2, device="cuda:3", pin_memory=True),
        plain.cuda(),
        plain.to("cuda"),
        plain.to(torch.device("cuda"), torch.float64),
        plain.to(0),
        plain.to(device="cuda"),
        plain.new_zeros(2, device="cuda"),
        torch.nn.Linear(2, 2).cuda(torch.cuda.current_device()).weight,
        torch.cuda.FloatTensor([1.0]),
        plain.pin_memory(),
        plain.type("torch.cuda.HalfTensor"),
    ]
    return {str(tensor.device) for tensor in tensors}


def types_of_tensors() -> list[Any]:
    half = torch.ones(2).type("torch.cuda.HalfTensor")
    return [half.dtype, half.type(), isinstance(half, torch.cuda.HalfTensor)]


def gradient_of_a_cuda_computation() -> list[float]:
    leaf = torch.tensor([1.0, 2.0], device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loss = (leaf.to("cuda") ** 2).sum()
    event = stream.record_event()
    torch.cuda.current_stream().wait_event(event)
    leaf.record_stream(stream)
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad.tolist()


def elapsed_time_between_events() -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.ones(300, 300) @ torch.ones(300, 300)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def numbers_drawn_again_from_a_saved_state() -> bool:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    return torch.equal(torch.rand(4, device="cuda"), first)


def devices_seen(index: int) -> list[Any]:
    before = torch.cuda.device_count()
    torch.cuda.set_device(f"cuda:{index}")
    return [
        before,
        torch.cuda.current_device(),
        torch.cuda.get_device_capability(),
        torch.cuda.get_device_properties(index).name,
    ]


def calls_seen_by_a_synchronize_wrapper() -> int:
    calls = []
    original = torch.cuda.synchronize
    torch.cuda.synchronize = lambda *args: calls.append(original(*args))
    torch.cuda.synchronize()
    torch.cuda.synchronize(0)
    return len(calls)


def backends_of_groups() -> list[str]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    groups = [dist.new_group([0, 1], backend="nccl"), dist.new_group([0, 1], None, "nccl")]
    tensor = torch.ones(2, device="cuda")
    for group in groups:
        dist.all_reduce(tensor, group=group)
    dist.barrier(device_ids=[rank])
    assert tensor.tolist() == [4.0, 4.0]
    return [dist.get_backend(), *(dist.get_backend(group) for group in groups)]


def rows_exchanged_by_tensor_split_sizes() -> list[float]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    sent = torch.full((3,), float(rank))
    received = torch.empty(2 if rank == 0 else 4)
    dist.all_to_all_single(
        received,
        sent,
        output_split_sizes=torch.tensor([1, 1] if rank == 0 else [2, 2]),
        input_split_sizes=torch.tensor([1, 2]),
    )
    return received.tolist()


def batch_of_a_pinning_data_loader(workers: int) -> list[int]:
    loader = torch.utils.data.DataLoader(
        torch.arange(4), batch_size=4, num_workers=workers, pin_memory=True
    )
    return next(iter(loader)).tolist()


def markers_of_norm_parameters(sequence_parallel: bool) -> list[bool]:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        persist_layer_norm=False,
    )
    norm = WrappedTorchNorm(config=config, hidden_size=8)
    assert config.sequence_parallel == sequence_parallel
    return [parameter.sequence_parallel for parameter in norm.parameters()]


def _launch_triton_kernel() -> None:
    import triton

    @triton.jit
    def kernel_of_the_test(pointer):
        pass

    kernel_of_the_test[(1,)](torch.ones(1))


def _apply_fused_softmax() -> None:
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer.enums import AttnMaskType

    softmax = FusedScaleMaskSoftmax(
        input_in_fp16=False,
        input_in_bf16=True,
        attn_mask_type=AttnMaskType.causal,
        scaled_masked_softmax_fusion=True,
        mask_func=None,
        softmax_in_fp32=True,
        scale=None,
    )
    softmax.is_kernel_available = lambda *args: True
    softmax(torch.zeros(1, 4, 32, 32, dtype=torch.bfloat16), None)


_CUDA_ONLY: dict[str, Callable[[], Any]] = {
    "graph": lambda: torch.cuda.CUDAGraph(),
    "profiler": lambda: torch.cuda.cudart().cudaProfilerStart(),
    "memory pool": lambda: torch.cuda.MemPool(),
    "softmax": _apply_fused_softmax,
    "triton": _launch_triton_kernel,
    "not replaced": lambda: torch.cuda.ipc_collect(),
}


def message_of_cuda_only(name: str) -> str:
    from tools.cpu_emulation.stand_ins import CudaOnlyError

    with contextlib.suppress(TypeError):
        try:
            _CUDA_ONLY[name]()
        except CudaOnlyError as error:
            return str(error)
    return "no CudaOnlyError"
