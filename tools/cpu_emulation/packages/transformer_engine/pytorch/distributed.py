"""Random generators, activation recomputation, and the exchanges of tensor parallelism."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch.distributed import ProcessGroup

from ..refusal import refuse


class CudaRNGStatesTracker:
    """Named states of the default generator.

    The emulation has a single generator; ``fork`` puts another state into it for a while.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of the states by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all states."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add the state that ``seed`` gives.

        Raises:
            ValueError: The name or the seed is taken.
        """
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"seed {seed} or name {name!r} is there already.")
        self.seeds_.add(seed)
        before = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        self.states_[name] = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the state ``name`` in the body, and keep how far it got."""
        before = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(before)


@contextlib.contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Change nothing: only fp8 needs to know in which phase the body runs."""
    yield


def is_fp8_activation_recompute_enabled() -> bool:
    """Return whether fp8 tensors are recomputed."""
    return False


def checkpoint(
    function: Callable[..., Any],
    *arguments: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: ProcessGroup | None = None,
    **named: Any,
) -> Any:
    """Call ``function``; recompute its activations in the backward pass instead of keeping them.

    Raises:
        NotOffered: ``distribute_saved_activations``.
    """
    refuse(
        {"distribute_saved_activations": distribute_saved_activations},
        {"distribute_saved_activations": "leave out --distribute-saved-activations"},
    )
    tracker = get_rng_state_tracker() if get_rng_state_tracker is not None else None
    if tracker is not None:
        named["context_fn"] = lambda: (contextlib.nullcontext(), _in_states_of_now(tracker))
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False, **named)


def _in_states_of_now(tracker: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context whose body draws what it would draw now, and leaves no trace."""
    now = tracker.get_states()

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        later = tracker.get_states()
        tracker.set_states(now)
        try:
            yield
        finally:
            tracker.set_states(later)

    return again()


def copy_to_region(value: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return ``value``, which all ranks of ``group`` hold; its gradient is the sum of theirs."""
    return _Copy.apply(value, group)


def reduce_from_region(value: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return the sum of the ranks' values."""
    return _Reduce.apply(value, group)


def gather_sequence(value: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return the ranks' slices of the first dimension in one tensor."""
    return _Gather.apply(value, group)


def reduce_scatter_sequence(value: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return this rank's slice, in the first dimension, of the sum of the ranks' values."""
    return _ReduceScatter.apply(value, group)


def _all_reduce(value: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=group)
    return total


def _all_gather(value: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    whole = value.new_empty(value.shape[0] * group.size(), *value.shape[1:])
    torch.distributed.all_gather_into_tensor(whole, value.contiguous(), group=group)
    return whole


def _slice_of_sum(value: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    return _all_reduce(value, group).chunk(group.size())[group.rank()].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        return _all_reduce(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_gather(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _slice_of_sum(gradient, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _slice_of_sum(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather(gradient, ctx.group), None
