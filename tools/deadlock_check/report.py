"""What a command prints: the verdict on every machine, and the most telling one explained."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from . import explain
from .check import Checked, is_safe, most_telling
from .outcome import Outcome, Verdict
from .trace import Trace

JSON_FORMAT = "deadlock-check-report"
JSON_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change to the configuration, and what comes of it on the same machines.

    Attributes:
        change: What the user would do.
        results: The outcomes with the change.
    """

    change: str
    results: Sequence[Checked]


def as_text(trace: Trace, results: Sequence[Checked], remedies: Sequence[Remedy] = ()) -> str:
    """Return the report for people.

    Args:
        trace: What was checked.
        results: Its outcomes.
        remedies: Changes that were tried.
    """
    told = most_telling(results)
    sections = [
        "\n".join(_row(result) for result in results),
        explain.as_text(trace, told.outcome, told.machine),
    ]
    if remedies:
        tried = [f"  {remedy.change}: {_summary(remedy.results)}" for remedy in remedies]
        sections.append(
            "\n".join(["What helps and what does not, checked in the same way:", *tried])
        )
    return "\n\n".join(sections)


def as_json(
    trace: Trace, results: Sequence[Checked], remedies: Sequence[Remedy] = ()
) -> dict[str, Any]:
    """Return the report for programs; ``docs/deadlock_check.md`` describes the fields.

    Takes the arguments of ``as_text``.
    """
    return {
        "format": JSON_FORMAT,
        "version": JSON_VERSION,
        "description": trace.description,
        "is_safe": is_safe(results),
        "machines": [explain.as_json(trace, result.outcome, result.machine) for result in results],
        "remedies": [
            {"change": remedy.change, "is_safe": is_safe(remedy.results)} for remedy in remedies
        ],
    }


def _row(result: Checked) -> str:
    kinds = ", ".join(verdict.value for verdict in _remarks(result.outcome))
    row = f"{result.outcome.verdict.value:<10}{result.machine.name}"
    return f"{row}  ({kinds})" if kinds else row


def _remarks(outcome: Outcome) -> list[Verdict]:
    found = {finding.verdict for finding in outcome.findings}
    return [verdict for verdict in Verdict if verdict in found and verdict is not outcome.verdict]


def _summary(results: Sequence[Checked]) -> str:
    unsafe = [result for result in results if not result.outcome.verdict.is_safe]
    if not unsafe:
        return f"safe on {len(results)} of {len(results)} machines"
    return f"{unsafe[0].outcome.verdict.value} on {len(unsafe)} of {len(results)} machines"
