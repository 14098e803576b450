"""Records a process of a command that ``python -m tools.deadlock_check record`` runs.

Python imports the first ``sitecustomize`` on its path when it starts. This one hands over to the
one that it hides, first: what that one replaces in torch is to lie under the hooks.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_TOOLS = _HERE.parents[1]


def _load_package(name):
    """Import a package of this checkout, wherever the process was started."""
    if name not in sys.modules:
        folder = _TOOLS / name.rpartition(".")[2]
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


def _run_hidden_sitecustomize():
    """Execute the ``sitecustomize`` that Python would have found without this one."""
    paths = [Path(entry or os.curdir).resolve() for entry in sys.path]
    behind = sys.path[paths.index(_HERE) + 1 :]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_hidden_sitecustomize()
if "DEADLOCK_CHECK_OUTPUT" in os.environ:
    _load_package("tools.cpu_emulation")
    _load_package("tools.deadlock_check")
    importlib.import_module("tools.deadlock_check.process_recording").record_with_torch()
