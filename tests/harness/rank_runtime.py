"""What a case function may use on the rank that runs it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

PROGRESS_FILE_VARIABLE = "WORKER_PROGRESS_FILE"
BACKEND_VARIABLE = "WORKER_BACKEND"
_PROGRESS_BYTES = 400


def report_progress(label: str) -> None:
    """Notes what this rank is about to do; the report of a failed rank shows the last note.

    Args:
        label: One line; cut after 400 bytes.
    """
    record = label.encode()[:_PROGRESS_BYTES].ljust(_PROGRESS_BYTES)
    descriptor = os.open(os.environ[PROGRESS_FILE_VARIABLE], os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(descriptor, record, 0)
    finally:
        os.close(descriptor)


def case_device() -> Any:
    """Returns the device on which this rank's tensors live: CPU, or CUDA where NCCL is tested."""
    import torch

    if os.environ.get(BACKEND_VARIABLE) != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def init_process_group(timeout: timedelta = timedelta(minutes=30)) -> None:
    """Initialises the default group with the backend of the case: gloo, or NCCL.

    With fewer GPUs than ranks these share them, see ``tools.single_gpu_nccl``.

    Args:
        timeout: Of the group's operations.
    """
    import torch
    import torch.distributed as dist

    device = case_device()
    if device.type == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return
    if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        from tools.single_gpu_nccl.rank_environment import nccl_version, sharing_variables

        os.environ.update(sharing_variables(int(os.environ["RANK"]), nccl_version()))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timeout)


@contextmanager
def model_parallel_groups(
    pipeline_size: int, virtual_size: int | None = None, **initialize_options: Any
) -> Iterator[Any]:
    """Initialises the default group and model parallelism; ends the body on all ranks at once.

    Every rank of the case calls it. Nothing is torn down: the process ends with the case, and
    gloo takes most of a second to close its groups. When the body raises, the rank does not wait
    for the others either; they may be blocked.

    Args:
        pipeline_size: Pipeline-parallel size; the rest of the world becomes data-parallel.
        virtual_size: Model chunks per pipeline stage, ``None`` for no interleaving.
        initialize_options: Further arguments of ``initialize_model_parallel``.

    Yields:
        The pipeline-parallel process group of this rank.
    """
    import torch.distributed as dist

    from megatron.core import parallel_state

    init_process_group()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pipeline_size,
        virtual_pipeline_model_parallel_size=virtual_size,
        **initialize_options,
    )
    yield parallel_state.get_pipeline_model_parallel_group()
    # A rank that ended now would close connections that its peers may still be reading from.
    dist.barrier()
