"""Traces as JSON Lines: a header, a line per process group, a line per operation.

``docs/deadlock_check.md`` documents the format. A file may hold all ranks or some of them; the
files of one run are read together. A field that is left out has its default of
:mod:`tools.deadlock_check.trace`.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from .errors import UsageError
from .garbage_collection import no_garbage_collection
from .trace import (
    NOWHERE,
    ROLES,
    Batch,
    Collective,
    Compute,
    CreateGroup,
    Group,
    Meet,
    Operation,
    Phase,
    Place,
    Synchronize,
    Trace,
    Transfer,
    Wait,
)
from .trace_builder import TraceBuilder

FORMAT = "pipeline-communication-trace"
VERSION = 1

_IS_SEND = {"send": True, "recv": False}
_CLASSES: dict[str, type] = {
    "batch": Batch,
    "wait": Wait,
    "synchronize": Synchronize,
    "collective": Collective,
    "create_group": CreateGroup,
    "meet": Meet,
    "compute": Compute,
}
_NAMES = {cls: name for name, cls in _CLASSES.items()}

_Check = tuple[Callable[[Any], bool], str]


def header(
    world_size: int, description: str = "", ranks: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the first line of a file.

    Args:
        world_size: Number of ranks of the job.
        description: What was recorded; equal in all files of one run.
        ranks: Ranks whose programs the file holds; ``None`` for all.
    """
    line: dict[str, Any] = {"format": FORMAT, "version": VERSION, "world_size": world_size}
    if description:
        line["description"] = description
    if ranks is not None:
        line["ranks"] = list(ranks)
    return line


def group_to_json(group: Group) -> dict[str, Any]:
    """Return the line of a process group, which comes before the operations on it."""
    fields = _given_fields(group)
    return {"group": fields.pop("name"), **fields}


def operation_to_json(operation: Operation) -> dict[str, Any]:
    """Return the line of an operation, but for its rank."""
    if isinstance(operation, Transfer):
        name = "send" if operation.is_send else "recv"
    else:
        name = _NAMES[type(operation)]
    line = {"op": name, **_given_fields(operation)}
    if isinstance(operation, Batch):
        line["transfers"] = [operation_to_json(transfer) for transfer in operation.transfers]
    if operation.place != NOWHERE:
        place = operation.place._asdict()
        line |= {field: value for field, value in place.items() if value is not None}
    return line


def operation_from_json(
    line: Mapping[str, Any], places: dict[Place, Place] | None = None
) -> Operation:
    """Return the operation of a line; the inverse of ``operation_to_json``.

    Args:
        line: May have a ``rank`` besides.
        places: Makes equal places one object: pass the same dictionary for all lines.

    Raises:
        UsageError: The line is no operation.
    """
    name = line.get("op")
    if not isinstance(name, str) or (name not in _IS_SEND and name not in _CLASSES):
        known = ", ".join((*_IS_SEND, *_CLASSES))
        raise UsageError(f"unknown operation {name!r}; known are {known}")
    cls = _CLASSES.get(name, Transfer)
    values: dict[str, Any] = {"is_send": _IS_SEND[name]} if cls is Transfer else {}
    place: dict[str, Any] = {}
    for field, value in line.items():
        if field in _PLACE_FIELDS:
            place[field] = _checked(field, value)
        elif field in _FIELDS[cls]:
            values[field] = _checked(field, value)
        elif field not in ("op", "rank"):
            known = ", ".join((*_FIELDS[cls], *_PLACE_FIELDS))
            raise UsageError(f"{name!r} has no field {field!r}; it may have {known}")
    _require(cls, values, f"operation {name!r}")
    if cls is Batch:
        values["transfers"] = [_part_from_json(part, places) for part in values["transfers"]]
    if place:
        there = Place(**place)
        values["place"] = there if places is None else places.setdefault(there, there)
    return cls(**values)


