"""Base wheels, copies of the source tree, a git repository and virtual environments."""

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from build_backend.base_wheel import LOCAL_WHEEL_VARIABLE, obtain
from build_backend.hooks import Backend

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("pyproject.toml", "setup.py", "build_backend", "base", "megatron", "LICENSE", "NOTICE")
BASES = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test that asks for `base` on every supported base release."""
    if "base" in metafunc.fixturenames:
        metafunc.parametrize("base", BASES)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The caller's environment without what changes builds, and with a pip cache of the session."""
    removed = {LOCAL_WHEEL_VARIABLE, "PYTHONPATH", "PIP_CONSTRAINT", "PIP_REQUIRE_VIRTUALENV"}
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    cache = tmp_path_factory.mktemp("pip-cache")
    return {**kept, "PIP_CACHE_DIR": str(cache), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@pytest.fixture(scope="session")
def base_wheel(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Downloads a base wheel the way the backend does, once per session."""

    @functools.cache
    def download(base: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(LOCAL_WHEEL_VARIABLE, raising=False)
            patch.setenv("PIP_CACHE_DIR", environment["PIP_CACHE_DIR"])
            return obtain(base, tmp_path_factory.mktemp(f"base-{base}"))

    return download


@pytest.fixture(scope="session")
def fork_wheel(
    base_wheel: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Builds a wheel of the fork from the working tree, once per session."""

    @functools.cache
    def build(base: str) -> Path:
        folder = tmp_path_factory.mktemp(f"fork-{base}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(LOCAL_WHEEL_VARIABLE, str(base_wheel(base)))
            return folder / Backend(base).build_wheel(str(folder))

    return build


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    """A copy of what a build reads, to change or to build in."""
    tree = tmp_path / "source"
    _copy_sources(tree)
    return tree


@dataclass(frozen=True)
class Repository:
    """A git repository with the working tree committed."""

    path: Path
    commit: str

    def url(self, base: str | None = None) -> str:
        subdirectory = f"#subdirectory=base/{base}" if base else ""
        return f"git+file://localhost{self.path}@{self.commit}{subdirectory}"


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    path = tmp_path_factory.mktemp("repository")
    _copy_sources(path)
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.invalid"]
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "Sources"]):
        subprocess.run(["git", *identity, *command], cwd=path, check=True)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=path, check=True, capture_output=True, text=True
    )
    return Repository(path, head.stdout.strip())


@dataclass(frozen=True)
class VirtualEnvironment:
    """A virtual environment with nothing but pip in it."""

    path: Path
    environment: dict[str, str]

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next(self.path.glob("lib/python*/site-packages"))

    def run(
        self, *arguments: str | Path, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs the environment's Python, by default in its own folder; checks nothing."""
        return subprocess.run(
            [self.python, *arguments],
            cwd=cwd or self.path,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def pip(self, *arguments: str | Path, cwd: Path | None = None, **variables: str) -> str:
        """Runs pip and returns what it printed; fails the test if pip fails."""
        result = self.run("-m", "pip", *arguments, cwd=cwd, **variables)
        output = result.stdout + result.stderr
        assert result.returncode == 0, output
        return output

    def version(self) -> str:
        """Returns the installed version of megatron-core."""
        code = "import importlib.metadata as metadata; print(metadata.version('megatron-core'))"
        return self.run("-c", code).stdout.strip()

    def add_packages_of_this_python(self) -> None:
        """Makes the packages of the tests' own Python visible, after those installed here."""
        path = sysconfig.get_paths()["purelib"]
        (self.site_packages / "packages_of_the_tests.pth").write_text(f"{path}\n")


@pytest.fixture(scope="session")
def template_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "venv"
    subprocess.run([sys.executable, "-m", "venv", path], check=True)
    return path


@pytest.fixture
def virtual_environment(
    template_environment: Path, environment: dict[str, str], tmp_path: Path
) -> VirtualEnvironment:
    # A copy, because installing pip into each new environment takes longer than most tests.
    path = tmp_path / "venv"
    shutil.copytree(template_environment, path, symlinks=True)
    return VirtualEnvironment(path, environment)


def _copy_sources(tree: Path) -> None:
    tree.mkdir(exist_ok=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".*")
            )
        else:
            shutil.copy(ROOT / name, tree / name)
