"""Hand-written programs, in a short notation, as traces.

A file has a line per rank, ``rank: statement; statement; ...``, in any order. Ranks that are only
mentioned do nothing. A line ``groups: P = 0 1 2 3; H = host 0 1`` declares process groups by their
global ranks; ``W``, the default, has all ranks. ``#`` begins a comment.

=================  =================================================================================
``s1(P)``          send to rank 1 on group P; ``r1(P)`` receives. ``s1(P, 64)`` or
                   ``s1(P, bf16[100])`` gives the size, ``s1(P)=grad0`` names the message and
                   ``s1(P):send_next`` its role
``{s1, r1=x}(P)``  a batch
``w``              wait for every request since the last ``w``
``sync``           the host waits for the device; ``sync(stream)`` for the current stream only
``AR(P)``          all-reduce; likewise A2A, AG, RS and BC. ``AR*(P)`` is asynchronous
``init(0, 1)``     the host waits until these ranks, its own among them, all are at such an init
``new(P)``         create the group; ``new(P, members)`` is called by its members only
=================  =================================================================================
"""

import contextlib
import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .errors import UsageError
from .trace import (
    SENDS_TO_RECEIVES,
    Batch,
    Collective,
    CreateGroup,
    Group,
    Meet,
    Operation,
    Place,
    Synchronize,
    Trace,
    Transfer,
    Wait,
)
from .trace_builder import TraceBuilder

DEFAULT_GROUP = "W"

_COLLECTIVES = {
    "AR": "all_reduce",
    "A2A": "all_to_all",
    "AG": "all_gather",
    "RS": "reduce_scatter",
    "BC": "broadcast",
}
_ELEMENT_BYTES = {
    **dict.fromkeys(("int8", "uint8", "bool", "fp8"), 1),
    **dict.fromkeys(("int16", "fp16", "bf16"), 2),
    **dict.fromkeys(("int32", "fp32"), 4),
    **dict.fromkeys(("int64", "fp64"), 8),
}

_RANK = r"\d{1,4}"
_ARGUMENTS = r"\s*(?:\((?P<arguments>[^()]*)\))?"
_LINE = re.compile(rf"(?P<label>groups|{_RANK})\s*:(?P<rest>.*)")
_GROUP = re.compile(rf"(?P<name>[A-Za-z]\w*)\s*=\s*(?P<host>host\s)?(?P<ranks>(?:\s*{_RANK}\b)+)")
_TRANSFER = re.compile(
    rf"(?P<kind>[sr])(?P<peer>{_RANK}){_ARGUMENTS}"
    r"(?:\s*=\s*(?P<message>[\w.+-]+))?(?:\s*:\s*(?P<role>\w+))?"
)
_BATCH = re.compile(rf"\{{(?P<parts>[^{{}}]*)\}}{_ARGUMENTS}")
_COLLECTIVE = re.compile(rf"(?P<name>{'|'.join(_COLLECTIVES)})(?P<is_async>\*?){_ARGUMENTS}")
_CALL = re.compile(rf"(?P<name>w|sync|init|new){_ARGUMENTS}")
_SIZE = re.compile(r"(?P<bytes>\d+)|(?P<type>[a-z]+\d*)\[(?P<elements>\d+)\]")


