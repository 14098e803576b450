"""Documents packed greedily into microbatches of varying length.

A microbatch is a run of whole documents, in an order shuffled anew every epoch, that holds as many
of them as fit into ``sequence_length`` tokens. It is as long as its documents, never padded to
``sequence_length``. What a microbatch holds follows from the random seed and its index alone: every
pipeline stage, tensor parallel rank and model chunk that reads index ``i`` sees the same tokens,
the batches do not depend on how the model is split, and a run resumed at a sample count goes on
with exactly the microbatches that an uninterrupted run would have read.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split


@dataclass
class PackedDocumentConfig(BlendedMegatronDatasetConfig):
    """What :class:`PackedDocumentDataset` needs to know beyond the base's dataset options.

    Attributes:
        documents_per_microbatch: Most documents in one microbatch; None for as many as fit.
        document_multiple: Every document is padded to a multiple of this many tokens.
        microbatch_multiple: Every microbatch is padded to a multiple of this many tokens, itself a
            multiple of ``document_multiple`` and a divisor of ``sequence_length``.
    """

    documents_per_microbatch: int | None = None
    document_multiple: int = 1
    microbatch_multiple: int = 1


class DocumentStore(Protocol):
    """Where documents come from: an ``IndexedDataset`` or :class:`MockDocuments`."""

    sequence_lengths: numpy.ndarray
    document_indices: numpy.ndarray

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> numpy.ndarray:
        """Return ``length`` tokens of the sequence ``idx`` from ``offset`` on."""


class MockDocuments:
    """Synthetic documents that a small model learns quickly: arithmetic progressions of tokens.

    Their lengths are spread evenly from 2 tokens to two thirds of the longest microbatch.

    Args:
        sequence_length: Longest microbatch in tokens.
        vocab_size: Number of token ids, from 0.
        seed: Random seed of lengths and tokens.
    """

    number_of_documents = 10_000

    def __init__(self, sequence_length: int, vocab_size: int, seed: int) -> None:
        longest = max(2, sequence_length * 2 // 3)
        random = numpy.random.default_rng(seed)
        self.sequence_lengths = random.integers(2, longest + 1, self.number_of_documents)
        self.document_indices = numpy.arange(self.number_of_documents + 1)
        self._first_tokens = random.integers(0, vocab_size, self.number_of_documents)
        self._steps = random.integers(1, 8, self.number_of_documents)
        self._vocab_size = vocab_size

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> numpy.ndarray:
        """Return ``length`` tokens (int64) of the document ``idx`` from ``offset`` on."""
        end = self.sequence_lengths[idx] if length is None else offset + length
        positions = numpy.arange(offset, end)
        return (self._first_tokens[idx] + positions * self._steps[idx]) % self._vocab_size


class PackedDocumentDataset(MegatronDataset):
    """Microbatches of packed documents, for the base's ``BlendedMegatronDatasetBuilder``.

    Items are dictionaries of one microbatch of ``tokens`` tokens in ``documents`` documents:
    ``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask`` (float32), of shape
    ``[tokens]``, and ``cu_seqlens`` (int32, ``[documents + 1]``), the documents' boundaries from 0
    to ``tokens``. Positions start at 0 in every document. A document's last token, which has
    nothing to predict, and padding are masked out of the loss. A document longer than
    ``sequence_length`` is split into chunks, each a document of its own for attention and
    positions; the last token of a chunk still predicts the first of the next, so that every token
    of a document but its first is predicted exactly once.

    Args:
        dataset: The documents of all splits.
        dataset_path: Path prefix of ``dataset``, None for mock data.
        indices: Numbers of the documents of this split.
        num_samples: Fewest microbatches to provide, in as many epochs as that takes, none for 0;
            None for one epoch.
        index_split: The split.
        config: Dataset options.

    Raises:
        ValueError: Microbatches are wanted of a split that holds no tokens.
    """

    config: PackedDocumentConfig

    def __init__(
        self,
        dataset: DocumentStore,
        dataset_path: str | None,
        indices: numpy.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: PackedDocumentConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        wanted = 1 if num_samples is None else num_samples
        self._pieces = self._split_documents()
        if wanted and not len(self._pieces):
            raise ValueError(
                f"The {index_split.name} split of {dataset_path or 'the mock data'} holds no "
                f"tokens in {len(indices)} documents: choose another --split than {config.split}, "
                "or more data."
            )
        self._orders: list[numpy.ndarray] = []
        self._boundaries: list[numpy.ndarray] = []
        self._first_microbatches = [0]
        while len(self) < wanted:
            self._pack_epoch()

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: DocumentStore) -> int:
        """Return the number of documents, by which splits are cut."""
        return len(low_level_dataset.document_indices) - 1

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: PackedDocumentConfig
    ) -> DocumentStore:
        """Open the indexed dataset at ``dataset_path``, or make mock documents when it is None."""
        if dataset_path is None:
            return MockDocuments(
                config.sequence_length, config.tokenizer.vocab_size, config.random_seed
            )
        return IndexedDataset(dataset_path, multimodal=False, mmap=config.mmap_bin_files)

    def __len__(self) -> int:
        return self._first_microbatches[-1]

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        epoch = int(numpy.searchsorted(self._first_microbatches, idx, side="right")) - 1
        position = idx - self._first_microbatches[epoch]
        start, end = self._boundaries[epoch][position : position + 2]
        pieces = self._pieces[self._orders[epoch][start:end]]
        padded = _round_up(pieces[:, 2], self.config.document_multiple)
        padded[-1] += -padded.sum() % self.config.microbatch_multiple
        cu_seqlens = numpy.concatenate([[0], numpy.cumsum(padded)])

        tokens = numpy.zeros(cu_seqlens[-1], dtype=numpy.int64)
        labels = numpy.zeros_like(tokens)
        position_ids = numpy.empty_like(tokens)
        loss_mask = numpy.zeros(len(tokens), dtype=numpy.float32)
        for (sequence, offset, length, targets), first, last in zip(
            pieces, cu_seqlens[:-1], cu_seqlens[1:], strict=True
        ):
            # One token more than the piece where the document goes on: the last label.
            text = self.dataset.get(
                int(sequence), offset=int(offset), length=int(max(length, targets + 1))
            )
            tokens[first : first + length] = text[:length]
            labels[first : first + targets] = text[1 : targets + 1]
            loss_mask[first : first + targets] = 1.0
            position_ids[first:last] = numpy.arange(last - first)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.from_numpy(position_ids),
            "cu_seqlens": torch.from_numpy(cu_seqlens.astype(numpy.int32)),
        }

    def _split_documents(self) -> numpy.ndarray:
        """Return this split's pieces, none longer than a microbatch.

        Returns:
            int64 array of shape ``[pieces, 4]``: a piece's document (the number of its first
            sequence), its offset in the document, its length, and how many of its tokens have a
            next token to predict.
        """
        longest = self.config.sequence_length
        first_sequences = self.dataset.document_indices[self.indices]
        tokens_before = numpy.concatenate(
            [[0], numpy.cumsum(self.dataset.sequence_lengths, dtype=numpy.int64)]
        )
        lengths = (
            tokens_before[self.dataset.document_indices[self.indices + 1]]
            - tokens_before[first_sequences]
        )
        chunks = -(-lengths // longest)
        document = numpy.repeat(numpy.arange(len(lengths)), chunks)
        first_chunk = numpy.repeat(numpy.cumsum(chunks) - chunks, chunks)
        offset = (numpy.arange(len(document)) - first_chunk) * longest
        length = numpy.minimum(lengths[document] - offset, longest)
        targets = numpy.minimum(lengths[document] - offset - 1, longest)
        return numpy.stack([first_sequences[document], offset, length, targets], axis=1)

    def _pack_epoch(self) -> None:
        """Shuffle the pieces once more and cut them greedily into microbatches."""
        epoch = len(self._orders)
        order = numpy.random.default_rng([self.config.random_seed, epoch]).permutation(
            len(self._pieces)
        )
        lengths = _round_up(self._pieces[order, 2], self.config.document_multiple)
        ends = numpy.cumsum(lengths)
        most = self.config.documents_per_microbatch or len(order)
        boundaries = [0]
        while boundaries[-1] < len(order):
            start = boundaries[-1]
            tokens_before = ends[start] - lengths[start]
            fitting = numpy.searchsorted(
                ends, tokens_before + self.config.sequence_length, side="right"
            )
            boundaries.append(min(int(fitting), start + most))
        self._orders.append(order)
        self._boundaries.append(numpy.array(boundaries))
        self._first_microbatches.append(self._first_microbatches[-1] + len(boundaries) - 1)


def _round_up(values: numpy.ndarray, multiple: int) -> numpy.ndarray:
    """Return ``values`` rounded up to multiples of ``multiple``, as a new array."""
    return -(-values // multiple) * multiple
