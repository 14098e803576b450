"""What the ranks of a job ask of torch.distributed, as plain data.

A trace has one program per rank: the operations that the rank's host issues, in order. Nothing in
it depends on how PyTorch or NCCL would run them; that is the model's part.
"""

import dataclasses
from typing import Literal, NamedTuple

SENDS_TO_RECEIVES = {"send_next": "recv_prev", "send_prev": "recv_next"}
"""The role that a message sent in each role must arrive in."""
ROLES = (*SENDS_TO_RECEIVES, *SENDS_TO_RECEIVES.values())

Phase = Literal["startup", "warmup", "steady", "cooldown"]


class Place(NamedTuple):
    """Where in the schedule and in the source an operation was issued.

    Attributes:
        phase: ``startup`` before the first forward or backward of a schedule can begin; ``None``
            where unknown, as for all attributes.
        microbatch: Microbatch that the operation serves, from 0.
        chunk: Model chunk (virtual pipeline stage) of the issuing rank that it serves, from 0.
        source: ``file:line function`` of the innermost frame that says something to the user.
    """

    phase: Phase | None = None
    microbatch: int | None = None
    chunk: int | None = None
    source: str | None = None


NOWHERE = Place()


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """A process group.

    Attributes:
        name: Unique in the trace.
        ranks: Global ranks of its members, in group order.
        on_host: Whether its messages are CPU tensors (a gloo group beside NCCL ones).
        is_device_bound: Whether WORLD had a bound device when the group was made, so that the group
            inherited it. Matters to machines that bind a device to WORLD only.
    """

    name: str
    ranks: tuple[int, ...]
    on_host: bool = False
    is_device_bound: bool = True


@dataclasses.dataclass(slots=True)
class Transfer:
    """``isend`` or ``irecv``; alone, or as a part of a batch.

    Attributes:
        is_send: Else it receives.
        group: Name of the process group.
        peer: Global rank of the other end.
        size: In bytes; ``None`` if unknown.
        role: One of ``ROLES``; ``None`` outside pipelines.
        content: ``shape`` for a message that tells the shape of the next ``data`` message.
        message: Free label; the two ends of a message must agree where both have one.
        request: Number by which a ``Wait`` of the same rank names it; several transfers of a batch
            may share one.
    """

    is_send: bool
    group: str
    peer: int
    size: int | None = None
    role: str | None = None
    content: Literal["shape", "data"] | None = None
    message: str | None = None
    request: int | None = None
    place: Place = NOWHERE


@dataclasses.dataclass(slots=True)
class Batch:
    """``batch_isend_irecv`` of transfers on one group."""

    group: str
    transfers: list[Transfer]
    place: Place = NOWHERE


@dataclasses.dataclass(slots=True)
class Wait:
    """``Work.wait`` on requests issued before.

    Attributes:
        requests: Their numbers.
        blocks_host: Whether a timeout was given, which makes the host wait for device work too.
    """

    requests: tuple[int, ...]
    blocks_host: bool = False
    place: Place = NOWHERE


@dataclasses.dataclass(slots=True)
class Synchronize:
    """The host waits for the device.

    Attributes:
        scope: ``device`` for everything launched (``torch.cuda.synchronize``), ``stream`` for the
            current stream only (``Tensor.tolist`` and its like).
    """

    scope: Literal["device", "stream"]
    place: Place = NOWHERE


@dataclasses.dataclass(slots=True)
class Collective:
    """A collective on all members of a group.

    Attributes:
        name: Such as ``all_reduce``.
        group: Name of the process group.
        is_async: Whether it returned a request instead of running on the current stream.
        request: See ``Transfer``; for asynchronous ones.
    """

    name: str
    group: str
    is_async: bool = False
    size: int | None = None
    request: int | None = None
    place: Place = NOWHERE


@dataclasses.dataclass(slots=True)
class CreateGroup:
    """``new_group``, called on members and others alike.

    Attributes:
        group: Name of the process group.
        members_only: Whether others need not call (``use_local_synchronization``).
    """

    group: str
    members_only: bool = False
    place: Place = NOWHERE


@dataclasses.dataclass(slots=True)
class Meet:
    """The host waits, through the store, until all of some ranks come to the same place.

    Attributes:
        ranks: Global ranks, the issuing one among them.
        name: Of the place; unique among the meetings of these ranks.
    """

    ranks: tuple[int, ...]
    name: str
    place: Place = NOWHERE


@dataclasses.dataclass(slots=True)
class Compute:
    """Forward or backward of one microbatch through one model chunk, on the current stream."""

    direction: Literal["forward", "backward"]
    place: Place = NOWHERE


Operation = Transfer | Batch | Wait | Synchronize | Collective | CreateGroup | Meet | Compute


@dataclasses.dataclass
class Trace:
    """The programs of all ranks.

    Attributes:
        groups: Process groups by name. ``W`` is the default group over all ranks.
        programs: The operations of each rank, by global rank.
        description: What was recorded, in one line.
    """

    groups: dict[str, Group]
    programs: list[list[Operation]]
    description: str = ""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.programs)
