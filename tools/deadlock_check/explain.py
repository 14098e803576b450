"""The outcome of a trace on a machine, as text for people and as data for programs."""

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from .machine import Machine
from .outcome import Dependence, Issued, Outcome, Verdict
from .trace import Batch, Trace
from .wording import Wording

JSON_FORMAT = "deadlock-check-outcome"
JSON_VERSION = 1

WIDTH = 120
MAX_CYCLE = 8
MAX_STUCK = 6
MAX_FINDINGS = 2
MAX_REMARKS = 1

_MEANING = {
    Verdict.PASS: "every rank finishes, with every message in its place.",
    Verdict.DEADLOCK: "operations wait for one another in a circle.",
    Verdict.CROSSED: "messages arrive in the place of others: wrong values, and no error.",
    Verdict.SIZE: "the two ends of a message disagree about its size.",
    Verdict.UNMATCHED: "an operation has no partner.",
}


def as_text(trace: Trace, outcome: Outcome, machine: Machine) -> str:
    """Return verdict, wait-for cycle, where ranks are stuck, counts, remarks and advice.

    Args:
        trace: What was checked.
        outcome: What the model found.
        machine: The machine that it ran on.

    Returns:
        About 40 lines at most, whatever the size of the trace.
    """
    wording = Wording(trace)
    sections = [
        _verdict(trace, outcome, machine),
        _cycle(outcome.cycle, wording),
        _stuck(outcome, wording),
        _findings(outcome, wording),
        _advice(trace, outcome, machine),
        _wrapped(_counts(outcome), ""),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def as_json(trace: Trace, outcome: Outcome, machine: Machine) -> dict[str, Any]:
    """Return the outcome as JSON data; ``docs/deadlock_check.md`` describes the fields.

    Args:
        trace: What was checked.
        outcome: What the model found.
        machine: The machine that it ran on.
    """
    wording = Wording(trace)
    statistics = dataclasses.asdict(outcome.statistics)
    return {
        "format": JSON_FORMAT,
        "version": JSON_VERSION,
        "description": trace.description,
        "machine": dataclasses.asdict(machine),
        "verdict": outcome.verdict.value,
        "is_safe": outcome.verdict.is_safe,
        "cycle": [
            {
                "waiter": _issued_json(dependence.waiter, wording),
                "reason": dependence.reason.name,
                "target": _issued_json(dependence.target, wording),
            }
            for dependence in outcome.cycle
        ],
        "stuck": [_issued_json(issued, wording) for issued in outcome.stuck.values()],
        "findings": [
            {
                "verdict": finding.verdict.value,
                "detail": finding.detail,
                "where": [_issued_json(issued, wording) for issued in finding.where],
            }
            for finding in outcome.findings
        ],
        "statistics": {
            name: value if math.isfinite(value) else None for name, value in statistics.items()
        },
    }


def _issued_json(issued: Issued, wording: Wording) -> dict[str, Any]:
    return {
        "rank": issued.rank,
        "stage": wording.stages.get(issued.rank),
        "index": issued.index,
        "part": issued.part,
        "operation": wording.operation(issued),
        "group": wording.group(issued),
        **wording.place(issued)._asdict(),
    }


def _verdict(trace: Trace, outcome: Outcome, machine: Machine) -> list[str]:
    lines = [f"{outcome.verdict.value}: {_MEANING[outcome.verdict]}"]
    if outcome.stuck:
        lines[0] += f" {len(outcome.stuck)} of {trace.world_size} ranks never finish."
    if trace.description:
        lines.append(textwrap.shorten(f"Checked: {trace.description}", WIDTH, placeholder=" ..."))
    return [*lines, f"Machine: {machine.name}"]


def _cycle(cycle: Sequence[Dependence], wording: Wording) -> list[str]:
    if not cycle:
        return []
    lines = ["The wait-for cycle (each operation waits for the one below, the last for the first):"]
    for dependence in _elided(cycle, MAX_CYCLE):
        if isinstance(dependence, int):
            lines.append(f"  ... {dependence} more of them ...")
            continue
        waiter = dependence.waiter
        lines += _wrapped(f"{wording.rank(waiter.rank)}: {wording.operation(waiter)}")
        if where := _where(waiter, wording, wording.group(waiter)):
            lines.append(f"    {where}")
        lines += _wrapped(dependence.reason.value, "    ")
    return lines


def _stuck(outcome: Outcome, wording: Wording) -> list[str]:
    if not outcome.stuck:
        return []
    lines = ["Where each rank is stuck:"]
    for issued in _elided(list(outcome.stuck.values()), MAX_STUCK):
        if isinstance(issued, int):
            lines.append(f"  ... {issued} more ranks ...")
        else:
            lines += _line(issued, wording)
    return lines


def _findings(outcome: Outcome, wording: Wording) -> list[str]:
    lines = []
    for verdict in Verdict:
        found = [finding for finding in outcome.findings if finding.verdict is verdict]
        limit = MAX_REMARKS if verdict.is_safe else MAX_FINDINGS
        for finding in found[:limit]:
            lines += _wrapped(f"{verdict.value}: {finding.detail}", "")
            for issued in finding.where:
                lines += _line(issued, wording)
        if len(found) > limit:
            lines.append("  ... and other such places")
    return lines


def _line(issued: Issued, wording: Wording) -> list[str]:
    text = f"{wording.rank(issued.rank)}: {wording.label(issued)} {_where(issued, wording)}"
    return _wrapped(text.rstrip())


def _where(issued: Issued, wording: Wording, *more: str | None) -> str:
    source = wording.place(issued).source
    parts = [wording.situation(issued), _short(source) if source else None, *more]
    known = "; ".join(filter(None, parts))
    return f"[{known}]" if known else ""


def _short(source: str) -> str:
    """Return the last part of the file's path, line, and last part of the function's name."""
    file, _, function = source.partition(" ")
    return f"{file.rpartition('/')[2]} {function.rpartition('.')[2]}".rstrip()


def _advice(trace: Trace, outcome: Outcome, machine: Machine) -> list[str]:
    if outcome.verdict.is_safe:
        return []
    if machine.coalesces or machine.is_host_only or not _has_batches(trace):
        return []
    return _wrapped(
        "Batches are issued one by one here, which makes the order inside them matter. Torch 2.7 "
        "to 2.10 do so under TORCH_DISTRIBUTED_DEBUG=DETAIL: unset it.",
        "",
    )


def _has_batches(trace: Trace) -> bool:
    return any(isinstance(operation, Batch) for program in trace.programs for operation in program)


def _counts(outcome: Outcome) -> str:
    counts = outcome.statistics
    return (
        f"Counted: {counts.operations:,} operations, {counts.messages:,} messages, "
        f"{counts.batches:,} batches, {counts.device_synchronisations:,} device-wide "
        f"synchronisations, {counts.communicators_in_schedule:,} communicators and connections "
        f"made in the schedule, {counts.head_of_line_waits:,} head-of-line waits."
    )


def _elided[Item](items: Sequence[Item], limit: int) -> list[Item | int]:
    """Return the items; past ``limit``, the number of those left out in place of the middle."""
    if len(items) <= limit:
        return list(items)
    tail = limit // 3
    head = limit - tail
    return [*items[:head], len(items) - limit, *items[len(items) - tail :]]


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
