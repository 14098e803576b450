"""Switches the CPU emulation on in a process started with ``tools.cpu_emulation.environment()``.

Python imports the first ``sitecustomize`` on its path when it starts. This one hands over to the
one that it hides.
"""

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


_emulation = _load_emulation()
if os.environ.get("MEGATRON_CPU_EMULATION") == "1":
    _emulation.enable_with_torch()
_emulation.run_hidden_sitecustomize(_HERE)
