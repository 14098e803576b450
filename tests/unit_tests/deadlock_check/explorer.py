"""Tries every interleaving of a small program: the independent check of the deadlock checker.

It shares the trace's data types with the model and nothing else. The model propagates a clock
through waits; this walks the graph of all states, one step of one host or of one kernel at a time,
and collects the states in which nothing can move.

What may happen next depends only on which steps the hosts have taken, which kernels have started
and which parts of them have completed. So programs are first compiled into steps and kernels, and
a state is that triple.
"""

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tools.deadlock_check.machine import Machine
from tools.deadlock_check.outcome import Issued
from tools.deadlock_check.trace import (
    SENDS_TO_RECEIVES,
    Batch,
    Collective,
    Compute,
    CreateGroup,
    Meet,
    Synchronize,
    Trace,
    Transfer,
    Wait,
)


class TooManyStates(Exception):
    """The program is too large to try everything."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """A state in which nothing can move.

    Attributes:
        stuck: Ranks whose host has steps left or whose device has work that has not ended.
        crossed: Send and receive, both posted, that name different messages or roles.
        missized: Send and receive of different sizes.
    """

    stuck: frozenset[int] = frozenset()
    crossed: frozenset[tuple[Issued, Issued]] = frozenset()
    missized: frozenset[tuple[Issued, Issued]] = frozenset()


def explore(trace: Trace, machine: Machine, most_states: int) -> set[Ending]:
    """Returns every way in which the programs can end.

    Raises:
        TooManyStates: There are more than ``most_states``.
    """
    job = _Job(trace, machine)
    first = _State((0,) * trace.world_size, 0, 0)
    seen = {first}
    todo = [first]
    endings = set()
    while todo:
        state = todo.pop()
        following = set(job.moves(state))
        if not following:
            endings.add(job.ending(state))
        todo += following - seen
        seen |= following
        if len(seen) > most_states:
            raise TooManyStates
    return endings


class _State(NamedTuple):
    positions: tuple[int, ...]
    """How many steps the host of each rank has taken."""
    started: int
    """Kernels, as bits."""
    completed: int
    """Parts of kernels, as bits."""


@dataclasses.dataclass(eq=False)
class _Part:
    """One transfer of a kernel, its share of a collective, or the work of a computation."""

    kernel: "_Kernel"
    issued: Issued
    transfer: Transfer | None = None
    partners: list["_Part"] = dataclasses.field(default_factory=list)
    """The other end of the transfer, or all shares of the collective, as far as programs have them.
    """
    partners_wanted: int = 0
    bit: int = 0


@dataclasses.dataclass(eq=False)
class _Kernel:
    """Work in a stream; also a wait that a stream does, and a message between hosts."""

    rank: int
    step: int
    """The host's step that launches it."""
    after: list["_Kernel"]
    """What must have ended before it starts."""
    behind: list["_Kernel"]
    """What must have started before it starts."""
    is_on_device: bool
    parts: list[_Part] = dataclasses.field(default_factory=list)
    bit: int = 0


@dataclasses.dataclass
class _Step:
    """One step of a host, and what it blocks for."""

    meetings: dict[Hashable, frozenset[int]] = dataclasses.field(default_factory=dict)
    """By meeting point: whom it takes. A rank is there once it is before the first such step."""
    kernels: list[_Kernel] = dataclasses.field(default_factory=list)
    """Kernels that must have ended."""


