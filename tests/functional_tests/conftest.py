"""Data, initial checkpoints and ranks for the functional tests."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.functional_tests.case_file import SAVING_INITIAL_CHECKPOINT, FunctionalCase, cpu_case
from tests.functional_tests.documents import write_documents
from tests.functional_tests.training_run import Training, train
from tests.harness.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool():
    """Ranks with the installed fork, under the CUDA emulation."""
    with WorkerPool.for_fork(emulate_cuda=True) as pool:
        yield pool


@pytest.fixture(scope="session")
def documents(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path prefix of an indexed dataset: short documents of counted-up tokens."""
    prefix = tmp_path_factory.mktemp("data") / "documents"
    pool.run(write_documents, world_size=1, arguments={"prefix": prefix}).values()
    return prefix


@pytest.fixture(scope="session")
def run_case(
    pool: WorkerPool, documents: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Training]:
    """A function that runs a case by its name, or returns what it logged when it ran before."""
    folder = tmp_path_factory.mktemp("runs")

    def train_case(case: FunctionalCase, part: str, **changes: Any) -> Training:
        checkpoint = folder / case.initial_checkpoint_case / "initial checkpoint"
        paths = {"DATA_PATH": documents, "INITIAL_CHECKPOINT": checkpoint}
        return train(
            pool,
            case.flags(paths, **changes),
            ranks=case.ranks,
            environment=case.environment,
            log_folder=folder / case.name / part,
        )

    @functools.cache
    def save_initial_checkpoint(name: str) -> None:
        # The base's initial weights depend on how the model is split; a checkpoint does not.
        train_case(
            cpu_case(name),
            "initial",
            **SAVING_INITIAL_CHECKPOINT,
        )

    @functools.cache
    def run(name: str) -> Training:
        case = cpu_case(name)
        save_initial_checkpoint(case.initial_checkpoint_case)
        if case.test_type == "regular":
            return train_case(case, "run")
        assert case.test_type == "ckpt-resume", f"{name}: unknown TEST_TYPE {case.test_type}"
        half = case.model_args["--train-iters"] // 2
        checkpoint = folder / case.name / "checkpoint"
        first = train_case(
            case, "until checkpoint", save=checkpoint, save_interval=half, exit_interval=half
        )
        second = train_case(case, "resumed", load=checkpoint, finetune=None)
        return Training(
            losses=first.losses + second.losses,
            microbatch_lengths=first.microbatch_lengths + second.microbatch_lengths,
        )

    return run
