"""Sentences, split with Punkt models that are trained here on the Python manual's own prose."""

from pydoc_data.topics import topics

import nltk.data
import pytest
from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTrainer, save_punkt_params


@pytest.fixture(scope="module")
def prose():
    return [topics[name] for name in sorted(topics)[:12]]


@pytest.fixture(scope="module")
def punkt(tmp_path_factory, prose):
    """A model in the layout of NLTK's data, and NLTK told to look nowhere else."""
    root = tmp_path_factory.mktemp("nltk_data")
    folder = root / "tokenizers" / "punkt_tab" / "manual"
    folder.mkdir(parents=True)
    parameters = PunktTrainer("\n".join(prose)).get_params()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk.data, "path", [str(root)])
        save_punkt_params(parameters, dir=str(folder))
        yield PunktSentenceTokenizer(parameters)


def _write(folder, texts):
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")


def test_each_sentence_is_a_sequence(
    tmp_path, run_tool, punkt, prose, tokenizer_folder, base_tokenizer, read_documents
):
    _write(tmp_path, prose)
    outcome = run_tool(
        *["--input", tmp_path, "--glob", "*.txt", "--split-sentences", "--lang", "manual"],
        *["--tokenizer-model", tokenizer_folder, "--append-eod", "--workers", 2],
        *["--output-prefix", tmp_path / "out"],
    )
    assert outcome.status == 0, outcome.stderr
    tokenizer = base_tokenizer(tokenizer_folder)
    expected = []
    for text in prose:
        expected.append([tokenizer.tokenize(sentence) for sentence in punkt.tokenize(text)])
        expected[-1][-1].append(tokenizer.eod)
    assert max(len(document) for document in expected) > 20
    assert read_documents(tmp_path / "out_text_sentence") == expected


def test_kept_white_space_makes_the_sentences_the_document(
    tmp_path, run_tool, punkt, prose, tokenizer_folder, base_tokenizer, read_documents
):
    texts = [f"\n  {prose[0]} \n", "One.  Two.\n\nThree.\n", " \n\n", *prose[1:]]
    _write(tmp_path, texts)
    outcome = run_tool(
        *["--input", tmp_path, "--glob", "*.txt", "--split-sentences", "--lang", "manual"],
        *["--keep-newlines", "--tokenizer-model", tokenizer_folder],
        *["--output-prefix", tmp_path / "out"],
    )
    assert outcome.status == 0, outcome.stderr
    tokenizer = base_tokenizer(tokenizer_folder)
    documents = read_documents(tmp_path / "out_text_sentence")
    sentences = [[tokenizer.detokenize(tokens) for tokens in document] for document in documents]
    assert sentences[1] == ["One.  ", "Two.\n\n", "Three.\n"]
    assert sentences[2] == []
    joined = ["".join(document) for document in sentences]
    assert joined == [text if text.strip() else "" for text in texts]


@pytest.mark.parametrize("language", ["english", "../manual"])
def test_a_missing_model_is_named_with_the_remedy(tmp_path, run_tool, punkt, language):
    _write(tmp_path, ["One. Two."])
    outcome = run_tool(
        *["--input", tmp_path / "00.txt", "--split-sentences", "--lang", language],
        *["--train-tokenizer", "--vocab-size", 300, "--output-prefix", tmp_path / "out"],
    )
    assert outcome.status == 2
    assert outcome.stderr.count("\n") == 1
    assert language in outcome.stderr
    if language == "english":
        assert "python -m nltk.downloader punkt_tab" in outcome.stderr
    assert not list(tmp_path.glob("*out*"))
