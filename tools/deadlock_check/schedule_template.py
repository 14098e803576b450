"""The process behind ``record_schedule``: imports megatron.core once, and forks for every rank.

Started as ``python -m tools.deadlock_check.schedule_template FD FOLDER``: FD is the inherited end
of a ``multiprocessing`` pipe, FOLDER where megatron.core must come from, empty for wherever it is
installed. It receives ``ScheduleOptions`` until the pipe closes. For each it sends one answer per
rank, a pair of the rank and its pickled groups and program; or a message that says what failed,
after which no more come.
"""

import collections
import copyreg
import dataclasses
import gc
import io
import multiprocessing
import operator
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, get_args

from .record_schedule import ScheduleOptions
from .trace import Operation

Answer = tuple[int, bytes] | str


def main() -> None:
    """Answer requests until the other end closes the pipe."""
    descriptor, folder = sys.argv[1:]
    connection = Connection(int(descriptor))
    failure = _import_implementation(folder)
    # What is frozen is never visited by the collector, so the children do not copy it.
    gc.freeze()
    while True:
        try:
            options = connection.recv()
        except EOFError:
            return
        for answer in _answers(options) if failure is None else [failure]:
            connection.send(answer)


def _import_implementation(folder: str) -> str | None:
    try:
        import megatron.core

        from . import schedule_rank  # noqa: F401
    except Exception as error:
        return f"megatron.core cannot be imported: {_described(error)}"
    origin = megatron.core.__file__
    if folder and not Path(origin).is_relative_to(folder):
        return f"megatron.core comes from {origin} and not from {folder}"
    return None


def _answers(options: ScheduleOptions) -> Iterator[Answer]:
    context = multiprocessing.get_context("fork")
    waiting = collections.deque(range(options.pipeline_size))
    running: dict[Any, tuple[int, Any]] = {}
    reader: Any
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            rank = waiting.popleft()
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_record, args=(options, rank, writer))
            process.start()
            writer.close()
            running[reader] = rank, process
        for reader in wait(list(running)):
            rank, process = running.pop(reader)
            try:
                result = reader.recv()
            except EOFError:
                process.join()
                result = f"its process ended with exit code {process.exitcode}"
            process.join()
            reader.close()
            if isinstance(result, str):
                for _, other in running.values():
                    other.kill()
                yield f"recording rank {rank} of {options} failed: {result}"
                return
            yield rank, result


def _record(options: ScheduleOptions, rank: int, writer: Connection) -> None:
    from .schedule_rank import record_rank

    gc.disable()
    try:
        result: bytes | str = _compact(record_rank(options, rank))
    except Exception as error:
        result = _described(error)
    writer.send(result)


def _described(error: Exception) -> str:
    origin = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({origin.filename}:{origin.lineno})"


def _compact(value: Any) -> bytes:
    """Pickle operations as calls of their classes: a third of the usual time and size."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table.copy()
    for cls in get_args(Operation):
        pickler.dispatch_table[cls] = _reducer(cls)
    pickler.dump(value)
    return file.getvalue()


def _reducer(cls: type) -> Callable[[Any], tuple[type, tuple[Any, ...]]]:
    fields = operator.attrgetter(*(field.name for field in dataclasses.fields(cls)))
    return lambda operation: (cls, fields(operation))


if __name__ == "__main__":
    main()
