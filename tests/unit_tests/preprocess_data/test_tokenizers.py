"""Trained tokenizers, and those on disk that training would load with the base."""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, processors

from tools.preprocessing.tokenizer import load_tokenizer


def test_the_base_loads_a_trained_tokenizer(tokenizer_folder, base_tokenizer, sources):
    tokenizer = base_tokenizer(tokenizer_folder)
    assert tokenizer.vocab_size == 600
    assert tokenizer.eod == tokenizer.bos == 0
    assert tokenizer.pad == 1
    for text in sources:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_training_does_not_depend_on_threads_or_hashing(source_folder):
    program = """
import sys
from pathlib import Path
from tools.preprocessing.tokenizer import train_tokenizer
texts = [path.read_text() for path in sorted(Path(sys.argv[1]).glob("*.py"))]
print(train_tokenizer(texts, 1000).to_str())
"""
    digests = set()
    for threads, hash_seed in (("1", "1"), ("3", "2")):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": hash_seed}
        result = subprocess.run(
            [sys.executable, "-c", program, str(source_folder)],
            env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
        )
        assert len(json.loads(result.stdout)["model"]["vocab"]) == 1000
        digests.add(hashlib.sha256(result.stdout).hexdigest())
    assert len(digests) == 1


def test_a_corpus_too_small_for_the_vocabulary_gives_a_smaller_one(
    tmp_path, run_tool, base_tokenizer
):
    (tmp_path / "input.txt").write_text("abc abc abd")
    outcome = run_tool(
        *["--input", tmp_path / "input.txt", "--train-tokenizer", "--vocab-size", 5000],
        *["--output-prefix", tmp_path / "out"],
    )
    assert outcome.status == 0
    entries = base_tokenizer(tmp_path / "out_tokenizer").vocab_size
    assert 258 < entries < 270
    assert f"{entries} vocabulary entries (the corpus is too small for the 5000" in outcome.stdout


def _with_special_tokens(folder, source, **configuration):
    """Copy a tokenizer; the copy puts tokens around every text, and asks to cut and fill it up."""
    shutil.copytree(source, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|padding|> $A <|endoftext|>",
        special_tokens=[("<|endoftext|>", 0), ("<|padding|>", 1)],
    )
    tokenizer.enable_truncation(10)
    tokenizer.enable_padding(length=10)
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | configuration))
    return folder


@pytest.mark.parametrize("include", [True, False])
def test_special_tokens_are_added_as_training_would(
    tmp_path, run_tool, sources, tokenizer_folder, base_tokenizer, read_documents, include
):
    folder = _with_special_tokens(tmp_path / "tokenizer", tokenizer_folder)
    (tmp_path / "input.txt").write_text(sources[1])
    outcome = run_tool(
        *["--input", tmp_path / "input.txt", "--output-prefix", tmp_path / "out"],
        *["--tokenizer-model", folder, "--append-eod"],
        *([] if include else ["--tokenizer-hf-no-include-special-tokens"]),
    )
    assert outcome.status == 0, outcome.stderr
    tokenizer = base_tokenizer(folder, include_special_tokens=include)
    [[tokens]] = read_documents(tmp_path / "out_text_document")
    assert tokens == [*tokenizer.tokenize(sources[1]), 0]
    assert len(tokens) > 1000
    assert (tokens[0] == 1) == include


def test_text_that_spells_a_special_token_is_split_if_the_tokenizer_says_so(
    tmp_path, tokenizer_folder, base_tokenizer
):
    text = "a<|endoftext|>b"
    for split in (False, True):
        folder = _with_special_tokens(
            tmp_path / str(split), tokenizer_folder, split_special_tokens=split
        )
        loaded = load_tokenizer(str(folder), add_special_tokens=False, trust_remote_code=False)
        in_a_worker = pickle.loads(pickle.dumps(loaded.encoder))
        expected = base_tokenizer(folder, include_special_tokens=False).tokenize(text)
        assert loaded.encoder.encode(text) == in_a_worker.encode(text) == expected
        assert (0 in expected) != split


def test_a_tokenizer_written_in_python(tmp_path, run_tool, base_tokenizer, read_documents):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    (tmp_path / "input.txt").write_text("naïve")
    outcome = run_tool(
        *["--input", tmp_path / "input.txt", "--output-prefix", tmp_path / "out"],
        *["--tokenizer-model", tmp_path],
    )
    assert outcome.status == 0, outcome.stderr
    [[tokens]] = read_documents(tmp_path / "out_text_document")
    # ByT5 is documented as the UTF-8 bytes moved up by three, then its end-of-sequence token 1.
    assert tokens == [*(byte + 3 for byte in "naïve".encode()), 1]
    assert tokens == base_tokenizer(tmp_path).tokenize("naïve")

    loaded = load_tokenizer(str(tmp_path), add_special_tokens=True, trust_remote_code=False)
    assert pickle.loads(pickle.dumps(loaded.encoder)).encode("naïve") == tokens


def test_a_tokenizer_json_is_its_folder_where_there_is_a_configuration(
    tmp_path, run_tool, tokenizer_folder, read_documents
):
    (tmp_path / "input.txt").write_text("import email")
    outcome = run_tool(
        *["--input", tmp_path / "input.txt", "--output-prefix", tmp_path / "out", "--append-eod"],
        *["--tokenizer-model", tokenizer_folder / "tokenizer.json"],
    )
    assert outcome.status == 0, outcome.stderr
    [[tokens]] = read_documents(tmp_path / "out_text_document")
    assert tokens[-1] == 0
