"""Writes indexed datasets that appear under their final names complete or not at all."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tools.preprocessing.encoding import EncodedDocument
from tools.preprocessing.errors import InputError

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

_DATASET_SUFFIXES = (".bin", ".idx")


@dataclass
class DatasetCounts:
    """What was written to one dataset.

    Attributes:
        prefix: Final path less ``.bin`` and ``.idx``: what ``--data-path`` takes.
        documents: Number of documents, empty ones included.
        empty_documents: Number of documents without tokens.
        sequences: Number of sequences: sentences, or documents that are not empty.
        tokens: Number of tokens.
    """

    prefix: Path
    documents: int = 0
    empty_documents: int = 0
    sequences: int = 0
    tokens: int = 0


class DatasetOutput:
    """The output of one run: one indexed dataset per key, and a trained tokenizer if there is one.

    A context manager. Everything is written into a hidden folder beside the final files, which
    leaving the context removes; :meth:`publish` moves the files out of it.

    Args:
        prefix: ``--output-prefix``: path and first part of the name of every file.
        keys: Keys that get a dataset each.
        level: Last part of the datasets' names: ``document`` or ``sentence``.
        with_tokenizer: Whether the run trains a tokenizer, saved as ``<prefix>_tokenizer``.
        overwrite: Whether existing files of these names are replaced.

    Attributes:
        datasets: What was written so far, one per key in the order of ``keys``.
        tokenizer_folder: Final path of the trained tokenizer.

    Raises:
        InputError: The folder does not exist, a key is not fit for a file name, or a file exists
            and ``overwrite`` is False.
    """

    def __init__(
        self, prefix: str, keys: Sequence[str], level: str, *, with_tokenizer: bool, overwrite: bool
    ) -> None:
        if not os.path.basename(prefix):
            raise InputError(f"--output-prefix {prefix}: must end in the first part of a file name")
        self._folder = Path(prefix).parent
        if not self._folder.is_dir():
            raise InputError(f"--output-prefix {prefix}: no folder {self._folder}; create it first")
        for key in keys:
            if os.sep in key:
                raise InputError(
                    f"--json-keys {key}: a key with {os.sep!r} cannot be part of a file name; "
                    "rename the key in the input"
                )
        self.datasets = [DatasetCounts(Path(f"{prefix}_{key}_{level}")) for key in keys]
        self.tokenizer_folder = Path(f"{prefix}_tokenizer")
        self._with_tokenizer = with_tokenizer
        self._overwrite = overwrite
        self._staging_prefix = f".{os.path.basename(prefix)}.partial-"
        self._staging: Path | None = None
        self._builders: list[IndexedDatasetBuilder] = []
        self._refuse_to_overwrite()

    def __enter__(self) -> Self:
        self._staging = Path(tempfile.mkdtemp(prefix=self._staging_prefix, dir=self._folder))
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._staging is not None, "__enter__ sets it"
        shutil.rmtree(self._staging)

    def staged(self, final: Path) -> Path:
        """Return where to write what :meth:`publish` shall move to the path ``final``."""
        assert self._staging is not None, "used outside its context"
        return self._staging / final.name

    def leftovers(self) -> list[Path]:
        """Return hidden folders of other runs with this prefix: killed ones, or still running."""
        assert self._staging is not None, "used outside its context"
        return sorted(
            path
            for path in self._folder.iterdir()
            if path.name.startswith(self._staging_prefix) and path.name != self._staging.name
        )

    def open_datasets(self, vocabulary_size: int) -> None:
        """Start the datasets, in the smallest data type that the base has for the vocabulary.

        Args:
            vocabulary_size: One more than the largest token id.
        """
        with warnings.catch_warnings():
            # The base warns of a dozen GPU libraries it does without, none of which matters here.
            warnings.simplefilter("ignore")
            # Imported here because it takes seconds, which no wrong argument should have to wait.
            from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
        data_type = DType.optimal_dtype(vocabulary_size)
        self._builders = [
            IndexedDatasetBuilder(f"{self.staged(dataset.prefix)}.bin", dtype=data_type)
            for dataset in self.datasets
        ]

    def add(self, document: EncodedDocument) -> None:
        """Append a document to every dataset.

        One without tokens is a document as well, so that document ``i`` of each dataset is
        document ``i`` of the input.
        """
        for dataset, builder, text in zip(
            self.datasets, self._builders, document.texts, strict=True
        ):
            builder.add_document(text.tokens, text.lengths)
            dataset.documents += 1
            dataset.empty_documents += not text.lengths
            dataset.sequences += len(text.lengths)
            dataset.tokens += text.tokens.size

    def publish(self) -> None:
        """Finish the files and move them to their final names.

        At no moment does a ``.bin`` lie beside an ``.idx`` of another run: an old ``.idx`` goes
        first, and the new one comes last.

        Raises:
            InputError: A file of a final name has appeared meanwhile, and ``overwrite`` is False.
        """
        for dataset, builder in zip(self.datasets, self._builders, strict=True):
            builder.finalize(f"{self.staged(dataset.prefix)}.idx")
        self._refuse_to_overwrite()
        for dataset in self.datasets:
            Path(f"{dataset.prefix}.idx").unlink(missing_ok=True)
        if self._with_tokenizer:
            if self.tokenizer_folder.exists():
                self.tokenizer_folder.rename(self.staged(Path("replaced")))
            self.staged(self.tokenizer_folder).rename(self.tokenizer_folder)
        for dataset in self.datasets:
            for suffix in _DATASET_SUFFIXES:
                final = Path(f"{dataset.prefix}{suffix}")
                self.staged(final).replace(final)

    def _refuse_to_overwrite(self) -> None:
        if self._overwrite:
            return
        finals = [
            Path(f"{dataset.prefix}{suffix}")
            for dataset in self.datasets
            for suffix in _DATASET_SUFFIXES
        ]
        if self._with_tokenizer:
            finals.append(self.tokenizer_folder)
        for final in finals:
            if final.exists():
                raise InputError(
                    f"--output-prefix: {final} exists; give --overwrite to replace it, "
                    "or another prefix"
                )
