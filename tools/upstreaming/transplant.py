"""The fork's protocol inside another version of ``p2p_communication.py``.

The file is edited and not replaced: what a version has beyond the fork's (decorators, options that
skip the shape exchange) stays, and the reviewer reads the protocol alone.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tools.upstreaming.errors import Refusal

PATH = "megatron/core/pipeline_parallel/p2p_communication.py"

_CLASS = "P2PCommunicator"
_POSTS = ("_batched_p2p_ops", "_p2p_ops")
_SHAPE_EXCHANGE = "_communicate_shapes"
_EXCHANGE = "_communicate"
_ONE_TENSOR = ("Optional[torch.Tensor]", "torch.Tensor | None", "None")

Function = ast.FunctionDef


def transplant(fork: str, target: str) -> str:
    """Give the target's functions the fork's protocol.

    ``_batched_p2p_ops``, ``_p2p_ops`` and ``_communicate_shapes`` keep their decorators and
    signatures and get the fork's bodies, together with the helpers and imports that these need.
    ``_communicate`` stays, except that it batches only where a batch cannot deadlock.

    Args:
        fork: Source of the fork's module.
        target: Source of the checkout's module.

    Returns:
        The target's source with the edits, not formatted.

    Raises:
        Refusal: The target has a layout in which the edits would not be right.
    """
    donor, patient = _Module("the fork", fork), _Module(PATH, target)
    edits = _Edits(target)
    wanted = _Wanted(donor, patient)
    for name in _POSTS:
        function = patient.function(name)
        _check_signature(donor.function(name), function)
        _check_takes_one_tensor_each(function)
        edits.replace_body(function, donor.body(donor.function(name)))
        wanted.add(donor.function(name).body)
    exchange = patient.method(_SHAPE_EXCHANGE)
    _check_signature(donor.method(_SHAPE_EXCHANGE), exchange)
    edits.replace_body(exchange, donor.body(donor.method(_SHAPE_EXCHANGE)))
    wanted.add(donor.method(_SHAPE_EXCHANGE).body)
    if _edit_exchange(patient, edits):
        wanted.add([ast.Name("communication_device")])

    edits.insert_after(patient.last_import(), "".join(f"{line}\n" for line in wanted.imports()))
    first_post = patient.function(_POSTS[0])
    edits.insert_before(first_post, wanted.constants())
    edits.insert_after(patient.function(_POSTS[-1]), wanted.functions())
    edits.insert_after(exchange, wanted.methods())
    result = edits.apply()
    try:
        ast.parse(result)
    except SyntaxError as error:
        raise Refusal(f"{PATH} would not be valid Python after the edits: {error}") from None
    return result


class _Module:
    """A parsed source whose definitions are found by name."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.lines = source.splitlines(keepends=True)
        try:
            self.tree = ast.parse(source)
        except SyntaxError as error:
            raise Refusal(f"{name} is not valid Python: {error}") from None

    def function(self, name: str) -> Function:
        return self._only(name, self.tree.body, "")

    def method(self, name: str) -> Function:
        return self._only(name, self.communicator().body, f"{_CLASS}.")

    def communicator(self) -> ast.ClassDef:
        classes = [
            node
            for node in self.tree.body
            if isinstance(node, ast.ClassDef) and node.name == _CLASS
        ]
        if len(classes) != 1:
            raise Refusal(
                f"{self.name} defines the class {_CLASS} {len(classes)} times, not once; this "
                "layout is not known, adapt tools/upstreaming/transplant.py"
            )
        return classes[0]

    def _only(self, name: str, body: list[ast.stmt], owner: str) -> Function:
        found = [node for node in body if isinstance(node, Function) and node.name == name]
        if len(found) != 1:
            raise Refusal(
                f"{self.name} defines {owner}{name}() {len(found)} times, not once; this layout "
                "is not known, adapt tools/upstreaming/transplant.py"
            )
        return found[0]

    def last_import(self) -> ast.stmt:
        imports = [
            node for node in self.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        if not imports:
            raise Refusal(f"{self.name} imports nothing; this layout is not known")
        return imports[-1]

    def bindings(self) -> dict[str, ast.stmt]:
        """Return the statement that binds each name of the module."""
        names: dict[str, ast.stmt] = {}
        for node in self.tree.body:
            for name in _bound_names(node):
                names[name] = node
        return names

    def text(self, node: ast.stmt) -> str:
        return "".join(self.lines[_first_line(node) - 1 : node.end_lineno])

    def body(self, function: Function) -> str:
        last = function.body[-1].end_lineno
        return "".join(self.lines[function.body[0].lineno - 1 : last])


@dataclass
class _Wanted:
    """Definitions of the donor that transplanted code needs and the patient lacks.

    Attributes:
        donor: Where they come from.
        patient: Where they are to go.
        names: Names on the donor's module level.
        method_names: Names of methods.
    """

    donor: _Module
    patient: _Module
    names: set[str] = field(default_factory=set)
    method_names: set[str] = field(default_factory=set)

    def add(self, nodes: Iterable[ast.AST]) -> None:
        """Add what ``nodes`` use, and what that uses in turn."""
        bindings, present = self.donor.bindings(), self.patient.bindings()
        methods = _methods(self.donor.communicator())
        present_methods = _methods(self.patient.communicator())
        pending = list(nodes)
        while pending:
            node = pending.pop()
            pending.extend(ast.iter_child_nodes(node))
            if isinstance(node, ast.Name) and node.id in bindings and node.id not in self.names:
                statement = bindings[node.id]
                if node.id in present:
                    self._check_same_meaning(node.id, statement, present[node.id])
                    continue
                self.names.add(node.id)
                pending.append(statement)
            if (
                isinstance(node, ast.Attribute)
                and node.attr in methods
                and node.attr not in present_methods
                and node.attr not in self.method_names
            ):
                self.method_names.add(node.attr)
                pending.append(methods[node.attr])

    def _check_same_meaning(self, name: str, ours: ast.stmt, theirs: ast.stmt) -> None:
        is_helper = isinstance(ours, Function) and name not in _POSTS
        if is_helper or _import_of(name, ours) != _import_of(name, theirs):
            raise Refusal(
                f"{self.patient.name} uses the name {name} for something else (line "
                f"{theirs.lineno}); rename it there or in the fork's module"
            )

    def imports(self) -> Iterator[str]:
        """Yield one import statement for each imported name."""
        bindings = self.donor.bindings()
        for name in sorted(self.names):
            if imported := _import_of(name, bindings[name]):
                yield imported

    def constants(self) -> str:
        nodes = self._nodes(ast.Assign)
        return "".join(map(self.donor.text, nodes)) + "\n\n" if nodes else ""

    def functions(self) -> str:
        return "".join(f"\n\n{self.donor.text(node)}" for node in self._nodes(Function))

    def methods(self) -> str:
        methods = _methods(self.donor.communicator())
        return "".join(
            f"\n{self.donor.text(methods[name])}" for name in methods if name in self.method_names
        )

    def _nodes(self, kind: type[ast.stmt]) -> list[ast.stmt]:
        bindings = self.donor.bindings()
        nodes = {bindings[name] for name in self.names}
        return sorted(
            (node for node in nodes if isinstance(node, kind)), key=lambda node: node.lineno
        )


class _Edits:
    """Replacements in a source, applied together.

    Positions are of bytes, as ``ast`` counts them.
    """

    def __init__(self, source: str) -> None:
        self._source = source.encode()
        self._lines = self._source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._replacements: list[tuple[int, int, bytes]] = []

    def text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def replace(self, node: ast.expr, text: str) -> None:
        self._replacements.append((*self._span(node), text.encode()))

    def replace_body(self, function: Function, body: str) -> None:
        """Replace everything below a function's header."""
        first = function.body[0].lineno
        if self._lines[first - 1][: function.body[0].col_offset].strip():
            raise Refusal(
                f"{PATH}:{first} has the body of {function.name}() on the line of its header; "
                "put it on a line of its own"
            )
        while self._lines[first - 2].strip() == b"" or self._lines[first - 2].lstrip()[:1] == b"#":
            first -= 1
        assert function.end_lineno is not None
        self._replacements.append(
            (self._starts[first - 1], self._starts[function.end_lineno], body.encode())
        )

    def insert_before(self, node: ast.stmt, text: str) -> None:
        position = self._starts[_first_line(node) - 1]
        self._replacements.append((position, position, text.encode()))

    def insert_after(self, node: ast.stmt, text: str) -> None:
        assert node.end_lineno is not None
        position = self._starts[node.end_lineno]
        self._replacements.append((position, position, text.encode()))

    def apply(self) -> str:
        result = self._source
        for start, end, text in sorted(self._replacements, reverse=True):
            result = result[:start] + text + result[end:]
        return result.decode()

    def _span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )


