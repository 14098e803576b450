"""Exchanges on backends, groups and wrappers other than the plain ones; which path they took."""

import logging
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig

from megatron.core.pipeline_parallel import p2p_communication
from tests.harness.observed_operations import observed_operations
from tests.harness.rank_runtime import model_parallel_groups
from tests.unit_tests.pipeline_parallel.exchange_cases import exchange_on
from tests.unit_tests.pipeline_parallel.schedule_cases import Step, run_steps

TENSOR_RANKS = (3,)


@contextmanager
def _recorded_operations():
    """Records the operations posted one by one, and each batch, by the group they went to."""
    record: dict[str, list[Any]] = {"one by one": [], "batches": []}

    def observe(name, peer, group):
        record["one by one"].append((name, peer, group.group_desc))

    def batch(operations):
        record["batches"].append(
            [(op.op.__name__, op.peer, op.group.group_desc) for op in operations]
        )
        # Past the observer: these are not posted one by one.
        return [op.op.__wrapped__(op.tensor, op.peer, group=op.group) for op in operations]

    with (
        observed_operations(observe),
        mock.patch.object(dist, "batch_isend_irecv", batch),
    ):
        yield record


def exchange_on_a_coalescing_backend(
    pipeline_size: int, is_variable: bool, virtual_size: int | None = None
) -> dict[str, Any]:
    """Runs the exchanges on a backend that says that it coalesces.

    Returns:
        ``problems`` with what was received, and what was posted at ``start-up`` and ``after`` it.
    """
    backend = SimpleNamespace(supports_coalescing=True)
    with (
        mock.patch.object(dist.ProcessGroup, "_get_backend", return_value=backend),
        _recorded_operations() as record,
        model_parallel_groups(pipeline_size, virtual_size=2) as group,
    ):
        start_up = {kind: list(operations) for kind, operations in record.items()}
        for operations in record.values():
            operations.clear()
        problems = exchange_on(group, "batched", is_variable, TENSOR_RANKS, virtual_size)
        after = {kind: list(operations) for kind, operations in record.items()}
    return {"problems": problems, "start-up": start_up, "after": after}


def exchange_through_a_wrapper_without_group(pipeline_size: int) -> dict[str, Any]:
    """Runs the exchanges while ``_batched_p2p_ops`` is wrapped as ms-swift does it.

    Returns:
        ``problems``, and the groups that data was posted to.
    """
    batched_p2p_ops = p2p_communication._batched_p2p_ops

    def without_group(**arguments):
        arguments["group"] = None
        return batched_p2p_ops(**arguments)

    with (
        model_parallel_groups(pipeline_size, virtual_size=2) as group,
        _recorded_operations() as record,
        mock.patch.object(p2p_communication, "_batched_p2p_ops", without_group),
    ):
        problems = exchange_on(group, "batched", False, TENSOR_RANKS)
    posted = sum(record["batches"], record["one by one"])
    return {"problems": problems, "groups": {group for _, _, group in posted}}


def exchange_on_own_group(
    pipelines: list[list[int]], transport: str, is_variable: bool, backend: str, is_dedicated: bool
) -> dict[str, Any]:
    """Runs the exchanges on pipeline groups that ``parallel_state`` knows nothing of.

    Args:
        pipelines: Global ranks of each pipeline.
        transport: One of ``exchange_cases.TRANSPORTS``.
        is_variable: Whether shapes differ by link, direction and microbatch.
        backend: Backend of the groups.
        is_dedicated: Whether even/odd groups are made for them.

    Returns:
        ``problems``, and the groups that messages were posted to.
    """
    dist.init_process_group("gloo")
    groups = [
        dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=60), group_desc="own")
        for ranks in pipelines
    ]
    (own,) = (g for g, ranks in zip(groups, pipelines, strict=True) if dist.get_rank() in ranks)
    if is_dedicated:
        from megatron.core.pipeline_parallel import even_odd_groups

        even_odd_groups.create_even_odd_groups(
            pipelines, pp_group=own, virtual_pipeline_model_parallel_size=2
        )
    with _recorded_operations() as record:
        problems = exchange_on(own, transport, is_variable, TENSOR_RANKS)
    dist.barrier()
    return {"problems": problems, "groups": {group for _, _, group in record["one by one"]}}


def warnings_of_unbatched_exchanges(pipeline_size: int) -> list[str]:
    """Returns what is logged while batches are wanted from a backend that has none."""
    # The ranks import torch, which reads the variable, before it is set.
    dist.set_debug_level_from_env()
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    p2p_communication.logger.addHandler(handler)
    with model_parallel_groups(pipeline_size, virtual_size=2) as group:
        for _ in range(2):
            exchange_on(group, "batched", False, TENSOR_RANKS)
    return messages


def count_device_synchronisations(transport: str, is_variable: bool) -> int:
    """Returns how often one step makes the host wait for the whole device."""
    with mock.patch.object(torch.cuda, "synchronize") as synchronize:
        problems = run_steps(4, 1, transport, (Step(8, is_variable),))
    assert not problems, problems
    return synchronize.call_count


def sends_kept_after(num_steps: int) -> int:
    """Returns how many sends are still held after some steps."""
    from megatron.core.pipeline_parallel import even_odd_groups

    problems = run_steps(2, 1, "unbatched", (Step(8, is_variable=True),) * num_steps)
    assert not problems, problems
    (groups,) = even_odd_groups._groups_of_pipeline.values()
    return sum(map(len, groups.sends_in_flight.values()))


def send_too_many_dimensions() -> str:
    """Returns the error of sending a tensor with nine dimensions."""
    config = ModelParallelConfig(
        pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, variable_seq_lengths=True
    )
    with model_parallel_groups(2) as group:
        communicator = p2p_communication.P2PCommunicator(group, config)
        with pytest.raises(ValueError, match="dimensions") as raised:
            communicator.send_forward(torch.zeros([1] * 9), is_last_stage=False)
    return str(raised.value)
