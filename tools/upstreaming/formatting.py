"""Formatting of new files and of edited lines in the manner of a checkout."""

import difflib
import importlib.util
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.upstreaming.errors import Refusal

_DEFAULT_LINE_LENGTH = 100


@dataclass(frozen=True)
class Formatter:
    """Formats sources with the settings of a checkout.

    Attributes:
        description: Which tool runs with which settings, for the user.
        pyproject: Text of the checkout's ``pyproject.toml``.
        sort_imports: Module and arguments of the tool that sorts imports; a path is appended.
        format_lines: Module and arguments of the tool that formats; a path is appended.
        range_option: Its option for a range of lines.
    """

    description: str
    pyproject: str
    sort_imports: tuple[str, ...]
    format_lines: tuple[str, ...]
    range_option: str

    def new_file(self, path: str, text: str) -> str:
        """Return the text of a new file, formatted as a whole."""
        with tempfile.TemporaryDirectory() as folder:
            file = self._write(Path(folder), path, text)
            self._run(self.sort_imports, file)
            self._run(self.format_lines, file)
            return file.read_text(encoding="utf-8")

    def edited_file(self, path: str, original: str, edited: str) -> str:
        """Return an edited file, formatted without changing a line that was not edited.

        A tool that would change the original is kept from lines that are not edited; imports are
        not sorted then.

        Args:
            path: Path in the checkout.
            original: The file as the checkout has it.
            edited: The file with the edits.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = self._write(Path(folder), path, original)
            are_imports_sorted = self._leaves_alone(self.sort_imports, file)
            is_formatted = self._leaves_alone(self.format_lines, file)
            file.write_text(edited, encoding="utf-8")
            if are_imports_sorted:
                self._run(self.sort_imports, file)
            if is_formatted:
                self._run(self.format_lines, file)
            else:
                self._format_edited_lines(original, file)
            return file.read_text(encoding="utf-8")

    def _leaves_alone(self, arguments: Sequence[str], file: Path) -> bool:
        text = file.read_text(encoding="utf-8")
        self._run(arguments, file)
        is_unchanged = file.read_text(encoding="utf-8") == text
        file.write_text(text, encoding="utf-8")
        return is_unchanged

    def _format_edited_lines(self, original: str, file: Path) -> None:
        # From the end, so that the numbers of the lines before stay right.
        for first, last in reversed(_edited_lines(original, file.read_text(encoding="utf-8"))):
            self._run((*self.format_lines, f"{self.range_option}={first}-{last}"), file)

    def _write(self, folder: Path, path: str, text: str) -> Path:
        # At its own path beside the settings, as both tools look for them in the folders above.
        (folder / "pyproject.toml").write_text(self.pyproject, encoding="utf-8")
        file = folder / path
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")
        return file

    def _run(self, arguments: Sequence[str], file: Path) -> None:
        finished = subprocess.run(
            [sys.executable, "-m", *arguments, str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
        if finished.returncode != 0:
            lines = (finished.stderr or finished.stdout).strip().splitlines()
            raise Refusal(f"{self.description} failed on {file.name}: {' '.join(lines)}")


def formatter_of(pyproject: str) -> Formatter:
    """Return the formatter that a checkout's ``pyproject.toml`` names, or a stand-in.

    Args:
        pyproject: Its text. ``[tool.black]`` with ``[tool.isort]``, or ``[tool.ruff]``.

    Raises:
        Refusal: It is not valid TOML.
    """
    try:
        tools: dict[str, Any] = tomllib.loads(pyproject).get("tool", {})
    except tomllib.TOMLDecodeError as error:
        raise Refusal(f"pyproject.toml of the checkout is not valid TOML: {error}") from None
    if "black" in tools:
        if _can_import("black") and _can_import("isort"):
            return Formatter(
                "black and isort with the checkout's settings",
                pyproject,
                ("isort", "--quiet"),
                ("black", "--quiet"),
                "--line-ranges",
            )
        return _ruff_in_place_of_black(pyproject, tools["black"])
    if "format" in tools.get("ruff", {}) or "line-length" in tools.get("ruff", {}):
        return _ruff("ruff with the checkout's settings", pyproject, ())
    return _ruff(
        f"ruff at {_DEFAULT_LINE_LENGTH} columns, as the checkout names no formatter",
        pyproject,
        ("--isolated", "--config", f"line-length={_DEFAULT_LINE_LENGTH}"),
    )


def _ruff_in_place_of_black(pyproject: str, settings: dict[str, Any]) -> Formatter:
    line_length = settings.get("line_length", settings.get("line-length", 88))
    keeps_quotes = settings.get("skip_string_normalization") or settings.get(
        "skip-string-normalization"
    )
    skips_commas = settings.get("skip_magic_trailing_comma") or settings.get(
        "skip-magic-trailing-comma"
    )
    configuration = [
        f"line-length={line_length}",
        f'format.quote-style="{"preserve" if keeps_quotes else "double"}"',
        f"format.skip-magic-trailing-comma={'true' if skips_commas else 'false'}",
        'lint.isort.known-first-party=["megatron"]',
        f"lint.isort.split-on-trailing-comma={'false' if skips_commas else 'true'}",
    ]
    return _ruff(
        f"ruff with the checkout's settings for black ({line_length} columns), as black and isort "
        "are not installed here",
        pyproject,
        ("--isolated", *(part for value in configuration for part in ("--config", value))),
    )


def _ruff(description: str, pyproject: str, options: tuple[str, ...]) -> Formatter:
    return Formatter(
        description,
        pyproject,
        ("ruff", "check", "--quiet", "--no-cache", "--select", "I", "--fix", *options),
        ("ruff", "format", "--quiet", "--no-cache", *options),
        "--range",
    )


def _can_import(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _edited_lines(original: str, edited: str) -> list[tuple[int, int]]:
    """Return first and last line, from 1, of each stretch that is new or differs."""
    matcher = difflib.SequenceMatcher(
        a=original.splitlines(), b=edited.splitlines(), autojunk=False
    )
    return [
        (first + 1, after)
        for tag, _, _, first, after in matcher.get_opcodes()
        if first < after
        if tag != "equal"
    ]
