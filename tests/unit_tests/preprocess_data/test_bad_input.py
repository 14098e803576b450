"""Every wrong argument or input gives one line that names it, status 2, and no output."""

import gzip
import json
import sys

import pytest

GOOD_LINE = json.dumps({"text": "import email"}).encode()

TRAIN = ("--train-tokenizer", "--vocab-size", "300")


@pytest.fixture
def folder(tmp_path):
    """An input folder with something wrong in every file but good.jsonl and good.txt."""
    folder = tmp_path / "input"
    folder.mkdir()
    (folder / "good.jsonl").write_bytes(GOOD_LINE)
    (folder / "good.txt").write_text("import email")
    (folder / "malformed.jsonl").write_bytes(GOOD_LINE + b'\n\n{"text": "abc}\n')
    (folder / "deep.jsonl").write_bytes(b"[" * 200_000)
    (folder / "list.jsonl").write_bytes(GOOD_LINE + b"\n[1, 2]\n")
    (folder / "no_key.jsonl").write_bytes(GOOD_LINE + b'\n{"body": "a", "title": "b"}\n')
    (folder / "number.jsonl").write_bytes(b'{"text": 17}\n')
    (folder / "surrogate.jsonl").write_bytes(b'{"text": "a\\ud800b"}\n')
    (folder / "latin.jsonl").write_bytes(b'{"text": "na\xefve"}\n')
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (folder / "not_gzip.txt.gz").write_text("plain")
    (folder / "cut.txt.gz").write_bytes(gzip.compress(bytes(range(256)) * 40)[:-20])
    (folder / "empty.jsonl").write_bytes(b"\n \n")
    (folder / "empty_texts.jsonl").write_bytes(b'{"text": ""}\n' * 3)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "not_a_tokenizer").mkdir()
    return folder


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--input", "absent.txt", *TRAIN], ["--input absent.txt: no such file"]),
        (["--input", "/dev/null", *TRAIN], ["/dev/null: neither a regular file nor a folder"]),
        (["--input", ".", *TRAIN], ["--input .: a folder", "--glob '**/*.txt'"]),
        (["--input", ".", "--glob", "*.md", *TRAIN], ["--glob *.md: matches no file in ."]),
        (["--input", ".", "--glob", "/x/*", *TRAIN], ["--glob '/x/*'", "relative"]),
        (["--input", "good.txt", "--glob", "*", *TRAIN], ["no --input is a folder"]),
        (
            ["--input", "malformed.jsonl", *TRAIN],
            ["malformed.jsonl:3: not valid JSON", """'{"text": "abc}'"""],
        ),
        (["--input", "deep.jsonl", *TRAIN], ["deep.jsonl:1: not valid JSON", "[[[..."]),
        (["--input", "list.jsonl", *TRAIN], ["list.jsonl:2", "JSON object, not '[1, 2]'"]),
        (
            ["--input", "no_key.jsonl", *TRAIN],
            ["no_key.jsonl:2: no key 'text'", "body, title", "--json-keys"],
        ),
        (["--input", "number.jsonl", *TRAIN], ["number.jsonl:1", "string, not '17'"]),
        (["--input", "surrogate.jsonl", *TRAIN], ["surrogate.jsonl:1", r"\ud800"]),
        (["--input", "latin.jsonl", *TRAIN], ["latin.jsonl:1: byte 0xef at offset 12"]),
        (["--input", "latin.txt", *TRAIN], ["latin.txt: byte 0xef at offset 2", "UTF-8"]),
        (["--input", "not_gzip.txt.gz", *TRAIN], ["not_gzip.txt.gz: damaged or not a gzip"]),
        (["--input", "cut.txt.gz", *TRAIN], ["cut.txt.gz: damaged or not a gzip file"]),
        (["--input", "empty.jsonl", *TRAIN], ["the 0 documents hold no text", "'text'"]),
        (["--input", "empty_texts.jsonl", *TRAIN], ["the 3 documents hold no text", "'text'"]),
        (
            ["--input", "good.txt", "--json-keys", "a", "b", *TRAIN],
            ["--json-keys a b: good.txt is plain text", "--input-format jsonl"],
        ),
        (["--input", "good.jsonl", "--json-keys", "a", "a", *TRAIN], ["--json-keys a a"]),
        (["--input", "good.jsonl", "--json-keys", "a/b", *TRAIN], ["--json-keys a/b"]),
        (
            ["--input", "good.txt", "--train-tokenizer", "--vocab-size", "257"],
            ["--vocab-size 257: too small", "at least 258"],
        ),
        (["--input", "good.txt", "--train-tokenizer"], ["--train-tokenizer", "--vocab-size"]),
        (
            ["--input", "good.txt", "--tokenizer-model", ".", "--vocab-size", "300"],
            ["--vocab-size 300", "--train-tokenizer"],
        ),
        (
            ["--input", "good.txt", "--tokenizer-model", ".", *TRAIN],
            ["--train-tokenizer: not allowed with argument --tokenizer-model"],
        ),
        (["--input", "good.txt"], ["--tokenizer-model --train-tokenizer is required"]),
        (
            ["--input", "good.txt", "--tokenizer-model", "meta/model"],
            ["--tokenizer-model meta/model: no such folder", "not downloaded"],
        ),
        (
            ["--input", "good.txt", "--tokenizer-model", "not_a_tokenizer"],
            ["--tokenizer-model not_a_tokenizer: not a tokenizer"],
        ),
        (
            ["--input", "good.txt", "--tokenizer-model", "tokenizer.json"],
            ["--tokenizer-model tokenizer.json: not a tokenizer"],
        ),
        (
            ["--input", "good.txt", "--tokenizer-type", "GPT2BPETokenizer", *TRAIN],
            ["--tokenizer-type", "GPT2BPETokenizer", "HuggingFaceTokenizer"],
        ),
        (["--input", "good.txt", "--keep-newlines", *TRAIN], ["--keep-newlines"]),
        (["--input", "good.txt", "--workers", "0", *TRAIN], ["--workers: '0'"]),
        (["--input", "good.txt", "--log-interval", "x", *TRAIN], ["--log-interval: 'x'"]),
    ],
)
def test_wrong_arguments_and_inputs(folder, tmp_path, run_tool, monkeypatch, arguments, messages):
    monkeypatch.chdir(folder)
    output = tmp_path / "output"
    output.mkdir()
    outcome = run_tool(*arguments, "--output-prefix", output / "out")
    assert outcome.status == 2
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("preprocess_data.py: error: ")
    assert outcome.stderr.count("\n") == 1
    for message in messages:
        assert message in outcome.stderr
    assert list(output.iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_found_while_encoding(folder, run_tool, tokenizer_folder, workers):
    outcome = run_tool(
        *["--input", folder / "malformed.jsonl", "--tokenizer-model", tokenizer_folder],
        *["--workers", workers, "--output-prefix", folder / "out"],
    )
    assert outcome.status == 2
    assert outcome.stderr.count("\n") == 1
    assert f"{folder}/malformed.jsonl:3: not valid JSON" in outcome.stderr
    assert not list(folder.glob("*out*"))
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(("prefix", "message"), [("absent/out", "create it"), ("in/", "name")])
def test_wrong_output_prefixes(folder, run_tool, prefix, message):
    outcome = run_tool(
        *["--input", folder / "good.txt", *TRAIN, "--output-prefix", f"{folder}/{prefix}"]
    )
    assert outcome.status == 2
    assert f"--output-prefix {folder}/{prefix}: " in outcome.stderr
    assert message in outcome.stderr


def test_end_of_document_without_such_a_token(folder, run_tool, tokenizer_folder):
    model = folder / "not_a_tokenizer" / "tokenizer.json"
    model.write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    outcome = run_tool(
        *["--input", folder / "good.txt", "--tokenizer-model", model, "--append-eod"],
        *["--output-prefix", folder / "out"],
    )
    assert outcome.status == 2
    assert f"--append-eod: the tokenizer {model} has no eos_token" in outcome.stderr
    assert not list(folder.glob("*out*"))


def test_a_missing_package_is_named(folder, run_tool, monkeypatch):
    # None in sys.modules is how Python itself marks a package as not importable.
    monkeypatch.delitem(sys.modules, "tools.preprocessing.sentences", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "nltk"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nltk", None)
    outcome = run_tool(
        *["--input", folder / "good.txt", "--split-sentences", *TRAIN],
        *["--output-prefix", folder / "out"],
    )
    assert outcome.status == 2
    assert "pip install nltk" in outcome.stderr
