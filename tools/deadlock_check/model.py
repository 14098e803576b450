"""Runs a trace on a machine: which operations end, and what keeps the others from it.

The host of each rank goes through its program. What it launches on the device starts when the work
before it in its stream has ended and what the current stream waited for at that moment has ended;
messages are rendezvous. Nothing is guessed about speed: an operation ends in every execution or in
none, because every wait is for all of some events and no event is ever taken back.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from .events import Agenda, Gate
from .garbage_collection import no_garbage_collection
from .machine import Machine
from .matching import End, Findings, Matching, Work
from .outcome import Issued, Outcome, Reason, Span, Statistics, Verdict
from .state import Assembly, Host, HostMessage, Kernel, Rendezvous
from .trace import (
    Batch,
    Collective,
    Compute,
    CreateGroup,
    Group,
    Meet,
    Synchronize,
    Trace,
    Transfer,
    Wait,
)
from .wait_for import shortest_cycle

COMPUTE_DURATION = {"forward": 1.0, "backward": 2.0}
COLLECTIVE_DURATION = 0.05
END_OF_TIME = float("inf")
PROGRESS_STEP = 10_000

Blocks = Iterator[None]
"""The steps of a host: it yields wherever it blocks."""


def run(
    trace: Trace,
    machine: Machine,
    *,
    with_timeline: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> Outcome:
    """Decide what becomes of a trace.

    Args:
        trace: What the ranks issue.
        machine: How it is run.
        with_timeline: Fill ``Outcome.spans``.
        progress: Called now and then with the number of host operations run since the last call.

    Returns:
        The outcome. Time and memory grow linearly with the number of operations.
    """
    with no_garbage_collection():
        return _Run(trace, machine, with_timeline, progress).outcome()


class _Run:
    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        with_timeline: bool,
        progress: Callable[[int], None],
    ) -> None:
        self._trace = trace
        self._machine = machine
        self._progress = progress
        self._spans: list[Span] | None = [] if with_timeline else None
        self._agenda = Agenda()
        self._findings = Findings()
        self._statistics = Statistics()
        self._matching = Matching(
            self._agenda,
            self._findings,
            machine.buffered_send_bytes,
            machine.batch_progress == "all-or-nothing",
        )
        self._hosts = [Host(rank, machine.max_resident_kernels) for rank in range(trace.world_size)]
        self._assemblies: dict[Hashable, Assembly] = {}
        self._rendezvous: dict[tuple[str, int], Rendezvous] = {}

    def outcome(self) -> Outcome:
        self._run_hosts()
        self._note_what_never_meets()
        stuck = dict(self._stuck())
        cycle = shortest_cycle(self._hosts) if stuck else []
        counts = self._findings.counts
        self._statistics.operations = sum(host.issued.index for host in self._hosts)
        self._statistics.head_of_line_waits = counts[Verdict.SLOW]
        self._statistics.communicators_in_schedule = counts[Verdict.FIRST_USE]
        found = [v for v in (Verdict.CROSSED, Verdict.SIZE, Verdict.UNMATCHED) if counts[v]]
        if cycle:
            found.insert(0, Verdict.DEADLOCK)
        elif stuck:
            found.append(Verdict.UNMATCHED)
        return Outcome(
            verdict=found[0] if found else Verdict.PASS,
            findings=self._findings.kept,
            cycle=cycle,
            stuck=stuck,
            statistics=self._statistics,
            spans=self._all_spans(),
        )

    def _stuck(self) -> Iterator[tuple[int, Issued]]:
        for host in self._hosts:
            if not host.is_finished:
                yield host.rank, host.issued
            elif host.undone:
                yield host.rank, next(iter(host.undone)).issued

    def _note_what_never_meets(self) -> None:
        for end in self._matching.left_over():
            peer = end.transfer.peer
            if self._hosts[peer].is_finished:
                detail = f"rank {peer} never issues the matching operation"
                self._findings.add(Verdict.UNMATCHED, (end.issued,), detail)
        for rendezvous in self._rendezvous.values():
            absent = [rank for rank in rendezvous.ranks if rank not in rendezvous.parts]
            if any(self._hosts[rank].is_finished for rank in absent):
                work, _ = next(iter(rendezvous.parts.values()))
                detail = f"the ranks {absent} never issue it"
                self._findings.add(Verdict.UNMATCHED, (work.issued,), detail)

    def _all_spans(self) -> list[Span]:
        if self._spans is None:
            return []
        unfinished = [
            Span(kernel.issued, kernel.time, END_OF_TIME)
            for host in self._hosts
            for kernel in host.undone
        ]
        return self._spans + unfinished

    def _run_hosts(self) -> None:
        for host in self._hosts:
            host.resume = self._program(host)
            self._agenda.add(host)
        self._agenda.run()

    # The host

    def _program(self, host: Host) -> Blocks:
        unreported = 0
        for index, operation in enumerate(self._trace.programs[host.rank]):
            host.issued = Issued(host.rank, index)
            yield from _HANDLERS[type(operation)](self, host, index, operation)
            unreported += 1
            if unreported == PROGRESS_STEP:
                self._progress(unreported)
                unreported = 0
        host.issued = Issued(host.rank, len(self._trace.programs[host.rank]))
        self._progress(unreported)

    def _transfer(self, host: Host, index: int, transfer: Transfer) -> Blocks:
        group = self._trace.groups[transfer.group]
        self._statistics.messages += transfer.is_send
        if self._is_on_host(group):
            self._post_on_host(host, transfer)
            return
        communicator: Hashable = group.name
        members = group.ranks
        if self._uses_pair_communicator(group):
            members = (min(host.rank, transfer.peer), max(host.rank, transfer.peer))
            communicator = (group.name, *members)
        yield from self._join_communicator(host, group, communicator, members)
        yield from self._connect(host, communicator, [transfer])
        kernel = self._launch(host, communicator)
        kernel.transfer = transfer
        self._post(kernel, transfer, host.issued, communicator)
        self._enqueue(kernel)

    def _batch(self, host: Host, index: int, batch: Batch) -> Blocks:
        group = self._trace.groups[batch.group]
        if self._is_on_host(group) or not self._machine.coalesces:
            for part, transfer in enumerate(batch.transfers):
                host.issued = Issued(host.rank, index, part)
                yield from self._transfer(host, index, transfer)
            return
        self._statistics.batches += 1
        self._statistics.messages += sum(transfer.is_send for transfer in batch.transfers)
        yield from self._join_communicator(host, group, group.name, group.ranks)
        yield from self._connect(host, group.name, batch.transfers)
        kernel = self._launch(host, group.name)
        for part, transfer in enumerate(batch.transfers):
            self._post(kernel, transfer, Issued(host.rank, index, part), group.name)
        self._enqueue(kernel)

    def _wait(self, host: Host, index: int, wait: Wait) -> Blocks:
        blocks = wait.blocks_host or self._machine.blocking_wait
        for request in wait.requests:
            for work in host.requests.pop(request, ()):
                if blocks or isinstance(work, HostMessage):
                    host.wait_for(work.done, Reason.WAITS_FOR_WORK)
                else:
                    self._add_to_current(host, work)
        if host.pending:
            yield

    def _synchronize(self, host: Host, index: int, synchronize: Synchronize) -> Blocks:
        if synchronize.scope == "device":
            self._statistics.device_synchronisations += 1
            for kernel in host.undone:
                host.wait_for(kernel.done, Reason.WAITS_FOR_WORK)
        for work in self._undone_of_current(host):
            host.wait_for(work.done, Reason.WAITS_FOR_WORK)
        if host.pending:
            yield
        host.time = max(host.time, host.current_time)

    def _collective(self, host: Host, index: int, collective: Collective) -> Blocks:
        group = self._trace.groups[collective.group]
        work: Kernel | HostMessage
        if self._is_on_host(group):
            work = HostMessage(host)
        else:
            yield from self._join_communicator(host, group, group.name, group.ranks)
            work = self._launch(host, group.name if collective.is_async else None)
        work.rendezvous = self._join_rendezvous(host, group, collective, work)
        blocks_host = collective.name == "barrier" or isinstance(work, HostMessage)
        if isinstance(work, Kernel):
            self._enqueue(work)
        else:
            work.rendezvous.start(host.time, self._agenda, COLLECTIVE_DURATION)
        if collective.is_async:
            self._remember(host, collective.request, work)
        elif blocks_host:
            host.wait_for(work.done, Reason.WAITS_FOR_WORK)
            if host.pending:
                yield
        else:
            host.current = [work]

    def _create_group(self, host: Host, index: int, creation: CreateGroup) -> Blocks:
        group = self._trace.groups[creation.group]
        is_member = host.rank in group.ranks
        splits_world = (
            self._machine.communicators == "eager"
            and group.is_device_bound
            and not self._machine.is_host_only
        )
        if is_member and self._is_on_host(group):
            assembly = self._arrive(host, ("group", group.name), group.ranks)
        elif splits_world and (is_member or not creation.members_only):
            everybody = range(self._trace.world_size)
            members = group.ranks if creation.members_only else everybody
            name = group.name if creation.members_only else host.splits
            host.splits += not creation.members_only
            assembly = self._arrive(host, ("split", name), members)
        else:
            return
        host.wait_for(assembly.gate, Reason.CREATES_COMMUNICATOR)
        if host.pending:
            yield

    def _meet(self, host: Host, index: int, meeting: Meet) -> Blocks:
        assembly = self._arrive(host, ("meeting", meeting.name, meeting.ranks), meeting.ranks)
        host.wait_for(assembly.gate, Reason.MEETS)
        if host.pending:
            yield

    def _compute(self, host: Host, index: int, compute: Compute) -> Blocks:
        kernel = self._launch(host, None)
        kernel.duration = COMPUTE_DURATION[compute.direction]
        self._enqueue(kernel)
        host.current = [kernel]
        yield from ()

    # Communicators

    def _is_on_host(self, group: Group) -> bool:
        return group.on_host or self._machine.is_host_only

    def _is_eager(self, group: Group) -> bool:
        return self._machine.communicators == "premade" or (
            self._machine.communicators == "eager" and group.is_device_bound
        )

    def _uses_pair_communicator(self, group: Group) -> bool:
        return self._machine.pair_communicators or not self._is_eager(group)

    def _join_communicator(
        self, host: Host, group: Group, communicator: Hashable, members: Sequence[int]
    ) -> Blocks:
        is_full = communicator == group.name
        if self._machine.communicators == "premade" or (is_full and self._is_eager(group)):
            return
        key = ("communicator", communicator)
        if key not in self._assemblies:
            which = "" if is_full else "two-rank "
            self._note_first_use(
                host,
                f"the {which}communicator of group {group.name} is made here, which blocks the "
                f"hosts of the ranks {list(members)} until all have joined",
            )
        assembly = self._arrive(host, key, members)
        if assembly.gate.time is None:
            host.wait_for(assembly.gate, Reason.CREATES_COMMUNICATOR)
            yield

    def _connect(self, host: Host, communicator: Hashable, transfers: Sequence[Transfer]) -> Blocks:
        if self._machine.communicators == "premade":
            return
        for transfer in transfers:
            ends = (host.rank, transfer.peer)
            source, target = ends if transfer.is_send else reversed(ends)
            key = ("connection", communicator, source, target)
            if key not in self._assemblies:
                self._note_first_use(
                    host,
                    f"the connection from rank {source} to rank {target} is made here, which "
                    "blocks the hosts of both until the matching operation is issued",
                )
            assembly = self._arrive(host, key, (source, target))
            if assembly.gate.time is None:
                host.wait_for(assembly.gate, Reason.CONNECTS)
        if host.pending:
            yield

    def _arrive(self, host: Host, key: Hashable, ranks: Sequence[int]) -> Assembly:
        assembly = self._assemblies.get(key)
        if assembly is None:
            assembly = self._assemblies[key] = Assembly(ranks)
        assembly.arrive(host, self._agenda)
        return assembly

    def _note_first_use(self, host: Host, detail: str) -> None:
        operation = host.issued.operation(self._trace)
        assert operation is not None
        if operation.place.phase != "startup":
            self._findings.add(Verdict.FIRST_USE, (host.issued,), detail)

    # The device

    def _launch(self, host: Host, communicator: Hashable | None) -> Kernel:
        """Make a kernel on the stream of a communicator, or on the current one for ``None``."""
        undone = self._undone_of_current(host)
        kernel = Kernel(host, self)
        for work in undone:
            kernel.wait_for(work.done, Reason.WAITS_FOR_STREAM)
        if communicator is not None:
            tail = host.stream_tail.get(communicator)
            if tail is not None:
                kernel.behind = tail
                if tail.done.time is None:
                    kernel.wait_for(tail.done, Reason.BEHIND_IN_STREAM)
            host.stream_tail[communicator] = kernel
        return kernel

    def _enqueue(self, kernel: Kernel) -> None:
        host = kernel.host
        if self._machine.hardware_queues == "one":
            if host.latest_launch is not None:
                kernel.wait_for(host.latest_launch.started, Reason.BEHIND_IN_QUEUE)
            host.latest_launch = kernel
        if host.free_slots is not None:
            if host.free_slots:
                host.free_slots -= 1
            else:
                slot = Gate(host)
                host.slot_queue.append(slot)
                kernel.wait_for(slot, Reason.BEHIND_RESIDENT)
        host.undone[kernel] = None
        self._agenda.add(kernel)

    def start(self, kernel: Kernel) -> None:
        time = kernel.time
        if kernel.behind is not None:
            time = max(time, kernel.behind.done.time)
        kernel.awaited.clear()
        self._agenda.open(kernel.started, time)
        if kernel.duration is not None:
            kernel.finish(self._agenda, time + kernel.duration)
        elif kernel.rendezvous is not None:
            kernel.rendezvous.start(time, self._agenda, COLLECTIVE_DURATION)
        else:
            self._matching.start(kernel)

    def finish(self, kernel: Kernel, time: float) -> None:
        host = kernel.host
        del host.undone[kernel]
        if host.slot_queue:
            self._agenda.open(host.slot_queue.popleft(), time)
        elif host.free_slots is not None:
            host.free_slots += 1
        self._statistics.duration = max(self._statistics.duration, time)
        if self._spans is not None and kernel.started.time is not None:
            self._spans.append(Span(kernel.issued, kernel.started.time, time))
        self._note_head_of_line_wait(kernel)

    def _note_head_of_line_wait(self, kernel: Kernel) -> None:
        if kernel.behind is None or kernel.transfer is None:
            return
        before = kernel.behind
        ours, theirs, partner = kernel.transfer, before.transfer, kernel.ends[0].partner
        if theirs is None or partner is None:
            return
        if (ours.peer, ours.is_send) == (theirs.peer, theirs.is_send):
            return
        could_start = max(kernel.time, partner.work.started.time or 0.0)
        if before.done.time > could_start:
            self._findings.add(
                Verdict.SLOW,
                (kernel.issued, before.issued),
                "both ends were ready, but the message before it in the stream, which goes another "
                "way, had not ended",
            )

    # What both have

    def _post_on_host(self, host: Host, transfer: Transfer) -> None:
        message = HostMessage(host)
        self._post(message, transfer, host.issued, transfer.group)
        self._matching.start(message)

    def _post(self, work: Work, transfer: Transfer, issued: Issued, communicator: Hashable) -> None:
        self._remember(self._hosts[issued.rank], transfer.request, work)
        end = End(work, transfer, issued)
        self._matching.post(end, communicator, isinstance(work, HostMessage))

    def _remember(self, host: Host, request: int | None, work: Work) -> None:
        if request is None:
            return
        works = host.requests.setdefault(request, [])
        if work not in works:
            works.append(work)

    def _join_rendezvous(
        self, host: Host, group: Group, collective: Collective, work: Work
    ) -> Rendezvous:
        key = (group.name, host.collectives[group.name])
        host.collectives[group.name] += 1
        rendezvous = self._rendezvous.setdefault(key, Rendezvous(group.ranks))
        for other, theirs in rendezvous.parts.values():
            if theirs.name != collective.name:
                self._findings.add(
                    Verdict.CROSSED,
                    (other.issued, work.issued),
                    f"{theirs.name} on one rank meets {collective.name} on another",
                )
                break
        rendezvous.parts[host.rank] = (work, collective)
        if len(rendezvous.parts) == len(group.ranks):
            del self._rendezvous[key]
        return rendezvous

    def _undone_of_current(self, host: Host) -> list[Work]:
        undone = []
        for work in host.current:
            if work.done.time is None:
                undone.append(work)
            else:
                host.current_time = max(host.current_time, work.done.time)
        host.current = undone
        return undone

    def _add_to_current(self, host: Host, work: Work) -> None:
        if work.done.time is None:
            host.current.append(work)
        else:
            host.current_time = max(host.current_time, work.done.time)


_HANDLERS: dict[type, Callable[[_Run, Host, int, Any], Blocks]] = {
    Transfer: _Run._transfer,
    Batch: _Run._batch,
    Wait: _Run._wait,
    Synchronize: _Run._synchronize,
    Collective: _Run._collective,
    CreateGroup: _Run._create_group,
    Meet: _Run._meet,
    Compute: _Run._compute,
}
