"""Run a CUDA-only training stack on a machine that has no GPU.

Megatron assumes CUDA in some thirty places. With the emulation on, the real training loop,
schedules, optimizer, datasets and checkpointing run on the CPU over gloo, several ranks on one
machine. What is replaced is one table, :data:`tools.cpu_emulation.replacements.REPLACEMENTS`;
``python -m tools.cpu_emulation --list`` prints it.

There are two ways to switch it on, and it is never on otherwise:

* ``python -m tools.cpu_emulation COMMAND ...`` runs a command, and every Python process that it
  starts, under the emulation;
* :func:`enable` switches it on in the calling process only.
"""

import importlib.machinery
import importlib.util
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from .import_hook import after_import

ENABLE_VARIABLE = "MEGATRON_CPU_EMULATION"
"""Environment variable that is ``1`` where child processes are to switch the emulation on."""

PACKAGES_DIRECTORY = Path(__file__).resolve().parent / "packages"
"""Directory of the stand-in for Transformer Engine, on the search path where that is asked for."""

STARTUP_DIRECTORY = Path(__file__).resolve().parent / "startup"
"""Directory of the ``sitecustomize`` that child processes find through ``PYTHONPATH``."""

__all__ = [
    "ENABLE_VARIABLE",
    "PACKAGES_DIRECTORY",
    "STARTUP_DIRECTORY",
    "enable",
    "enable_with_torch",
    "environment",
    "put_first",
    "run_hidden_sitecustomize",
]


def environment(
    base: Mapping[str, str] | None = None, *, transformer_engine: bool = False
) -> dict[str, str]:
    """Return an environment whose Python processes run under the emulation.

    Args:
        base: Environment to extend; the calling process's own when None. It is not changed.
        transformer_engine: Whether ``import transformer_engine`` finds the stand-in for it.

    Returns:
        A copy of ``base`` to start a process with. The process and its children switch the
        emulation on when they import torch. Commands are looked up beside the running interpreter
        first, and gloo connects over the loopback interface unless ``base`` names another.
    """
    extended = dict(os.environ if base is None else base)
    extended[ENABLE_VARIABLE] = "1"
    extended["TORCHDYNAMO_DISABLE"] = "1"
    if transformer_engine:
        put_first(extended, "PYTHONPATH", str(PACKAGES_DIRECTORY))
    put_first(extended, "PYTHONPATH", str(STARTUP_DIRECTORY))
    put_first(extended, "PATH", str(Path(sys.executable).parent))
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if loopback:
        extended.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    return extended


def enable(*, transformer_engine: bool = False) -> None:
    """Switch the emulation on in this process; a second call changes nothing.

    Call it before megatron is imported: the base binds some of the replaced functions while it is
    being imported.

    Args:
        transformer_engine: Whether ``import transformer_engine`` finds the stand-in for it.

    Raises:
        RuntimeError: A GPU is visible, or megatron.core has been imported already.
    """
    from .replacements import install

    install()
    if transformer_engine and str(PACKAGES_DIRECTORY) not in sys.path:
        sys.path.insert(0, str(PACKAGES_DIRECTORY))


def enable_with_torch() -> None:
    """Switch the emulation on when this process imports torch; if it never does, not at all."""
    after_import("torch", enable)


def run_hidden_sitecustomize(directory: Path) -> None:
    """Execute the ``sitecustomize`` that Python would have found without the one in ``directory``.

    Python imports only the first one on its path when it starts.
    """
    paths = [Path(entry or os.curdir).resolve() for entry in sys.path]
    behind = sys.path[paths.index(directory) + 1 :]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def put_first(variables: dict[str, str], name: str, entry: str) -> None:
    """Put ``entry`` before the others of the search path in the variable ``name``."""
    others = variables.get(name)
    variables[name] = entry + os.pathsep + others if others else entry
