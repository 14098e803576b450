"""Finds the input files and reads the documents in them, in an order that is always the same."""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from tools.preprocessing.errors import InputError

JSON_LINES_SUFFIXES = frozenset({".json", ".jsonl", ".ndjson"})
"""File name endings, without ``.gz``, that mean one JSON object per line."""

INPUT_FORMATS = ("auto", "text", "jsonl")
"""Values of ``--input-format``; ``auto`` goes by the file name ending."""

_EXCERPT_LENGTH = 80


@dataclass(frozen=True)
class InputFile:
    """A file to read.

    Attributes:
        path: Where it is.
        is_json_lines: Whether each line is a JSON object; otherwise the whole file is one document.
    """

    path: Path
    is_json_lines: bool

    @property
    def is_compressed(self) -> bool:
        """Whether the file is a gzip archive."""
        return self.path.suffix == ".gz"


@dataclass(frozen=True)
class Record:
    """One document as it stands in its file, not decoded yet: workers do that.

    Attributes:
        content: The bytes of the line or of the file, after decompression.
        file: Path of the file, for messages.
        line_number: Line of the file, from 1; None where the file is one plain-text document.
    """

    content: bytes
    file: str
    line_number: int | None

    def texts(self, keys: Sequence[str]) -> list[str]:
        """Return the document's text under each key.

        Args:
            keys: Keys of the JSON object. A plain-text document has one text, whatever the key.

        Returns:
            One text per key, in the order of ``keys``.

        Raises:
            InputError: The bytes are not UTF-8, the line is not a JSON object, or a key is missing
                or holds something else than a string.
        """
        try:
            text = self.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self._location}: byte {self.content[error.start]:#04x} at offset {error.start} "
                "is not UTF-8; convert the file to UTF-8"
            ) from None
        if self.line_number is None:
            return [text]
        fields = self._json_object(text)
        return [self._string(fields, key) for key in keys]

    @property
    def _location(self) -> str:
        return self.file if self.line_number is None else f"{self.file}:{self.line_number}"

    def _json_object(self, line: str) -> dict[str, object]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{self._location}: not valid JSON ({error}): {_excerpt(line)}; "
                "each line must be one JSON object"
            ) from None
        if not isinstance(value, dict):
            raise InputError(
                f"{self._location}: each line must be a JSON object, not {_excerpt(line)}"
            )
        return value

    def _string(self, fields: dict[str, object], key: str) -> str:
        if key not in fields:
            raise InputError(
                f"{self._location}: no key {key!r} (the keys here: {', '.join(fields) or 'none'}); "
                "name an existing key with --json-keys"
            )
        value = fields[key]
        if not isinstance(value, str):
            raise InputError(
                f"{self._location}: key {key!r} must hold a string, "
                f"not {_excerpt(json.dumps(value))}"
            )
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"{self._location}: key {key!r} holds half of a surrogate pair "
                f"({value[error.start]!r}), which no text encoding has; repair or drop the line"
            ) from None
        return value


def find_input_files(
    inputs: Sequence[str], patterns: Sequence[str], input_format: str
) -> list[InputFile]:
    """Return the files to read: inputs in the given order, each folder's files by sorted path.

    Args:
        inputs: Paths of files and folders.
        patterns: Glob patterns, relative to each folder; ``**`` descends into sub-folders.
        input_format: One of :data:`INPUT_FORMATS`.

    Returns:
        At least one file for each input.

    Raises:
        InputError: An input does not exist, a folder came without patterns or matches none, or
            patterns came without a folder.
    """
    paths: list[Path] = []
    any_folder = False
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            any_folder = True
            paths += _matching_files(path, patterns)
        elif path.is_file():
            paths.append(path)
        elif path.exists():
            raise InputError(f"--input {name}: neither a regular file nor a folder")
        else:
            raise InputError(f"--input {name}: no such file or folder")
    if patterns and not any_folder:
        raise InputError(
            f"--glob {' '.join(patterns)}: no --input is a folder; name a folder or drop --glob"
        )
    return [InputFile(path, _is_json_lines(path, input_format)) for path in paths]


def read_records(files: Sequence[InputFile]) -> Iterator[Record]:
    """Yield every document of the files, in order, without decoding it.

    Args:
        files: What :func:`find_input_files` returned.

    Yields:
        One record per plain-text file and per non-blank line of a JSON-lines file.

    Raises:
        InputError: A file cannot be read or is not the gzip archive that its name says it is.
    """
    for file in files:
        name = str(file.path)
        try:
            with _open(file) as stream:
                if not file.is_json_lines:
                    yield Record(stream.read(), name, None)
                    continue
                for line_number, line in enumerate(stream, start=1):
                    if line.strip():
                        yield Record(line, name, line_number)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(f"{name}: damaged or not a gzip file ({error})") from None
        except OSError as error:
            raise InputError(f"{name}: cannot be read: {error.strerror}") from None


def total_bytes(files: Sequence[InputFile]) -> int | None:
    """Return the bytes that all records will hold, or None if that takes decompressing a file."""
    if any(file.is_compressed for file in files):
        return None
    return sum(file.path.stat().st_size for file in files)


def _matching_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    if not patterns:
        raise InputError(
            f"--input {folder}: a folder; say which of its files with --glob, "
            "for example --glob '**/*.txt'"
        )
    matches: set[Path] = set()
    for pattern in patterns:
        try:
            matches.update(path for path in folder.glob(pattern) if path.is_file())
        except (ValueError, NotImplementedError) as error:
            raise InputError(
                f"--glob {pattern!r}: {error}; give a pattern relative to the folder"
            ) from None
    if not matches:
        raise InputError(f"--glob {' '.join(patterns)}: matches no file in {folder}")
    return sorted(matches, key=Path.as_posix)


def _is_json_lines(path: Path, input_format: str) -> bool:
    if input_format != "auto":
        return input_format == "jsonl"
    name = path.with_suffix("") if path.suffix == ".gz" else path
    return name.suffix in JSON_LINES_SUFFIXES


def _open(file: InputFile) -> BinaryIO:
    if file.is_compressed:
        return cast(BinaryIO, gzip.open(file.path, "rb"))
    return file.path.open("rb")


def _excerpt(text: str) -> str:
    line = text.strip()
    shown = line if len(line) <= _EXCERPT_LENGTH else line[:_EXCERPT_LENGTH] + "..."
    return repr(shown)
