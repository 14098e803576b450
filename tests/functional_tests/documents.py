"""The text that functional cases train on."""

from pathlib import Path

_DOCUMENTS = 4000
_VOCABULARY = 128


def write_documents(prefix: Path, longest: int = 60) -> None:
    """Write an indexed dataset of documents of counted-up tokens.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
        longest: Most tokens of a document; the shortest has 2.
    """
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    random = numpy.random.default_rng(0)
    for _ in range(_DOCUMENTS):
        length, first, step = random.integers([2, 0, 1], [longest + 1, _VOCABULARY, 8])
        tokens = (first + step * numpy.arange(length)) % _VOCABULARY
        builder.add_document(torch.from_numpy(tokens), [length])
    builder.finalize(f"{prefix}.idx")
