"""What a case function may use on the rank that runs it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

PROGRESS_FILE_VARIABLE = "WORKER_PROGRESS_FILE"
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


@contextmanager
def model_parallel_groups(
    pipeline_size: int, virtual_size: int | None = None, **initialize_options: Any
) -> Iterator[Any]:
    """Initialises gloo and Megatron's model parallelism, and ends the body on all ranks at once.

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

    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pipeline_size,
        virtual_pipeline_model_parallel_size=virtual_size,
        **initialize_options,
    )
    yield parallel_state.get_pipeline_model_parallel_group()
    # A rank that ended now would close connections that its peers may still be reading from.
    dist.barrier()
