"""The table of everything that the CPU emulation replaces, and its installation."""

import collections
import contextlib
import copy
import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .import_hook import after_import
from .stand_ins import (
    ARGUMENTS,
    TENSOR_METHODS,
    CudaOnCpu,
    CudaOnlyError,
    CurrentDevice,
    EmulatedEvent,
    EmulatedStream,
    SameForEveryIndex,
    device_properties,
    memory_info,
)


@dataclass(frozen=True)
class Replacement:
    """One row of the table.

    Attributes:
        module: Name of the module that holds what the row replaces.
        names: Attributes of the module, separated by spaces; dotted where they are a class's.
        effect: What they do under the emulation, in words.
        make: Takes an original and returns what stands in its place.
    """

    module: str
    names: str
    effect: str
    make: Callable[[Any], Any]

    def apply(self) -> None:
        """Put the stand-ins in place; the module has been imported."""
        for name in self.names.split():
            *owner_path, attribute = name.split(".")
            owner = functools.reduce(getattr, owner_path, sys.modules[self.module])
            # Not every supported version of torch has all of them.
            if hasattr(owner, attribute):
                setattr(owner, attribute, self.make(getattr(owner, attribute)))


def _instead(value: Any) -> Callable[[Any], Any]:
    """Return a ``make`` that puts ``value`` in the original's place."""
    return lambda original: value


def _returning(value: Any) -> Callable[[Any], Any]:
    """Return a ``make`` for a function that gives ``value`` whatever it is asked."""
    return lambda original: lambda *args, **kwargs: value


def _cuda_only(module: str, names: str, remedy: str) -> Replacement:
    """Return the row of something that no CPU can stand in for."""

    def make(original: Any) -> type:
        class CudaOnly:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                name = getattr(original, "__qualname__", original)
                raise CudaOnlyError(
                    f"{module}.{name} works on a GPU only. Under the CPU emulation: {remedy}."
                )

        return CudaOnly

    return Replacement(module, names, f"an error that says: {remedy}", make)


def _refuse_kernel(original: Any) -> Callable[..., None]:
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        raise CudaOnlyError(
            f"The Triton kernel {self.fn.__module__}.{self.fn.__name__} works on a GPU only. Under "
            "the CPU emulation leave out the flag that chose it, or give that flag's --no-... form."
        )

    return run


def _refuse_cuda_initialization(original: Any) -> Callable[[], None]:
    def lazy_init() -> None:
        caller = sys._getframe(1)
        module = caller.f_globals.get("__name__", "")
        # This one initializes CUDA only to reach the generators, which are replaced.
        if module != "megatron.core.tensor_parallel.random":
            raise CudaOnlyError(
                f"{module}.{caller.f_code.co_name} (line {caller.f_lineno}) wants CUDA in a way "
                "that the CPU emulation does not replace; python -m tools.cpu_emulation --list "
                "shows what it does. Device arguments are replaced in the main thread only."
            )

    return lazy_init


