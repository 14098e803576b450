"""The fork's wheel against the base wheel, member by member."""

import base64
import csv
import difflib
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email.parser import BytesParser
from pathlib import Path

import pytest

from build_backend.graft_table import GRAFTS
from build_backend.release import fork_version

ROOT = Path(__file__).resolve().parents[3]
GRAFTED = "megatron/core/parallel_state.py"
REPLACED = {"megatron/core/pipeline_parallel/p2p_communication.py"}
LICENSE_FILES = ("LICENSE", "NOTICE")


def dist_info(base: str) -> str:
    return f"megatron_core-{fork_version(base)}.dist-info/"


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as wheel:
        assert wheel.testzip() is None
        assert len(set(wheel.namelist())) == len(wheel.namelist())
        return {name: wheel.read(name) for name in wheel.namelist()}


def fork_sources() -> dict[str, bytes]:
    """The fork's files by name, found by another means than the backend's."""
    return {
        os.path.relpath(os.path.join(folder, name), ROOT): Path(folder, name).read_bytes()
        for folder, _, names in os.walk(ROOT / "megatron")
        for name in names
        if not folder.endswith("__pycache__")
    }


@pytest.fixture
def base_contents(base: str, base_wheel: Callable[[str], Path]) -> dict[str, bytes]:
    """The base wheel's members, under the names that they have in the fork's wheel."""
    return {
        name.replace(f"megatron_core-{base}.dist-info/", dist_info(base)): content
        for name, content in contents(base_wheel(base)).items()
    }


@pytest.fixture
def fork_contents(base: str, fork_wheel: Callable[[str], Path]) -> dict[str, bytes]:
    return contents(fork_wheel(base))


def test_members_differ_by_exactly_the_fork(
    base: str, base_contents: dict[str, bytes], fork_contents: dict[str, bytes]
):
    sources = fork_sources()
    added = set(sources) - REPLACED
    licenses = {f"{dist_info(base)}licenses/{name}" for name in LICENSE_FILES}
    assert not added & set(base_contents)
    assert set(sources) >= REPLACED
    assert set(fork_contents) == set(base_contents) | added | licenses

    changed = {name for name in base_contents if fork_contents[name] != base_contents[name]}
    assert changed == REPLACED | {GRAFTED, f"{dist_info(base)}METADATA", f"{dist_info(base)}RECORD"}
    for name, content in sources.items():
        assert fork_contents[name] == content, name
    for name in LICENSE_FILES:
        assert fork_contents[f"{dist_info(base)}licenses/{name}"] == (ROOT / name).read_bytes()


def test_grafted_file_gains_the_statements_and_loses_nothing(
    base_contents: dict[str, bytes], fork_contents: dict[str, bytes]
):
    changes = list(
        difflib.ndiff(
            base_contents[GRAFTED].decode().splitlines(keepends=True),
            fork_contents[GRAFTED].decode().splitlines(keepends=True),
        )
    )
    assert not [line for line in changes if line.startswith(("- ", "? "))]
    inserted = "".join(line[2:] for line in changes if line.startswith("+ "))
    expected = "".join(
        f"    {line}" for graft in GRAFTS for line in graft.statements.splitlines(keepends=True)
    )
    assert inserted == expected
    compile(fork_contents[GRAFTED], GRAFTED, "exec")


def test_metadata_differ_by_the_version_and_the_licence_files(
    base: str, base_contents: dict[str, bytes], fork_contents: dict[str, bytes]
):
    name = f"{dist_info(base)}METADATA"
    changes = list(
        difflib.ndiff(
            base_contents[name].decode().splitlines(), fork_contents[name].decode().splitlines()
        )
    )
    assert [line for line in changes if line.startswith("- ")] == [f"- Version: {base}"]
    assert [line for line in changes if line.startswith("+ ")] == [
        f"+ Version: {fork_version(base)}",
        "+ License-File: LICENSE",
        "+ License-File: NOTICE",
    ]
    headers = BytesParser().parsebytes(fork_contents[name])
    assert headers["Name"] == "megatron-core"
    assert headers["Version"] == f"{fork_version(base)}"
    assert headers.get_all("License-File") == list(LICENSE_FILES)
    # Earlier metadata versions do not know License-File.
    assert tuple(map(int, headers["Metadata-Version"].split("."))) >= (2, 4)


def test_file_name_and_permissions_are_the_base_wheels(
    base: str, base_wheel: Callable[[str], Path], fork_wheel: Callable[[str], Path]
):
    original, built = base_wheel(base), fork_wheel(base)
    assert built.name == original.name.replace(f"-{base}-", f"-{fork_version(base)}-")
    with zipfile.ZipFile(original) as wheel:
        expected = {info.filename: info.external_attr for info in wheel.infolist()}
    with zipfile.ZipFile(built) as wheel:
        actual = {info.filename: info.external_attr for info in wheel.infolist()}
    kept = {name for name in expected if ".dist-info" not in name} - REPLACED
    assert {name: actual[name] for name in kept} == {name: expected[name] for name in kept}
    for name in set(actual) - kept - {name for name in actual if name.endswith("/")}:
        assert actual[name] == 0o100644 << 16, name


def test_record_lists_every_file_with_its_sum(base: str, fork_contents: dict[str, bytes]):
    record = f"{dist_info(base)}RECORD"
    rows = list(csv.reader(io.StringIO(fork_contents[record].decode())))
    assert rows[-1] == [record, "", ""]
    files = {name for name in fork_contents if not name.endswith("/")}
    assert sorted(name for name, _, _ in rows) == sorted(files)
    for name, digest, size in rows[:-1]:
        expected = base64.urlsafe_b64encode(hashlib.sha256(fork_contents[name]).digest())
        assert digest == f"sha256={expected.decode().rstrip('=')}", name
        assert int(size) == len(fork_contents[name]), name


def test_two_builds_are_equal_byte_by_byte(
    base_wheel: Callable[[str], Path],
    fork_wheel: Callable[[str], Path],
    source_tree: Path,
    environment: dict[str, str],
):
    """Also from another folder, by another entry, with other times and permissions."""
    for path in source_tree.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
        path.chmod(0o700 if path.is_dir() else 0o600)
    subprocess.run(
        [sys.executable, "setup.py", "bdist_wheel"],
        cwd=source_tree,
        env={**environment, "MEGATRON_CORE_BASE_WHEEL": str(base_wheel("0.19.2"))},
        check=True,
    )
    (built,) = (source_tree / "dist").iterdir()
    assert built.name == fork_wheel("0.19.2").name
    assert built.read_bytes() == fork_wheel("0.19.2").read_bytes()
    with zipfile.ZipFile(built) as wheel:
        assert {info.date_time for info in wheel.infolist()} == {(1980, 1, 1, 0, 0, 0)}
