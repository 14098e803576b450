"""Case functions that end in every way in which a rank can end."""

import importlib.util
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.rank_runtime import report_progress

_seen_cases: list[str] = []


def remember(case: str) -> tuple[int, list[str], torch.Tensor]:
    """Returns this process's id, the cases that it has seen, and a tensor with the rank."""
    _seen_cases.append(case)
    return os.getpid(), _seen_cases, torch.tensor([float(os.environ["RANK"])])


def add_up() -> float:
    """Returns the sum of all ranks' numbers, which every rank must take part in."""
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def wait_in_a_circle() -> None:
    """Never returns: each rank receives from the next one, and none sends."""
    dist.init_process_group("gloo")
    report_progress("about to wait in a circle")
    dist.recv(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size())


def compute_for_ever() -> None:
    """Never returns, and never rests."""
    while True:
        pass


def wait_for_a_busy_peer(seconds: float) -> float:
    """Returns what rank 0 got from rank 1, which computes for some time before it sends."""
    dist.init_process_group("gloo")
    message = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.recv(message, 1)
    else:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            message += 1
        dist.send(message, 0)
    return message.item()


def raise_in_rank_1() -> None:
    """Rank 1 raises at once; the others wait for it."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.barrier()


def die_in_rank_1_alone() -> None:
    """Rank 1 is killed by a signal; the others, not connected to it, wait for ever."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSEGV)
    signal.pause()


def return_something_unpicklable() -> Any:
    """Returns what no parent can receive."""
    return lambda: None


def has_even_odd_groups() -> bool:
    """Returns whether the package that this rank sees is the fork."""
    return importlib.util.find_spec("megatron.core.pipeline_parallel.even_odd_groups") is not None


def leave_process_id_and_wait(folder: str) -> None:
    """Never returns; leaves a file named after this process."""
    (Path(folder) / str(os.getpid())).touch()
    signal.pause()


def leave_a_child_behind() -> int:
    """Returns the process id of a child that would run for an hour."""
    return subprocess.Popen(["sleep", "3600"]).pid
