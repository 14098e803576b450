"""Builds that must fail: with one clear line, without a traceback, and with nothing written."""

import functools
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from build_backend.base_wheel import LOCAL_WHEEL_VARIABLE
from build_backend.errors import BuildError
from build_backend.hooks import Backend
from build_backend.interpreter import running_interpreter

BUILD = "import sys; from build_backend.hooks import Backend; Backend(*sys.argv[1:2])"
RECORDS = "base/0.19.2/replaced.sha256"


@pytest.fixture
def failing_build(
    source_tree: Path, environment: dict[str, str], tmp_path: Path
) -> Callable[..., str]:
    """Runs a build in the source tree, checks that it fails cleanly, and returns its last line."""

    def run(
        base: str = "0.19.2",
        hook: str = "build_wheel",
        python: str | Path = sys.executable,
        **variables: str,
    ) -> str:
        wheels, temporary = tmp_path / "wheels", tmp_path / "temporary"
        wheels.mkdir()
        temporary.mkdir()
        before = files_below(source_tree)
        result = subprocess.run(
            [python, "-B", "-c", f"{BUILD}.{hook}(sys.argv[2])", base, wheels],
            cwd=source_tree,
            env={**environment, "TMPDIR": str(temporary), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 1, result
        assert "Traceback" not in result.stderr, result.stderr
        *others, line = result.stderr.splitlines()
        assert line.startswith("megatron-core fork: ")
        assert not [other for other in others if other.startswith("megatron-core fork: ")]
        assert files_below(wheels) == files_below(temporary) == set()
        assert files_below(source_tree) == before
        return line

    return run


def files_below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.fixture(scope="session")
def other_wheel(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """Downloads the base wheel of another interpreter."""

    @functools.cache
    def download(python: str, machine: str) -> Path:
        folder = tmp_path_factory.mktemp("other")
        command = [sys.executable, "-m", "pip", "download", "megatron-core==0.19.2", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", folder, f"--python-version={python}"]
        command += [f"--platform=manylinux_2_28_{machine}", "--quiet"]
        subprocess.run(command, env=environment, check=True)
        (wheel,) = folder.glob("*.whl")
        return wheel

    return download


@pytest.fixture
def tampered_wheel(base_wheel: Callable[[str], Path], tmp_path: Path) -> Path:
    """A base wheel with its published name and one byte more."""
    folder = tmp_path / "tampered"
    folder.mkdir()
    wheel = Path(shutil.copy(base_wheel("0.19.2"), folder))
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    return wheel


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_local_wheel_with_another_sum(failing_build, tampered_wheel: Path):
    line = failing_build(**{LOCAL_WHEEL_VARIABLE: str(tampered_wheel)})
    assert re.search(r"has sha256 [0-9a-f]{64}, which is not in base/0\.19\.2\.txt", line)
    assert str(tampered_wheel) in line
    assert f"give the wheel of megatron-core 0.19.2 for {running_interpreter()}" in line


def test_local_wheel_of_another_base(failing_build, base_wheel: Callable[[str], Path]):
    line = failing_build("0.18.2", **{LOCAL_WHEEL_VARIABLE: str(base_wheel("0.19.2"))})
    assert "is not in base/0.18.2.txt: give the wheel of megatron-core 0.18.2" in line


def test_index_that_serves_another_file(failing_build, tampered_wheel: Path):
    line = failing_build(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tampered_wheel.parent))
    assert "the package index serves a megatron-core 0.19.2" in line
    assert "whose sha256 is not in base/0.19.2.txt" in line


def test_no_index_within_reach(failing_build, tmp_path: Path):
    line = failing_build(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert f"could not download megatron-core 0.19.2 for {running_interpreter()}" in line
    assert "PIP_INDEX_URL" in line
    assert LOCAL_WHEEL_VARIABLE in line


def test_no_pip(failing_build, tmp_path: Path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    line = failing_build(python=python)
    assert f"{python} has no pip" in line
    assert LOCAL_WHEEL_VARIABLE in line


@pytest.mark.parametrize("hook", ["build_wheel", "get_requires_for_build_wheel"])
def test_unknown_base(failing_build, hook: str):
    line = failing_build("0.15.0", hook=hook)
    assert "unknown base release '0.15.0': choose one of 0.16.1, 0.17.1, 0.18.2, 0.19.2" in line


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable", "get_requires_for_build_wheel"])
def test_relative_local_wheel(failing_build, hook: str):
    line = failing_build(hook=hook, **{LOCAL_WHEEL_VARIABLE: "wheels/base.whl"})
    assert f"{LOCAL_WHEEL_VARIABLE}='wheels/base.whl' is a relative path" in line
    assert "absolute path" in line


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable", "get_requires_for_build_wheel"])
def test_missing_local_wheel(failing_build, hook: str, tmp_path: Path):
    line = failing_build(hook=hook, **{LOCAL_WHEEL_VARIABLE: f"{tmp_path}/absent.whl"})
    assert f"{LOCAL_WHEEL_VARIABLE}='{tmp_path}/absent.whl' is not a file" in line


@pytest.mark.parametrize(
    ("python", "machine"),
    [
        pytest.param("3.13" if sys.version_info[:2] == (3, 12) else "3.12", None, id="Python"),
        pytest.param(None, "aarch64", id="machine"),
    ],
)
def test_local_wheel_for_another_interpreter(
    failing_build, other_wheel, python: str | None, machine: str | None
):
    running = running_interpreter()
    wheel = other_wheel(
        python or ".".join(map(str, sys.version_info[:2])),
        machine or running.machine,
    )
    line = failing_build(**{LOCAL_WHEEL_VARIABLE: str(wheel)})
    assert f"{wheel} is for cp3" in line
    assert f"and the running Python is {running}: give the wheel" in line


@pytest.mark.parametrize(
    "abi",
    [
        "cpython-311-x86_64-linux-gnu",
        "cpython-314-x86_64-linux-gnu",
        "cpython-313t-x86_64-linux-gnu",
        "cpython-312-x86_64-linux-musl",
        "cpython-312-i386-linux-gnu",
        "cpython-312-darwin",
        "pypy311-pp73",
        None,
    ],
)
def test_interpreter_without_base_wheels(monkeypatch: pytest.MonkeyPatch, abi: str | None):
    original = sysconfig.get_config_var
    monkeypatch.setattr(
        sysconfig, "get_config_var", lambda name: abi if name == "SOABI" else original(name)
    )
    for hook in (Backend("0.19.2").get_requires_for_build_wheel, running_interpreter):
        with pytest.raises(BuildError, match="is not supported") as error:
            hook()
        message = str(error.value)
        assert f"({abi or sys.platform})" in message
        assert "cp312 and cp313 on Linux (glibc), x86_64 and aarch64" in message
        assert "\n" not in message


@pytest.fixture
def local_base(base_wheel: Callable[[str], Path]) -> dict[str, str]:
    return {LOCAL_WHEEL_VARIABLE: str(base_wheel("0.19.2"))}


def test_base_file_changed_under_a_fork_file(failing_build, source_tree: Path, local_base):
    recorded = (source_tree / RECORDS).read_text()[:64]
    edit(source_tree / RECORDS, recorded, "0" * 64)
    line = failing_build(**local_base)
    assert "p2p_communication.py was written against a base file with sha256 000" in line
    assert f"megatron-core 0.19.2 has {recorded}" in line
    assert f"put the new sum into {RECORDS}" in line


def test_fork_file_that_replaces_a_base_file_without_a_record(
    failing_build, source_tree: Path, local_base
):
    (source_tree / "megatron/core/utils.py").write_text("")
    line = failing_build(**local_base)
    assert "megatron/core/utils.py replaces a file of megatron-core 0.19.2" in line
    assert f"{RECORDS} has no line for it" in line


def test_record_of_a_file_that_is_not_replaced(failing_build, source_tree: Path, local_base):
    (source_tree / "megatron/core/pipeline_parallel/p2p_communication.py").unlink()
    line = failing_build(**local_base)
    assert f"{RECORDS} has a line for megatron/core/pipeline_parallel/p2p_communication.py" in line


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"destroy_model_parallel"', '"dismantle_model_parallel"', "is not defined"),
        ("core/parallel_state.py", "core/parallel.py", "has no megatron/core/parallel.py to graft"),
    ],
)
@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_graft_that_does_not_fit(
    failing_build, source_tree: Path, local_base, old: str, new: str, message: str, hook: str
):
    edit(source_tree / "build_backend/graft_table.py", old, new)
    line = failing_build(hook=hook, **local_base)
    assert message in line
    assert "graft_table.py" in line


def test_init_file_in_the_source_tree(failing_build, source_tree: Path, local_base):
    (source_tree / "megatron/core/__init__.py").write_text("")
    line = failing_build(**local_base)
    assert "megatron/core/__init__.py must not exist" in line


def test_source_archive(failing_build):
    assert "there are no source archives" in failing_build(hook="build_sdist")


def test_setup_command_without_a_meaning(source_tree: Path, environment: dict[str, str]):
    result = subprocess.run(
        [sys.executable, "setup.py", "install"],
        cwd=source_tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "invalid choice: 'install'" in result.stderr
    assert "Traceback" not in result.stderr
