"""Processes with and without the emulation."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.harness.worker_pool import WorkerPool

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def emulated_pool():
    """Ranks under the emulation."""
    with WorkerPool.for_fork(emulate_cuda=True) as pool:
        yield pool


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs ``python ARGUMENTS``, by default in the repository, to its end."""

    def run(
        *arguments: str,
        folder: Path = REPOSITORY,
        environment: Mapping[str, str] = os.environ,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
