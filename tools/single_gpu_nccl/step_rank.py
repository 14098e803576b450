"""One rank of one configuration; ``verify`` starts it.

It imports everything, then waits for its configuration on standard input, so that the ranks of the
next configuration can be started while this one runs. What it finds it appends to its file line by
line: a rank that hangs has written down how far it came.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.nccl_log import communicator_sizes, write_log

from .configuration import Configuration

_HIDDEN_SIZE = 4
_MICRO_BATCH_SIZE = 1
_BYTES_OF_A_NUMBER = 4
_WEIGHT = 0.75
_TIMEOUT = timedelta(minutes=30)


@dataclasses.dataclass(frozen=True)
class Payload:
    """What a stage sends for one microbatch.

    Attributes:
        size: Bytes; the largest where lengths vary.
        steps: Steps with it.
    """

    size: int
    steps: int


class ModelChunk(torch.nn.Module):
    """A number to multiply with, as a schedule expects a part of a model.

    Args:
        config: What the schedule reads.
        is_first: Whether it takes its input from the data.
        vp_stage: Position among the chunks of this rank, None without interleaving.
    """

    def __init__(self, config: Any, is_first: bool, vp_stage: int | None) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        self.config = config
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = vp_stage
        self.weight = torch.nn.Parameter(torch.full((), _WEIGHT, device=_device()))
        self._is_first = is_first
        self._received: Any = None

    def set_input_tensor(self, input_tensor: list[torch.Tensor | None]) -> None:
        """Take what the previous chunk sent; the schedule calls this before ``forward``."""
        (self._received,) = input_tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply ``inputs`` in the first chunk, else what was received."""
        return (inputs if self._is_first else self._received) * self.weight


class Findings:
    """The file of one rank.

    Args:
        path: Where to append.
        nccl_log: NCCL's log of this rank.
    """

    def __init__(self, path: Path, nccl_log: Path) -> None:
        self._path = path
        self._nccl_log = nccl_log

    def add(self, phase: str, **found: Any) -> None:
        """Append a line: what was found, the communicators, and the memory, in bytes.

        Args:
            phase: What has just been finished.
            found: What to note beside it.
        """
        is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
        line = {"phase": phase, **found}
        if is_nccl:
            free, total = torch.cuda.mem_get_info()
            line |= {
                "communicators": communicator_sizes(self._nccl_log),
                "device_memory_used": total - free,
                "torch_memory_reserved": torch.cuda.memory_reserved(),
            }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def run(configuration: Configuration, payloads: list[Payload], findings: Findings) -> None:
    """Start up and run all steps; every rank of the configuration calls this."""
    from megatron.core import parallel_state

    torch.cuda.set_device(0)
    torch.zeros(1, device=_device())
    dist.init_process_group(
        "nccl",
        timeout=_TIMEOUT,
        device_id=_device() if configuration.binds_device else None,
    )
    _meet("ready")
    findings.add("ready")
    _meet("noted")
    started = time.perf_counter()
    virtual_size = configuration.virtual_size if configuration.virtual_size > 1 else None
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=configuration.pipeline_size,
        virtual_pipeline_model_parallel_size=virtual_size,
    )
    seconds = time.perf_counter() - started
    _meet("started up")
    findings.add("start-up", seconds=seconds)
    for payload in payloads:
        for step in range(payload.steps):
            _meet(f"{payload.size} {step}")
            started = time.perf_counter()
            problem = _run_step(configuration, virtual_size, payload.size)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            _meet(f"{payload.size} {step} done")
            findings.add(f"step {step} of {payload.size} B", seconds=seconds, problem=problem)
    findings.add("end")
    _leave()


def _run_step(configuration: Configuration, virtual_size: int | None, size: int) -> str | None:
    """Run one step; return what was wrong with its losses."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    num_stages = configuration.pipeline_size
    stage = dist.get_rank()
    config = TransformerConfig(
        num_layers=num_stages * configuration.virtual_size,
        hidden_size=_HIDDEN_SIZE,
        num_attention_heads=1,
        pipeline_model_parallel_size=num_stages,
        virtual_pipeline_model_parallel_size=virtual_size,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=configuration.is_variable,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=configuration.transport == "batched",
        overlap_p2p_comm=configuration.transport == "overlapped",
        deallocate_pipeline_outputs=True,
    )
    chunks = [
        ModelChunk(config, stage == chunk == 0, chunk if virtual_size else None)
        for chunk in range(configuration.virtual_size)
    ]
    full_length = size // (_HIDDEN_SIZE * _MICRO_BATCH_SIZE * _BYTES_OF_A_NUMBER)
    schedule = get_forward_backward_func(pp_size=num_stages, vp_size=virtual_size)
    losses = schedule(
        forward_step_func=_forward_step,
        data_iterator=[_microbatches(configuration, full_length) for _ in chunks],
        model=chunks if virtual_size else chunks[0],
        num_microbatches=num_stages,
        seq_length=full_length,
        micro_batch_size=_MICRO_BATCH_SIZE,
        forward_only=False,
    )
    if stage != num_stages - 1:
        return None
    factor = _WEIGHT ** (num_stages * configuration.virtual_size)
    expected = torch.tensor([factor * (index + 1) for index in range(num_stages)])
    actual = torch.stack([loss["loss"] for loss in losses]).cpu()
    if torch.allclose(actual, expected, rtol=1e-4):
        return None
    return f"losses {actual.tolist()} instead of {expected.tolist()}"


def _microbatches(configuration: Configuration, full_length: int) -> Iterator[torch.Tensor]:
    for index in range(configuration.pipeline_size):
        shorter = index * full_length // (2 * configuration.pipeline_size)
        length = full_length - shorter * configuration.is_variable
        shape = (length, _MICRO_BATCH_SIZE, _HIDDEN_SIZE)
        yield torch.full(shape, index + 1.0, device=_device())


def _forward_step(
    data_iterator: Iterator[torch.Tensor], model: ModelChunk
) -> tuple[torch.Tensor, Any]:
    return model(next(data_iterator)), _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.mean()
    return loss, {"loss": loss.detach().clone()}


def _device() -> torch.device:
    return torch.device("cuda", 0)


def _meet(name: str) -> None:
    """Wait for all ranks, without any communicator."""
    store = dist.distributed_c10d._get_default_store()
    if store.add(f"arrived at {name}", 1) == dist.get_world_size():
        store.set(f"all at {name}", "")
    store.wait([f"all at {name}"], _TIMEOUT)


def _leave() -> None:
    """Return on rank 0, which serves the store, when no other rank needs it any more."""
    store = dist.distributed_c10d._get_default_store()
    others = dist.get_world_size() - 1
    if dist.get_rank() > 0 and store.add("left", 1) < others:
        return
    if dist.get_rank() > 0:
        store.set("all left", "")
    elif others:
        store.wait(["all left"], _TIMEOUT)


def main() -> None:
    """Import, wait for the configuration, and run it."""
    rank = int(os.environ["RANK"])
    import megatron.core.parallel_state
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.transformer.transformer_config  # noqa: F401

    request = json.loads(sys.stdin.readline())
    folder = Path(request["folder"])
    nccl_log = folder / f"nccl.rank{rank}.log"
    write_log(nccl_log)
    run(
        Configuration(**request["configuration"]),
        [Payload(**payload) for payload in request["payloads"]],
        Findings(folder / f"rank{rank}.jsonl", nccl_log),
    )
    # What tears NCCL down is not under test, and can hang.
    os._exit(0)


if __name__ == "__main__":
    main()
