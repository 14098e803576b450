"""Insertion of statements: where they land, what stays untouched, what is refused."""

import ast
import builtins
import inspect
import symtable
import zipfile
from collections.abc import Callable

import pytest

from build_backend.errors import BuildError
from build_backend.graft_table import GRAFTS
from build_backend.grafts import Graft, apply_grafts
from build_backend.release import ROOT

STATEMENTS = "calls.append(\n    'graft'\n)\n"


def graft(where: str, function: str = "target", statements: str = STATEMENTS) -> Graft:
    return Graft(file="module.py", function=function, where=where, statements=statements)


@pytest.mark.parametrize(
    ("where", "source", "expected"),
    [
        pytest.param(
            "start",
            'def target():\n    """Docstring."""\n    # About the call.\n    calls.append(1)\n',
            'def target():\n    """Docstring."""\n    <graft>    # About the call.\n'
            "    calls.append(1)\n",
            id="after a docstring",
        ),
        pytest.param(
            "start",
            'def target(\n    a=1,\n):\n    """Doc.\n\n    More.\n    """  # noqa\n\n    a\n',
            'def target(\n    a=1,\n):\n    """Doc.\n\n    More.\n    """  # noqa\n    <graft>\n'
            "    a\n",
            id="after a long docstring",
        ),
        pytest.param(
            "start",
            "def target():\n    # Comment.\n    calls.append(1)\n",
            "def target():\n    # Comment.\n    <graft>    calls.append(1)\n",
            id="without a docstring",
        ),
        pytest.param(
            "start",
            "def target():\n    @cache\n    def inner():\n        pass\n",
            "def target():\n    <graft>    @cache\n    def inner():\n        pass\n",
            id="before a decorator",
        ),
        pytest.param(
            "start",
            'def target():\n    """Only a docstring."""\n',
            'def target():\n    """Only a docstring."""\n    <graft>',
            id="only a docstring",
        ),
        pytest.param(
            "end",
            "def target():\n    if x:\n        f(\n            1\n        )\n\ny = 1\n",
            "def target():\n    if x:\n        f(\n            1\n        )\n    <graft>\ny = 1\n",
            id="after a compound statement",
        ),
        pytest.param(
            "end",
            "def target():\n    calls.append(1)  # last",
            "def target():\n    calls.append(1)  # last\n    <graft>",
            id="file without a final newline",
        ),
        pytest.param(
            "end",
            "if True:\n\tdef target():\n\t\tdef inner():\n\t\t\treturn 1\n\t\tinner()\n",
            "if True:\n\tdef target():\n\t\tdef inner():\n\t\t\treturn 1\n\t\tinner()\n\t\t<graft>",
            id="tabs, and a return in an inner function",
        ),
        pytest.param(
            "end",
            "x = '\u2028\u00e9'\r\ndef target():\r\n    f('\u00e9')\r\ny = 1\r\n",
            "x = '\u2028\u00e9'\r\ndef target():\r\n    f('\u00e9')\r\n    <graft>y = 1\r\n",
            id="other line endings and characters",
        ),
    ],
)
def test_inserts_at_the_place_and_changes_nothing_else(where: str, source: str, expected: str):
    before, after = expected.split("<graft>")
    indentation = before.splitlines()[-1]
    newline = "\r\n" if "\r\n" in source else "\n"
    text = newline.join(["calls.append(", f"{indentation}    'graft'", f"{indentation})", after])
    assert apply_grafts(source, [graft(where)]) == before + text


def test_grafts_run_first_and_last():
    source = "def target(calls):\n    '''Doc.'''\n    calls.append('body')"
    grafts = [
        graft("end", statements="calls.append('end 1')\n"),
        graft("start", statements="calls.append('start')\n"),
        graft("end", statements="calls.append('end 2')\n"),
    ]
    grafted = apply_grafts(source, grafts)
    assert len(grafted.splitlines()) == 6
    namespace: dict = {}
    exec(grafted, namespace)
    calls: list[str] = []
    namespace["target"](calls)
    assert calls == ["start", "body", "end 1", "end 2"]
    assert namespace["target"].__doc__ == "Doc."


