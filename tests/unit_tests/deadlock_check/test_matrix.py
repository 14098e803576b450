"""docs/support_matrix.md says what a fresh check says."""

import itertools
from pathlib import Path

import pytest

from tools.deadlock_check import matrix
from tools.deadlock_check.check import Checked
from tools.deadlock_check.machine import SMALL_SEND_BYTES, Machine
from tools.deadlock_check.outcome import Outcome, Statistics, Verdict

DOCUMENT = Path(__file__).parents[3] / "docs" / "support_matrix.md"


SETTINGS = [setting.name for setting in matrix.SETTINGS]


def columns_of(title):
    """Returns implementation and setting of every column that was merged under a title."""
    for part in title.split("; "):
        implementation, _, settings = part.partition(": ")
        for setting in settings.split(", ") if settings else SETTINGS:
            yield implementation, setting


def documented_verdicts():
    """Returns the first table, its merged rows and columns taken apart."""
    table = DOCUMENT.read_text().split("\n\n| ")[1].split("\n\n")[0]
    titles, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {
        (dimensions, column): verdict
        for row in rows
        for dimensions in itertools.product(*(values.split(", ") for values in row[:5]))
        for title, verdict in zip(titles[5:], row[5:], strict=True)
        for column in columns_of(title)
    }


@pytest.mark.parametrize(
    ("case", "dimensions"),
    [
        (matrix.Case(4, 1, 4, True, False), ("4", "1", "variable", "off", "PP")),
        (matrix.Case(2, 2, 4, False, False), ("2", "2", "fixed", "off", "2 PP")),
    ],
)
def test_the_document_holds_what_a_fresh_check_finds(case, dimensions):
    (row,) = matrix.check_cases([case])
    documented = documented_verdicts()
    assert row.cells == {
        column: documented[dimensions, column]
        for column in itertools.product(("base", "fork"), SETTINGS)
    }
    assert len(set(row.cells.values())) > 1


def test_the_document_has_every_case():
    cases = len(matrix.table_cases())
    assert len(documented_verdicts()) == cases * 2 * len(SETTINGS)


def found(verdict, **axes):
    return Checked(Machine(**axes), Outcome(verdict, [], [], {}, Statistics(), []))


def test_a_cell_says_which_machines_are_unsafe():
    strict, lucky = {"buffered_send_bytes": 0}, {"buffered_send_bytes": SMALL_SEND_BYTES}
    one, many = {"hardware_queues": "one"}, {"hardware_queues": "many"}
    only_strict = [found(Verdict.DEADLOCK, **strict, **queues) for queues in (one, many)]
    only_strict += [found(Verdict.PASS, **lucky, **queues) for queues in (one, many)]
    assert matrix.verdict_in_words(only_strict) == "DEADLOCK (strict rendezvous)"
    assert matrix.verdict_in_words(only_strict[:2]) == "DEADLOCK"
    assert matrix.verdict_in_words(only_strict[2:]) == "PASS"
    mixed = [found(Verdict.CROSSED, **many), found(Verdict.DEADLOCK, **one)]
    assert matrix.verdict_in_words(mixed) == "DEADLOCK, CROSSED"
