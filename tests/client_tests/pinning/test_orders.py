"""The fork beside ms-swift and mcore-bridge, installed by pip in every order that users take."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.client_tests.pinning.conftest import REQUIREMENTS
from tests.unit_tests.packaging.conftest import Repository, VirtualEnvironment

CASES = {
    "clients first": ("current", None, [["clients"], ["fork"]]),
    "fork first": ("current", None, [["fork"], ["clients"]]),
    "together": ("current", None, [["clients", "fork"]]),
    "clients first, fork alone": ("oldest", "0.17.1", [["clients"], ["--no-deps", "fork"]]),
}
"""Requirements file, base in the fork's URL (None: the default), and the arguments of each pip."""

DAMAGED_FILES = """
import base64, hashlib, importlib.metadata, json, sys
damaged, checked = [], 0
for name in sys.argv[1:]:
    for file in importlib.metadata.files(name):
        if file.hash is not None:
            digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
            checked += 1
            if base64.urlsafe_b64encode(digest).decode().rstrip("=") != file.hash.value:
                damaged.append(str(file))
print(json.dumps([checked, damaged]))
"""


def damaged_files(environment: VirtualEnvironment, *distributions: str) -> list[str]:
    """Returns the files of distributions that are no longer as their wheels had them."""
    result = environment.run("-c", DAMAGED_FILES, *distributions)
    assert result.returncode == 0, result.stderr
    checked, damaged = json.loads(result.stdout)
    assert checked > 50
    return damaged


def install(
    environment: VirtualEnvironment, order: Sequence[Sequence[str]], clients: list[str], fork: str
) -> None:
    meanings = {"clients": clients, "fork": [f"megatron-core @ {fork}"]}
    for step in order:
        arguments = [part for word in step for part in meanings.get(word, [word])]
        environment.pip("install", *arguments)


@pytest.mark.parametrize(("requirements", "base", "order"), CASES.values(), ids=CASES.keys())
def test_fork_stays_whatever_comes_last(
    client_environment: Callable[[str], tuple[VirtualEnvironment, list[str]]],
    repository: Repository,
    requirements: str,
    base: str | None,
    order: Sequence[Sequence[str]],
):
    environment, clients = client_environment(requirements)
    install(environment, order, clients, repository.url(base))

    assert environment.version().startswith(f"{base or '0.19.2'}+p2p.")
    find = "import megatron.core.pipeline_parallel.even_odd_groups as new; print(new.__file__)"
    result = environment.run("-c", find)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.splitlines()[-1]).is_relative_to(environment.site_packages)
    assert "No broken requirements found" in environment.pip("check")
    assert not damaged_files(environment, "ms-swift", "mcore-bridge", "megatron-core")


def test_edited_file_of_a_client_is_found(virtual_environment: VirtualEnvironment):
    lines = (REQUIREMENTS / "current.txt").read_text().splitlines()
    (bridge,) = [line for line in lines if line.startswith("mcore-bridge==")]
    virtual_environment.pip("install", "--no-deps", bridge)
    assert not damaged_files(virtual_environment, "mcore-bridge")
    edited = virtual_environment.site_packages / "mcore_bridge" / "__init__.py"
    edited.write_text(edited.read_text() + "# edited\n")
    assert damaged_files(virtual_environment, "mcore-bridge") == ["mcore_bridge/__init__.py"]
