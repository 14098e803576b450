"""The public surface of p2p_communication.py equals that of every supported base release."""

import ast
import importlib.metadata
import inspect
from pathlib import Path

import pytest

from megatron.core.pipeline_parallel import p2p_communication
from tools.base_release import supported_bases, unpacked_base

BASE_VERSIONS = supported_bases()
MODULE = "megatron/core/pipeline_parallel/p2p_communication.py"


def test_all_bases_are_covered():
    assert importlib.metadata.version("megatron-core").partition("+")[0] in BASE_VERSIONS


@pytest.mark.parametrize("base_version", BASE_VERSIONS)
def test_every_name_of_the_base_is_there_with_its_signature(base_version):
    base = signatures_in(unpacked_base(base_version) / MODULE)
    assert len(base) > 10
    fork = signatures_in(Path(inspect.getsourcefile(p2p_communication)))
    assert {name: fork.get(name) for name in base} == base


@pytest.mark.parametrize("base_version", BASE_VERSIONS)
def test_methods_stay_methods_and_properties_stay_properties(base_version):
    tree = ast.parse((unpacked_base(base_version) / MODULE).read_text())
    (communicator,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    for function in communicator.body:
        if isinstance(function, ast.FunctionDef):
            decorators = {ast.unparse(decorator) for decorator in function.decorator_list}
            ours = inspect.getattr_static(p2p_communication.P2PCommunicator, function.name)
            assert isinstance(ours, property) == ("property" in decorators)


def signatures_in(path):
    """Returns names, order, kinds and defaults of the arguments of each function and method."""
    signatures = {}
    for node in ast.parse(path.read_text()).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for function in members:
            if isinstance(function, ast.FunctionDef):
                arguments = function.args
                for argument in ast.walk(arguments):
                    if isinstance(argument, ast.arg):
                        argument.annotation = None
                signatures[owner + function.name] = ast.unparse(arguments)
    return signatures