def read_pattern(path: Path) -> Trace:
    """Read a file with a hand-written pattern.

    Raises:
        UsageError: As ``parse_pattern``, or there is no such file of text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}; name a pattern file") from error
    return parse_pattern(text, str(path))


def parse_pattern(text: str, name: str) -> Trace:
    """Return the trace that a pattern describes.

    Args:
        text: In the notation of this module.
        name: Where it comes from, for messages and ``Place.source``.

    Raises:
        UsageError: With line and column: what is wrong there and how it is written right.
    """
    groups: list[tuple[_Piece, Group]] = []
    programs: dict[int, list[tuple[_Piece, Operation]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        code = _Piece(line.partition("#")[0], name, number, 1).stripped()
        if not code.text:
            continue
        match = _match(_LINE, code, "'0: s1(P); w' for rank 0, or 'groups: P = 0 1'")
        pieces = [piece for piece in code.part(match.span("rest")).split(";") if piece.text]
        if match["label"] == "groups":
            groups += [(piece, _group(piece)) for piece in pieces]
        elif int(match["label"]) in programs:
            raise code.error(f"rank {match['label']} has a line already; continue that one")
        else:
            program = _Program()
            programs[int(match["label"])] = [(piece, program.parse(piece)) for piece in pieces]
    if not programs:
        raise UsageError(f"{name}: no rank has a program; write lines such as '0: s1; w'")
    return _build(name, groups, programs)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A part of the text, and where it begins."""

    text: str
    name: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.name}:{self.line}:{self.column}"

    def part(self, span: tuple[int, int]) -> "_Piece":
        """Return what stands between two positions, without white space around it."""
        text = self.text[slice(*span)]
        return dataclasses.replace(self, text=text, column=self.column + span[0]).stripped()

    def stripped(self) -> "_Piece":
        """Return the piece without white space around it."""
        indent = len(self.text) - len(self.text.lstrip())
        return dataclasses.replace(self, text=self.text.strip(), column=self.column + indent)

    def split(self, separator: str) -> Iterator["_Piece"]:
        """Yield what stands between separators."""
        start = 0
        for part in self.text.split(separator):
            yield self.part((start, start + len(part)))
            start += len(part) + len(separator)

    def error(self, message: str) -> UsageError:
        """Return an error that says where."""
        return UsageError(f"{self}: {message}")


