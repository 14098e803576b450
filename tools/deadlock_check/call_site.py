"""Where in the source an operation was issued, and which part of an exchange it plays there."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

from .trace import ROLES, Phase, Place

_INTERNAL_PACKAGES = ("torch", "contextlib", "tools.deadlock_check", "tools.cpu_emulation")
"""Modules whose frames say nothing to the user."""

_FRAMES_WITH_ROLE = 4
"""How far up from the call the role of a transfer is looked for."""

_SHAPE_EXCHANGE = "_communicate_shapes"
"""Name of the function that exchanges shapes, in the base as in the fork."""


class CallSites:
    """Finds the calls in the source that issue operations; what is the same is done once."""

    def __init__(self) -> None:
        # By id, as the hash of a code object walks all that is in it. The value holds the object,
        # so that its id is not given to another one.
        self._places: dict[tuple[int, int], _Places] = {}
        self._role_variables: dict[int, tuple[CodeType, list[tuple[str, str]]]] = {}

    def find(self, frame: FrameType) -> "CallSite":
        """Return the innermost call, from ``frame`` upwards, that says something to the user."""
        while True:
            key = id(frame.f_code), frame.f_lasti
            places = self._places.get(key)
            if places is None:
                places = self._places[key] = _Places(frame.f_code, _source(frame))
            if places.source is not None or frame.f_back is None:
                return CallSite(self, frame, places)
            frame = frame.f_back

    def role_variables(self, code: CodeType) -> list[tuple[str, str]]:
        """Return the variables of a function that are named after a role, with the role."""
        known = self._role_variables.get(id(code))
        if known is None:
            names = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
            found = [(name, role) for name in names for role in ROLES if role in name]
            known = self._role_variables[id(code)] = code, found
        return known[1]


class _Places:
    """The places that one call stands for, by phase."""

    def __init__(self, code: CodeType, source: str | None) -> None:
        self.code = code
        self.source = source
        self.by_phase: dict[Phase | None, Place] = {}


class CallSite:
    """A call that is being made."""

    __slots__ = ("_frame", "_places", "_sites")

    def __init__(self, sites: CallSites, frame: FrameType, places: _Places) -> None:
        self._sites = sites
        self._frame = frame
        self._places = places

    def place(self, phase: Phase | None) -> Place:
        """Return the place of the call in a phase; equal ones are one object."""
        place = self._places.by_phase.get(phase)
        if place is None:
            place = self._places.by_phase[phase] = Place(phase, source=self._places.source)
        return place

    def content(self) -> Literal["shape", "data"]:
        """Tell what a transfer carries that is issued here between pipeline stages."""
        caller = self._frame.f_back
        names = self._frame.f_code.co_name, caller.f_code.co_name if caller else None
        return "shape" if _SHAPE_EXCHANGE in names else "data"

    def roles(self, tensors: Sequence[Any]) -> list[str | None]:
        """Find the role of each tensor that is transferred here.

        Code that exchanges tensors with both neighbours knows which is which: it holds them in
        variables named after their roles or in a dictionary keyed by roles, or it handles one at a
        time and holds its role. The peer does not tell: in a pipeline of two stages both neighbours
        are one rank.

        Returns:
            One of ``ROLES`` for each tensor, ``None`` where there is none.
        """
        roles: list[str | None] = [None] * len(tensors)
        frame: FrameType | None = self._frame
        for _ in range(_FRAMES_WITH_ROLE):
            if frame is None or None not in roles:
                break
            variables = frame.f_locals
            if len(tensors) == 1:
                roles[0] = _name_of_role(variables.get("role"))
            for index, tensor in enumerate(tensors):
                if roles[index] is None:
                    roles[index] = self._role_by_variables(tensor, frame.f_code, variables)
            frame = frame.f_back
        return roles

    def _role_by_variables(
        self, tensor: Any, code: CodeType, variables: dict[str, Any]
    ) -> str | None:
        for name, role in self._sites.role_variables(code):
            if variables.get(name) is tensor:
                return role
        for value in variables.values():
            if type(value) is dict and _name_of_role(next(iter(value), None)):
                for key, held in value.items():
                    if held is tensor:
                        return _name_of_role(key)
        return None


def _name_of_role(value: Any) -> str | None:
    name = getattr(value, "name", None)
    return name if name in ROLES else None


def _source(frame: FrameType) -> str | None:
    module = frame.f_globals.get("__name__", "")
    if any(module == package or module.startswith(f"{package}.") for package in _INTERNAL_PACKAGES):
        return None
    path = Path(frame.f_code.co_filename)
    depth = module.count(".") + 1 + (path.name == "__init__.py")
    file = "/".join(path.parts[-depth:])
    return sys.intern(f"{file}:{frame.f_lineno} {frame.f_code.co_qualname}")
