"""Describes what one rank asks of torch.distributed as operations of a trace."""

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .call_site import CallSites
from .trace import Group, Meet, Operation, Phase, Place, Transfer, Wait

WORLD = "W"

MOVED_ON_DEVICE = "_was_moved_on_device"
"""Attribute of tensors that the device has sent or received: they are on it, so that the host waits
for the current stream when it reads them."""


class Recorder:
    """Describes the operations of the rank that the calling process is.

    Args:
        emit: Takes each operation.
        declare: Takes each process group before the first operation on it.

    Attributes:
        emit: As given.
        phase: Phase of the schedule in which the rank is now.
        thread: What is particular to the calling thread.
        requests: The numbers of the requests to come.
    """

    def __init__(self, emit: Callable[[Operation], None], declare: Callable[[Group], None]) -> None:
        self.emit = emit
        self.phase: Phase | None = "startup"
        self.thread = _ThreadState()
        self.requests = itertools.count()
        self._declare = declare
        self._call_sites = CallSites()
        self._names: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
        self._host_groups: set[str] = set()
        self._groups_created = 0
        self._local_groups_created: Counter[tuple[int, ...]] = Counter()
        self._meetings: Counter[tuple[tuple[int, ...], str]] = Counter()

    def declare_world(self) -> None:
        """Declare the default group; to be called once it is initialised, before any operation."""
        ranks = tuple(range(dist.get_world_size()))
        self._declare(Group(WORLD, ranks, is_device_bound=is_device_bound()))

    def declare_new(
        self, ranks: Sequence[int], description: str | None, is_local: bool, **attributes: bool
    ) -> str:
        """Declare a group that is about to be created.

        Args:
            ranks: Global ranks of its members.
            description: What the caller calls it.
            is_local: Whether its members alone create it.
            attributes: Further ones of ``Group``.

        Returns:
            A name, at which every rank that takes part in the creation arrives.
        """
        members = tuple(ranks)
        name = description or "group"
        if is_local:
            self._local_groups_created[members] += 1
            name += f" of {'-'.join(map(str, members))} #{self._local_groups_created[members]}"
        else:
            self._groups_created += 1
            name += f" #{self._groups_created}"
        group = Group(name, members, **attributes)
        self._declare(group)
        if group.on_host:
            self._host_groups.add(name)
        return name

    def set_name(self, group: dist.ProcessGroup, name: str) -> None:
        """Tell the name of a group that has been created."""
        self._names[group] = name

    def name(self, group: dist.ProcessGroup | None) -> str:
        """Return the name of a group; ``None`` stands for the default one."""
        if group is None or group is dist.group.WORLD:
            return WORLD
        name = self._names.get(group)
        if name is None:
            # It was made past the hooks.
            name = self._names[group] = f"group {group.group_name}"
            ranks = tuple(dist.get_process_group_ranks(group))
            is_bound = group.bound_device_id is not None
            self._declare(Group(name, ranks, is_device_bound=is_bound))
        return name

    def place(self) -> Place:
        """Return the place of the innermost call, from that of the caller up, for the user."""
        return self._call_sites.find(sys._getframe(2)).place(self.phase)

    def transfers(
        self, posts: Sequence[tuple[bool, torch.Tensor, int]], group: dist.ProcessGroup | None
    ) -> tuple[list[Transfer], list[int]]:
        """Describe transfers that the caller's caller issues at once.

        Args:
            posts: For each: whether it sends, the tensor, the global rank of the other end.
            group: Their group.

        Returns:
            The transfers, and their requests.
        """
        site = self._call_sites.find(sys._getframe(2))
        place = site.place(self.phase)
        name = self.name(group)
        is_on_device = name not in self._host_groups
        roles = site.roles([tensor for _, tensor, _ in posts])
        requests = [next(self.requests) for _ in posts]
        transfers = []
        for (is_send, tensor, peer), role, request in zip(posts, roles, requests, strict=True):
            if is_on_device:
                setattr(tensor, MOVED_ON_DEVICE, True)
            content = None if role is None else site.content()
            transfers.append(
                Transfer(is_send, name, peer, tensor.nbytes, role, content, None, request, place)
            )
        return transfers, requests

    def meet(self, ranks: Sequence[int], name: str) -> None:
        """Describe that the host waits, through the store, for all of ``ranks``."""
        key = tuple(ranks), name
        self._meetings[key] += 1
        repetition = self._meetings[key]
        unique = name if repetition == 1 else f"{name} #{repetition}"
        self.emit(Meet(key[0], unique, self.place()))

    def run(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Call a function that is described as a whole, so that what it calls is not."""
        self.thread.is_inside = True
        try:
            return function(*args, **keywords)
        finally:
            self.thread.is_inside = False


class _ThreadState(threading.local):
    is_inside = False
    """Whether the thread is in a call that has been described as a whole."""
    coalesced: list[int] | None = None
    """Requests of the collectives that are being coalesced, if that is asynchronous."""


class RecordedWork:
    """A work object whose waits are recorded; else it is as the original.

    Args:
        recorder: Takes the waits.
        work: The original.
        requests: Numbers of the operations that the work object stands for.
    """

    __slots__ = ("_recorder", "_requests", "_work")

    def __init__(self, recorder: Recorder, work: Any, requests: Sequence[int]) -> None:
        self._recorder = recorder
        self._work = work
        self._requests = requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Some callers ask whether they got a work object before they wait for it.
        return type(self._work)

    def wait(self, *timeout: timedelta, **keywords: timedelta) -> Any:
        """Wait as the original does."""
        recorder = self._recorder
        blocks_host = any(timeout) or any(keywords.values())
        recorder.emit(Wait(tuple(self._requests), blocks_host, recorder.place()))
        return self._work.wait(*timeout, **keywords)


def is_device_bound() -> bool:
    """Return whether a device is bound to the default group now."""
    return distributed_c10d._get_default_group().bound_device_id is not None