@pytest.mark.parametrize(
    ("where", "source", "reason"),
    [
        ("start", "def other():\n    pass\n", "is not defined"),
        ("end", "target = print\n", "is not defined"),
        ("start", "def target():\n    pass\ndef target():\n    pass\n", "is defined 2 times"),
        (
            "end",
            "if x:\n    def target():\n        pass\nelse:\n    def target():\n        pass\n",
            "is defined 2 times",
        ),
        ("start", "def target(): pass\n", "body on the line of its header"),
        ("end", "def target(): pass\n", "body on the line of its header"),
        ("start", "def target():\n    'Doc.'; pass\n", "on the line of its docstring"),
        ("end", "def target():\n    if x:\n        return\n    pass\n", "returns before its end"),
    ],
)
def test_refuses_a_function_that_does_not_fit(where: str, source: str, reason: str):
    with pytest.raises(BuildError) as error:
        apply_grafts(source, [graft(where)])
    message = str(error.value)
    assert reason in message
    assert f"cannot insert at the {where} of target() in module.py" in message
    assert "graft_table.py" in message


def test_refuses_statements_that_are_not_python():
    with pytest.raises(BuildError, match=r"module\.py is not valid Python with its grafts"):
        apply_grafts("def target():\n    pass\n", [graft("end", statements="call(\n")])


def test_names_in_the_table_exist_in_every_base(base: str, base_wheel):
    """Each name that a graft reads is a parameter, is assigned before, or is a module's name."""
    for grafted in GRAFTS:
        with zipfile.ZipFile(base_wheel(base)) as wheel:
            source = wheel.read(grafted.file).decode()
        module = symtable.symtable(
            apply_grafts(source, [item for item in GRAFTS if item.file == grafted.file]),
            grafted.file,
            "exec",
        )
        function = next(
            child for child in module.get_children() if child.get_name() == grafted.function
        )
        module_names = {
            symbol.get_name()
            for symbol in module.get_symbols()
            if symbol.is_assigned() or symbol.is_imported()
        }
        parameters = {
            symbol.get_name() for symbol in function.get_symbols() if symbol.is_parameter()
        }
        imported_here = {
            symbol.get_name() for symbol in function.get_symbols() if symbol.is_imported()
        }
        local = {symbol.get_name() for symbol in function.get_symbols() if symbol.is_local()}
        known = parameters | imported_here | (module_names - local) | set(dir(builtins))
        if grafted.where == "end":
            known |= local
        names = {
            node.id
            for node in ast.walk(ast.parse(grafted.statements))
            if isinstance(node, ast.Name)
        }
        assert names, grafted
        assert names <= known, f"{names - known} in {grafted.function} of {base}"


def test_calls_in_the_table_fit_the_functions_they_call():
    source = (ROOT / "megatron/core/pipeline_parallel/even_odd_groups.py").read_text()
    functions = {
        node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)
    }
    for grafted in GRAFTS:
        (call,) = (
            statement.value
            for statement in ast.parse(grafted.statements).body
            if isinstance(statement, ast.Expr)
        )
        assert ast.unparse(call.func.value) == "even_odd_groups"
        function = functions[call.func.attr]
        keywords = {keyword.arg: None for keyword in call.keywords}
        try:
            inspect.signature(without_body(function)).bind(*call.args, **keywords)
        except TypeError as error:
            pytest.fail(f"{function.name}({ast.unparse(function.args)}): {error}")


def without_body(function: ast.FunctionDef) -> Callable:
    """Returns a function with the same parameters; making the real one would import torch."""
    arguments = function.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    return eval(f"lambda {ast.unparse(arguments)}: None")
