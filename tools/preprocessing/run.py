"""The run itself: documents in, indexed datasets out."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

from tqdm import tqdm

from tools.preprocessing.dataset_output import DatasetOutput
from tools.preprocessing.documents import InputFile, find_input_files, read_records, total_bytes
from tools.preprocessing.encoding import DocumentEncoder, encode_in_order
from tools.preprocessing.errors import InputError
from tools.preprocessing.settings import Settings
from tools.preprocessing.tokenizer import (
    LoadedTokenizer,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
    trained,
)


def preprocess(settings: Settings) -> None:
    """Encode the input, write the datasets, and print what was written.

    Args:
        settings: What to do.

    Raises:
        InputError: A setting or an input is wrong; nothing was written.
        WorkerError: A worker process died; nothing was written.
        OSError: The output cannot be written.
    """
    started = time.monotonic()
    files = find_input_files(settings.inputs, settings.glob_patterns, settings.input_format)
    _refuse_keys_of_plain_text(settings.keys, files)
    splitter = None
    if settings.split_sentences:
        # Imported here so that nltk is needed only by those who split sentences.
        from tools.preprocessing.sentences import SentenceSplitter

        splitter = SentenceSplitter(settings.language, settings.keep_newlines)
    with DatasetOutput(
        settings.output_prefix,
        settings.keys,
        "sentence" if settings.split_sentences else "document",
        with_tokenizer=settings.trained_vocabulary_size is not None,
        overwrite=settings.overwrite,
    ) as output:
        for path in output.leftovers():
            print(
                f"note: {path} is of another run; delete it if that run was killed", file=sys.stderr
            )
        tokenizer = _tokenizer(settings, files, output)
        encoder = DocumentEncoder(
            settings.keys,
            tokenizer.encoder,
            splitter,
            tokenizer.end_of_document if settings.append_end_of_document else None,
        )
        output.open_datasets(tokenizer.vocabulary_size)
        _encode(settings, files, encoder, output)
        _refuse_empty_datasets(settings.keys, output)
        output.publish()
    _report(settings, output, tokenizer)
    print(f"{time.monotonic() - started:.1f} seconds")


def _tokenizer(
    settings: Settings, files: Sequence[InputFile], output: DatasetOutput
) -> LoadedTokenizer:
    if settings.trained_vocabulary_size is not None:
        model = train_tokenizer(_texts(settings.keys, files), settings.trained_vocabulary_size)
        save_tokenizer(model, output.staged(output.tokenizer_folder))
        return trained(model, add_special_tokens=settings.add_special_tokens)
    assert settings.tokenizer_model is not None, "the command line asks for one of the two"
    tokenizer = load_tokenizer(
        settings.tokenizer_model,
        add_special_tokens=settings.add_special_tokens,
        trust_remote_code=settings.trust_remote_code,
    )
    if settings.append_end_of_document and tokenizer.end_of_document is None:
        raise InputError(
            f"--append-eod: the tokenizer {settings.tokenizer_model} has no eos_token; name one in "
            "a tokenizer_config.json beside its tokenizer.json, or drop --append-eod"
        )
    return tokenizer


def _texts(keys: Sequence[str], files: Sequence[InputFile]) -> Iterator[str]:
    with _progress_bar("reading", files) as progress:
        for record in read_records(files):
            yield from record.texts(keys)
            progress.update(len(record.content))


def _encode(
    settings: Settings, files: Sequence[InputFile], encoder: DocumentEncoder, output: DatasetOutput
) -> None:
    started = time.monotonic()
    documents = encode_in_order(encoder, read_records(files), settings.workers)
    with closing(documents), _progress_bar("encoding", files) as progress:
        for count, document in enumerate(documents, start=1):
            output.add(document)
            progress.update(document.input_bytes)
            if settings.log_interval is not None and count % settings.log_interval == 0:
                rate = count / (time.monotonic() - started)
                tqdm.write(f"encoded {count} documents, {rate:.1f} per second", file=sys.stderr)


def _progress_bar(description: str, files: Sequence[InputFile]) -> "tqdm[None]":
    # disable=None means: silent unless standard error is a terminal.
    return tqdm(total=total_bytes(files), desc=description, unit="B", unit_scale=True, disable=None)


def _refuse_keys_of_plain_text(keys: Sequence[str], files: Sequence[InputFile]) -> None:
    if len(keys) == 1:
        return
    for file in files:
        if not file.is_json_lines:
            raise InputError(
                f"--json-keys {' '.join(keys)}: {file.path} is plain text, which has one key only; "
                "name one key, or give --input-format jsonl if its lines are JSON objects"
            )


def _refuse_empty_datasets(keys: Sequence[str], output: DatasetOutput) -> None:
    for key, dataset in zip(keys, output.datasets, strict=True):
        if dataset.tokens == 0:
            raise InputError(
                f"--input: the {dataset.documents} documents hold no text under the key {key!r}; "
                "a dataset without tokens cannot be trained on"
            )


def _report(settings: Settings, output: DatasetOutput, tokenizer: LoadedTokenizer) -> None:
    for dataset in output.datasets:
        print(
            f"{dataset.prefix}: {dataset.documents} documents ({dataset.empty_documents} empty), "
            f"{dataset.sequences} sequences, {dataset.tokens} tokens"
        )
    model = settings.tokenizer_model or output.tokenizer_folder
    size = tokenizer.vocabulary_size
    wanted = settings.trained_vocabulary_size or size
    shortage = f" (the corpus is too small for the {wanted} asked for)" if size < wanted else ""
    print(f"{model}: {size} vocabulary entries{shortage}")
