"""Documents on disk, and ranks."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def emulated_pool():
    """Ranks under the CUDA emulation."""
    with WorkerPool.for_fork(emulate_cuda=True) as pool:
        yield pool


@pytest.fixture
def write_documents(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes documents, each a list of sequences, and returns their path prefix."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    numbers = itertools.count()

    def write(documents: Sequence[Sequence[Sequence[int]]]) -> Path:
        prefix = tmp_path / f"documents{next(numbers)}"
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
        for sequences in documents:
            tokens = list(itertools.chain(*sequences))
            builder.add_document(torch.tensor(tokens), [len(sequence) for sequence in sequences])
        builder.finalize(f"{prefix}.idx")
        return prefix

    return write


@pytest.fixture
def build_packed(write_documents: Callable[..., Path]) -> Callable[..., Any]:
    """A function that packs documents, by default all of them in one epoch."""
    import numpy
    from megatron.core.datasets.utils import Split

    from packed_documents import PackedDocumentConfig, PackedDocumentDataset

    def build(
        documents: Sequence[Sequence[Sequence[int]]],
        *,
        sequence_length: int,
        seed: int = 0,
        num_samples: int | None = None,
        indices: Sequence[int] | None = None,
        **options: int,
    ) -> PackedDocumentDataset:
        prefix = str(write_documents(documents))
        config = PackedDocumentConfig(
            random_seed=seed,
            sequence_length=sequence_length,
            blend=([prefix], None),
            split="1,0,0",
            **options,
        )
        chosen = range(len(documents)) if indices is None else indices
        return PackedDocumentDataset(
            PackedDocumentDataset.build_low_level_dataset(prefix, config),
            prefix,
            numpy.array(chosen, dtype=numpy.int32),
            num_samples,
            Split.train,
            config,
        )

    return build
