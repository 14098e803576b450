"""The model agrees with the explorer of all interleavings on small random programs.

A program begins as a job that makes sense: messages, collectives, meetings and the like in one
order, which every rank follows. It is then disturbed: operations of a rank change places or are
left out, and neighbours are gathered into batches. Some of what comes out ends, some does not.

``EXPLORER_EXAMPLES=20000`` tries that many new programs instead of the same few hundred.
"""

import contextlib
import itertools
import os

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.unit_tests.deadlock_check.explorer import Ending, TooManyStates, explore
from tools.deadlock_check.machine import GLOO, Machine
from tools.deadlock_check.model import run
from tools.deadlock_check.outcome import Issued, Outcome, Verdict
from tools.deadlock_check.pattern import parse_pattern
from tools.deadlock_check.trace import (
    SENDS_TO_RECEIVES,
    Batch,
    Collective,
    Compute,
    CreateGroup,
    Group,
    Meet,
    Operation,
    Synchronize,
    Trace,
    Transfer,
    Wait,
)

NEW_EXAMPLES = os.environ.get("EXPLORER_EXAMPLES")

MOST_STATES = 20_000
MOST_OPERATIONS = 12

SMALL, LARGE = 24, 4096

MACHINES = st.builds(
    Machine,
    coalesces=st.booleans(),
    communicators=st.sampled_from(("premade", "premade", "premade", "eager", "lazy")),
    pair_communicators=st.booleans(),
    buffered_send_bytes=st.sampled_from((0, SMALL)),
    hardware_queues=st.sampled_from(("many", "one")),
    blocking_wait=st.sampled_from((False, False, False, True)),
    batch_progress=st.sampled_from(("per-peer", "all-or-nothing")),
    is_host_only=st.sampled_from((False, False, False, False, True)),
)

Programs = list[list[Operation]]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    ranks = tuple(range(draw(st.integers(2, 3))))
    groups = [
        Group("W", ranks),
        Group("P", draw(st.sampled_from((ranks, ranks[:2], ranks[-2:])))),
        Group("U", ranks, is_device_bound=False),
        Group("H", ranks, on_host=True),
    ]
    used = draw(st.sampled_from((groups[:1], groups[:2], groups)))
    kinds = draw(st.sampled_from(((_add_message,), (*[_add_message] * 5, *_OTHERS))))
    programs: Programs = [[] for _ in ranks]
    for number in range(draw(st.integers(2, 5))):
        add = draw(st.sampled_from(kinds))
        add(draw, programs, draw(st.sampled_from(used)), number)
    if draw(st.booleans()):
        programs = [draw(st.permutations(program)) for program in programs]
    else:
        for _ in range(draw(st.integers(0, 5))):
            _disturb(draw, draw(st.sampled_from(programs)))
    hypothesis.assume(sum(map(len, programs)) <= MOST_OPERATIONS)
    finished = [_with_requests(_with_batches(draw, program)) for program in programs]
    return Trace({group.name: group for group in groups}, finished)


def _add_message(draw: st.DrawFn, programs: Programs, group: Group, number: int) -> None:
    source, destination = draw(st.permutations(group.ranks))[:2]
    size = draw(st.sampled_from((SMALL, LARGE, None)))
    other_size = draw(st.sampled_from((size, size, size, LARGE)))
    role, other_role = draw(st.sampled_from((*SENDS_TO_RECEIVES.items(), (None, None))))
    message = draw(st.sampled_from((f"message {number}", None)))
    send = Transfer(True, group.name, destination, size, role, message=message)
    receive = Transfer(False, group.name, source, other_size, other_role, message=message)
    programs[source].append(send)
    programs[destination].append(receive)
    for program in (programs[source], programs[destination]):
        if draw(st.integers(0, 2)) == 0:
            program.append(Wait(()))


def _add_collective(draw: st.DrawFn, programs: Programs, group: Group, number: int) -> None:
    is_async = draw(st.booleans())
    for rank in group.ranks:
        programs[rank].append(Collective("all_reduce", group.name, is_async))


def _add_meeting(draw: st.DrawFn, programs: Programs, group: Group, number: int) -> None:
    for rank in group.ranks:
        programs[rank].append(Meet(group.ranks, f"meeting {number}"))


def _add_creation(draw: st.DrawFn, programs: Programs, group: Group, number: int) -> None:
    creation = CreateGroup(group.name, members_only=draw(st.booleans()))
    is_new = all(getattr(o, "group", None) != group.name for o in itertools.chain(*programs))
    for program in programs if is_new else ():
        program.append(creation)


def _add_lone_operation(draw: st.DrawFn, programs: Programs, group: Group, number: int) -> None:
    lone: list[Operation] = [
        Compute("forward"),
        Synchronize("device"),
        Synchronize("stream"),
        Wait((), blocks_host=False),
        Wait((), blocks_host=True),
    ]
    draw(st.sampled_from(programs)).append(draw(st.sampled_from(lone)))


