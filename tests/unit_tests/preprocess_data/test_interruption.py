"""Runs that end before their time leave no output and no processes.

The tool logs every document to a pipe that nobody reads, so each run stands still in the middle of
its work, for certain, once the pipe is full.
"""

import inspect
import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tools.preprocessing.documents import Record
from tools.preprocessing.encoding import DocumentEncoder, encode_in_order
from tools.preprocessing.errors import WorkerError
from tools.preprocessing.tokenizer import load_tokenizer

DOCUMENTS = 20_000


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"def f{i}()"}) + "\n" for i in range(DOCUMENTS)))
    return path


@pytest.fixture
def output(tmp_path):
    folder = tmp_path / "output"
    folder.mkdir()
    return folder


@pytest.fixture
def stalled(corpus, output, start_tool, tokenizer_folder):
    """A run in the middle of its work, and its worker processes."""
    process = start_tool(
        *["--input", corpus, "--tokenizer-model", tokenizer_folder, "--workers", 2],
        *["--log-interval", 1, "--output-prefix", "out"],
        folder=output,
    )
    while not (line := process.stderr.readline()).startswith("encoded 1 documents"):
        assert line, f"the tool ended early with status {process.wait()}"
    children = psutil.Process(process.pid).children()
    workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    assert len(workers) == 2
    return process, workers


def _ignores_interrupts(process):
    status = Path(f"/proc/{process.pid}/status").read_text()
    blocked = int(re.search(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE)[1], base=16)
    return bool(blocked >> (signal.SIGINT - 1) & 1)


def _visible(folder):
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def test_a_killed_run_leaves_no_visible_output_and_no_workers(
    stalled, corpus, output, run_tool, tokenizer_folder, read_documents
):
    process, workers = stalled
    maps = {path.path for path in psutil.Process(process.pid).memory_maps()}
    assert any("libtorch" in path for path in maps), "the base imports torch"
    for worker in workers:
        assert not any("libtorch" in path.path for path in worker.memory_maps())

    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert psutil.wait_procs(workers, timeout=30)[1] == []
    assert _visible(output) == []

    [leftover] = output.iterdir()
    outcome = run_tool(
        *["--input", corpus, "--tokenizer-model", tokenizer_folder],
        *["--output-prefix", output / "out"],
    )
    assert outcome.status == 0
    assert str(leftover) in outcome.stderr
    assert len(read_documents(output / "out_text_document")) == DOCUMENTS


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [(signal.SIGTERM, 143, ""), (signal.SIGINT, 130, "interrupted; nothing was written")],
)
def test_a_stopped_run_cleans_up(stalled, output, number, status, message):
    process, workers = stalled
    assert all(_ignores_interrupts(worker) for worker in workers)
    # To the whole group, as a terminal's Ctrl-C and a batch system's end of the job go.
    os.killpg(process.pid, number)
    _, stderr = process.communicate()
    assert process.returncode == status
    assert message in stderr
    assert "Traceback" not in stderr
    assert psutil.wait_procs(workers, timeout=30)[1] == []
    assert list(output.iterdir()) == []


def test_a_dead_worker_ends_the_run(stalled, output):
    process, workers = stalled
    for worker in workers:
        worker.kill()
    _, stderr = process.communicate()
    assert process.returncode == 1
    assert "error: a worker process died" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    assert list(output.iterdir()) == []


def test_a_worker_that_dies_while_it_answers_is_noticed(tokenizer_folder):
    tokenizer = load_tokenizer(
        str(tokenizer_folder / "tokenizer.json"), add_special_tokens=True, trust_remote_code=False
    )
    encoder = DocumentEncoder(["text"], tokenizer.encoder, None, None)
    before = set(psutil.Process().children())
    # Each text is a batch of its own. The second answer fits no buffer of the pipe, so once it has
    # begun it is unfinished for as long as nobody reads it.
    texts = [b"import email\n" * 30_000, b"import email\n" * 200_000]
    documents = encode_in_order(encoder, [Record(text, "file", None) for text in texts], 2)
    next(documents)
    [pipe] = inspect.getgeneratorlocals(documents)["in_flight"]
    assert pipe.poll(timeout=60)
    for process in set(psutil.Process().children()) - before:
        if "spawn_main" in " ".join(process.cmdline()):
            process.kill()
    with pytest.raises(WorkerError, match="a worker process died"):
        next(documents)
