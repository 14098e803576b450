"""Unmodified releases of ``megatron-core``, to compare the fork with."""

import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from build_backend import base_wheel
from build_backend.interpreter import running_interpreter
from build_backend.release import ROOT


def supported_bases() -> list[str]:
    """Returns the base releases that the fork can be built over."""
    return sorted(path.stem for path in (ROOT / "base").glob("*.txt"))


def unpacked_base(version: str) -> Path:
    """Returns a folder to put on ``sys.path`` to import the base release ``version``.

    The wheel is the one that the fork is built over: downloaded once, or taken from where the
    build's environment variable says, and checked against the lock either way.

    Args:
        version: One of the supported bases, such as ``0.19.2``.

    Raises:
        RuntimeError: The wheel cannot be had; the message says why and what to do.
    """
    tag = "-".join(running_interpreter())
    folder = ROOT / "build" / "bases" / f"{version}-{tag}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory() as download:
            wheel = base_wheel.obtain(version, Path(download))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(partial)
        partial.rename(folder)
    except SystemExit as error:
        raise RuntimeError(f"base release {version} is needed for comparison: {error}") from error
    except OSError:
        # Another process may have been faster; its folder is as good.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