class _Host:
    """Compiles the program of one rank, following its host and its streams."""

    def __init__(self, trace: Trace, machine: Machine, rank: int) -> None:
        self.steps: list[_Step] = []
        self.kernels: list[_Kernel] = []
        self.transfers: list[tuple[Hashable, _Part]] = []
        """With their communicators, in posting order."""
        self.collectives: list[tuple[Hashable, _Part]] = []
        """With group and number in that group."""
        self._trace = trace
        self._machine = machine
        self._rank = rank
        self._requests: dict[int | None, list[_Kernel]] = defaultdict(list)
        self._streams: dict[Hashable, list[_Kernel]] = defaultdict(list)
        self._counts: Counter[Hashable] = Counter()
        self._connected: set[Hashable] = set()
        for index, operation in enumerate(trace.programs[rank]):
            self._issue(operation, Issued(rank, index))

    def _issue(self, operation: Any, issued: Issued) -> None:
        match operation:
            case Transfer():
                self._messages([(operation, issued)], is_batch=False)
            case Batch():
                parts = [
                    (transfer, Issued(self._rank, issued.index, part))
                    for part, transfer in enumerate(operation.transfers)
                ]
                if self._machine.coalesces and not self._is_on_host(operation.group):
                    self._messages(parts, is_batch=True)
                else:
                    for part in parts:
                        self._messages([part], is_batch=False)
            case Collective():
                self._collective(operation, issued)
            case Wait():
                self._wait(operation)
            case Synchronize():
                everything = [k for k in self.kernels if k.is_on_device]
                current = self._streams["current"]
                self._block(kernels=everything if operation.scope == "device" else current)
            case Compute():
                kernel = self._launch("current")
                kernel.parts.append(_Part(kernel, issued))
            case Meet():
                self._block({(operation.ranks, operation.name): frozenset(operation.ranks)})
            case CreateGroup():
                self._create_group(operation)

    def _messages(self, parts: list[tuple[Transfer, Issued]], is_batch: bool) -> None:
        first = parts[0][0]
        if self._is_on_host(first.group):
            communicator: Hashable = ("host", first.group)
            kernel = self._launch(None)
        else:
            communicator = self._communicator(first.group, None if is_batch else first.peer)
            self._connect(communicator, [transfer for transfer, _ in parts])
            kernel = self._launch(communicator)
        for transfer, issued in parts:
            part = _Part(kernel, issued, transfer, partners_wanted=1)
            kernel.parts.append(part)
            self.transfers.append((communicator, part))
        self._requests[first.request].append(kernel)

    def _communicator(self, group: str, peer: int | None) -> Hashable:
        """Returns the communicator of an operation, having blocked for it if it is not there."""
        premade = self._machine.communicators == "premade"
        is_bound = self._trace.groups[group].is_device_bound
        # A group that inherits no device is lazy, and a lazy group uses pairs in every release.
        is_lazy = not premade and not (self._machine.communicators == "eager" and is_bound)
        is_pair = peer is not None and (is_lazy or self._machine.pair_communicators)
        ranks = frozenset({self._rank, peer} if is_pair else self._trace.groups[group].ranks)
        is_there = premade or not (is_lazy or is_pair)
        communicator = (group, ranks, is_pair)
        if not is_there and communicator not in self._connected:
            self._connected.add(communicator)
            self._block({communicator: ranks})
        return communicator

    def _connect(self, communicator: Hashable, transfers: list[Transfer]) -> None:
        """Blocks for the links of the communicator that are used for the first time."""
        ends = [(self._rank, t.peer) if t.is_send else (t.peer, self._rank) for t in transfers]
        links: dict[Hashable, frozenset[int]] = {
            (communicator, pair): frozenset(pair) for pair in ends
        }
        new = {link: ranks for link, ranks in links.items() if link not in self._connected}
        self._connected.update(new)
        if new and self._machine.communicators != "premade":
            self._block(new)

    def _collective(self, collective: Collective, issued: Issued) -> None:
        is_on_host = self._is_on_host(collective.group)
        if is_on_host:
            kernel = self._launch(None)
        else:
            communicator = self._communicator(collective.group, None)
            kernel = self._launch(communicator if collective.is_async else "current")
        members = self._trace.groups[collective.group].ranks
        part = _Part(kernel, issued, partners_wanted=len(members))
        kernel.parts.append(part)
        self.collectives.append((self._next("collective", collective.group), part))
        if collective.is_async:
            self._requests[collective.request].append(kernel)
        elif is_on_host:
            self._block(kernels=[kernel])

    def _wait(self, wait: Wait) -> None:
        kernels = [kernel for request in wait.requests for kernel in self._requests[request]]
        blocks = wait.blocks_host or self._machine.blocking_wait
        awaited_by_host = [kernel for kernel in kernels if blocks or not kernel.is_on_device]
        awaited_by_stream = [kernel for kernel in kernels if kernel not in awaited_by_host]
        if awaited_by_host:
            self._block(kernels=awaited_by_host)
        if awaited_by_stream:
            self._launch("current", waits_for=awaited_by_stream)

    def _create_group(self, creation: CreateGroup) -> None:
        members = frozenset(self._trace.groups[creation.group].ranks)
        if self._is_on_host(creation.group):
            callers = members
        elif (
            self._machine.communicators == "eager"
            and self._trace.groups[creation.group].is_device_bound
        ):
            callers = members if creation.members_only else frozenset(range(self._trace.world_size))
        else:
            return
        if self._rank in callers:
            self._block({self._next("creation", creation.group): callers})

    def _block(
        self,
        meetings: dict[Hashable, frozenset[int]] | None = None,
        kernels: Sequence[_Kernel] = (),
    ) -> None:
        self.steps.append(_Step(meetings or {}, list(kernels)))

    def _launch(self, stream: Hashable, waits_for: Sequence[_Kernel] = ()) -> _Kernel:
        """Takes a step that puts a kernel into a stream, or starts a message between hosts.

        A kernel starts after what its stream and the current stream hold at this moment. One that
        waits for others is no kernel, but a mark in its stream, so it holds up no hardware queue.
        """
        after: list[_Kernel] = list(waits_for)
        behind: list[_Kernel] = []
        if stream is not None:
            after += self._streams[stream][-1:] + self._streams["current"][-1:]
            if self._machine.hardware_queues == "one" and not waits_for:
                behind = [kernel for kernel in self.kernels if kernel.is_on_device and kernel.parts]
        kernel = _Kernel(self._rank, len(self.steps), after, behind, stream is not None)
        self._block()
        self.kernels.append(kernel)
        if stream is not None:
            self._streams[stream].append(kernel)
        return kernel

    def _next(self, kind: str, group: str) -> Hashable:
        self._counts[kind, group] += 1
        return kind, group, self._counts[kind, group]

    def _is_on_host(self, group: str) -> bool:
        return self._machine.is_host_only or self._trace.groups[group].on_host


