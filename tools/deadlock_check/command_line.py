"""The commands of ``python -m tools.deadlock_check``."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tools.base_release import supported_bases, unpacked_base

from . import arguments, matrix, model, record_processes, record_schedule, report
from .annotate import annotate
from .check import Checked, check, is_safe, most_telling, progress_bar
from .errors import UsageError
from .machine import Machine
from .pattern import read_pattern
from .report import Remedy
from .trace import Trace
from .trace_file import read_traces, write_trace

SAFE, UNSAFE, BAD_USAGE = 0, 1, 2
SIGNAL_STATUS = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Command-line arguments; the process's own when ``None``.

    Returns:
        Exit status: 0 safe, 1 unsafe, 2 bad usage; that of the command for ``record``.
    """
    commands = {
        "run": _run,
        "pattern": _pattern,
        "trace": _trace,
        "record": _record,
        "matrix": _matrix,
    }
    try:
        options = arguments.parse(sys.argv[1:] if argv is None else argv)
        return commands[options.command](options)
    except UsageError as error:
        print(f"deadlock_check: error: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        return SIGNAL_STATUS + signal.SIGINT


def _run(options: argparse.Namespace) -> int:
    trace = _recorded(options)
    results = _checked(trace, options)
    remedies = [] if is_safe(results) else _tried_remedies(trace, results, options)
    return _report(trace, results, options, remedies)


def _pattern(options: argparse.Namespace) -> int:
    trace = read_pattern(options.file)
    return _report(trace, _checked(trace, options), options)


def _trace(options: argparse.Namespace) -> int:
    trace = read_traces(options.files)
    annotate(dict(enumerate(trace.programs)))
    return _report(trace, _checked(trace, options), options)


def _record(options: argparse.Namespace) -> int:
    status = record_processes.record_command(options.recorded, options.output)
    return status if status >= 0 else SIGNAL_STATUS - status


def _matrix(options: argparse.Namespace) -> int:
    cases = [*matrix.table_cases(), *matrix.REPORTS]
    with progress_bar(len(cases), "case") as progress:
        rows = matrix.check_cases(cases, jobs=options.jobs, progress=progress)
    print(matrix.as_json(rows) if options.format == "json" else matrix.as_markdown(rows))
    return SAFE


def _recorded(options: argparse.Namespace) -> Trace:
    recorded = arguments.schedule(options)
    implementation = _implementation(options.implementation)
    try:
        with progress_bar(recorded.pipeline_size, "rank") as progress:
            trace = record_schedule.record(recorded, implementation, progress)
    except RuntimeError as error:
        raise UsageError(f"cannot record this with {options.implementation}: {error}") from None
    trace.description = arguments.description(options)
    return trace


def _implementation(name: str) -> str:
    """Return what the recorder calls the implementation of that flag."""
    kind, _, base = name.partition(":")
    if name == record_schedule.INSTALLED:
        return name
    if kind != "base" or base not in supported_bases():
        choices = ", ".join(f"base:{supported}" for supported in supported_bases())
        raise UsageError(
            f"--implementation {name}: choose {record_schedule.INSTALLED}, or one of {choices}"
        )
    try:
        return str(unpacked_base(base))
    except RuntimeError as error:
        raise UsageError(f"--implementation {name}: {error}") from None


def _checked(trace: Trace, options: argparse.Namespace) -> list[Checked]:
    machines = arguments.machines(options)
    total = sum(map(len, trace.programs)) * len(machines)
    with progress_bar(total, "operation") as progress:
        return check(trace, machines, progress)


def _tried_remedies(
    trace: Trace, results: Sequence[Checked], options: argparse.Namespace
) -> list[Remedy]:
    """Check again with each change that may help."""
    changes: dict[str, tuple[dict[str, object], bool]] = {
        "unset TORCH_DISTRIBUTED_DEBUG": ({"debug_detail": False}, options.debug_detail),
        "make and use every communicator at start-up": (
            {"world": "premade"},
            any(result.outcome.statistics.communicators_in_schedule for result in results),
        ),
        "the luck that NCCL buffers small sends, which it does not promise": (
            {"small_sends": "buffered"},
            options.variable_seq_lengths and options.small_sends == "strict",
        ),
    }
    tried = [
        (change, flags)
        for change, (flags, may_help) in changes.items()
        if may_help and options.backend == "nccl"
    ]
    if options.implementation != record_schedule.INSTALLED and "+p2p." in version("megatron-core"):
        tried.append(("install this fork", {"implementation": record_schedule.INSTALLED}))
    remedies = []
    for change, flags in tried:
        changed = argparse.Namespace(**{**vars(options), **flags})
        is_recorded = _recording(changed) == _recording(options)
        recorded = trace if is_recorded else _recorded(changed)
        remedies.append(Remedy(change, _checked(recorded, changed)))
    return remedies


def _recording(options: argparse.Namespace) -> tuple[record_schedule.ScheduleOptions, str]:
    """Return all that a recording depends on."""
    return arguments.schedule(options), options.implementation


def _report(
    trace: Trace,
    results: Sequence[Checked],
    options: argparse.Namespace,
    remedies: Sequence[Remedy] = (),
) -> int:
    if options.json:
        print(json.dumps(report.as_json(trace, results, remedies), indent=1))
    else:
        print(report.as_text(trace, results, remedies))
    # What can fail comes after what took long.
    if options.save_trace is not None:
        _save(trace, options.save_trace)
    if options.plot is not None:
        _plot(trace, most_telling(results).machine, options.plot)
    return SAFE if is_safe(results) else UNSAFE


def _save(trace: Trace, path: Path) -> None:
    try:
        write_trace(trace, path)
    except OSError as error:
        raise UsageError(f"--save-trace {path}: cannot write it ({error}); name another") from None


def _plot(trace: Trace, machine: Machine, path: Path) -> None:
    try:
        from . import plot
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--plot needs the package {error.name}; pip install {error.name}"
        ) from None
    plot.plot(trace, model.run(trace, machine, with_timeline=True), path)
