"""Installation by pip into fresh virtual environments, in every documented way."""

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from build_backend.base_wheel import LOCAL_WHEEL_VARIABLE
from build_backend.release import fork_version

VERSION = fork_version("0.19.2")
NEW_FILE = "megatron/core/pipeline_parallel/even_odd_groups.py"


def assert_installed(virtual_environment, wheel: Path) -> None:
    """Checks that the installed package is, file by file, what the wheel holds."""
    assert virtual_environment.version() == wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(("/", "RECORD")):
                installed = virtual_environment.site_packages / name
                assert installed.read_bytes() == archive.read(name), name


def test_checkout_replaces_the_base_and_uninstalls(
    virtual_environment, source_tree: Path, base_wheel, fork_wheel
):
    virtual_environment.pip("install", "--no-deps", base_wheel("0.19.2"))
    assert virtual_environment.version() == "0.19.2"

    output = virtual_environment.pip("install", "--no-deps", ".", cwd=source_tree)
    assert "Successfully uninstalled megatron-core-0.19.2" in output
    assert_installed(virtual_environment, fork_wheel("0.19.2"))

    virtual_environment.add_packages_of_this_python()
    assert "No broken requirements found" in virtual_environment.pip("check")

    virtual_environment.pip("uninstall", "--yes", "megatron-core")
    # pip leaves the empty folder of a namespace package behind, for the base release too.
    left = virtual_environment.site_packages.glob("megatron*/**/*")
    assert [path for path in left if path.is_file()] == []


def test_failed_build_leaves_the_installed_package(
    virtual_environment, source_tree: Path, base_wheel, tmp_path: Path
):
    original = base_wheel("0.19.2")
    virtual_environment.pip("install", "--no-deps", original)
    broken = tmp_path / original.name
    broken.write_bytes(original.read_bytes()[:-1])
    result = virtual_environment.run(
        "-m", "pip", "install", "--no-deps", source_tree, **{LOCAL_WHEEL_VARIABLE: str(broken)}
    )
    assert result.returncode == 1
    assert "which is not in base/0.19.2.txt" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert_installed(virtual_environment, original)


@pytest.mark.parametrize("form", ["{}", "megatron-core @ {}"])
def test_commit(virtual_environment, repository, fork_wheel, form: str):
    virtual_environment.pip("install", "--no-deps", form.format(repository.url()))
    assert_installed(virtual_environment, fork_wheel("0.19.2"))


def test_commit_in_a_requirements_file_runs_from_any_folder(
    virtual_environment, repository, tmp_path: Path
):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"megatron-core @ {repository.url()}\n")
    virtual_environment.pip("install", "--no-deps", "-r", requirements)
    virtual_environment.add_packages_of_this_python()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = "import megatron.core.pipeline_parallel.even_odd_groups as m; print(m.__file__)"
    result = virtual_environment.run("-c", code, cwd=elsewhere)
    assert result.stdout.strip() == str(virtual_environment.site_packages / NEW_FILE), result


def test_other_base_by_subdirectory_is_not_confused_by_the_cache(
    virtual_environment, repository, fork_wheel
):
    """All builds of one commit go through one wheel cache, and the first comes out of it again."""
    for base in (None, "0.18.2", "0.16.1"):
        virtual_environment.pip("install", "--no-deps", f"megatron-core @ {repository.url(base)}")
        assert_installed(virtual_environment, fork_wheel(base or "0.19.2"))
    output = virtual_environment.pip("install", "--no-deps", f"megatron-core @ {repository.url()}")
    assert "Building wheel" not in output
    assert_installed(virtual_environment, fork_wheel("0.19.2"))


def test_local_base_wheel_without_a_network(
    virtual_environment, source_tree: Path, base_wheel, fork_wheel, tmp_path: Path
):
    wheel = shutil.copy(base_wheel("0.19.2"), tmp_path / "renamed.whl")
    nowhere = "http://127.0.0.1:9"
    virtual_environment.pip(
        "install",
        "--no-deps",
        source_tree,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS="",
        PIP_CONFIG_FILE=os.devnull,
        PIP_CACHE_DIR=str(tmp_path / "empty-cache"),
        http_proxy=nowhere,
        https_proxy=nowhere,
        **{LOCAL_WHEEL_VARIABLE: str(wheel)},
    )
    assert_installed(virtual_environment, fork_wheel("0.19.2"))


def test_folder_of_wheels_instead_of_an_index(
    virtual_environment, source_tree: Path, base_wheel, fork_wheel, tmp_path: Path
):
    """The folder also holds a build of the fork, which `==0.19.2` would prefer to the base."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    shutil.copy(base_wheel("0.19.2"), folder)
    shutil.copy(fork_wheel("0.19.2"), folder)
    virtual_environment.pip(
        "install",
        "--no-deps",
        "--no-build-isolation",
        source_tree,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(folder),
    )
    assert_installed(virtual_environment, fork_wheel("0.19.2"))


def test_user_constraint_on_the_fork_does_not_refuse_the_base(
    virtual_environment, source_tree: Path, fork_wheel, tmp_path: Path
):
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"megatron-core=={VERSION}\n")
    virtual_environment.pip("install", "--no-deps", source_tree, PIP_CONSTRAINT=str(constraints))
    assert_installed(virtual_environment, fork_wheel("0.19.2"))


def test_editable_edits_are_live(
    virtual_environment, source_tree: Path, base_wheel: Callable[[str], Path]
):
    local_base = {LOCAL_WHEEL_VARIABLE: str(base_wheel("0.19.2"))}
    install = ("install", "--no-deps", "--no-build-isolation", "-e", source_tree)
    virtual_environment.pip(*install, **local_base)
    assert virtual_environment.version() == VERSION

    code = "import megatron; print(*megatron.__path__)"
    (package,) = virtual_environment.run("-c", code).stdout.split()
    assert Path(package).is_relative_to(source_tree / "build")
    installed = Path(package, os.path.relpath(NEW_FILE, "megatron"))
    with (source_tree / NEW_FILE).open("a") as source:
        source.write("# edited\n")
    assert installed.read_text().endswith("# edited\n")
    assert "await_all_ranks" in Path(package, "core/parallel_state.py").read_text()
    assert Path(package, "core/transformer/transformer_config.py").is_file()

    # A second installation replaces the first and knows files that came since.
    (source_tree / "megatron/core/pipeline_parallel/added.py").write_text("ADDED = 1\n")
    virtual_environment.pip(*install, **local_base)
    assert installed.with_name("added.py").read_text() == "ADDED = 1\n"
    assert [path.name for path in (source_tree / "build").iterdir()] == [Path(package).parent.name]

    virtual_environment.pip("uninstall", "--yes", "megatron-core")
    assert virtual_environment.run("-c", "import megatron").returncode == 1
    assert (source_tree / NEW_FILE).is_file()
