"""Loads a Hugging Face tokenizer from disk, or trains one on the corpus."""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tools.preprocessing.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_DOCUMENT_TOKEN = "<|endoftext|>"
PADDING_TOKEN = "<|padding|>"
_SPECIAL_TOKENS = (END_OF_DOCUMENT_TOKEN, PADDING_TOKEN)
SMALLEST_VOCABULARY = 256 + len(_SPECIAL_TOKENS)
"""Entries of a trained vocabulary that learnt nothing: every byte and the special tokens."""


class TextEncoder(Protocol):
    """Turns a text into token ids. It can be pickled, so that workers can be handed one."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``."""


@dataclass(frozen=True)
class TokenizersEncoder:
    """A tokenizer of the ``tokenizers`` library: what almost every Hugging Face tokenizer is.

    Attributes:
        tokenizer: The tokenizer.
        add_special_tokens: Whether a text gets the tokens that the tokenizer puts around it.
    """

    tokenizer: tokenizers.Tokenizer
    add_special_tokens: bool

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``."""
        return self.tokenizer.encode(text, add_special_tokens=self.add_special_tokens).ids


@dataclass(frozen=True)
class TransformersEncoder:
    """A tokenizer that needs ``transformers`` to encode; it makes the workers import torch.

    Attributes:
        tokenizer: The tokenizer.
        add_special_tokens: Whether a text gets the tokens that the tokenizer puts around it.
    """

    tokenizer: "PreTrainedTokenizerBase"
    add_special_tokens: bool

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``."""
        # Without verbose=False every text longer than the model's context prints a warning.
        encoding = self.tokenizer(text, add_special_tokens=self.add_special_tokens, verbose=False)
        ids: list[int] = encoding.input_ids
        return ids


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer and what an indexed dataset must know of it.

    Attributes:
        encoder: Gives the same ids as the base's ``HuggingFaceTokenizer`` gives in training.
        vocabulary_size: One more than the largest token id.
        end_of_document: Id of the token that ``--append-eod`` appends; None if there is none.
    """

    encoder: TextEncoder
    vocabulary_size: int
    end_of_document: int | None


def load_tokenizer(
    model: str, *, add_special_tokens: bool, trust_remote_code: bool
) -> LoadedTokenizer:
    """Load a tokenizer from this machine's disk; nothing is ever downloaded.

    Args:
        model: A folder that ``AutoTokenizer`` can load, or a ``tokenizer.json``. The latter is
            loaded as its folder is where a ``tokenizer_config.json`` lies beside it.
        add_special_tokens: Whether a text gets the tokens that the tokenizer puts around it.
        trust_remote_code: Whether Python code in the folder may run.

    Raises:
        InputError: ``model`` does not exist or is no tokenizer.
    """
    path = Path(model)
    if not path.exists():
        raise InputError(
            f"--tokenizer-model {model}: no such folder or tokenizer.json; give one on this "
            "machine's disk (names on a model hub are not downloaded)"
        )
    try:
        if path.is_file() and not path.with_name("tokenizer_config.json").exists():
            return _from_tokenizers(
                tokenizers.Tokenizer.from_file(model), add_special_tokens, end_of_document=None
            )
        return _load_folder(
            path.parent if path.is_file() else path, add_special_tokens, trust_remote_code
        )
    # tokenizers raises plain Exception, and AutoTokenizer whatever its many classes raise.
    except Exception as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"--tokenizer-model {model}: not a tokenizer that transformers can load: {cause}"
        ) from None


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> tokenizers.Tokenizer:
    """Train a byte-level BPE tokenizer; the same texts always give the same one.

    Args:
        texts: The corpus.
        vocabulary_size: Entries of the vocabulary, special tokens included. A corpus too small for
            so many gives fewer.

    Raises:
        InputError: ``vocabulary_size`` is less than :data:`SMALLEST_VOCABULARY`.
    """
    if vocabulary_size < SMALLEST_VOCABULARY:
        raise InputError(
            f"--vocab-size {vocabulary_size}: too small; a byte-level vocabulary needs at least "
            f"{SMALLEST_VOCABULARY} entries (256 bytes and {len(_SPECIAL_TOKENS)} special tokens)"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Save a trained tokenizer as a folder that the base's ``HuggingFaceTokenizer`` can load.

    Args:
        tokenizer: What :func:`train_tokenizer` returned.
        folder: The folder to create.
    """
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    # Not written by transformers, whose version 5 names a class that version 4 cannot load.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_DOCUMENT_TOKEN,
        "eos_token": END_OF_DOCUMENT_TOKEN,
        "pad_token": PADDING_TOKEN,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def trained(tokenizer: tokenizers.Tokenizer, *, add_special_tokens: bool) -> LoadedTokenizer:
    """Return what :func:`load_tokenizer` returns for a trained tokenizer that is saved."""
    return _from_tokenizers(
        tokenizer, add_special_tokens, tokenizer.token_to_id(END_OF_DOCUMENT_TOKEN)
    )


def _load_folder(
    folder: Path, add_special_tokens: bool, trust_remote_code: bool
) -> LoadedTokenizer:
    # Imported here because it brings torch with it, which a trained tokenizer does not need.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=trust_remote_code
    )
    # Pickling loses encode_special_tokens, so the way to the workers is open without it only.
    if tokenizer.is_fast and not tokenizer.backend_tokenizer.encode_special_tokens:
        return _from_tokenizers(
            tokenizer.backend_tokenizer, add_special_tokens, tokenizer.eos_token_id
        )
    return LoadedTokenizer(
        TransformersEncoder(tokenizer, add_special_tokens),
        _vocabulary_size(tokenizer.get_vocab()),
        tokenizer.eos_token_id,
    )


def _from_tokenizers(
    tokenizer: tokenizers.Tokenizer, add_special_tokens: bool, end_of_document: int | None
) -> LoadedTokenizer:
    # A tokenizer.json may ask for both; training texts are neither cut nor filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return LoadedTokenizer(
        TokenizersEncoder(tokenizer, add_special_tokens),
        _vocabulary_size(tokenizer.get_vocab()),
        end_of_document,
    )


def _vocabulary_size(vocabulary: dict[str, int]) -> int:
    # Not the number of entries: ids may have gaps, and the largest id decides the data type.
    return max(vocabulary.values()) + 1
