"""Hooks on megatron.core: computations, phases of the schedule, and meetings at start-up."""

import collections
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Literal

from .recorder import Recorder
from .trace import Compute

Direction = Literal["forward", "backward"]

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)


def hook_schedules(recorder: Recorder, schedules: ModuleType) -> None:
    """Write down what the schedules compute, and in which phase they are.

    A schedule warms up until its first backward and cools down after its last forward. One that
    runs forwards only warms up throughout, as nothing ends it.

    Args:
        recorder: Takes the computations, and is told the phase.
        schedules: ``megatron.core.pipeline_parallel.schedules``.
    """
    progress = _Progress(recorder)
    for name in _SCHEDULES:
        setattr(schedules, name, progress.schedule_hook(getattr(schedules, name)))
    steps: tuple[Direction, ...] = ("forward", "backward")
    for direction in steps:
        name = f"{direction}_step"
        setattr(schedules, name, progress.step_hook(direction, getattr(schedules, name)))


def hook_start_up(recorder: Recorder, even_odd_groups: ModuleType) -> None:
    """Write down where ranks meet through the store.

    Args:
        recorder: Takes the meetings.
        even_odd_groups: ``megatron.core.pipeline_parallel.even_odd_groups``.
    """
    start_up = even_odd_groups._StartUp
    agree, meet = start_up.agree, start_up.meet

    @functools.wraps(agree)
    def recorded_agree(self: Any, phase: str, plan: Any = None) -> None:
        recorder.meet(self._ranks, phase)
        agree(self, phase, plan)

    @functools.wraps(meet)
    def recorded_meet(self: Any, ranks: Any, place: str) -> None:
        recorder.meet(ranks, place)
        meet(self, ranks, place)

    start_up.agree, start_up.meet = recorded_agree, recorded_meet


class _Progress:
    """How far the schedule that runs now has come."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._forwards_left: int | None = None
        self._microbatches: dict[tuple[str, int], Iterator[int]] = {}

    def schedule_hook(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(schedule)
        def run(**keywords: Any) -> Any:
            model = keywords["model"]
            num_chunks = len(model) if isinstance(model, list) else 1
            is_forward_only = keywords.get("forward_only", False)
            self._forwards_left = (
                None if is_forward_only else keywords["num_microbatches"] * num_chunks
            )
            self._microbatches = collections.defaultdict(itertools.count)
            self._recorder.phase = "warmup"
            try:
                return schedule(**keywords)
            finally:
                self._recorder.phase = None

        return run

    def step_hook(self, direction: Direction, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*args: Any, **keywords: Any) -> Any:
            # The interleaved schedule holds the chunk in this variable; the other has one chunk.
            chunk = sys._getframe(1).f_locals.get("model_chunk_id", 0)
            if direction == "backward" and self._recorder.phase == "warmup":
                self._recorder.phase = "steady"
            microbatch = next(self._microbatches[direction, chunk])
            place = self._recorder.place()._replace(microbatch=microbatch, chunk=chunk)
            self._recorder.emit(Compute(direction, place))
            result = step(*args, **keywords)
            if direction == "forward" and self._forwards_left is not None:
                self._forwards_left -= 1
                if not self._forwards_left:
                    self._recorder.phase = "cooldown"
            return result

        return run