class _Program:
    """Parses the statements of one rank, numbering its requests."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: list[int] = []
        self._meetings: Counter[tuple[int, ...]] = Counter()

    def parse(self, piece: _Piece) -> Operation:
        """Return the operation of a statement."""
        place = Place(source=str(piece))
        if _TRANSFER.fullmatch(piece.text):
            return _transfer(piece, *_arguments(piece, _TRANSFER), self._issue(), place)
        if match := _BATCH.fullmatch(piece.text):
            return self._batch(piece, match, place)
        if match := _COLLECTIVE.fullmatch(piece.text):
            group, size = _arguments(piece, _COLLECTIVE)
            is_async = bool(match["is_async"])
            request = self._issue() if is_async else None
            name = _COLLECTIVES[match["name"]]
            return Collective(name, group, is_async, size, request, place)
        return self._call(piece, place)

    def _issue(self) -> int:
        self._open.append(next(self._numbers))
        return self._open[-1]

    def _batch(self, piece: _Piece, match: re.Match[str], place: Place) -> Batch:
        group, size = _arguments(piece, _BATCH)
        if size is not None:
            raise piece.error("a batch has no size; write it with each part, '{s1(64)}(P)'")
        request = self._issue()
        transfers = []
        for part in piece.part(match.span("parts")).split(","):
            _match(_TRANSFER, part, "parts such as s1, r1(64) or s1=name in a batch")
            own_group, size = _arguments(part, _TRANSFER, default_group=group)
            if own_group != group:
                raise part.error("the group of a batch is written behind it, '{s1, r1}(P)'")
            transfers.append(_transfer(part, group, size, request, Place(source=str(part))))
        return Batch(group, transfers, place)

    def _call(self, piece: _Piece, place: Place) -> Operation:
        match = _match(_CALL, piece, "s1(P), r1, {s1, r1}(P), w, sync, AR(P), init(0, 1) or new(P)")
        arguments = [part.strip() for part in (match["arguments"] or "").split(",")]
        match match["name"], arguments:
            case "w", [""]:
                if not self._open:
                    raise piece.error("no request is left to wait for; drop the w")
                requests, self._open = tuple(self._open), []
                return Wait(requests, place=place)
            case "sync", [""]:
                return Synchronize("device", place)
            case "sync", ["stream"]:
                return Synchronize("stream", place)
            case "init", [*ranks] if all(re.fullmatch(_RANK, rank) for rank in ranks):
                return self._meeting(tuple(sorted(map(int, ranks))), place)
            case "new", [group] if group:
                return CreateGroup(group, place=place)
            case "new", [group, "members"]:
                return CreateGroup(group, members_only=True, place=place)
        raise piece.error(
            f"{piece.text!r} has wrong arguments; write w, sync, sync(stream), init(0, 1), new(P) "
            "or new(P, members)"
        )

    def _meeting(self, ranks: tuple[int, ...], place: Place) -> Meet:
        self._meetings[ranks] += 1
        return Meet(ranks, f"init {self._meetings[ranks]}", place)


def _match(pattern: re.Pattern[str], piece: _Piece, right: str) -> re.Match[str]:
    match = pattern.fullmatch(piece.text)
    if match is None:
        raise piece.error(f"cannot read {piece.text!r}; write {right}")
    return match


def _group(piece: _Piece) -> Group:
    match = _match(_GROUP, piece, "'P = 0 1 2', or 'H = host 0 1' for a group on CPU tensors")
    if match["name"] == DEFAULT_GROUP:
        raise piece.error(f"{DEFAULT_GROUP} is the group of all ranks; take another name")
    ranks = tuple(map(int, match["ranks"].split()))
    return Group(match["name"], ranks, on_host=match["host"] is not None)


def _transfer(piece: _Piece, group: str, size: int | None, request: int, place: Place) -> Transfer:
    match = _match(_TRANSFER, piece, "s1(P) or r1(P)")
    is_send, role = match["kind"] == "s", match["role"]
    fitting = list(SENDS_TO_RECEIVES if is_send else SENDS_TO_RECEIVES.values())
    if role is not None and role not in fitting:
        raise piece.error(f"{role!r} is no role of it; write {' or '.join(fitting)}")
    return Transfer(
        is_send,
        group,
        int(match["peer"]),
        size,
        role,
        message=match["message"],
        request=request,
        place=place,
    )


def _arguments(
    piece: _Piece, pattern: re.Pattern[str], default_group: str = DEFAULT_GROUP
) -> tuple[str, int | None]:
    """Return group and size."""
    match = _match(pattern, piece, "group and size in parentheses")
    group, size = None, None
    if match["arguments"] is not None:
        for argument in piece.part(match.span("arguments")).split(","):
            sized = _SIZE.fullmatch(argument.text)
            if sized and size is None:
                size = _bytes(argument, sized)
            elif group is None and size is None and re.fullmatch(r"[A-Za-z]\w*", argument.text):
                group = argument.text
            else:
                raise argument.error(
                    f"cannot read {argument.text!r}; write (P), (64), (P, 64) or (P, bf16[100])"
                )
    return group or default_group, size


def _bytes(piece: _Piece, match: re.Match[str]) -> int:
    if match["bytes"]:
        return int(match["bytes"])
    if match["type"] not in _ELEMENT_BYTES:
        raise piece.error(f"unknown type {match['type']!r}; known are {', '.join(_ELEMENT_BYTES)}")
    return _ELEMENT_BYTES[match["type"]] * int(match["elements"])


def _build(
    name: str,
    groups: list[tuple[_Piece, Group]],
    programs: dict[int, list[tuple[_Piece, Operation]]],
) -> Trace:
    ranks = set(programs)
    for _, group in groups:
        ranks.update(group.ranks)
    for program in programs.values():
        for _, operation in program:
            ranks.update(_mentioned(operation))
    builder = TraceBuilder(max(ranks) + 1, f"pattern {name}")
    builder.add_group(Group(DEFAULT_GROUP, tuple(range(builder.world_size))))
    for piece, group in groups:
        with _located(piece):
            builder.add_group(group)
    for rank in range(builder.world_size):
        builder.add_rank(rank)
        for piece, operation in programs.get(rank, []):
            with _located(piece):
                builder.add(rank, operation)
    return builder.trace()


def _mentioned(operation: Operation) -> Iterator[int]:
    if isinstance(operation, Meet):
        yield from operation.ranks
    elif isinstance(operation, Transfer):
        yield operation.peer
    elif isinstance(operation, Batch):
        yield from (transfer.peer for transfer in operation.transfers)


@contextlib.contextmanager
def _located(piece: _Piece) -> Iterator[None]:
    """Adds the place to an error about what stands there."""
    try:
        yield
    except UsageError as error:
        raise piece.error(str(error)) from None
