"""Puts the fork together: base release, fork files, grafts and metadata."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from build_backend import base_wheel, overlay
from build_backend.errors import BuildError
from build_backend.graft_table import GRAFTS
from build_backend.grafts import apply_grafts
from build_backend.release import ROOT, fork_version
from build_backend.wheel_file import Member, read_members, read_tags, wheel_name

_DISTRIBUTION = "megatron_core"
_LICENSE_FILES = ("LICENSE", "NOTICE")


@dataclass(frozen=True)
class Fork:
    """Everything that goes into a wheel of the fork.

    Attributes:
        wheel: File name of the wheel.
        dist_info: Name of its metadata folder, ending with `/`.
        members: Its entries by name, without its record.
        fork_files: Those entries that come from the fork's source tree as they are, by name.
    """

    wheel: str
    dist_info: str
    members: dict[str, Member]
    fork_files: dict[str, Path]


def assemble(base: str) -> Fork:
    """Returns the fork over a base release, for the running interpreter.

    Args:
        base: A release of megatron-core.

    Raises:
        BuildError: The base wheel, a fork file or a graft does not fit; see the modules of each.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = base_wheel.obtain(base, Path(folder))
        members, tags = read_members(path), read_tags(path)
    files = overlay.fork_files()
    overlay.check_replaced(base, members, files)
    members.update((name, Member(path.read_bytes())) for name, path in files.items())
    _graft(members)
    version = fork_version(base)
    dist_info = f"{_DISTRIBUTION}-{version}.dist-info/"
    return Fork(
        wheel=wheel_name(_DISTRIBUTION, version, tags),
        dist_info=dist_info,
        members=_with_metadata(members, base, dist_info),
        fork_files=files,
    )


def _graft(members: dict[str, Member]) -> None:
    for file in dict.fromkeys(graft.file for graft in GRAFTS):
        if file not in members:
            raise BuildError(
                f"the base release has no {file} to graft into: adapt GRAFTS in "
                "build_backend/graft_table.py to it"
            )
        grafts = [graft for graft in GRAFTS if graft.file == file]
        source = apply_grafts(members[file].content.decode("utf-8"), grafts)
        members[file] = members[file]._replace(content=source.encode("utf-8"))


def _with_metadata(members: dict[str, Member], base: str, dist_info: str) -> dict[str, Member]:
    """Returns the members with the fork's metadata folder in place of the base's."""
    base_dist_info = f"{_DISTRIBUTION}-{base}.dist-info/"
    renamed = {
        name.replace(base_dist_info, dist_info, 1): member
        for name, member in members.items()
        if name != f"{base_dist_info}RECORD"
    }
    metadata = f"{dist_info}METADATA"
    headers, blank_line, description = renamed[metadata].content.partition(b"\n\n")
    lines = headers.split(b"\n")
    lines[lines.index(f"Version: {base}".encode())] = f"Version: {fork_version(base)}".encode()
    lines += [f"License-File: {name}".encode() for name in _LICENSE_FILES]
    content = b"\n".join(lines) + blank_line + description
    renamed[metadata] = renamed[metadata]._replace(content=content)
    for name in _LICENSE_FILES:
        renamed[f"{dist_info}licenses/{name}"] = Member((ROOT / name).read_bytes())
    return renamed