class _Job:
    """All ranks together: which moves a state allows."""

    def __init__(self, trace: Trace, machine: Machine) -> None:
        hosts = [_Host(trace, machine, rank) for rank in range(trace.world_size)]
        self._buffered_send_bytes = machine.buffered_send_bytes
        self._is_all_or_nothing = machine.batch_progress == "all-or-nothing"
        self._steps = [host.steps for host in hosts]
        self._kernels = [kernel for host in hosts for kernel in host.kernels]
        self._parts = [part for kernel in self._kernels for part in kernel.parts]
        for number, kernel in enumerate(self._kernels):
            kernel.bit = 1 << number
        for number, part in enumerate(self._parts):
            part.bit = 1 << number
        _match_transfers(itertools.chain.from_iterable(host.transfers for host in hosts))
        _match_collectives(itertools.chain.from_iterable(host.collectives for host in hosts))
        self._first_step_at = [_first_steps(host.steps) for host in hosts]

    def moves(self, state: _State) -> Iterator[_State]:
        """Yields what can follow a state."""
        for rank, position in enumerate(state.positions):
            if position < len(self._steps[rank]) and self._can_pass(state, rank, position):
                positions = (*state.positions[:rank], position + 1, *state.positions[rank + 1 :])
                yield state._replace(positions=positions)
        for kernel in self._kernels:
            if not state.started & kernel.bit and self._can_start(state, kernel):
                yield state._replace(started=state.started | kernel.bit)
        for part in self._parts:
            if not state.completed & part.bit and self._can_complete(state, part):
                yield state._replace(completed=state.completed | part.bit)

    def ending(self, state: _State) -> Ending:
        """Returns what an outsider sees of a state."""
        unfinished = {
            kernel.rank
            for kernel in self._kernels
            if kernel.is_on_device and _is_launched(state, kernel) and not _has_ended(state, kernel)
        }
        blocked = {r for r, steps in enumerate(self._steps) if state.positions[r] < len(steps)}
        pairs = [
            (part, part.partners[0])
            for part in self._parts
            if part.transfer and part.transfer.is_send and part.partners
            if _is_launched(state, part.kernel) and _is_launched(state, part.partners[0].kernel)
        ]
        return Ending(
            frozenset(unfinished | blocked),
            _issued(pair for pair in pairs if _is_crossed(*pair)),
            _issued(pair for pair in pairs if _is_missized(*pair)),
        )

    def _can_pass(self, state: _State, rank: int, position: int) -> bool:
        step = self._steps[rank][position]
        return all(_has_ended(state, kernel) for kernel in step.kernels) and all(
            state.positions[other] >= self._first_step_at[other].get(point, float("inf"))
            for point, ranks in step.meetings.items()
            for other in ranks
        )

    def _can_start(self, state: _State, kernel: _Kernel) -> bool:
        return (
            _is_launched(state, kernel)
            and all(_has_ended(state, before) for before in kernel.after)
            and all(state.started & before.bit for before in kernel.behind)
        )

    def _can_complete(self, state: _State, part: _Part) -> bool:
        if not state.started & part.kernel.bit:
            return False
        if not self._is_all_or_nothing or part.transfer is None:
            return self._is_served(state, part)
        tied = self._tied_kernels(part.kernel)
        return all(state.started & kernel.bit for kernel in tied) and all(
            self._is_served(state, other) for kernel in tied for other in kernel.parts
        )

    def _is_served(self, state: _State, part: _Part) -> bool:
        """Whether the others have done what the part needs of them."""
        return self._is_buffered(part) or (
            len(part.partners) == part.partners_wanted
            and all(state.started & partner.kernel.bit for partner in part.partners)
        )

    def _tied_kernels(self, kernel: _Kernel) -> set[_Kernel]:
        """Returns the kernels that end together; a buffered send ties nobody."""
        tied, todo = {kernel}, [kernel]
        while todo:
            for part in todo.pop().parts:
                for partner in part.partners:
                    is_tie = not (self._is_buffered(part) or self._is_buffered(partner))
                    if is_tie and partner.kernel not in tied:
                        tied.add(partner.kernel)
                        todo.append(partner.kernel)
        return tied

    def _is_buffered(self, part: _Part) -> bool:
        transfer = part.transfer
        return (
            transfer is not None
            and transfer.is_send
            and transfer.size is not None
            and transfer.size <= self._buffered_send_bytes
            and part.kernel.is_on_device
        )


