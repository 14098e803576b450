"""What is in a packed microbatch."""

from collections import Counter
from itertools import chain, pairwise

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")

SEQUENCE_LENGTH = 16


def documents_of_lengths(*lengths, sequences=1):
    """Documents of tokens that occur nowhere else, cut into equally long sequences."""
    first = 1
    documents = []
    for length in lengths:
        tokens = list(range(first, first + length))
        first += length
        size = -(-length // sequences)
        documents.append([tokens[start : start + size] for start in range(0, length, size)])
    return documents


VARIED = documents_of_lengths(5, 1, 16, 7, 40, 3, 17, 2, 12, 33, 16, 9)
SEVERAL_SEQUENCES = documents_of_lengths(5, 1, 16, 7, 40, 3, 17, 2, 12, sequences=3)


def predictions(dataset):
    """Every (token, label) that counts in the loss, and how often."""
    return Counter(
        (token, label)
        for microbatch in dataset
        for token, label, counts in zip(
            microbatch["tokens"].tolist(),
            microbatch["labels"].tolist(),
            microbatch["loss_mask"].tolist(),
            strict=True,
        )
        if counts
    )


def pieces(microbatch):
    """The tokens of every document in a microbatch."""
    boundaries = microbatch["cu_seqlens"].tolist()
    return [microbatch["tokens"][first:last].tolist() for first, last in pairwise(boundaries)]


def contents(dataset):
    return [microbatch["tokens"].tolist() for microbatch in dataset]


@pytest.mark.parametrize("documents", [VARIED, SEVERAL_SEQUENCES])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"documents_per_microbatch": 1},
        {"document_multiple": 4, "microbatch_multiple": 8},
        {"microbatch_multiple": 2},
    ],
)
def test_every_token_but_the_first_of_a_document_is_predicted_once(
    build_packed, documents, options
):
    dataset = build_packed(documents, sequence_length=SEQUENCE_LENGTH, **options)
    texts = [list(chain(*sequences)) for sequences in documents]

    assert predictions(dataset) == Counter(chain(*(pairwise(text) for text in texts)))


def test_microbatches_are_as_long_as_their_documents_and_hold_as_many_as_fit(build_packed):
    dataset = build_packed(VARIED, sequence_length=SEQUENCE_LENGTH)
    microbatches = [pieces(microbatch) for microbatch in dataset]
    lengths = [sum(map(len, microbatch)) for microbatch in microbatches]

    assert sum(lengths) == sum(len(sequences[0]) for sequences in VARIED)
    assert max(lengths) <= SEQUENCE_LENGTH
    assert len(set(lengths)) > 3
    for length, following in zip(lengths, microbatches[1:], strict=False):
        assert length + len(following[0]) > SEQUENCE_LENGTH


def test_long_documents_are_split_into_chunks_of_the_sequence_length(build_packed):
    dataset = build_packed(documents_of_lengths(40), sequence_length=SEQUENCE_LENGTH)
    chunks = sorted(piece for microbatch in dataset for piece in pieces(microbatch))

    assert [len(chunk) for chunk in chunks] == [16, 16, 8]


def test_positions_restart_and_boundaries_are_those_of_the_documents(build_packed):
    dataset = build_packed(VARIED, sequence_length=SEQUENCE_LENGTH)
    for microbatch in dataset:
        lengths = [len(piece) for piece in pieces(microbatch)]

        assert microbatch["position_ids"].tolist() == list(chain(*map(range, lengths)))
        assert microbatch["cu_seqlens"].tolist()[0] == 0
        assert microbatch["cu_seqlens"].tolist()[-1] == len(microbatch["tokens"])


def test_the_last_token_of_a_document_counts_nothing(build_packed):
    dataset = build_packed(documents_of_lengths(3, 4), sequence_length=SEQUENCE_LENGTH)
    [microbatch] = dataset
    lasts = [last - 1 for last in microbatch["cu_seqlens"].tolist()[1:]]

    assert microbatch["loss_mask"][lasts].tolist() == [0.0, 0.0]
    assert microbatch["loss_mask"].sum() == 5.0


def test_padding_reaches_the_multiples_and_counts_nothing(build_packed):
    options = {"document_multiple": 4, "microbatch_multiple": 8}
    dataset = build_packed(VARIED, sequence_length=SEQUENCE_LENGTH, **options)
    for microbatch in dataset:
        lengths = [len(piece) for piece in pieces(microbatch)]
        padding = microbatch["tokens"] == 0

        assert all(length % 4 == 0 for length in lengths)
        assert sum(lengths) % 8 == 0
        assert sum(lengths) <= SEQUENCE_LENGTH
        assert microbatch["loss_mask"][padding].sum() == 0.0


