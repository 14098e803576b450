"""What a run is asked to do."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The command line's options, checked against one another.

    Attributes:
        inputs: Files and folders.
        glob_patterns: Patterns of the files to take from a folder.
        input_format: One of :data:`tools.preprocessing.documents.INPUT_FORMATS`.
        keys: Keys of a JSON object to encode; one dataset each.
        split_sentences: Whether a sequence is a sentence rather than a document.
        keep_newlines: Whether the white space after a sentence is kept in it.
        language: Name of the Punkt model that splits sentences.
        tokenizer_model: Path of a tokenizer; None if one is trained.
        trained_vocabulary_size: Entries of the vocabulary to train; None if none is trained.
        add_special_tokens: Whether a text gets the tokens that the tokenizer puts around it.
        trust_remote_code: Whether Python code in the tokenizer's folder may run.
        append_end_of_document: Whether each document ends in the tokenizer's ``eos_token``.
        output_prefix: Path and first part of the name of every output file.
        overwrite: Whether existing output is replaced.
        workers: Number of processes that encode.
        log_interval: Documents between two lines of progress; None for no such lines.
    """

    inputs: Sequence[str]
    glob_patterns: Sequence[str]
    input_format: str
    keys: Sequence[str]
    split_sentences: bool
    keep_newlines: bool
    language: str
    tokenizer_model: str | None
    trained_vocabulary_size: int | None
    add_special_tokens: bool
    trust_remote_code: bool
    append_end_of_document: bool
    output_prefix: str
    overwrite: bool
    workers: int
    log_interval: int | None
