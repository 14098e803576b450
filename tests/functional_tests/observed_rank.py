"""One rank of a GPU case: ``pretrain_gpt.py`` with its steps observed.

``run`` has torchrun start it. The rank's log, NCCL's log and a line for every step go to files of
its own in ``OBSERVATION_FOLDER``. With ``BIND_DEVICE=1`` the default process group is bound to the
device, for which the base has no flag: it takes over a group that exists already.
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.nccl_log import communicator_sizes, write_log

FIRST_STEP_DONE = "observed_rank: first step done"
FOLDER_VARIABLE = "OBSERVATION_FOLDER"
BIND_VARIABLE = "BIND_DEVICE"
_SCRIPT = Path(__file__).parents[2] / "pretrain_gpt.py"


def main() -> None:
    """Train, with the command line of ``pretrain_gpt.py``."""
    folder, rank = Path(os.environ[FOLDER_VARIABLE]), os.environ["RANK"]
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    # The descriptors, so that what PyTorch's C++ code writes comes along, in order.
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)
    nccl_log = folder / f"nccl.rank{rank}.log"
    write_log(nccl_log)
    if os.environ.get(BIND_VARIABLE) == "1":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timedelta(minutes=10))

    from megatron.training import training

    steps = folder / f"steps.rank{rank}.jsonl"
    training.train_step = _observed(training.train_step, steps, nccl_log)
    sys.argv[0] = str(_SCRIPT)
    sys.path.insert(0, str(_SCRIPT.parent))
    runpy.run_path(str(_SCRIPT), run_name="__main__")


def _observed(step: Callable[..., Any], steps: Path, nccl_log: Path) -> Callable[..., Any]:
    steps.unlink(missing_ok=True)

    def observed_step(*arguments: Any, **keywords: Any) -> Any:
        started = time.perf_counter()
        result = step(*arguments, **keywords)
        torch.cuda.synchronize()
        is_first = not steps.exists()
        is_nccl = dist.get_backend() == "nccl"
        line = {
            "seconds": round(time.perf_counter() - started, 4),
            "peak_memory": torch.cuda.max_memory_allocated() if is_nccl else None,
            "communicators": len(communicator_sizes(nccl_log)) if is_nccl else None,
        }
        with steps.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if is_first:
            print(FIRST_STEP_DONE)
        return result

    return observed_step


if __name__ == "__main__":
    main()
