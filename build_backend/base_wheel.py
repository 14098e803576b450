"""Gets the wheel of a base release and makes sure that it is the right one."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

from build_backend.errors import BuildError
from build_backend.interpreter import Interpreter, running_interpreter
from build_backend.release import ROOT
from build_backend.wheel_file import read_tags

LOCAL_WHEEL_VARIABLE = "MEGATRON_CORE_BASE_WHEEL"


def locked_hashes(base: str) -> frozenset[str]:
    """Returns the sha256 sums of the wheels that may serve as a base, for all interpreters.

    Args:
        base: A release of megatron-core.

    Raises:
        BuildError: The fork does not support this base.
    """
    lock = _lock_file(base)
    if not lock.is_file():
        supported = sorted(path.stem for path in lock.parent.glob("*.txt"))
        raise BuildError(
            f"unknown base release {base!r}: choose one of {', '.join(supported)} with "
            "#subdirectory=base/<release> at the end of the URL"
        )
    return frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})", lock.read_text("utf-8")))


def local_wheel() -> Path | None:
    """Returns the base wheel that the user provides, or None where pip is to download it.

    Raises:
        BuildError: The environment variable does not hold the absolute path of a file.
    """
    value = os.environ.get(LOCAL_WHEEL_VARIABLE)
    if not value:
        return None
    path = Path(value)
    if not path.is_absolute():
        raise BuildError(
            f"{LOCAL_WHEEL_VARIABLE}={value!r} is a relative path: pip builds in a folder of its "
            "own, so give the absolute path of the wheel"
        )
    if not path.is_file():
        raise BuildError(
            f"{LOCAL_WHEEL_VARIABLE}={value!r} is not a file: give the absolute path of the "
            "wheel, or unset the variable to download it"
        )
    return path


def obtain(base: str, folder: Path) -> Path:
    """Returns the base wheel for the running interpreter, checked against the lock.

    Args:
        base: A release of megatron-core.
        folder: Existing folder for a downloaded wheel. A local wheel stays where it is.

    Raises:
        BuildError: The wheel cannot be had, is not one that the lock names, or is for another
            interpreter.
    """
    hashes = locked_hashes(base)
    interpreter = running_interpreter()
    path = local_wheel() or _download(base, folder, interpreter)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest not in hashes:
        raise BuildError(
            f"{path} has sha256 {digest}, which is not in base/{base}.txt: give the wheel of "
            f"megatron-core {base} for {interpreter} as it was published"
        )
    tags = read_tags(path)
    if not any(
        (tag.python, tag.abi) == (interpreter.python, interpreter.python)
        and tag.platform.endswith(f"_{interpreter.machine}")
        for tag in tags
    ):
        raise BuildError(
            f"{path} is for {', '.join(map(str, tags))} and the running Python is {interpreter}: "
            f"give the wheel of megatron-core {base} for {interpreter}"
        )
    return path


def _lock_file(base: str) -> Path:
    return ROOT / "base" / f"{base}.txt"


def _download(base: str, folder: Path, interpreter: Interpreter) -> Path:
    """Downloads with pip, so that the user's mirrors, proxies, certificates and cache apply."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "-r", str(_lock_file(base)), "--dest", str(folder)]
    command += ["--no-input", "--progress-bar=off", "--disable-pip-version-check"]
    # The user's constraints speak about what is installed in the end, which is not the base:
    # `megatron-core==0.19.2+p2p.2` would refuse it.
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    result = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    sys.stderr.write(result.stdout)
    if "No module named pip" in result.stdout:
        raise BuildError(
            f"{sys.executable} has no pip to download megatron-core {base} with: install pip "
            f"there, or set {LOCAL_WHEEL_VARIABLE} to the absolute path of that wheel"
        )
    if "DO NOT MATCH THE HASHES" in result.stdout:
        raise BuildError(
            f"the package index serves a megatron-core {base} for {interpreter} whose sha256 is "
            f"not in base/{base}.txt: use an index or mirror that serves the published wheels"
        )
    raise BuildError(
        f"pip could not download megatron-core {base} for {interpreter} (its messages are "
        "above): check PIP_INDEX_URL and the proxy in the environment or pip.conf (command line "
        f"options do not reach here), or set {LOCAL_WHEEL_VARIABLE} to the absolute path of "
        "that wheel"
    )
