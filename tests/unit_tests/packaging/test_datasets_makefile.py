"""`make` in the datasets folder, as `megatron.training` calls it when it runs from a wheel."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

HELPERS = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"


@pytest.fixture
def datasets(base: str, fork_wheel, tmp_path: Path) -> Path:
    """The folder as it is installed."""
    with zipfile.ZipFile(fork_wheel(base)) as wheel:
        wheel.extractall(tmp_path)
    return tmp_path / "megatron/core/datasets"


def compile_helpers(datasets: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs make as the base does: as a child of the training process, without a shell."""
    code = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    return subprocess.run(
        [sys.executable, "-c", code, "make", "-C", datasets],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def other_python_first(tmp_path: Path) -> str:
    """A PATH on which `python3` and `python` are another Python than the running one."""
    folder = tmp_path / "other-python"
    folder.mkdir()
    for name in ("python", "python3"):
        script = folder / name
        script.write_text("#!/bin/sh\necho .cpython-27-x86_64-linux-gnu.so\n")
        script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_nothing_is_done_when_the_helpers_are_there(datasets: Path, other_python_first: str):
    before = {path: path.stat().st_mtime_ns for path in datasets.rglob("*")}
    assert datasets / HELPERS in before
    os.utime(datasets / "helpers.cpp")
    before[datasets / "helpers.cpp"] = (datasets / "helpers.cpp").stat().st_mtime_ns
    result = compile_helpers(datasets, PATH=other_python_first, CXX="false")
    assert result.returncode == 0, result
    assert "Nothing to be done" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in datasets.rglob("*")} == before


def test_missing_helpers_are_compiled_for_the_running_python(
    datasets: Path, other_python_first: str, tmp_path: Path
):
    (datasets / HELPERS).unlink()
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\necho "$@" > "$COMPILER_LOG"\n')
    compiler.chmod(0o755)
    log = tmp_path / "log"
    # Stands in for pybind11 in the same site-packages.
    (datasets.parents[2] / "pybind11.py").write_text("print('-I/headers')\n")
    result = compile_helpers(
        datasets, PATH=other_python_first, CXX=str(compiler), COMPILER_LOG=str(log)
    )
    assert result.returncode == 0, result
    assert log.read_text().split()[-4:] == ["-I/headers", "helpers.cpp", "-o", HELPERS]