def _on_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def create_group(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        if "nccl" in (call.arguments.get("backend") or ""):
            call.arguments["backend"] = "gloo"
            call.arguments.pop("pg_options", None)
        call.arguments.pop("device_id", None)
        return original(*call.args, **call.kwargs)

    return create_group


def _without(name: str) -> Callable[[Any], Any]:
    """Return a ``make`` that drops the keyword argument ``name``."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop(name, None)
            return original(*args, **kwargs)

        return call

    return make


def _split_sizes_as_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(call.arguments.get(name), torch.Tensor):
                call.arguments[name] = call.arguments[name].tolist()
        return original(*call.args, **call.kwargs)

    return all_to_all_single


def _allow_sequence_parallel_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            # The base sums the gradients of parameters so marked over tensor parallel ranks.
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return new


def _start_at_step_zero(original: Callable[..., Any]) -> Callable[..., Any]:
    def state_dict(self: Any) -> Any:
        adam = self.optimizer
        if not isinstance(adam, torch.optim.Adam) or adam.state:
            return original(self)
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            adam.state[parameter] = {"step": torch.zeros(())}
        try:
            return original(self)
        finally:
            # What is loaded next is allocated only where there is no state yet.
            adam.state.clear()

    return state_dict


def _load_own_step_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    @torch.no_grad()
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        if isinstance(self.optimizer, torch.optim.Adam):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    # The base gives all of them one tensor, and a new optimizer's step in it.
                    self.optimizer.state[parameter]["step"] = torch.tensor(group["step"])

    return load_state_dict


_STREAM = EmulatedStream()
_DEVICE = CurrentDevice()


def _device_count() -> int:
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), _DEVICE.index + 1)


_TENSOR_TYPES = (
    "FloatTensor DoubleTensor HalfTensor BFloat16Tensor ByteTensor CharTensor ShortTensor "
    "IntTensor LongTensor BoolTensor"
)
_MEMORY_FIGURES = (
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved device_memory_used"
)

REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement("torch.cuda", "is_available is_initialized", "True", _returning(True)),
    Replacement(
        "torch.cuda",
        "device_count",
        "LOCAL_WORLD_SIZE: every rank of the machine has a device",
        _instead(_device_count),
    ),
    Replacement("torch.cuda", "set_device", "remembers the index", _instead(_DEVICE.set)),
    Replacement("torch.cuda", "current_device", "the index that was set", _instead(_DEVICE.get)),
    Replacement(
        "torch.cuda",
        "get_device_properties",
        "'CPU emulation', compute capability 0.0, the machine's memory",
        _instead(device_properties),
    ),
    Replacement("torch.cuda", "get_device_name", "'CPU emulation'", _returning("CPU emulation")),
    Replacement("torch.cuda", "get_device_capability", "(0, 0)", _returning((0, 0))),
    Replacement(
        "torch.cuda",
        "synchronize empty_cache init set_stream reset_peak_memory_stats",
        "nothing",
        _returning(None),
    ),
    Replacement("torch", "Tensor.record_stream", "nothing", _returning(None)),
    Replacement("torch.cuda.nvtx", "range_push range_pop", "nothing", _returning(None)),
    Replacement("torch.cuda", "is_current_stream_capturing", "False", _returning(False)),
    Replacement(
        "torch.cuda", "current_stream default_stream", "the emulated stream", _returning(_STREAM)
    ),
    Replacement(
        "torch.cuda",
        "Stream ExternalStream",
        "a stream whose work is always finished",
        _instead(EmulatedStream),
    ),
    Replacement(
        "torch.cuda",
        "Event",
        "an event that has happened once it is recorded, and measures host time",
        _instead(EmulatedEvent),
    ),
    Replacement(
        "torch.cuda",
        "stream device",
        "a context that changes nothing",
        _returning(contextlib.nullcontext()),
    ),
    Replacement("torch.cuda", _MEMORY_FIGURES, "0", _returning(0)),
    Replacement("torch.cuda", "mem_get_info", "the machine's memory", _instead(memory_info)),
    Replacement(
        "torch.cuda",
        "memory_stats",
        "0 for every statistic",
        _returning(collections.defaultdict(int)),
    ),
    Replacement(
        "torch.cuda",
        "get_rng_state random.get_rng_state",
        "the state of the CPU's generator",
        _instead(lambda device="cuda": torch.get_rng_state()),
    ),
    Replacement(
        "torch.cuda",
        "set_rng_state random.set_rng_state",
        "sets the state of the CPU's generator",
        _instead(lambda new_state, device="cuda": torch.set_rng_state(new_state)),
    ),
    Replacement(
        "torch.cuda",
        "manual_seed manual_seed_all",
        "seeds the CPU's generator",
        _instead(torch.default_generator.manual_seed),
    ),
    Replacement(
        "torch.cuda",
        "default_generators",
        "the CPU's generator at every index",
        _instead(SameForEveryIndex(torch.default_generator)),
    ),
    Replacement(
        "torch.cuda",
        "_lazy_call",
        "calls back at once",
        _instead(lambda callback, **kwargs: callback()),
    ),
    Replacement(
        "torch.cuda",
        _TENSOR_TYPES,
        "the type of the same name in torch",
        lambda original: getattr(torch, original.__name__),
    ),
    Replacement(
        "torch.cuda",
        "_lazy_init",
        "an error that names the function that reached for CUDA past this table",
        _refuse_cuda_initialization,
    ),
    Replacement(
        "torch.distributed",
        "init_process_group new_group",
        "a backend that names nccl becomes gloo; device_id and NCCL's options are dropped",
        _on_gloo,
    ),
    Replacement("torch.distributed", "barrier", "device_ids is dropped", _without("device_ids")),
    Replacement(
        "torch.distributed",
        "all_to_all_single",
        "split sizes may be tensors: the base turns them into numbers only if they are CUDA's",
        _split_sizes_as_lists,
    ),
    Replacement(
        "torch.utils.data", "DataLoader.__init__", "pin_memory is dropped", _without("pin_memory")
    ),
    Replacement(
        "megatron.core.transformer.torch_norm",
        "WrappedTorchNorm.__new__",
        "torch's norms also serve sequence parallelism, as Apex's fused ones do on a GPU",
        _allow_sequence_parallel_norm,
    ),
    Replacement(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.state_dict",
        "torch's Adam is at step 0 before its first step, as fused ones are on a GPU",
        _start_at_step_zero,
    ),
    Replacement(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.load_state_dict",
        "torch's Adam gets the step count that was saved, as fused ones do on a GPU",
        _load_own_step_counts,
    ),
    _cuda_only("torch.cuda", "CUDAGraph graph graph_pool_handle", "--cuda-graph-impl none"),
    _cuda_only("torch.cuda", "MemPool use_mem_pool", "leave out --use-nccl-ub"),
    _cuda_only("torch.cuda", "cudart", "leave out --profile"),
    _cuda_only(
        "megatron.core.fusions.fused_softmax",
        "FusedScaleMaskSoftmax.forward_fused_softmax",
        "--no-masked-softmax-fusion",
    ),
    Replacement(
        "triton.runtime.jit",
        "JITFunction.run",
        "an error that names the Triton kernel",
        _refuse_kernel,
    ),
)


def markdown_table() -> str:
    """Return everything that the emulation replaces as a Markdown table, from the tables in use."""
    rows = [
        (", ".join(f"`{row.module}.{name}`" for name in row.names.split()), row.effect)
        for row in REPLACEMENTS
    ]
    rows += [
        (f"`torch.Tensor.{method.__name__}`", effect)
        for method, (effect, _) in TENSOR_METHODS.items()
    ]
    rows += [(f"`{name}=` of any torch function", effect) for name, effect in ARGUMENTS.items()]
    rows.append(("`TORCHDYNAMO_DISABLE`", "1: `torch.compile` returns what it is given"))
    lines = [f"| {names} | {effect} |" for names, effect in rows]
    return "\n".join(["| Replaced | What happens instead |", "|---|---|", *lines])


_cuda_on_cpu: CudaOnCpu | None = None


def refuse_gpu() -> None:
    """Raise RuntimeError where the emulation would take the place of a GPU that is there."""
    if _cuda_on_cpu is None and torch.cuda.is_available():
        raise RuntimeError(
            "the CPU emulation does not start where a GPU is visible: run the command without it, "
            "or hide the GPUs with CUDA_VISIBLE_DEVICES=''."
        )


def install() -> None:
    """Replace everything in the table, in this process; a second call changes nothing.

    Raises:
        RuntimeError: A GPU is visible, or megatron.core has been imported already.
    """
    global _cuda_on_cpu
    if _cuda_on_cpu is not None:
        return
    refuse_gpu()
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "the CPU emulation must be switched on before megatron.core is imported."
        )
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    for row in REPLACEMENTS:
        after_import(row.module, row.apply)
    _cuda_on_cpu = CudaOnCpu()
    _cuda_on_cpu.__enter__()
