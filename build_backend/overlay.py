"""The fork's own files, and the base files that they were written against."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from build_backend.errors import BuildError
from build_backend.release import ROOT
from build_backend.wheel_file import Member


def fork_files() -> dict[str, Path]:
    """Returns every file below `megatron/` of the fork's source by its name in the wheel.

    Left out are hidden files and bytecode, which editors and interpreters leave behind.

    Raises:
        BuildError: An `__init__.py` is among them. It would hide the installed package from
            whatever runs in the source tree.
    """
    files = {}
    for path in sorted((ROOT / "megatron").rglob("*")):
        inside = path.relative_to(ROOT)
        name = inside.as_posix()
        if path.name == "__init__.py":
            raise BuildError(f"{name} must not exist: delete it, the base release brings its own")
        leftover = any(part.startswith((".", "__pycache__")) for part in inside.parts)
        if path.is_file() and not leftover:
            files[name] = path
    return files


def check_replaced(
    base: str, base_members: Mapping[str, Member], files: Mapping[str, Path]
) -> None:
    """Makes sure that each fork file replaces the very file that it was written against.

    Args:
        base: The release that `base_members` come from.
        base_members: Contents of the base wheel.
        files: The fork's files, as `fork_files` returns them.

    Raises:
        BuildError: `base/<base>/replaced.sha256` does not record exactly the base files that are
            replaced, with their sha256 sums.
    """
    records = f"base/{base}/replaced.sha256"
    lines = (ROOT / records).read_text("utf-8").splitlines()
    recorded = {name: digest for digest, name in (line.split(maxsplit=1) for line in lines)}
    replaced = [name for name in files if name in base_members]
    for name in replaced:
        digest = hashlib.sha256(base_members[name].content).hexdigest()
        if name not in recorded:
            raise BuildError(
                f"{name} replaces a file of megatron-core {base} and {records} has no line for "
                f"it: compare the two files, then add '{digest}  {name}'"
            )
        if recorded[name] != digest:
            raise BuildError(
                f"{name} was written against a base file with sha256 {recorded[name]}, and "
                f"megatron-core {base} has {digest}: bring the fork's file up to date, then put "
                f"the new sum into {records}"
            )
    unused = sorted(recorded.keys() - set(replaced))
    if unused:
        raise BuildError(
            f"{records} has a line for {unused[0]}, which the fork does not replace in "
            f"megatron-core {base}: restore the fork's file or delete the line"
        )
