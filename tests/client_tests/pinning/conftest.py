"""What the packaging tests have, and environments where all that the clients need is installed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit_tests.packaging.conftest import (
    VirtualEnvironment,
    environment,
    repository,
    template_environment,
    virtual_environment,
)

__all__ = [
    "client_environment",
    "environment",
    "repository",
    "template_environment",
    "virtual_environment",
]

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
CLIENTS = ("ms-swift", "mcore-bridge")


@pytest.fixture
def client_environment(
    virtual_environment: VirtualEnvironment,
) -> Callable[[str], tuple[VirtualEnvironment, list[str]]]:
    """Makes an environment with pip and all of a requirements file but the clients themselves.

    The second value returned is what is left to install, as `name==version`.
    """

    def make(requirements: str) -> tuple[VirtualEnvironment, list[str]]:
        lines = (REQUIREMENTS / f"{requirements}.txt").read_text().splitlines()
        clients = [line for line in lines if line.startswith(tuple(f"{c}==" for c in CLIENTS))]
        # Links, because copies of PyTorch and CUDA are several gigabytes.
        install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps"]
        install += ["--python", virtual_environment.path, "--link-mode", "symlink"]
        others = "\n".join(line for line in lines if line not in clients)
        subprocess.run([*install, "--requirements", "-"], input=others, text=True, check=True)
        return virtual_environment, clients

    return make
