"""Ranks, models, datasets and a table of results for the tests of ``megatron sft``."""

import functools
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.client_tests.megatron_sft import inputs, sft_run
from tests.harness.worker_pool import WorkerPool

_PRELOAD = ("swift.megatron", "swift.megatron.pipelines")
_ROWS = pytest.StashKey[list[tuple[str, str, str, float]]]()

VARYING = range(5, 90)
CONSTANT = (40,)

# What a CPU needs; no training is done differently for it.
CPU_FLAGS: dict[str, Any] = {
    "check_model": False,
    "gradient_accumulation_fusion": False,
    "load_from_cache_file": False,
    "dataloader_num_workers": 0,
}
if Version(importlib.metadata.version("ms-swift")) >= Version("4.6"):
    # It otherwise spawns a process for packing, which imports everything once more.
    CPU_FLAGS["dataloader_multiprocessing_context"] = "fork"
SMALL_FLAGS = {
    "torch_dtype": "float32",
    "fp16": False,
    "bf16": False,
    "train_iters": 2,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "logging_steps": 1,
    "max_length": 128,
    "lr": 1e-2,
    "split_dataset_ratio": 0,
    "no_save_optim": True,
    "no_save_rng": True,
    "save_safetensors": False,
}
LORA_FLAGS = {"tuner_type": "lora", "lora_dropout": 0, "target_modules": "all-linear"}


@pytest.fixture(scope="session")
def fork_pool():
    """Ranks with the installed fork and ms-swift."""
    with WorkerPool.for_fork(emulate_cuda=True, transformer_engine=True, preload=_PRELOAD) as pool:
        yield pool


@pytest.fixture(scope="session")
def base_pool():
    """Ranks with the release that the installed fork is built on, unmodified, and ms-swift."""
    release = importlib.metadata.version("megatron-core").partition("+")[0]
    with WorkerPool.for_base(release, transformer_engine=True, preload=_PRELOAD) as pool:
        yield pool


@pytest.fixture(scope="session")
def model(fork_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that makes a model of a type and a number of layers, once."""
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(model_type: str, layers: int = 8) -> Path:
        folder = root / f"{layers}_layers" / inputs.MODEL_NAMES[model_type]
        arguments = {"model_type": model_type, "layers": layers, "folder": folder}
        fork_pool.run(inputs.make_model, world_size=1, arguments=arguments, stall_s=60.0).values()
        return folder

    return make


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """A function that writes a dataset whose answers have the given lengths."""
    root = tmp_path_factory.mktemp("datasets")

    @functools.cache
    def write(answer_lengths: Any) -> Path:
        path = root / f"{answer_lengths[0]}_to_{answer_lengths[-1]}.jsonl"
        inputs.write_dataset(path, answer_lengths, samples=64)
        return path

    return write


@pytest.fixture(scope="session")
def one_rank(
    fork_pool: WorkerPool,
    model: Callable[..., Path],
    dataset: Callable[[Any], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., sft_run.Training]:
    """A function that trains on one rank, once for equal arguments."""
    root = tmp_path_factory.mktemp("one_rank")

    @functools.cache
    def run(model_type: str, lengths: Any, flags: tuple[tuple[str, Any], ...]) -> sft_run.Training:
        inputs_of_run = {"model": model(model_type), "dataset": dataset(lengths)}
        folder = root / str(len(list(root.iterdir())))
        all_flags = {**SMALL_FLAGS, **CPU_FLAGS, **inputs_of_run, **dict(flags)}
        return sft_run.train(fork_pool, all_flags, ranks=1, folder=folder)

    return run


@pytest.fixture(scope="session")
def adapter(
    fork_pool: WorkerPool,
    model: Callable[..., Path],
    dataset: Callable[[Any], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A LoRA adapter of the Qwen3 model, trained for a step.

    A run that starts without one draws its values from the generator of every stage.
    """
    folder = tmp_path_factory.mktemp("adapter") / "run"
    inputs_of_run = {"model": model("qwen3"), "dataset": dataset(VARYING)}
    saved = {"train_iters": 1, "save_safetensors": True, "merge_lora": False}
    flags = {**SMALL_FLAGS, **CPU_FLAGS, **LORA_FLAGS, **inputs_of_run, **saved}
    sft_run.train(fork_pool, flags, ranks=1, folder=folder)
    return folder / "output" / "checkpoint-1"


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str, str, float], None]:
    """A function that puts a row into the table: result, what it is compared with, seconds."""
    rows = request.config.stash.setdefault(_ROWS, [])

    def add(result: str, expected: str, seconds: float) -> None:
        rows.append((request.node.name, result, expected, seconds))

    return add


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash.get(_ROWS, [])
    if not rows:
        return
    terminalreporter.section("megatron sft: fork, and one rank")
    for name, result, expected, seconds in rows:
        terminalreporter.write_line(f"{name:62} {result:34} {expected:28} {seconds:6.1f} s")
