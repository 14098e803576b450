"""A checkout of the size of a test: the names and signatures that the tool edits, little else."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
TOOL = REPOSITORY / "tools" / "upstream_pr.py"
CORE = "megatron/core"
P2P = f"{CORE}/pipeline_parallel/p2p_communication.py"
PARALLEL_STATE = f"{CORE}/parallel_state.py"
UNIT_TEST = "tests/unit_tests/pipeline_parallel/test_even_odd_groups.py"

BLACK_SETTINGS = """\
[tool.black]
line_length = 100
skip_string_normalization = true
skip_magic_trailing_comma = true

[tool.isort]
profile = "black"
line_length = 100
known_first_party = ["megatron"]
"""

_PARAMETERS = """\
    *,
    tensor_send_prev: Optional[torch.Tensor],
    tensor_recv_prev: Optional[torch.Tensor],
    tensor_send_next: Optional[torch.Tensor],
    tensor_recv_next: Optional[torch.Tensor],
    group: dist.ProcessGroup,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
"""

FILES = {
    "pyproject.toml": BLACK_SETTINGS,
    P2P: """\
# A comment that stays.
from typing import Optional

import torch
import torch.distributed as dist

from megatron.core.telemetry import span

UNTOUCHED = {'quotes': 'stay'}


@span('p2p.batch')
def _batched_p2p_ops(
PARAMETERS):
    return []


@span('p2p.single')
def _p2p_ops(
PARAMETERS):
    # A comment about the old body.

    return {}


class P2PCommunicator:
    def __init__(self, pp_group, config):
        self.pp_group, self.config = pp_group, config
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    @span('p2p.shapes')
    def _communicate_shapes(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next):
        return [0, 0, 0], [0, 0, 0]

    @span('p2p.exchange')
    def _communicate(self, *, tensor_shape):
        config = self.config
        if config.variable_seq_lengths and not config.fixed_shape:
            shapes = self._communicate_shapes(None, None, False, False)
        else:
            shapes = tensor_shape
        if config.batch_p2p_comm:
            post = _batched_p2p_ops
        else:
            post = _p2p_ops
        if config.batch_p2p_comm and config.batch_p2p_sync:
            torch.cuda.synchronize()
        return post, shapes
""".replace("PARAMETERS", _PARAMETERS),
    PARALLEL_STATE: '''\
"""State."""


def initialize_model_parallel(size: int = 1) -> None:
    """Initialize."""
    print(size)


def destroy_model_parallel():
    """Destroy."""
    print('destroyed')
''',
}


class Repository:
    """A git repository in a temporary folder, with an identity of its own.

    Args:
        folder: Folder that does not exist.
        files: Text by path.
    """

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.git("init", "--quiet", "--initial-branch", "main")
        self.write(files)
        self.git("config", "user.name", "Test")
        self.git("config", "user.email", "test@example.org")
        self.git("add", "--all", "--force")
        self.git("commit", "--quiet", "--message", "Base")

    def write(self, files: dict[str, str]) -> None:
        for path, text in files.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_text(text, encoding="utf-8")

    def commit(self, files: dict[str, str]) -> None:
        self.write(files)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "More")

    def git(self, *arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments],
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    def read(self, path: str) -> str:
        return (self.folder / path).read_text(encoding="utf-8")

    def state(self) -> tuple[str, ...]:
        """Returns all that a refused run must leave alone."""
        return (
            self.git("status", "--porcelain", "--ignored"),
            self.git("for-each-ref"),
            self.git("rev-parse", "--symbolic-full-name", "HEAD"),
        )

    def run_tool(self, *options: str) -> subprocess.CompletedProcess[str]:
        return run_tool(self.folder, *options)


def run_tool(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), "--megatron-lm", str(folder), *options],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def environment() -> dict[str, str]:
    """Returns this process's environment without settings of git that are not the test's."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return inherited | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
