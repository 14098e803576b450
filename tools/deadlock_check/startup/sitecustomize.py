"""Records a process of a command that ``python -m tools.deadlock_check record`` runs.

Python imports the first ``sitecustomize`` on its path when it starts. This one hands over to the
one that it hides, first: what that one replaces in torch is to lie under the hooks.
"""

import importlib.util
import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_TOOLS = _HERE.parents[1]


def _load_package(name):
    """Import a package of this checkout, wherever the process was started."""
    folder = _TOOLS / name.rpartition(".")[2]
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


_load_package("tools.cpu_emulation").run_hidden_sitecustomize(_HERE)
if "DEADLOCK_CHECK_OUTPUT" in os.environ:
    _load_package("tools.deadlock_check")
    importlib.import_module("tools.deadlock_check.process_recording").record_with_torch()