def test_dtypes(build_packed):
    microbatch = build_packed(VARIED, sequence_length=SEQUENCE_LENGTH)[0]
    dtypes = {name: str(tensor.dtype) for name, tensor in microbatch.items()}

    assert dtypes == {
        "tokens": "torch.int64",
        "labels": "torch.int64",
        "loss_mask": "torch.float32",
        "position_ids": "torch.int64",
        "cu_seqlens": "torch.int32",
    }


def test_the_seed_alone_decides_the_order(build_packed):
    first, again, other = (
        contents(build_packed(VARIED, sequence_length=SEQUENCE_LENGTH, seed=seed))
        for seed in (3, 3, 4)
    )

    assert first == again
    assert first != other


def test_epochs_are_shuffled_anew_and_repeat_until_there_are_enough(build_packed):
    one_epoch = len(build_packed(VARIED, sequence_length=SEQUENCE_LENGTH))
    dataset = build_packed(VARIED, sequence_length=SEQUENCE_LENGTH, num_samples=3 * one_epoch)
    once = predictions(build_packed(VARIED, sequence_length=SEQUENCE_LENGTH))
    repeats = predictions(dataset)

    assert len(dataset) >= 3 * one_epoch
    assert {count // once[pair] for pair, count in repeats.items()} in ({3}, {4})
    assert contents(dataset)[:one_epoch] != contents(dataset)[one_epoch : 2 * one_epoch]


def test_packing_keeps_the_order_of_single_documents(build_packed):
    packed = build_packed(VARIED, sequence_length=SEQUENCE_LENGTH)
    single = build_packed(VARIED, sequence_length=SEQUENCE_LENGTH, documents_per_microbatch=1)

    assert list(chain(*contents(packed))) == list(chain(*contents(single)))
    assert all(len(pieces(microbatch)) == 1 for microbatch in single)
    assert any(len(pieces(microbatch)) > 1 for microbatch in packed)


def test_a_limit_on_documents_is_kept(build_packed):
    documents = documents_of_lengths(*[2] * 9)
    dataset = build_packed(documents, sequence_length=SEQUENCE_LENGTH, documents_per_microbatch=4)

    assert [len(pieces(microbatch)) for microbatch in dataset] == [4, 4, 1]


def test_a_split_holds_its_own_documents_only(build_packed):
    documents = documents_of_lengths(5, 6, 7, 8)
    dataset = build_packed(documents, sequence_length=SEQUENCE_LENGTH, indices=[1, 3])

    assert sorted(chain(*contents(dataset))) == sorted(documents[1][0] + documents[3][0])


def test_no_samples_are_an_empty_dataset(build_packed):
    dataset = build_packed(VARIED, sequence_length=SEQUENCE_LENGTH, indices=[], num_samples=0)

    assert len(dataset) == 0


def test_a_split_without_tokens_is_refused(build_packed):
    with pytest.raises(ValueError, match=r"train split of .* in 0 documents: choose another"):
        build_packed(VARIED, sequence_length=SEQUENCE_LENGTH, indices=[], num_samples=5)


def test_the_base_builds_splits_and_blends_of_it(write_documents):
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    from packed_documents import PackedDocumentConfig, PackedDocumentDataset

    prefixes = [str(write_documents(documents_of_lengths(*[length] * 30))) for length in (4, 6)]
    config = PackedDocumentConfig(
        random_seed=1,
        sequence_length=SEQUENCE_LENGTH,
        blend=(prefixes, [0.5, 0.5]),
        split="80,20,0",
        mid_level_dataset_surplus=0.5,
    )
    train, valid, test = BlendedMegatronDatasetBuilder(
        PackedDocumentDataset, [20, 4, 0], lambda: True, config
    ).build()
    document_lengths = {len(piece) for item in train for piece in pieces(item)}

    assert (len(train), len(valid), test) == (20, 4, None)
    assert document_lengths == {4, 6}


def test_mock_documents_are_reproducible_and_of_many_lengths():
    from packed_documents import MockDocuments

    first, again = (MockDocuments(sequence_length=60, vocab_size=50, seed=5) for _ in range(2))

    assert first.get(7).tolist() == again.get(7).tolist()
    assert first.get(7, offset=1, length=1).tolist() == first.get(7).tolist()[1:2]
    assert len(first.get(7)) == first.sequence_lengths[7]
    assert (first.sequence_lengths.min(), first.sequence_lengths.max()) == (2, 40)
    assert max(first.get(index).max() for index in range(100)) < 50