def _match_transfers(posted: Iterable[tuple[Hashable, _Part]]) -> None:
    """Pairs the n-th send of a link with its n-th receive, as NCCL and gloo do without tags."""
    links: dict[Hashable, dict[bool, list[_Part]]] = defaultdict(lambda: {True: [], False: []})
    for communicator, part in posted:
        transfer, rank = _transfer(part), part.kernel.rank
        ends = (rank, transfer.peer) if transfer.is_send else (transfer.peer, rank)
        links[communicator, ends][transfer.is_send].append(part)
    for link in links.values():
        for send, receive in zip(link[True], link[False], strict=False):
            send.partners, receive.partners = [receive], [send]


def _match_collectives(issued: Iterable[tuple[Hashable, _Part]]) -> None:
    shares: dict[Hashable, list[_Part]] = defaultdict(list)
    for key, part in issued:
        part.partners = shares[key]
        shares[key].append(part)


def _first_steps(steps: list[_Step]) -> dict[Hashable, int]:
    first: dict[Hashable, int] = {}
    for position, step in enumerate(steps):
        for point in step.meetings:
            first.setdefault(point, position)
    return first


def _issued(pairs: Iterable[tuple[_Part, _Part]]) -> frozenset[tuple[Issued, Issued]]:
    return frozenset((send.issued, receive.issued) for send, receive in pairs)


def _is_launched(state: _State, kernel: _Kernel) -> bool:
    return state.positions[kernel.rank] > kernel.step


def _has_ended(state: _State, kernel: _Kernel) -> bool:
    return bool(state.started & kernel.bit) and all(
        state.completed & part.bit for part in kernel.parts
    )


def _is_crossed(send: _Part, receive: _Part) -> bool:
    sent, received = _transfer(send), _transfer(receive)
    roles, messages = (sent.role, received.role), (sent.message, received.message)
    return (None not in roles and SENDS_TO_RECEIVES[str(sent.role)] != received.role) or (
        None not in messages and sent.message != received.message
    )


def _is_missized(send: _Part, receive: _Part) -> bool:
    sizes = {_transfer(send).size, _transfer(receive).size}
    return len(sizes) == 2 and None not in sizes


def _transfer(part: _Part) -> Transfer:
    assert part.transfer is not None
    return part.transfer
