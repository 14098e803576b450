"""What must hold of the repository itself."""

import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

from build_backend.base_wheel import locked_hashes
from build_backend.graft_table import GRAFTS
from build_backend.hooks import Backend
from build_backend.interpreter import MACHINES, PYTHON_TAGS
from build_backend.overlay import fork_files
from build_backend.release import DEFAULT_BASE, FORK_RELEASE, fork_version

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def repository_files() -> list[Path]:
    """Every file that is or would be committed."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    assert ROOT / "build_backend" / "grafts.py" in files
    return [path for path in files if path.is_file()]


def test_no_init_file_hides_the_installed_package():
    assert not list((ROOT / "megatron").rglob("__init__.py"))


def test_no_upstream_copyright_header(repository_files: list[Path], base_wheel):
    header = re.compile(rb"Copyright (\(c\) )?[\d, -]*NVIDIA|SPDX-File[C]opyrightText")
    with zipfile.ZipFile(base_wheel(DEFAULT_BASE)) as wheel:
        assert header.search(wheel.read("megatron/core/parallel_state.py"))
    assert [path for path in repository_files if header.search(path.read_bytes())] == []


def test_default_base_and_version():
    assert (ROOT / "base" / f"{DEFAULT_BASE}.txt").is_file()
    assert fork_version(DEFAULT_BASE) == f"{DEFAULT_BASE}+p2p.{FORK_RELEASE}"


def test_every_base_has_a_lock_and_a_folder(base: str):
    lock = (ROOT / "base" / f"{base}.txt").read_text()
    requirement = "".join(line for line in lock.splitlines() if not line.startswith("#"))
    assert requirement.startswith(f"megatron-core==={base} ")
    assert len(locked_hashes(base)) == len(PYTHON_TAGS) * len(MACHINES)
    assert requirement.count("--hash=sha256:") == len(locked_hashes(base))

    folder = ROOT / "base" / base
    build_system = tomllib.loads((folder / "pyproject.toml").read_text())["build-system"]
    assert build_system == {
        "requires": [],
        "build-backend": "shim:backend",
        "backend-path": ["."],
    }


def test_bases_differ_in_nothing_but_their_locks(base: str):
    reference = ROOT / "base" / DEFAULT_BASE
    folder = ROOT / "base" / base
    assert {path.name for path in folder.iterdir() if path.is_file()} == {
        "pyproject.toml",
        "replaced.sha256",
        "shim.py",
    }
    assert (folder / "shim.py").read_text() == (reference / "shim.py").read_text()


def test_backend_has_the_hooks_of_both_standards_and_no_other():
    hooks = {name for name in dir(Backend) if not name.startswith("_")}
    assert hooks == {
        "build_editable",
        "build_sdist",
        "build_wheel",
        "get_requires_for_build_editable",
        "get_requires_for_build_wheel",
    }


def test_notice_names_every_changed_file():
    notice = (ROOT / "NOTICE").read_text()
    for name in [*fork_files(), *(graft.file for graft in GRAFTS)]:
        assert name in notice, name
