"""Reading and writing of wheels, whatever is in them."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import zipfile
from collections.abc import Mapping
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import NamedTuple

_REGULAR_FILE = 0o100644 << 16
# Any fixed time would do: with the time of the build in it, no two builds would be equal.
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)


class Member(NamedTuple):
    """One entry of a wheel.

    Attributes:
        content: The file's bytes; empty for a folder, whose name ends with `/`.
        attributes: File type and permissions as zip archives keep them.
    """

    content: bytes
    attributes: int = _REGULAR_FILE

    @property
    def permissions(self) -> int:
        """Permission bits, for `os.chmod`."""
        return self.attributes >> 16 & 0o777


class Tag(NamedTuple):
    """One interpreter that a wheel is for.

    Attributes:
        python: Python tag, such as `cp312`.
        abi: ABI tag, such as `cp312`.
        platform: Platform tag, such as `manylinux_2_28_x86_64`.
    """

    python: str
    abi: str
    platform: str

    def __str__(self) -> str:
        return "-".join(self)


def read_members(path: Path) -> dict[str, Member]:
    """Returns the entries of a wheel by name, in the order of the archive."""
    with zipfile.ZipFile(path) as wheel:
        return {
            info.filename: Member(wheel.read(info), info.external_attr) for info in wheel.infolist()
        }


def read_tags(path: Path) -> list[Tag]:
    """Returns the tags in a wheel's own WHEEL file, so that a renamed wheel is still understood."""
    with zipfile.ZipFile(path) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
        headers = BytesHeaderParser().parsebytes(wheel.read(name))
    return [Tag(*tag.split("-")) for tag in headers.get_all("Tag", [])]


def wheel_name(distribution: str, version: str, tags: list[Tag]) -> str:
    """Returns the file name of a wheel: several tags are joined part by part, in their order."""
    parts = (".".join(dict.fromkeys(part)) for part in zip(*tags, strict=True))
    return "-".join([distribution, version, *parts]) + ".whl"


def write_wheel(path: Path, members: Mapping[str, Member], record: str) -> None:
    """Writes a wheel so that equal members give equal bytes, and a failure leaves no file.

    Args:
        path: The wheel to write; an existing one is replaced.
        members: Its entries by name, without its record.
        record: Name of the record to compute and append.
    """
    complete = {**members, record: Member(_record_of(members, record))}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(partial, "w") as wheel:
            for name, member in complete.items():
                info = zipfile.ZipInfo(name, _TIMESTAMP)
                info.external_attr = member.attributes
                info.compress_type = zipfile.ZIP_DEFLATED
                wheel.writestr(info, member.content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _record_of(members: Mapping[str, Member], record: str) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, member in members.items():
        if not name.endswith("/"):
            digest = base64.urlsafe_b64encode(hashlib.sha256(member.content).digest())
            rows.writerow([name, f"sha256={digest.decode().rstrip('=')}", len(member.content)])
    rows.writerow([record, "", ""])
    return text.getvalue().encode()