_OTHERS = (_add_collective, _add_meeting, _add_creation, _add_lone_operation, _add_lone_operation)


def _disturb(draw: st.DrawFn, program: list[Operation]) -> None:
    """Moves an operation behind the next one, or leaves it out."""
    if len(program) >= 2:
        place = draw(st.integers(0, len(program) - 2))
        taken = program.pop(place)
        if draw(st.integers(0, 3)):
            program.insert(place + 1, taken)


def _with_batches(draw: st.DrawFn, program: list[Operation]) -> list[Operation]:
    """Gathers some neighbouring transfers."""
    result: list[Operation] = []
    for operation in program:
        last = result[-1] if result else None
        if not isinstance(operation, Transfer) or not draw(st.booleans()):
            result.append(operation)
        elif isinstance(last, Batch) and last.group == operation.group:
            last.transfers.append(operation)
        else:
            result.append(Batch(operation.group, [operation]))
    return result


def _with_requests(program: list[Operation]) -> list[Operation]:
    """Numbers the requests; each wait is for all that are open. One for nothing is left out."""
    numbers = itertools.count()
    open_requests: list[int] = []
    result: list[Operation] = []
    for operation in program:
        if isinstance(operation, Wait):
            operation = Wait(tuple(open_requests), operation.blocks_host)
            open_requests.clear()
            if not operation.requests:
                continue
        elif isinstance(operation, Transfer | Batch) or (
            isinstance(operation, Collective) and operation.is_async
        ):
            open_requests.append(next(numbers))
            for part in operation.transfers if isinstance(operation, Batch) else (operation,):
                part.request = open_requests[-1]
        result.append(operation)
    return result


def _pairs(outcome: Outcome, verdict: Verdict) -> set[tuple[Issued, ...]]:
    """Returns send and receive of each such finding."""
    return {finding.where for finding in outcome.findings if finding.verdict is verdict}


def check(trace: Trace, machine: Machine) -> Ending:
    """Fails if the model and the explorer differ; returns how the programs end."""
    (ending,) = explore(trace, machine, MOST_STATES)
    outcome = run(trace, machine)
    assert set(outcome.stuck) == ending.stuck
    assert _pairs(outcome, Verdict.CROSSED) == ending.crossed
    assert _pairs(outcome, Verdict.SIZE) == ending.missized
    if ending != Ending():
        assert not outcome.verdict.is_safe
    if outcome.verdict is Verdict.DEADLOCK:
        assert ending.stuck
    return ending


@hypothesis.settings(
    max_examples=int(NEW_EXAMPLES or 500),
    derandomize=NEW_EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(traces(), MACHINES)
def test_model_says_what_every_interleaving_does(trace: Trace, machine: Machine):
    with contextlib.suppress(TooManyStates):
        check(trace, machine)


@pytest.mark.parametrize(
    ("pattern", "finishing", "hanging"),
    [
        pytest.param(
            "0: {s1, r1}; w\n1: {s0, r0}; w", Machine(), Machine(coalesces=False), id="batches"
        ),
        pytest.param(
            "0: {s1, r2}; w\n1: r0; w; s2; w\n2: r1; w; s0; w",
            Machine(),
            Machine(batch_progress="all-or-nothing"),
            id="progress of batches",
        ),
        pytest.param(
            "0: s1; r2; w\n1: s2; r0; w\n2: s0; r1; w",
            Machine(pair_communicators=True),
            Machine(),
            id="communicators of pairs",
        ),
        pytest.param(
            "groups: P = 0 1; Q = 0 1\n0: AR*(P); AR*(Q); w\n1: AR*(Q); AR*(P); w",
            Machine(communicators="eager"),
            Machine(communicators="lazy"),
            id="communicators at first use",
        ),
        pytest.param(
            "groups: P = 0 1\n0: s1; s1(P); w\n1: r0(P); r0; w",
            Machine(),
            Machine(communicators="eager"),
            id="connections at first contact",
        ),
        pytest.param(
            "0: s1(24); r1(24); w\n1: s0(24); r0(24); w",
            Machine(buffered_send_bytes=24),
            Machine(buffered_send_bytes=23),
            id="buffered sends",
        ),
        pytest.param(
            "groups: P = 0 1\n0: s1; s1; r1(P); w\n1: s0(P); w; r0; r0; w",
            Machine(),
            Machine(hardware_queues="one"),
            id="one hardware queue",
        ),
        pytest.param(
            "groups: H = host 0 1\n0: s1; w; s1(H)\n1: r0(H); w; r0; w",
            Machine(),
            Machine(blocking_wait=True),
            id="waits that block the host",
        ),
        pytest.param("0: s1; r1; w\n1: s0; r0; w", GLOO, Machine(), id="messages between hosts"),
    ],
)
def test_they_agree_where_one_rule_decides(pattern: str, finishing: Machine, hanging: Machine):
    trace = parse_pattern(pattern, "a test")
    assert check(trace, finishing) == Ending()
    assert check(trace, hanging).stuck == set(range(trace.world_size))
