"""Insertion of statements into a Python source, leaving every other byte as it is."""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from build_backend.errors import BuildError


@dataclass(frozen=True)
class Graft:
    """Statements to insert into one function of one file.

    Attributes:
        file: Path of the file inside the wheel, with `/`.
        function: Name of the function. The file must define it exactly once.
        where: `start` inserts after the docstring, `end` after the last statement.
        statements: Complete lines without indentation of their own.
    """

    file: str
    function: str
    where: Literal["start", "end"]
    statements: str


def apply_grafts(source: str, grafts: Sequence[Graft]) -> str:
    """Inserts grafts into the source of one file.

    Args:
        source: The file's text with its own line endings.
        grafts: Grafts for this file. Those for one place are inserted in the order given.

    Returns:
        The source with the statements inserted, indented like the body of their function.

    Raises:
        BuildError: A function is missing, defined more than once, or has a form in which the
            statements would not run on every call; or the result is not valid Python.
    """
    lines = list(io.StringIO(source, newline=""))
    tree = ast.parse(source)
    newline = "\r\n" if lines[:1] and lines[0].endswith("\r\n") else "\n"
    insertions: dict[int, list[str]] = {}
    for graft in grafts:
        position, indentation = _place(tree, lines, graft)
        insertions.setdefault(position, []).extend(
            f"{indentation}{line}{newline}" for line in graft.statements.splitlines()
        )
    for position in sorted(insertions, reverse=True):
        if not lines[position - 1].endswith(("\n", "\r")):
            lines[position - 1] += newline
        lines[position:position] = insertions[position]
    grafted = "".join(lines)
    try:
        ast.parse(grafted)
    except SyntaxError as error:
        files = ", ".join(sorted({graft.file for graft in grafts}))
        raise BuildError(
            f"{files} is not valid Python with its grafts ({error}): correct GRAFTS in "
            "build_backend/graft_table.py"
        ) from None
    return grafted


def _place(tree: ast.Module, lines: list[str], graft: Graft) -> tuple[int, str]:
    """Returns the index of the line to insert before, and the indentation there."""
    function = _only_definition(tree, graft)
    first, last = function.body[0], function.body[-1]
    indentation = lines[first.lineno - 1][: first.col_offset]
    if indentation.strip():
        raise _refusal(graft, "has its body on the line of its header")
    if graft.where == "start":
        has_docstring = ast.get_docstring(function, clean=False) is not None
        position = _last_line(first) if has_docstring else _first_line(first) - 1
        if has_docstring and len(function.body) > 1 and function.body[1].lineno == position:
            raise _refusal(graft, "has a statement on the line of its docstring")
    else:
        if any(isinstance(node, ast.Return) for node in _own_nodes(function)):
            raise _refusal(graft, "returns before its end")
        position = _last_line(last)
    return position, indentation


def _only_definition(tree: ast.Module, graft: Graft) -> ast.FunctionDef | ast.AsyncFunctionDef:
    definitions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == graft.function
    ]
    if not definitions:
        raise _refusal(graft, "is not defined")
    if len(definitions) > 1:
        raise _refusal(graft, f"is defined {len(definitions)} times")
    return definitions[0]


def _first_line(statement: ast.stmt) -> int:
    """Returns the first line of a statement, decorators included."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _last_line(statement: ast.stmt) -> int:
    assert statement.end_lineno is not None, "statements of a parsed source have an end"
    return statement.end_lineno


def _own_nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yields the nodes of a function without those of functions and classes inside it."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            pending.extend(ast.iter_child_nodes(node))


def _refusal(graft: Graft, reason: str) -> BuildError:
    return BuildError(
        f"cannot insert at the {graft.where} of {graft.function}() in {graft.file}: the function "
        f"{reason} there; adapt GRAFTS in build_backend/graft_table.py to this base release"
    )
