"""A machine that takes waits away never fails where the one with them passes.

The proof matrix rests on it: what passes on the hardest machines passes on those that are easier.
"""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit_tests.deadlock_check.test_against_explorer import MACHINES, traces
from tools.deadlock_check.model import run

EASIER = (
    {"hardware_queues": "many"},
    {"batch_progress": "per-peer"},
    {"buffered_send_bytes": 24},
    {"blocking_wait": False},
    {"hardware_queues": "many", "batch_progress": "per-peer", "blocking_wait": False},
)


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(traces(), MACHINES, st.sampled_from(EASIER))
def test_an_easier_machine_never_fails_where_a_harder_one_passes(trace, machine, changes):
    strict = dataclasses.replace(machine, buffered_send_bytes=0)
    harder = run(trace, strict)
    easier = run(trace, dataclasses.replace(strict, **changes))
    assert set(easier.stuck) <= set(harder.stuck)
    assert easier.verdict.is_safe or not harder.verdict.is_safe
