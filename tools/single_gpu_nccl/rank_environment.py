"""What makes NCCL accept several ranks on one GPU."""

import os
import socket
from collections.abc import Mapping

OLDEST_TESTABLE = (2, 5)
OFFICIAL_SINCE = (2, 30)


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that PyTorch has.

    Raises:
        RuntimeError: This PyTorch has none, or one with which this cannot work.
    """
    import torch

    try:
        version = torch.cuda.nccl.version()
    except AttributeError:
        raise RuntimeError(
            f"torch {torch.__version__} has no NCCL: install a build for CUDA"
        ) from None
    if version < OLDEST_TESTABLE:
        raise RuntimeError(
            f"NCCL {'.'.join(map(str, version))} is older than "
            f"{'.'.join(map(str, OLDEST_TESTABLE))}, and does not read NCCL_HOSTID: install a "
            "newer PyTorch"
        )
    return version


def sharing_variables(rank: int, version: tuple[int, ...]) -> dict[str, str]:
    """Return the variables that let a rank share its GPU, to be set before NCCL starts.

    Before 2.30 NCCL refuses two ranks with the same GPU and the same host ("Duplicate GPU
    detected", initTransportsRank in init.cc), and takes the host from ``NCCL_HOSTID``: a rank
    becomes a node of its own. From 2.30 on there is a switch for this, experimental.

    Args:
        rank: Global rank.
        version: Of NCCL.
    """
    if version >= OFFICIAL_SINCE:
        switch = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    else:
        switch = {"NCCL_HOSTID": f"single-gpu-rank-{rank}"}
    return {
        **switch,
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
    }


def rank_environment(
    rank: int, world_size: int, port: int, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a rank that uses device 0, like all the others.

    Every rank is told that it is alone on its machine, for scripts choose the device by
    ``LOCAL_RANK``.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        port: Where rank 0 serves the store.
        base: What to add to; the environment of this process when None.
    """
    return {
        **(os.environ if base is None else base),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
