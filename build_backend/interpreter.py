"""Which interpreters the fork can be built for."""

from __future__ import annotations

import re
import sys
import sysconfig
from typing import NamedTuple

from build_backend.errors import BuildError

PYTHON_TAGS = ("cp312", "cp313")
MACHINES = ("x86_64", "aarch64")


class Interpreter(NamedTuple):
    """What a compiled module must match.

    Attributes:
        python: Python tag, such as `cp312`.
        machine: Instruction set, such as `x86_64`.
    """

    python: str
    machine: str

    def __str__(self) -> str:
        return f"{self.python} {self.machine}"


def running_interpreter() -> Interpreter:
    """Returns the interpreter that runs the build, which is the one pip installs into.

    Raises:
        BuildError: No base wheel exists for it.
    """
    # The suffix of compiled modules tells the Python, its thread mode, the machine and the C
    # library at once; the kernel's machine name would be wrong under a 32-bit or emulated Python.
    abi = sysconfig.get_config_var("SOABI") or sys.platform
    match = re.fullmatch(r"cpython-(\w+)-(\w+)-linux-gnu", abi)
    if match:
        interpreter = Interpreter(f"cp{match[1]}", match[2])
        if interpreter.python in PYTHON_TAGS and interpreter.machine in MACHINES:
            return interpreter
    version = ".".join(map(str, sys.version_info[:3]))
    raise BuildError(
        f"Python {version} ({abi}) at {sys.executable} is not supported: megatron-core has wheels "
        f"for {' and '.join(PYTHON_TAGS)} on Linux (glibc), {' and '.join(MACHINES)}; install "
        "with such a Python"
    )