def _edit_exchange(patient: _Module, edits: _Edits) -> bool:
    """Restrict batches in ``_communicate``, and put receive buffers on the group's device.

    Returns:
        Whether ``communication_device`` is used now.
    """
    function = patient.method(_EXCHANGE)
    taken = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    for name in ("exchanges_shapes", "is_batch"):
        if name in taken:
            raise _unknown_exchange(function, f"uses the name {name} already")
    if "virtual_pipeline_model_parallel_size" not in ast.unparse(patient.method("__init__")):
        raise _unknown_exchange(
            function, "cannot tell an interleaved schedule: __init__ keeps no virtual size"
        )
    branch, condition, test = _shape_branch(function, edits)
    flags = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == "batch_p2p_comm"
    ]
    choices = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.If)
        and any(_mentions(statement, _POSTS[0]) for statement in node.body)
        and any(flag in ast.walk(node.test) for flag in flags)
    ]
    if len(choices) != 1 or min(flag.lineno for flag in flags) < branch.lineno:
        raise _unknown_exchange(function, f"does not choose {_POSTS[0]} by batch_p2p_comm")
    indentation = " " * branch.col_offset
    edits.insert_before(
        branch,
        f"{indentation}exchanges_shapes = {condition}\n"
        f"{indentation}is_batch = ({edits.text(flags[0])} and not exchanges_shapes "
        "and self.virtual_pipeline_model_parallel_size is None)\n",
    )
    edits.replace(branch.test, test)
    for flag in flags:
        edits.replace(flag, "is_batch")
    devices = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node) == "torch.cuda.current_device()"
    ]
    for device in devices:
        edits.replace(device, "communication_device(self.pp_group)")
    return bool(devices)