def write_trace(trace: Trace, path: Path) -> None:
    """Write all ranks to one file, which appears complete or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(_lines(trace))
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_traces(paths: Sequence[Path]) -> Trace:
    """Read the files of one run, which together hold each rank once.

    The last line of a file may lack its end, as a killed process leaves it; then it is left out.

    Raises:
        UsageError: With file and line: what is wrong there.
    """
    if not paths:
        raise UsageError("no trace file given; name the files of all ranks of one run")
    reader = _Reader()
    with no_garbage_collection():
        for path in paths:
            reader.read(path)
    return reader.trace()


def _lines(trace: Trace) -> Iterator[str]:
    yield _encode(header(trace.world_size, trace.description))
    for group in trace.groups.values():
        yield _encode(group_to_json(group))
    for rank, program in enumerate(trace.programs):
        for operation in program:
            yield _encode({"rank": rank} | operation_to_json(operation))


def _encode(line: dict[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def _given_fields(thing: Any) -> dict[str, Any]:
    return {
        field: value
        for field, default in _FIELDS[type(thing)].items()
        if (value := getattr(thing, field)) != default
    }


def _group_from_json(line: Mapping[str, Any]) -> Group:
    values: dict[str, Any] = {}
    for field, value in line.items():
        name = "name" if field == "group" else field
        if name not in _FIELDS[Group]:
            raise UsageError(f"a group has no field {field!r}; drop it")
        values[name] = _checked(field, value)
    _require(Group, values, f"group {values['name']!r}")
    return Group(**values)


def _part_from_json(part: Any, places: dict[Place, Place] | None) -> Transfer:
    transfer = operation_from_json(part, places) if isinstance(part, dict) else None
    if not isinstance(transfer, Transfer):
        raise UsageError(f"{part!r} in a batch is neither a 'send' nor a 'recv'")
    return transfer


def _is_natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _one_of(*values: str) -> _Check:
    return lambda value: isinstance(value, str) and value in values, " or ".join(values)


_NATURAL: _Check = (_is_natural, "a whole number from 0")
_NATURALS: _Check = (
    lambda value: isinstance(value, list) and all(map(_is_natural, value)),
    "a list of whole numbers from 0",
)
_TEXT: _Check = (lambda value: isinstance(value, str), "a string")
_TRUTH: _Check = (lambda value: isinstance(value, bool), "true or false")

_CHECKS: dict[str, _Check] = {
    "rank": _NATURAL,
    "world_size": _NATURAL,
    "description": _TEXT,
    "group": _TEXT,
    "peer": _NATURAL,
    "size": _NATURAL,
    "role": _one_of(*ROLES),
    "content": _one_of("shape", "data"),
    "message": _TEXT,
    "request": _NATURAL,
    "requests": _NATURALS,
    "transfers": (lambda value: isinstance(value, list) and bool(value), "a list of transfers"),
    "blocks_host": _TRUTH,
    "scope": _one_of("device", "stream"),
    "name": _TEXT,
    "is_async": _TRUTH,
    "members_only": _TRUTH,
    "ranks": _NATURALS,
    "on_host": _TRUTH,
    "is_device_bound": _TRUTH,
    "direction": _one_of("forward", "backward"),
    "phase": _one_of(*get_args(Phase)),
    "microbatch": _NATURAL,
    "chunk": _NATURAL,
    "source": _TEXT,
}
"""By field: whether a value is right, and in words what is."""

_PLACE_FIELDS = Place._fields
_FIELDS: dict[type, dict[str, Any]] = {
    cls: {f.name: f.default for f in dataclasses.fields(cls) if f.name not in ("is_send", "place")}
    for cls in (Group, Transfer, *_CLASSES.values())
}
"""By class: its fields and their defaults, ``MISSING`` where there is none."""


def _checked(field: str, value: Any) -> Any:
    is_right, wanted = _CHECKS[field]
    if not is_right(value):
        raise UsageError(f"{field!r} is {value!r}; it must be {wanted}")
    if type(value) is str:
        # Millions of operations share a few names and roles.
        return sys.intern(value)
    return tuple(value) if type(value) is list else value


def _require(cls: type, values: Mapping[str, Any], what: str) -> None:
    missing = [
        repr(field)
        for field, default in _FIELDS[cls].items()
        if default is dataclasses.MISSING and field not in values
    ]
    if missing:
        raise UsageError(f"{what} lacks {' and '.join(missing)}")


class _Reader:
    """Merges the lines of all files into one trace."""

    def __init__(self) -> None:
        self._builder: TraceBuilder | None = None
        self._places: dict[Place, Place] = {}

    def trace(self) -> Trace:
        assert self._builder is not None
        return self._builder.trace()

    def read(self, path: Path) -> None:
        number = 0
        ranks: frozenset[int] | None = None
        try:
            with path.open(encoding="utf-8") as file:
                for text in file:
                    number += 1
                    line = _decode(text)
                    if line is None:
                        break
                    if ranks is None:
                        ranks = self._add_header(line)
                    else:
                        self._add(line, ranks)
            if ranks is None:
                raise UsageError("the file has no header; name a trace file")
        except UsageError as error:
            raise UsageError(f"{path}:{number}: {error}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: {error}; name a trace file") from error

    def _add_header(self, line: dict[str, Any]) -> frozenset[int]:
        """Return the ranks that the file holds."""
        if line.get("format") != FORMAT:
            raise UsageError(f"no trace: its first line must have 'format' {FORMAT!r}")
        if line.get("version") != VERSION:
            raise UsageError(
                f"'version' is {line.get('version')!r}, and this tool reads {VERSION}; "
                "record the run again with this tool"
            )
        world_size = _checked("world_size", line.get("world_size"))
        description = _checked("description", line.get("description", ""))
        builder = self._builder
        if builder is None:
            builder = self._builder = TraceBuilder(world_size, description)
        elif (world_size, description) != (builder.world_size, builder.description):
            raise UsageError(
                f"from a run of {world_size} ranks, {description!r}, but the first file is from "
                f"one of {builder.world_size}, {builder.description!r}; name files of one run"
            )
        ranks = _checked("ranks", line.get("ranks", list(range(world_size))))
        for rank in ranks:
            builder.add_rank(rank)
        return frozenset(ranks)

    def _add(self, line: dict[str, Any], ranks: frozenset[int]) -> None:
        assert self._builder is not None
        if "op" in line:
            rank = _checked("rank", line.get("rank"))
            if rank not in ranks:
                raise UsageError(f"'rank' is {rank}, which the header does not announce")
            self._builder.add(rank, operation_from_json(line, self._places))
        elif "group" in line:
            self._builder.add_group(_group_from_json(line))
        else:
            raise UsageError("the line has neither 'op' nor 'group', so it is no part of a trace")


def _decode(text: str) -> dict[str, Any] | None:
    """Return the object of a line; ``None`` for a last one that was cut off."""
    try:
        line = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        if not text.endswith("\n"):
            return None
        raise UsageError(f"not valid JSON: {error}") from None
    if not isinstance(line, dict):
        raise UsageError(f"a line must be a JSON object, not {text.strip()[:40]!r}")
    return line
