"""Records the rank that the calling process is, inside a command that is being recorded."""

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import torch.distributed as dist

from tools.cpu_emulation.import_hook import after_import

from .pipeline_hooks import hook_schedules, hook_start_up
from .process_recording import COMMAND_VARIABLE, OUTPUT_VARIABLE, rank_file
from .recorder import Recorder
from .torch_hooks import hook_torch
from .trace import Group, Operation
from .trace_file import group_to_json, header, operation_to_json

_PIPELINE = "megatron.core.pipeline_parallel"


def record_this_process() -> None:
    """Record from now on; before megatron is imported."""
    recording = _RankRecording(Path(os.environ[OUTPUT_VARIABLE]), os.environ[COMMAND_VARIABLE])
    hook_torch(recording.recorder)
    for name, hook in (("schedules", hook_schedules), ("even_odd_groups", hook_start_up)):
        module = f"{_PIPELINE}.{name}"
        after_import(module, functools.partial(_hook_module, hook, recording.recorder, module))


def _hook_module(
    hook: Callable[[Recorder, ModuleType], None], recorder: Recorder, module: str
) -> None:
    hook(recorder, sys.modules[module])


class _RankRecording:
    """The file of this rank, begun when it first uses torch.distributed.

    Every line is given to the system at once, so that none is lost however the process ends.
    """

    def __init__(self, folder: Path, command: str) -> None:
        self.recorder = Recorder(self._add_operation, self._add_group)
        self._folder = folder
        self._command = command
        self._file: TextIO | None = None
        self._is_superfluous = False

    def _add_group(self, group: Group) -> None:
        if self._has_begun():
            self._write(group_to_json(group))

    def _add_operation(self, operation: Operation) -> None:
        if self._has_begun():
            self._write({"rank": self._rank} | operation_to_json(operation))

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def _has_begun(self) -> bool:
        if self._file is None and not self._is_superfluous and dist.is_initialized():
            self._begin()
        return self._file is not None

    def _begin(self) -> None:
        self._rank = dist.get_rank()
        path = rank_file(self._folder, self._rank)
        try:
            self._file = path.open("x", encoding="utf-8", buffering=1)
        except FileExistsError:
            self._is_superfluous = True
            print(
                f"deadlock_check: another process has recorded rank {self._rank} in {path}; this "
                "one is not recorded",
                file=sys.stderr,
            )
            return
        self._write(header(dist.get_world_size(), self._command, [self._rank]))
        self.recorder.declare_world()
