"""What the tool writes, read back with the base and compared token by token."""

import gzip
import io
import json
import resource
import sys

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_script_encodes_a_folder_as_the_base_would(
    tmp_path, start_tool, source_folder, sources, base_tokenizer, read_documents
):
    arguments = "--glob **/*.py --train-tokenizer --vocab-size 700 --append-eod --workers 2"
    process = start_tool(
        *["--input", source_folder, *arguments.split(), "--output-prefix", "email"],
        folder=tmp_path,
    )
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert "%|" not in stderr, "a progress bar went to something that is not a terminal"
    assert "note:" not in stderr, "the run took its own files for another's"

    prefix = tmp_path / "email_text_document"
    tokenizer = base_tokenizer(tmp_path / "email_tokenizer")
    expected = [[[*tokenizer.tokenize(text), tokenizer.eod]] if text else [] for text in sources]
    assert [] in expected, "an empty document must be among the input"
    assert read_documents(prefix) == expected

    tokens = sum(len(document[0]) for document in expected if document)
    empty = expected.count([])
    assert (
        f"email_text_document: {len(expected)} documents ({empty} empty), "
        f"{len(expected) - empty} sequences, {tokens} tokens" in stdout
    )
    assert "email_tokenizer: 700 vocabulary entries" in stdout
    assert _names(tmp_path) == [
        "email_text_document.bin",
        "email_text_document.idx",
        "email_tokenizer",
    ]


def test_the_number_of_workers_changes_no_byte(tmp_path, run_tool, source_folder):
    outputs = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        outcome = run_tool(
            *["--input", source_folder, "--glob", "**/*.py", "--workers", workers],
            *["--train-tokenizer", "--vocab-size", 500, "--append-eod"],
            *["--output-prefix", folder / "email"],
        )
        assert outcome.status == 0, outcome.stderr
        assert outcome.stderr == ""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        outputs.append({path.relative_to(folder): path.read_bytes() for path in files})
    assert len(outputs[0]) == 4
    assert outputs[0] == outputs[1]


def test_json_lines_give_one_dataset_for_each_key_in_the_order_of_the_lines(
    tmp_path, run_tool, sources, tokenizer_folder, base_tokenizer, read_documents
):
    # Short lines and long ones, so that batches, which workers take by size, end unevenly.
    bodies = [text[:length] for length in (0, 1, 40, 3000, 200_000) for text in sources]
    records = [{"title": f"№ {i}", "body": body, "n": i} for i, body in enumerate(bodies)]
    lines = [json.dumps(record, ensure_ascii=i % 2 == 0) for i, record in enumerate(records)]
    half = len(lines) // 2
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines[:half]), encoding="utf-8")
    with gzip.open(tmp_path / "b.json.gz", "wt", encoding="utf-8", newline="\r\n") as file:
        file.write("\n".join(lines[half:]) + "\n")

    outcome = run_tool(
        *["--input", tmp_path / "a.jsonl", tmp_path / "b.json.gz", "--workers", 2],
        *["--json-keys", "body", "title", "--tokenizer-model", tokenizer_folder],
        *["--output-prefix", tmp_path / "out"],
    )
    assert outcome.status == 0, outcome.stderr
    tokenizer = base_tokenizer(tokenizer_folder)
    encoded = {text: tokenizer.tokenize(text) for text in {*bodies} - {""}}
    titles = [[tokenizer.tokenize(record["title"])] for record in records]
    assert read_documents(tmp_path / "out_title_document") == titles
    assert read_documents(tmp_path / "out_body_document") == [
        [encoded[body]] if body else [] for body in bodies
    ]


def test_the_format_option_overrides_the_file_name(
    tmp_path, run_tool, tokenizer_folder, base_tokenizer, read_documents
):
    line = json.dumps({"text": "import email"})
    (tmp_path / "input.txt").write_text(f"{line}\n{line}\n")
    tokenizer = base_tokenizer(tokenizer_folder)
    for option, texts in (
        ("jsonl", ["import email"] * 2),
        ("text", [f"{line}\n{line}\n"]),
        ("auto", [f"{line}\n{line}\n"]),
    ):
        outcome = run_tool(
            *["--input", tmp_path / "input.txt", "--input-format", option],
            *["--tokenizer-model", tokenizer_folder, "--output-prefix", tmp_path / option],
        )
        assert outcome.status == 0, outcome.stderr
        expected = [[tokenizer.tokenize(text)] for text in texts]
        assert read_documents(tmp_path / f"{option}_text_document") == expected


