"""Other protocols than the fork's: its recorded traces, rewritten to what was not built, and why.

A variant keeps what the schedule asks for (which messages, when their results are awaited) and
changes the groups that carry them, the order within one exchange, and which shapes are awaited.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator

from tools.deadlock_check.trace import (
    Batch,
    Group,
    Operation,
    Synchronize,
    Trace,
    Transfer,
    Wait,
)

SENDS_FIRST = ("send_next", "send_prev", "recv_prev", "recv_next")
RECEIVES_FIRST = ("recv_prev", "recv_next", "send_next", "send_prev")
EVEN_STAGE = ("send_next", "recv_prev", "send_prev", "recv_next")
ODD_STAGE = ("recv_prev", "send_next", "recv_next", "send_prev")


def sends_first(stage: int) -> tuple[str, ...]:
    return SENDS_FIRST


def receives_first(stage: int) -> tuple[str, ...]:
    return RECEIVES_FIRST


def by_parity(stage: int) -> tuple[str, ...]:
    return ODD_STAGE if stage % 2 else EVEN_STAGE


def one_group(role: str, stage: int, num_stages: int) -> str:
    return "all"


def group_per_direction(role: str, stage: int, num_stages: int) -> str:
    return "forward" if role in ("send_next", "recv_prev") else "backward"


def group_by_own_parity(role: str, stage: int, num_stages: int) -> str:
    is_even_sender = role.startswith("send") == (stage % 2 == 0)
    return "even sends" if is_even_sender else "odd sends"


def group_by_senders_parity(role: str, stage: int, num_stages: int) -> str:
    offset = {"recv_prev": -1, "recv_next": 1}.get(role, 0)
    return "odd sends" if (stage + offset) % num_stages % 2 else "even sends"


def even_odd_group(role: str, stage: int, num_stages: int) -> str:
    link = (stage - role.endswith("prev")) % num_stages
    is_wrap_of_odd_ring = num_stages % 2 == 1 and link == num_stages - 1
    colour = "wrap" if is_wrap_of_odd_ring else ("even", "odd")[link % 2]
    return f"{group_per_direction(role, stage, num_stages)} {colour}"


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How an exchange is carried out.

    Attributes:
        group_of: Takes role, stage and number of stages; names the group that carries the role.
        shape_order: Takes the stage; the roles in the order in which their shapes are posted.
        data_order: Likewise for data.
        awaits_shape_sends: Whether the host waits for its shape sends too before it goes on.
        shapes_on_host: Whether shapes are host messages.
        shares_groups: Whether shapes and data use the same groups.
        batches_data: Whether the data of an exchange are one batch.
    """

    group_of: Callable[[str, int, int], str] = even_odd_group
    shape_order: Callable[[int], tuple[str, ...]] = receives_first
    data_order: Callable[[int], tuple[str, ...]] = sends_first
    awaits_shape_sends: bool = False
    shapes_on_host: bool = True
    shares_groups: bool = False
    batches_data: bool = False


def rewritten(trace: Trace, protocol: Protocol) -> Trace:
    """Rewrites the schedule's part of a trace of the fork, recorded with variable lengths."""
    num_stages = trace.world_size
    programs = [
        list(_rewritten_program(program, stage, num_stages, protocol))
        for stage, program in enumerate(trace.programs)
    ]
    ranks = tuple(range(num_stages))
    groups = {"W": Group("W", ranks)}
    for operation in itertools.chain.from_iterable(programs):
        if isinstance(operation, Transfer | Batch):
            on_host = operation.group.startswith("shape")
            groups[operation.group] = Group(
                operation.group, ranks, on_host=on_host and protocol.shapes_on_host
            )
    return Trace(groups, programs, f"{trace.description}, as {protocol}")


def _rewritten_program(
    program: list[Operation], stage: int, num_stages: int, protocol: Protocol
) -> Iterator[Operation]:
    schedule = [o for o in program if o.place.phase != "startup"]
    for content, run in itertools.groupby(schedule, _content):
        operations = list(run)
        if content == "shape":
            yield from _shapes(operations, stage, num_stages, protocol)
        elif content == "data":
            yield from _data(operations, stage, num_stages, protocol)
        else:
            yield from operations


def _content(operation: Operation) -> str | None:
    return operation.content if isinstance(operation, Transfer) else None


def _shapes(
    shapes: Iterable[Operation], stage: int, num_stages: int, protocol: Protocol
) -> Iterator[Operation]:
    posted = list(_posted(shapes, protocol.shape_order(stage), stage, num_stages, protocol))
    yield from posted
    if protocol.awaits_shape_sends:
        # The fork's own wait for the receives follows and finds nothing left to wait for.
        yield Wait(tuple(t.request for t in posted if t.request is not None), place=posted[0].place)
    if not protocol.shapes_on_host:
        receives = tuple(t.request for t in posted if not t.is_send and t.request is not None)
        if receives or protocol.awaits_shape_sends:
            yield Wait(receives, place=posted[0].place)
            yield Synchronize("stream", posted[0].place)


def _data(
    data: Iterable[Operation], stage: int, num_stages: int, protocol: Protocol
) -> Iterator[Operation]:
    posted = list(_posted(data, protocol.data_order(stage), stage, num_stages, protocol))
    if protocol.batches_data:
        yield Batch(posted[0].group, posted, posted[0].place)
    else:
        yield from posted


def _posted(
    transfers: Iterable[Operation],
    order: tuple[str, ...],
    stage: int,
    num_stages: int,
    protocol: Protocol,
) -> Iterator[Transfer]:
    by_role = {t.role: t for t in transfers if isinstance(t, Transfer)}
    for role in order:
        if role in by_role:
            transfer = by_role[role]
            purpose = "" if protocol.shares_groups else f"{transfer.content} "
            group = f"{purpose}{protocol.group_of(role, stage, num_stages)}"
            yield dataclasses.replace(transfer, group=group)
