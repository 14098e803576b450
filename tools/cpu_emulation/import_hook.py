"""Call back when a module has been imported."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence


def after_import(module: str, callback: Callable[[], None]) -> None:
    """Call ``callback`` once ``module`` has been loaded; at once when it has been already.

    Args:
        module: Full name of the module.
        callback: Called without arguments, in the thread that imports the module, before the import
            statement there continues.
    """
    if module in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _CallBackAfterLoading(module, callback))


class _CallBackAfterLoading(importlib.abc.MetaPathFinder):
    """Finds one module as the finders behind it do, and extends how it is loaded."""

    def __init__(self, module: str, callback: Callable[[], None]) -> None:
        self._module = module
        self._callback = callback

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the other finders give, with a loader that calls back."""
        if fullname != self._module:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next((found for found in specs if found is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_call_back(module: types.ModuleType) -> None:
                load(module)
                self._callback()

            spec.loader.exec_module = load_and_call_back  # type: ignore[method-assign]
        return spec