def test_plain_text_keeps_every_character(
    tmp_path, run_tool, tokenizer_folder, base_tokenizer, read_documents
):
    text = "\ufeffa\r\nb\rc\n\n\t日本語 😀\u2028 end \x00\n"
    with gzip.open(tmp_path / "input.txt.gz", "wb") as file:
        file.write(text.encode())
    outcome = run_tool(
        *["--input", tmp_path / "input.txt.gz", "--tokenizer-model", tokenizer_folder],
        *["--output-prefix", tmp_path / "out"],
    )
    assert outcome.status == 0, outcome.stderr
    [[tokens]] = read_documents(tmp_path / "out_text_document")
    assert base_tokenizer(tokenizer_folder).detokenize(tokens) == text


@pytest.mark.parametrize(("entries", "data_type"), [(60_000, "uint16"), (70_000, "int32")])
def test_the_data_type_holds_the_largest_id(tmp_path, run_tool, read_documents, entries, data_type):
    # 500 words, with ids up to `entries`: the number of words alone would fit either type.
    ids = {f"w{i}": i * (entries // 500) + 1 for i in range(500)}
    model = {"type": "WordLevel", "vocab": ids, "unk_token": "w0"}
    spaces = {"type": "WhitespaceSplit"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "pre_tokenizer": spaces, "model": model})
    )
    (tmp_path / "input.txt").write_text(" ".join(ids))
    outcome = run_tool(
        *["--input", tmp_path / "input.txt", "--tokenizer-model", tmp_path / "tokenizer.json"],
        *["--output-prefix", tmp_path / "out"],
    )
    assert outcome.status == 0, outcome.stderr
    assert read_documents(tmp_path / "out_text_document") == [[list(ids.values())]]
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert dataset.index.dtype.__name__ == data_type


def test_existing_output_is_kept_unless_overwriting_is_asked_for(
    tmp_path, run_tool, source_folder, read_documents
):
    def run(file, *options):
        return run_tool(
            *["--input", source_folder / file, "--train-tokenizer", "--vocab-size", 300],
            *["--output-prefix", tmp_path / "out", *options],
        )

    def contents():
        files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files}

    assert run("parser.py").status == 0
    first = contents()
    names = _names(tmp_path)
    aside = tmp_path / "aside"
    aside.mkdir()
    for name in names:
        # Each of the outputs is reason enough to refuse, without the others.
        for other in set(names) - {name}:
            (tmp_path / other).rename(aside / other)
        outcome = run("header.py")
        assert outcome.status == 2
        assert f"{tmp_path / name} exists; give --overwrite" in outcome.stderr
        for other in set(names) - {name}:
            (aside / other).rename(tmp_path / other)
    assert contents() == first

    assert run("header.py", "--overwrite").status == 0
    second = contents()
    assert first.keys() == second.keys()
    for path, old in first.items():
        # The configuration of every trained tokenizer is the same.
        assert (second[path] == old) == (path.name == "tokenizer_config.json")


def test_a_full_disk_leaves_nothing(tmp_path, run_tool, source_folder, tokenizer_folder):
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        outcome = run_tool(
            *["--input", source_folder, "--glob", "*.py", "--tokenizer-model", tokenizer_folder],
            *["--output-prefix", tmp_path / "out"],
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert outcome.status == 1
    assert outcome.stderr.startswith("preprocess_data.py: error: cannot write the output: ")
    assert outcome.stderr.count("\n") == 1
    assert _names(tmp_path) == []


def test_progress(tmp_path, run_tool, source_folder, tokenizer_folder, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    arguments = [
        *["--input", source_folder, "--glob", "*.py", "--tokenizer-model", tokenizer_folder],
        *["--output-prefix", tmp_path / "out", "--overwrite"],
    ]
    outcome = run_tool(*arguments, "--log-interval", 5)
    assert outcome.status == 0
    documents = len(list(source_folder.glob("*.py")))
    counts = [int(line.split()[1]) for line in outcome.stderr.splitlines()]
    assert counts == list(range(5, documents + 1, 5))

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run_tool(*arguments).status == 0
    assert "encoding" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