def _shape_branch(function: Function, edits: _Edits) -> tuple[ast.If, str, str]:
    """Return the ``if`` around the shape exchange, its condition in positive form, its new test."""
    for statement in function.body:
        if not isinstance(statement, ast.If):
            continue
        is_in_body = any(_mentions(node, _SHAPE_EXCHANGE) for node in statement.body)
        is_in_else = any(_mentions(node, _SHAPE_EXCHANGE) for node in statement.orelse)
        is_chain = len(statement.orelse) == 1 and isinstance(statement.orelse[0], ast.If)
        if is_in_body != is_in_else and not is_chain:
            condition = f"({edits.text(statement.test)})"
            if is_in_body:
                return statement, condition, "exchanges_shapes"
            return statement, f"not {condition}", "not exchanges_shapes"
    raise _unknown_exchange(
        function, f"does not call {_SHAPE_EXCHANGE} in one branch of an if at its top level"
    )


def _unknown_exchange(function: Function, reason: str) -> Refusal:
    return Refusal(
        f"{PATH}:{function.lineno} {_CLASS}.{_EXCHANGE}() {reason}; this layout is not known, "
        "adapt tools/upstreaming/transplant.py"
    )


def _check_signature(ours: Function, theirs: Function) -> None:
    if _parameters(ours) != _parameters(theirs):
        raise Refusal(
            f"{PATH}:{theirs.lineno} {theirs.name}() takes ({', '.join(_parameters(theirs))}), the "
            f"fork's ({', '.join(_parameters(ours))}); this layout is not known, adapt "
            f"megatron/core/pipeline_parallel/p2p_communication.py"
        )


def _check_takes_one_tensor_each(function: Function) -> None:
    arguments = function.args
    for argument in (*arguments.args, *arguments.kwonlyargs):
        if not argument.arg.startswith("tensor_") or argument.annotation is None:
            continue
        annotation = ast.unparse(argument.annotation)
        if annotation not in _ONE_TENSOR:
            raise Refusal(
                f"{PATH}:{argument.lineno} {function.name}() takes {annotation} as {argument.arg} "
                "and not one tensor or None; this layout is not known, adapt the fork's "
                "p2p_communication.py to it first"
            )


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    return [
        argument.arg
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    ]


def _mentions(node: ast.AST, name: str) -> bool:
    return any(
        (isinstance(inner, ast.Name) and inner.id == name)
        or (isinstance(inner, ast.Attribute) and inner.attr == name)
        for inner in ast.walk(node)
    )


def _methods(communicator: ast.ClassDef) -> Mapping[str, Function]:
    return {node.name: node for node in communicator.body if isinstance(node, Function)}


def _bound_names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, (ast.If, ast.Try)):
        for statement in node.body:
            yield from _bound_names(statement)


def _import_of(name: str, node: ast.stmt) -> str:
    """Return the import statement of one name, or nothing if ``node`` is no import."""
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        return ""
    (alias,) = (a for a in node.names if (a.asname or a.name.partition(".")[0]) == name)
    imported = ast.unparse(alias)
    if isinstance(node, ast.Import):
        return f"import {imported}"
    return f"from {'.' * node.level}{node.module or ''} import {imported}"


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])
