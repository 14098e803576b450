"""What stands in for CUDA's devices, streams, events and tensors on the CPU."""

import os
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CudaOnlyError(NotImplementedError):
    """Something was reached that works on a GPU only."""


class EmulatedStream:
    """A CUDA stream of which all work is finished by the time that it is issued."""

    device = CPU
    cuda_stream = 0
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept what ``torch.cuda.Stream`` accepts."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the only priority there is, as lowest and highest."""
        return (0, 0)

    def query(self) -> bool:
        """Return True: nothing is ever outstanding."""
        return True

    def record_event(self, event: "EmulatedEvent | None" = None) -> "EmulatedEvent":
        """Record ``event``, or a new one, and return it."""
        event = event or EmulatedEvent()
        event.record(self)
        return event

    def wait_stream(self, stream: "EmulatedStream") -> None:
        """Return at once."""

    def wait_event(self, event: "EmulatedEvent") -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


class EmulatedEvent:
    """A CUDA event that has happened as soon as it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept what ``torch.cuda.Event`` accepts."""
        self._seconds = 0.0

    def record(self, stream: EmulatedStream | None = None) -> None:
        """Take the host's time."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: "EmulatedEvent") -> float:
        """Return the milliseconds between this event and ``end``."""
        return (end._seconds - self._seconds) * 1000.0

    def query(self) -> bool:
        """Return True: nothing is ever outstanding."""
        return True

    def wait(self, stream: EmulatedStream | None = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


class SameForEveryIndex:
    """A sequence that holds one value at every index."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, index: int) -> Any:
        return self._value


class CurrentDevice:
    """Remembers the index of the device that a rank has chosen."""

    def __init__(self) -> None:
        self.index = 0

    def get(self) -> int:
        """Return the chosen index."""
        return self.index

    def set(self, device: int | str | torch.device) -> None:
        """Choose a device by its index or name."""
        self.index = device if isinstance(device, int) else torch.device(device).index or 0


def names_cuda_device(value: Any) -> bool:
    """Return whether ``value`` names a CUDA device the way that a ``device`` argument may."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, int) and not isinstance(value, bool)


def _return_itself(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    on_cpu: list[Any] = [CPU if names_cuda_device(value) else value for value in args]
    return tensor.to(*on_cpu, **kwargs)


def _type(tensor: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    if dtype is None:
        return tensor.type().replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return tensor.type(dtype, **kwargs)


TENSOR_METHODS: dict[Callable[..., Any], tuple[str, Callable[..., Any]]] = {
    torch.Tensor.cuda: ("the tensor itself, not a copy", _return_itself),
    torch.Tensor.pin_memory: ("the tensor itself", _return_itself),
    torch.Tensor.to: ("a CUDA device, by name or index, means the CPU", _to),
    torch.Tensor.type: ("type names have the prefix torch.cuda, asked or given", _type),
}
"""Methods of tensors with a CUDA side, what they do under the emulation, and how."""

ARGUMENTS: dict[str, str] = {
    "device": "a CUDA device, by name or index, means the CPU",
    "pin_memory": "ignored",
}
"""Keyword arguments that are changed in a call to any torch function, and how."""


class CudaOnCpu(TorchFunctionMode):
    """Runs torch functions that ask for a CUDA device on the CPU, in the thread that enters it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` with CUDA taken out of its arguments."""
        if kwargs and not ARGUMENTS.keys().isdisjoint(kwargs):
            kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
            if names_cuda_device(kwargs.get("device")):
                kwargs["device"] = CPU
        if func in TENSOR_METHODS:
            func = TENSOR_METHODS[func][1]
        return func(*args, **kwargs) if kwargs else func(*args)


def device_properties(device: Any = None) -> types.SimpleNamespace:
    """Return what the emulated device says of itself; its memory is the machine's."""
    return types.SimpleNamespace(
        name="CPU emulation",
        major=0,
        minor=0,
        multi_processor_count=1,
        total_memory=memory_info()[1],
    )


def memory_info(device: Any = None) -> tuple[int, int]:
    """Return the free bytes of the machine's memory, and all of them."""
    page_size = os.sysconf("SC_PAGE_SIZE")
    return page_size * os.sysconf("SC_AVPHYS_PAGES"), page_size * os.sysconf("SC_PHYS_PAGES")
