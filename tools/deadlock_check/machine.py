"""How PyTorch and NCCL run what a trace asks for: the axes of the model, and presets of them.

Sources: distributed_c10d.py of the torch releases 2.6 to 2.14 for what is coalesced and what a
bound device does; ProcessGroupNCCL.cpp (pointToPoint, WorkNCCL::wait) for communicators, streams
and waits; NCCL's documentation of point-to-point communication for rendezvous and per-peer order.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Literal

from .errors import UsageError

BatchProgress = Literal["per-peer", "all-or-nothing"]
HardwareQueues = Literal["many", "one"]
Communicators = Literal["lazy", "eager", "premade"]

SMALL_SEND_BYTES = 128
"""Sends up to this size complete unmatched on machines that buffer them: every shape message."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """One way in which a job's operations may be run.

    Attributes:
        name: Shown to the user.
        coalesces: Whether ``batch_isend_irecv`` launches one kernel; else it issues its operations
            one by one, in list order.
        communicators: ``lazy``: made at first use. ``eager``: a device is bound to WORLD, so groups
            that inherit it make their communicator at creation, but connections to peers at first
            contact. ``premade``: everything exists before the first operation.
        pair_communicators: Whether unbatched transfers use a two-rank communicator, made at first
            use, even on a group whose full communicator was made eagerly (torch before 2.9).
        buffered_send_bytes: Sends up to this size complete without their receive; 0 for rendezvous.
        hardware_queues: ``one`` for ``CUDA_DEVICE_MAX_CONNECTIONS=1``: kernels of all streams are
            dispatched in launch order, and one that waits for its stream holds back those launched
            after it.
        max_resident_kernels: Kernels of a rank that can be resident at once, granted in launch
            order; ``None`` for no limit.
        blocking_wait: Whether ``wait`` blocks the host (``TORCH_NCCL_BLOCKING_WAIT=1``).
        batch_progress: Where NCCL leaves freedom: the operations of a batch complete each with its
            peer, or only all together with everything that they are matched with.
        is_host_only: Whether all groups are gloo groups: messages start when they are posted, and
            waits block the host.
    """

    name: str = ""
    coalesces: bool = True
    communicators: Communicators = "premade"
    pair_communicators: bool = False
    buffered_send_bytes: int = 0
    hardware_queues: HardwareQueues = "many"
    max_resident_kernels: int | None = None
    blocking_wait: bool = False
    batch_progress: BatchProgress = "per-peer"
    is_host_only: bool = False


GLOO = Machine(name="gloo", coalesces=False, is_host_only=True)
"""CPU processes: every message is posted at once and is a rendezvous, even one of 32 bytes."""


def parse_torch_version(version: str) -> tuple[int, int]:
    """Return major and minor of a version such as ``2.10`` or ``2.10.0+cu128``.

    Raises:
        UsageError: The text is no version, or older than what is known of batches (2.6).
    """
    match = re.match(r"(\d+)\.(\d+)(?:\D|$)", version)
    if match is None:
        raise UsageError(f"--torch-version {version!r} is no version; write one such as 2.10")
    numbers = int(match[1]), int(match[2])
    if numbers < (2, 6):
        raise UsageError(
            f"--torch-version {version} is older than 2.6, the first whose point-to-point rules "
            "were read; check with 2.6 or later"
        )
    return numbers


def nccl_coalesces(torch_version: tuple[int, int], debug_detail: bool) -> bool:
    """Whether ``batch_isend_irecv`` makes one batch on NCCL.

    Args:
        torch_version: Major and minor.
        debug_detail: Whether ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps the backend. From 2.7 to 2.10
            the wrapper hides that NCCL coalesces (ProcessGroupWrapper; pytorch PR 173599).
    """
    return not (debug_detail and (2, 7) <= torch_version <= (2, 10))


def nccl_machines(
    torch_version: tuple[int, int],
    debug_detail: bool,
    *,
    communicators: tuple[Communicators, ...] = ("lazy", "eager"),
    hardware_queues: tuple[HardwareQueues, ...] = ("many", "one"),
    buffered_send_bytes: tuple[int, ...] = (0,),
    max_resident_kernels: int | None = None,
) -> Iterator[Machine]:
    """Yield every machine that a torch release leaves possible on NCCL.

    Args:
        torch_version: Major and minor.
        debug_detail: Whether ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` is set. Through 2.10 it makes a
            group lazy although a device is bound, as the wrapper hides that NCCL splits.
        communicators: Which of them to consider.
        hardware_queues: Which of them to consider.
        buffered_send_bytes: Which limits to consider.
        max_resident_kernels: See ``Machine``.
    """
    coalesces = nccl_coalesces(torch_version, debug_detail)
    policies: tuple[BatchProgress, ...] = ("per-peer", "all-or-nothing")
    if debug_detail and torch_version <= (2, 10):
        communicators = tuple(dict.fromkeys("lazy" if c == "eager" else c for c in communicators))
    for made, queues, limit, progress in itertools.product(
        communicators, hardware_queues, buffered_send_bytes, policies if coalesces else policies[:1]
    ):
        for per_pair in _pair_communicators(made, torch_version):
            parts = [
                "batches" if coalesces else "one by one",
                f"{made} communicators" + " per pair" * (made == "premade" and per_pair),
                f"{queues} hardware queue{'s' if queues == 'many' else ''}",
                *([f"sends up to {limit} B buffered"] if limit else []),
                *([f"batches {progress}"] if coalesces else []),
            ]
            yield Machine(
                name=", ".join(parts),
                coalesces=coalesces,
                communicators=made,
                pair_communicators=per_pair,
                buffered_send_bytes=limit,
                hardware_queues=queues,
                max_resident_kernels=max_resident_kernels,
                batch_progress=progress,
            )


def _pair_communicators(made: Communicators, torch_version: tuple[int, int]) -> tuple[bool, ...]:
    """Say whether unbatched transfers can have a communicator per pair of ranks."""
    if made == "lazy" or torch_version < (2, 9):
        return (True,)
    # What was made beforehand may have been made lazily or eagerly.
    return (False,) if made == "eager" else (True, False)
