"""Real text (the running Python's own sources), a tokenizer for it, and ways to run the tool."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from tools.preprocessing import command_line

REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Outcome:
    """How a run of the tool ended."""

    status: object
    stdout: str
    stderr: str


def _exit_status(*arguments: object) -> object:
    """Run the command line in this process, which has imported the base already."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return command_line.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return stop.code
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def run_tool(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command line to its end."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        status = _exit_status(*arguments)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


@pytest.fixture
def start_tool() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start the script as a user does, by its path from another folder; end it after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: object, folder: Path) -> "subprocess.Popen[str]":
        script = REPOSITORY / "tools" / "preprocess_data.py"
        process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A suite that runs in a shell's background inherits SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        # The group outlives its leader if the tool leaves workers behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="session")
def source_folder() -> Path:
    """The standard library's ``email`` package: 29 files, one of them empty."""
    return Path(sysconfig.get_path("stdlib")) / "email"


@pytest.fixture(scope="session")
def sources(source_folder: Path) -> list[str]:
    """The texts of all Python files under ``source_folder``, by sorted path."""
    paths = sorted(source_folder.glob("**/*.py"), key=Path.as_posix)
    return [path.read_bytes().decode("utf-8") for path in paths]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, source_folder: Path) -> Path:
    """A tokenizer of 600 entries that the tool itself trained."""
    folder = tmp_path_factory.mktemp("tokenizer")
    status = _exit_status(
        *["--input", source_folder, "--glob", "*.py", "--train-tokenizer", "--vocab-size", 600],
        *["--output-prefix", folder / "email"],
    )
    assert status == 0
    return folder / "email_tokenizer"


@pytest.fixture(scope="session")
def base_tokenizer() -> Callable[..., object]:
    """Load a tokenizer folder the way ``megatron.training`` does for its arguments."""

    def load(folder: Path, *, include_special_tokens: bool = True) -> object:
        return build_tokenizer(
            SimpleNamespace(
                tokenizer_type="HuggingFaceTokenizer",
                tokenizer_model=str(folder),
                tokenizer_hf_no_include_special_tokens=not include_special_tokens,
                tokenizer_hf_no_use_fast=False,
                trust_remote_code=False,
                chat_template=None,
                vocab_file=None,
                merge_file=None,
                special_tokens=None,
                metadata_path=None,
                pad_vocab_size=False,
            )
        )

    return load


@pytest.fixture(scope="session")
def read_documents() -> Callable[[Path], list[list[list[int]]]]:
    """Read a dataset with the base: documents of sequences of token ids."""

    def read(prefix: Path) -> list[list[list[int]]]:
        dataset = IndexedDataset(str(prefix))
        return [
            [numpy.asarray(dataset[i]).tolist() for i in range(begin, end)]
            for begin, end in itertools.pairwise(dataset.document_indices)
        ]

    return read
