"""Process groups on which the point-to-point traffic of a pipeline cannot deadlock.

The stages of a pipeline form a ring of links; link ``i`` joins stage ``i`` to stage ``i + 1`` and
the last one (used by interleaved schedules only) wraps round to stage 0. Every link has a colour:
even, odd, or, for the wrap link of a ring with an odd number of stages, a third one. Links of one
colour share no stage, so a process group per direction and colour (a *channel*) is a matching: a
rank has at most one partner in it, and no message ever queues behind the message of another link.

Shapes travel on channels of their own, as host messages wherever gloo may be used, so that a data
transfer that is still unmatched cannot hold back the shape that its partner waits for.

All of this is set up by ``initialize_model_parallel``, with a deadline of its own, because a rank
that blocks inside NCCL during communicator creation is watched by nobody: no work object exists
yet, so neither a timeout nor the watchdog applies (ProcessGroupNCCL.cpp enqueues the work after the
communicator is made; pytorch issue 88103).
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import create_group
from torch.distributed import distributed_c10d

STARTUP_TIMEOUT_VARIABLE = "MEGATRON_PIPELINE_STARTUP_TIMEOUT"
DEFAULT_STARTUP_TIMEOUT = timedelta(minutes=10)


@dataclasses.dataclass(frozen=True)
class Role:
    """One of the four parts that a stage plays in an exchange with its neighbours.

    Attributes:
        name: Key of the role's tensor and request.
        is_send: Whether the stage sends (else it receives).
        peer_offset: Position of the peer relative to the stage: +1 is next, -1 is previous.
        direction: ``forward`` carries activations, ``backward`` their gradients.
    """

    name: str
    is_send: bool
    peer_offset: int
    direction: str

    @property
    def operation(self) -> Callable[..., Any]:
        """The function of ``torch.distributed`` that the role posts, as it is now."""
        return dist.isend if self.is_send else dist.irecv

    def link(self, stage: int, num_stages: int) -> int:
        """Return the link that the role uses at ``stage``, named after its lower end."""
        return (stage + min(self.peer_offset, 0)) % num_stages


SEND_NEXT = Role("send_next", is_send=True, peer_offset=1, direction="forward")
RECV_PREV = Role("recv_prev", is_send=False, peer_offset=-1, direction="forward")
SEND_PREV = Role("send_prev", is_send=True, peer_offset=-1, direction="backward")
RECV_NEXT = Role("recv_next", is_send=False, peer_offset=1, direction="backward")

# Sends first: a send must never wait behind a receive of the same call. Where both neighbours are
# one rank, its receives stand in the order of these sends, which is what NCCL, having no tags,
# matches by.
SENDS_FIRST = (SEND_NEXT, SEND_PREV, RECV_PREV, RECV_NEXT)
# Shapes the other way round: their sends are not awaited, so on a device with one hardware queue
# one that waits for its stream would hold back the receives launched after it.
RECEIVES_FIRST = (RECV_PREV, RECV_NEXT, SEND_NEXT, SEND_PREV)
# Neighbours that share one queue take turns instead: what an even stage sends first, an odd stage
# receives first.
EVEN_STAGE_ORDER = (SEND_NEXT, RECV_PREV, SEND_PREV, RECV_NEXT)
ODD_STAGE_ORDER = (RECV_PREV, SEND_NEXT, RECV_NEXT, SEND_PREV)

COLOUR_NAMES = ("EVEN", "ODD", "WRAP")

Channel = tuple[str, int]


def _link_colour(link: int, num_stages: int) -> int:
    is_wrap_of_odd_ring = num_stages % 2 == 1 and link == num_stages - 1
    return 2 if is_wrap_of_odd_ring else link % 2


def _channels(num_stages: int) -> list[Channel]:
    colours = sorted({_link_colour(link, num_stages) for link in range(num_stages)})
    return [(direction, colour) for direction in ("forward", "backward") for colour in colours]


@dataclasses.dataclass
class EvenOddGroups:
    """The process groups that this rank uses in one pipeline.

    Attributes:
        ranks: Global ranks of the pipeline in stage order.
        pp_group: The pipeline's own process group, used for batched exchanges.
        data: Group of each channel for activations and gradients.
        shapes: Group of each channel for shape messages.
        shapes_on_host: Whether shape messages are CPU tensors.
        data_order: Order in which the data operations of one exchange are posted.
        shape_order: Likewise for its shape messages.
        timeout: How long the host waits for a shape message; zero for the timeout of the group.
        is_dedicated: Whether the groups were made for this pipeline. Else every channel is served
            by a group of the caller's.
        sends_in_flight: By role, work objects of sends that may not have arrived yet.
        is_batch_obstacle_reported: Whether the user was told that a requested batch is none.
    """

    ranks: tuple[int, ...]
    pp_group: dist.ProcessGroup
    data: Mapping[Channel, dist.ProcessGroup]
    shapes: Mapping[Channel, dist.ProcessGroup]
    shapes_on_host: bool
    data_order: tuple[Role, ...]
    shape_order: tuple[Role, ...]
    timeout: timedelta
    is_dedicated: bool
    sends_in_flight: defaultdict[Role, list[dist.Work]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )
    is_batch_obstacle_reported: bool = False

    @functools.cached_property
    def stage(self) -> int:
        """Position of the calling rank in the pipeline."""
        return self.ranks.index(dist.get_rank())

    def peer(self, role: Role) -> int:
        """Return the global rank with which ``role`` exchanges."""
        return self.ranks[(self.stage + role.peer_offset) % len(self.ranks)]

    def channel(self, role: Role) -> Channel:
        """Return the key under which ``data`` and ``shapes`` hold the group of ``role``."""
        num_stages = len(self.ranks)
        return role.direction, _link_colour(role.link(self.stage, num_stages), num_stages)

    def serves(self, group: dist.ProcessGroup) -> bool:
        """Whether the communication of ``group``, one over the same ranks, can go here."""
        return self.pp_group is group or (
            self.is_dedicated and self.pp_group in distributed_c10d._world.pg_map
        )

    def keep_send(self, role: Role, request: dist.Work, is_host_message: bool) -> None:
        """Hold a host message until a later send of its role is known to be complete.

        Gloo loses a message whose work object is dropped before it has arrived. Shape messages are
        never awaited, and schedules do not await every overlapped send. Sends on the device need
        no holding; here they only tell that the shapes sent before them have arrived.
        """
        sends = self.sends_in_flight[role]
        for index in reversed(range(len(sends))):
            if sends[index].is_completed():
                del sends[: index + 1]
                break
        if is_host_message or sends:
            sends.append(request)


_groups_of_pipeline: dict[tuple[int, ...], EvenOddGroups] = {}
_startup_generation = itertools.count()


def _backend_of_device(group: dist.ProcessGroup) -> dict[str, str]:
    return dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))


def communication_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device that tensors sent over ``group`` live on.

    Args:
        group: A process group of which the caller is a member.

    Returns:
        The current CUDA device when the group has an accelerator backend, else the CPU. Gloo
        counts as a CPU backend because its send and receive take CPU tensors only.
    """
    if _backend_of_device(group).get("cuda", "gloo") != "gloo" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def batch_obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Say why ``batch_isend_irecv`` would issue the operations of a batch one by one.

    Mirrors the condition in ``torch.distributed.batch_isend_irecv`` (distributed_c10d.py).

    Args:
        group: The group on which a batch is wanted.
        device: Device of the tensors in the batch.

    Returns:
        The cause in words, or ``None`` when the batch will be one.
    """
    if type(group) is not dist.ProcessGroup:
        return f"a process group of type {type(group).__name__} does not coalesce"
    backend = group._get_backend(device)
    # torch 2.6 has no such property and coalesces on CUDA only.
    if getattr(backend, "supports_coalescing", device.type == "cuda"):
        return None
    if type(backend).__name__ == "_ProcessGroupWrapper":
        return (
            f"TORCH_DISTRIBUTED_DEBUG=DETAIL on torch {torch.__version__} wraps the backend in a "
            "ProcessGroupWrapper, which hides that it coalesces; unset the variable to get batches"
        )
    return f"the backend {dist.get_backend(group)!r} does not coalesce"


def await_all_ranks(arguments: Mapping[str, Any]) -> None:
    """Wait until every rank initialises model parallelism, with the same sizes.

    Every rank that takes part calls this before the first process group is made; afterwards a
    missing rank could only be noticed by the timeout of a group, which may be months long.

    Args:
        arguments: The arguments of ``initialize_model_parallel`` by name.

    Raises:
        RuntimeError: A rank did not arrive in time, or has other sizes. Names the global ranks.
        ValueError: The environment variable for the deadline is not a positive number.
    """
    if not dist.is_initialized() or not _needs_groups(
        arguments["pipeline_model_parallel_size"],
        arguments["pipeline_model_parallel_comm_backend"],
    ):
        return
    first = arguments.get("rank_offset", 0)
    count = arguments.get("local_world_size") or dist.get_world_size()
    plan = {
        name: value
        for name, value in arguments.items()
        if name.endswith("parallel_size") or name in ("order", "create_gloo_process_groups")
    }
    timeout = timedelta(minutes=arguments["distributed_timeout_minutes"])
    with _StartUp(range(first, first + count), timeout) as start_up:
        start_up.agree("initialize_model_parallel", plan)


def create_even_odd_groups(
    pipelines: Sequence[Sequence[int]],
    *,
    pp_group: dist.ProcessGroup,
    virtual_pipeline_model_parallel_size: int | None = None,
    backend: str | None = None,
    nccl_options: Callable[[], Any] = lambda: None,
    use_gloo: bool = True,
    timeout: timedelta = distributed_c10d.default_pg_timeout,
) -> None:
    """Create and warm the even/odd groups of every pipeline.

    ``initialize_model_parallel`` calls this. Callers who build pipeline groups by themselves call
    it after that, on every rank that is in one of the pipelines, with the same arguments except
    ``pp_group``; the ranks of each pipeline must not overlap with those of another.

    Args:
        pipelines: Global ranks of every pipeline in stage order.
        pp_group: The calling rank's own pipeline group, over one of ``pipelines``.
        virtual_pipeline_model_parallel_size: Not ``None`` for interleaved schedules, which use the
            link from the last stage to the first.
        backend: Backend of the data groups; ``None`` for the default one.
        nccl_options: Makes the NCCL options of one group.
        use_gloo: Exchange shapes as host messages on gloo groups. Else on the device, which makes
            the host wait for the current stream.
        timeout: Timeout of the groups, and of the host's wait for a shape message.

    Raises:
        RuntimeError: A rank did not arrive in time or has another plan. Names the global ranks.
        ValueError: ``pp_group`` is over none of ``pipelines``, or the environment variable for the
            deadline is not a positive number.
    """
    ranks = tuple(dist.get_process_group_ranks(pp_group))
    if not _needs_groups(len(ranks), backend):
        return
    with _StartUp([rank for pipeline in pipelines for rank in pipeline], timeout) as start_up:
        digest = hashlib.sha256(json.dumps(list(map(list, pipelines))).encode()).hexdigest()
        plan = {"pipelines": len(pipelines), "sha256 of their ranks": digest, "use_gloo": use_gloo}
        if set(ranks) not in map(set, pipelines):
            raise ValueError(
                f"pp_group has the global ranks {list(ranks)}, which is none of the pipelines "
                f"{list(map(list, pipelines))}; pass the group that the calling rank is in"
            )
        start_up.agree("the creation of the even/odd groups", plan)
        is_fake = dist.get_backend() == "fake"
        use_gloo = use_gloo and not is_fake
        with _lazy_communicators():
            for pipeline in map(tuple, pipelines):
                data = _create_channels(pipeline, "DATA", backend, nccl_options, timeout)
                if use_gloo:
                    # No host waits on these without naming a timeout, so the group's own one only
                    # has to bound the connection of its members.
                    shapes = _create_channels(
                        pipeline, "SHAPES", "gloo", lambda: None, start_up.remaining()
                    )
                else:
                    shapes = _create_channels(pipeline, "SHAPES", backend, nccl_options, timeout)
                if set(pipeline) == set(ranks):
                    groups = EvenOddGroups(
                        ranks=ranks,
                        pp_group=pp_group,
                        data=data,
                        shapes=shapes,
                        shapes_on_host=use_gloo or communication_device(pp_group).type == "cpu",
                        data_order=SENDS_FIRST,
                        shape_order=RECEIVES_FIRST,
                        timeout=timeout,
                        is_dedicated=True,
                    )
        if not is_fake:
            _warm(groups, virtual_pipeline_model_parallel_size is not None, start_up)
        start_up.agree("the end of the warm-up of the pipeline links")
    _groups_of_pipeline[ranks] = groups


def get_even_odd_groups(
    group: dist.ProcessGroup | None, prev_rank: int, next_rank: int
) -> EvenOddGroups:
    """Look up the groups of a pipeline; called on every rank that communicates in it.

    Args:
        group: Any process group over the ranks of the pipeline, in stage order. ``None`` stands
            for the pipeline in which the calling rank has these neighbours (ms-swift replaces
            ``_batched_p2p_ops`` by a wrapper that passes ``None``), else for the default group.
        prev_rank: Global rank of the previous stage.
        next_rank: Global rank of the next stage.

    Returns:
        The groups made by ``create_even_odd_groups``. For a group unknown to it, the best that one
        group can do: the neighbours take turns, and shapes are host messages where the group has a
        CPU backend that can carry them.
    """
    if group is None:
        for groups in _groups_of_pipeline.values():
            if (groups.peer(RECV_PREV), groups.peer(SEND_NEXT)) == (prev_rank, next_rank):
                return groups
        group = _default_group()
    ranks = tuple(dist.get_process_group_ranks(group))
    known = _groups_of_pipeline.get(ranks)
    if known is None or not known.serves(group):
        known = _groups_of_pipeline[ranks] = _serve_by_one_group(group, ranks)
    return known


def destroy_even_odd_groups() -> None:
    """Destroy all even/odd groups; called on every rank by ``destroy_model_parallel``."""
    for groups in _groups_of_pipeline.values():
        if groups.is_dedicated:
            for group in (*groups.data.values(), *groups.shapes.values()):
                if group in distributed_c10d._world.pg_map:
                    dist.destroy_process_group(group)
    _groups_of_pipeline.clear()


def _default_group() -> dist.ProcessGroup:
    return distributed_c10d._get_default_group()


def _needs_groups(pipeline_model_parallel_size: int, backend: str | None) -> bool:
    return pipeline_model_parallel_size > 1 and backend != "ucc"


def _create_channels(
    pipeline: tuple[int, ...],
    purpose: str,
    backend: str | None,
    nccl_options: Callable[[], Any],
    timeout: timedelta,
) -> dict[Channel, dist.ProcessGroup]:
    return {
        (direction, colour): create_group(
            list(pipeline),
            timeout=timeout,
            backend=backend,
            pg_options=nccl_options(),
            group_desc=f"PIPELINE_{direction.upper()}_{COLOUR_NAMES[colour]}_{purpose}_GROUP",
        )
        for direction, colour in _channels(len(pipeline))
    }


def _serve_by_one_group(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> EvenOddGroups:
    groups: dict[Channel, dist.ProcessGroup] = dict.fromkeys(_channels(len(ranks)), group)
    if len(ranks) == 2 and dist.get_backend(group) != "ucc":
        # Both neighbours are one rank: what stage 1 sends takes the default group, so that the two
        # ways do not queue behind each other.
        groups[("forward", 1)] = groups[("backward", 0)] = _default_group()
    has_host_messages = _backend_of_device(group).get("cpu") in ("gloo", "mpi", "fake")
    turns = ODD_STAGE_ORDER if group.rank() % 2 else EVEN_STAGE_ORDER
    return EvenOddGroups(
        ranks=ranks,
        pp_group=group,
        data=groups,
        shapes=groups,
        shapes_on_host=has_host_messages,
        data_order=turns,
        shape_order=turns,
        timeout=timedelta(0),
        is_dedicated=False,
    )


@contextlib.contextmanager
def _lazy_communicators() -> Iterator[None]:
    """Unbind the default group from its device while groups are made.

    With a device bound to it every ``new_group`` splits the default group's communicator, which all
    its ranks must enter, and a gloo group made meanwhile leaves that split unmatched
    (``_new_process_group_helper`` in distributed_c10d.py; pytorch issue 145376). It would also put
    all messages of a group on the one stream of its communicator.
    """
    default_group = _default_group()
    bound_device = default_group.bound_device_id
    if bound_device is not None:
        default_group.bound_device_id = None
    try:
        yield
    finally:
        if bound_device is not None:
            default_group.bound_device_id = bound_device


def _warm(groups: EvenOddGroups, is_interleaved: bool, start_up: "_StartUp") -> None:
    """Send one number over every link in the manner in which the schedules will use it.

    NCCL makes its communicators and connections at first contact and blocks the host until the
    peer takes part, so both ends meet through the store before they touch the link. All ranks go
    through the channels in one order and have at most one partner in each.
    """
    num_stages = len(groups.ranks)
    wrap_link = num_stages - 1
    roles = [
        role
        for role in SENDS_FIRST
        if is_interleaved or role.link(groups.stage, num_stages) != wrap_link
    ]
    for purpose, channels in (("data", groups.data), ("shapes", groups.shapes)):
        for channel, group in channels.items():
            for role in roles:
                if groups.channel(role) == channel:
                    link = role.link(groups.stage, num_stages)
                    ends = (groups.ranks[link], groups.ranks[(link + 1) % num_stages])
                    start_up.meet(ends, f"{purpose}, {role.direction}, link {ends[0]}-{ends[1]}")
                    _exchange_link_numbers(groups, [role], group, start_up)
    if batch_obstacle(groups.pp_group, communication_device(groups.pp_group)) is None:
        start_up.meet(groups.ranks, f"first batch of the pipeline {list(groups.ranks)}")
        _exchange_link_numbers(groups, roles, groups.pp_group, start_up, is_batch=True)


def _exchange_link_numbers(
    groups: EvenOddGroups,
    roles: Sequence[Role],
    group: dist.ProcessGroup,
    start_up: "_StartUp",
    is_batch: bool = False,
) -> None:
    device = communication_device(group)
    links = {role: role.link(groups.stage, len(groups.ranks)) for role in roles}
    numbers = {
        role: torch.full((1,), link if role.is_send else -1, device=device)
        for role, link in links.items()
    }
    operations = [
        dist.P2POp(role.operation, number, groups.peer(role), group)
        for role, number in numbers.items()
    ]
    if is_batch:
        requests = dist.batch_isend_irecv(operations)
    else:
        requests = [
            operation.op(operation.tensor, operation.peer, group) for operation in operations
        ]
    for request in requests:
        if device.type == "cpu":
            request.wait(start_up.remaining())
        else:
            request.wait()
    _check_link_numbers(links, numbers)


def _check_link_numbers(links: Mapping[Role, int], numbers: Mapping[Role, torch.Tensor]) -> None:
    received = {role: int(number) for role, number in numbers.items()}
    if received != links:
        raise RuntimeError(
            f"the links {list(links.values())} of global rank {dist.get_rank()} delivered the "
            f"numbers {list(received.values())}: messages of the start-up got crossed; report this "
            "with the torch and NCCL versions"
        )


def _startup_timeout() -> timedelta:
    value = os.environ.get(STARTUP_TIMEOUT_VARIABLE)
    if value is None:
        return DEFAULT_STARTUP_TIMEOUT
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= timedelta.max.total_seconds():
        raise ValueError(
            f"{STARTUP_TIMEOUT_VARIABLE}={value!r} is not a number of seconds above 0; set it to "
            f"how long a rank may take to start up, or unset it for "
            f"{DEFAULT_STARTUP_TIMEOUT.total_seconds():g}"
        )
    return timedelta(seconds=seconds)


_AGREED = "agreed"


class _StartUp:
    """Agreement of ranks through the default store, under one deadline for all its phases.

    A rank that leaves the ``with`` block by an exception makes the others raise in their next
    ``agree``.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        self._ranks = ranks
        self._rank = dist.get_rank()
        self._limit = min(_startup_timeout(), timeout)
        self._deadline = time.monotonic() + self._limit.total_seconds()
        self._phase = 0
        prefix = f"even_odd_groups/{next(_startup_generation)}/{min(ranks)}-{max(ranks)}"
        self._store = dist.PrefixStore(prefix, distributed_c10d._get_default_store())

    def __enter__(self) -> "_StartUp":
        return self

    def __exit__(self, error_type: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            with contextlib.suppress(RuntimeError):
                self._set_outcome(f"Global rank {self._rank} raised: {error}")

    def remaining(self) -> timedelta:
        """Return the time left until the deadline, at least a millisecond."""
        return timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))

    def agree(self, phase: str, plan: Any = None) -> None:
        """Wait until all ranks have come to ``phase`` with the same JSON-like ``plan``."""
        if dist.get_backend() == "fake":
            return
        self._store.set(f"{phase}/{self._rank}", json.dumps(plan))
        if self._store.add(f"{phase}/arrived", 1) == len(self._ranks):
            self._set_outcome(self._compare_plans(phase))
        self._wait([self._outcome_key()], phase, self._ranks)
        self._raise_if_failed()
        self._phase += 1

    def meet(self, ranks: Sequence[int], place: str) -> None:
        """Wait until each of ``ranks``, the caller among them, is about to enter ``place``."""
        self._store.set(f"{place}/{self._rank}", "")
        self._store.set(f"latest place of {self._rank}", json.dumps([place, list(ranks)]))
        self._wait([f"{place}/{rank}" for rank in ranks], place, ranks)

    def _outcome_key(self) -> str:
        return f"outcome of phase {self._phase}"

    def _set_outcome(self, failure: str) -> None:
        # The first failure stays: it is the cause of those that follow.
        self._store.compare_set(self._outcome_key(), "", failure or _AGREED)

    def _raise_if_failed(self) -> None:
        outcome = self._store.get(self._outcome_key()).decode()
        if outcome != _AGREED:
            raise RuntimeError(f"pipeline start-up failed. {outcome}")

    def _wait(self, keys: list[str], place: str, ranks: Sequence[int]) -> None:
        try:
            self._store.wait(keys, self.remaining())
        except RuntimeError as error:
            try:
                is_known = self._store.check([self._outcome_key()])
                absent = self._absent(place, ranks)
            except RuntimeError:
                raise RuntimeError(
                    f"pipeline start-up failed at {place}: the store is gone, most likely with "
                    "global rank 0, which hosts it; see that rank's log"
                ) from error
            if is_known:
                self._raise_if_failed()
            places = "; ".join(
                f"global rank(s) {[r for r in absent if absent[r] == at]} did not come to {at}"
                for at in dict.fromkeys(absent.values())
            )
            raise RuntimeError(
                f"pipeline start-up failed: {places} within {self._limit.total_seconds():g} s. "
                "Look for the first error in their logs; if they are only slow, raise "
                f"{STARTUP_TIMEOUT_VARIABLE} (seconds)."
            ) from error

    def _absent(self, place: str, ranks: Sequence[int]) -> dict[int, str]:
        """Return where each rank did not come that others wait for, directly or in a chain."""
        absent: dict[int, str] = {}
        queue, seen = [(place, ranks)], set()
        while queue:
            place, ranks = queue.pop()
            for rank in ranks:
                if rank in seen or self._store.check([f"{place}/{rank}"]):
                    continue
                seen.add(rank)
                if self._store.check([f"latest place of {rank}"]):
                    waits_at = json.loads(self._store.get(f"latest place of {rank}"))
                    if any(not self._store.check([f"{waits_at[0]}/{r}"]) for r in waits_at[1]):
                        queue.append(waits_at)
                        continue
                absent[rank] = place
        return absent

    def _compare_plans(self, phase: str) -> str:
        plans = {r: self._store.get(f"{phase}/{r}").decode() for r in self._ranks}
        (common, _), *others = Counter(plans.values()).most_common()
        if not others:
            return ""
        deviating = {rank: plan for rank, plan in plans.items() if plan != common}
        return (
            f"Ranks came to {phase} with different settings. Global rank(s) {list(deviating)} "
            f"have {', '.join(set(deviating.values()))} where the others have {common}. Start all "
            "ranks with the same command line."
        )
