"""Switches the CPU emulation on in a process started with ``tools.cpu_emulation.environment()``.

Python imports the first ``sitecustomize`` on its path when it starts. This one hands over to the
one that it hides.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _load_emulation():
    """Import the emulation from this checkout, wherever the process was started."""
    package = _HERE.parent
    spec = importlib.util.spec_from_file_location(
        "tools.cpu_emulation", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    emulation = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(emulation)
    return emulation


def _run_hidden_sitecustomize():
    """Execute the ``sitecustomize`` that Python would have found without this one."""
    paths = [Path(entry or os.curdir).resolve() for entry in sys.path]
    behind = sys.path[paths.index(_HERE) + 1 :]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("MEGATRON_CPU_EMULATION") == "1":
    _load_emulation().enable_with_torch()
_run_hidden_sitecustomize()
