"""The wait-for graph of a run that came to a stop.

Every wait is for all of some events, so any cycle in the graph is a deadlock. Its nodes are hosts
that are blocked and work that has not ended.
"""

import collections
from collections.abc import Iterator, Sequence

from .matching import End, Work
from .outcome import Dependence, Reason
from .state import Assembly, Host, HostMessage, Kernel

Node = Host | Work
Edge = tuple[Reason, Node]


def shortest_cycle(hosts: Sequence[Host]) -> list[Dependence]:
    """Return a cycle of the graph, each target the next waiter; empty if there is none.

    Args:
        hosts: Of all ranks, by rank, after the run.
    """
    edges = _Edges(hosts)
    found = _any_cycle(hosts, edges)
    candidates = [_cycle_through(node, edges) for node in found[:MAX_STARTS]]
    shortest = min(candidates, key=len, default=[])
    return [Dependence(node.issued, reason, target.issued) for node, reason, target in shortest]


MAX_STARTS = 64
"""Of how many nodes of the first cycle the shortest cycle through them is looked for."""


class _Edges:
    """What each node waits for."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts

    def of(self, node: Node) -> Iterator[Edge]:
        if isinstance(node, Host):
            if not node.is_finished:
                yield from self._of_waiter(node)
        elif node.started.time is None:
            yield from self._of_waiter(node)
        elif node.done.time is None:
            yield from self._of_started(node)

    def _of_waiter(self, node: Node) -> Iterator[Edge]:
        for gate, reason in node.awaited:
            if gate.time is not None:
                continue
            owner = gate.owner
            if isinstance(owner, Assembly):
                for rank in sorted(owner.absent):
                    yield reason, self._hosts[rank]
            elif isinstance(owner, Host):
                for kernel in owner.undone:
                    if kernel is not node:
                        yield reason, kernel
            else:
                yield reason, owner

    def _of_started(self, work: Work) -> Iterator[Edge]:
        if isinstance(work, Kernel | HostMessage) and work.rendezvous is not None:
            for rank in work.rendezvous.ranks:
                part = work.rendezvous.parts.get(rank)
                if part is None:
                    yield Reason.NEEDS_MEMBER, self._hosts[rank]
                elif part[0].started.time is None:
                    yield Reason.NEEDS_PARTNER, part[0]
        elif work.component is not None:
            for tied in work.component.works:
                if tied.started.time is None:
                    yield Reason.NEEDS_WHOLE_BATCH, tied
                for reason, node in self._of_ends(tied.ends):
                    yield reason if tied is work else Reason.NEEDS_WHOLE_BATCH, node
        else:
            yield from self._of_ends(work.ends)

    def _of_ends(self, ends: Sequence[End]) -> Iterator[Edge]:
        for end in ends:
            if end.is_complete:
                continue
            if end.partner is None:
                yield Reason.NEEDS_POSTED, self._hosts[end.transfer.peer]
            elif end.partner.work.started.time is None:
                yield Reason.NEEDS_PARTNER, end.partner.work


def _any_cycle(hosts: Sequence[Host], edges: _Edges) -> list[Node]:
    """Return the nodes of the first cycle that a depth-first search closes."""
    on_path, finished = set[Node](), set[Node]()
    roots: list[Node] = [*hosts, *(kernel for host in hosts for kernel in host.undone)]
    for root in roots:
        if root in finished:
            continue
        path: list[Node] = [root]
        branches = [edges.of(root)]
        on_path.add(root)
        while path:
            reason_and_node = next(branches[-1], None)
            if reason_and_node is None:
                node = path.pop()
                branches.pop()
                on_path.remove(node)
                finished.add(node)
                continue
            node = reason_and_node[1]
            if node in on_path:
                return path[path.index(node) :]
            if node not in finished:
                path.append(node)
                branches.append(edges.of(node))
                on_path.add(node)
    return []


def _cycle_through(start: Node, edges: _Edges) -> list[tuple[Node, Reason, Node]]:
    """Return the shortest cycle through a node that is on one, by breadth-first search."""
    came_by: dict[Node, tuple[Node, Reason, Node]] = {}
    queue: collections.deque[Node] = collections.deque([start])
    while start not in came_by:
        node = queue.popleft()
        for reason, target in edges.of(node):
            if target not in came_by:
                came_by[target] = (node, reason, target)
                queue.append(target)
    cycle = [came_by[start]]
    while cycle[0][0] is not start:
        cycle.insert(0, came_by[cycle[0][0]])
    return cycle
