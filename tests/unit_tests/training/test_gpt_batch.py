"""Who reads a batch, and what every rank gets of it."""

import pytest

from tests.unit_tests.training import batch_cases as cases

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = [[0, 1, 2, 3, 4, 5, 6, 7]]
BLOCK_DIAGONAL_CAUSAL = [
    [1, 0, 0, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0, 0, 0],
    [0, 0, 0, 1, 0, 0, 0, 0],
    [0, 0, 0, 1, 1, 0, 0, 0],
    [0, 0, 0, 1, 1, 1, 0, 0],
    [0, 0, 0, 1, 1, 1, 1, 0],
    [0, 0, 0, 0, 0, 0, 0, 1],
]


@pytest.fixture
def read(emulated_pool):
    """A function that returns the batch of every rank."""

    def read(world_size, sizes, **options):
        arguments = {"sizes": sizes, **options}
        return emulated_pool.run(
            cases.batch_on_every_rank, world_size=world_size, arguments=arguments
        ).values()

    return read


def test_documents_are_kept_apart_by_a_mask_with_the_local_implementation(read):
    [batch] = read(1, {}, pack_documents=True)

    assert batch["allowed"] == BLOCK_DIAGONAL_CAUSAL
    assert batch["packed_seq_params"] is None
    assert batch["document_boundaries"] == cases.PACKED_BOUNDARIES


def test_documents_are_kept_apart_by_boundaries_with_transformer_engine(read):
    [batch] = read(1, {}, pack_documents=True, transformer_impl="transformer_engine")

    boundaries = cases.PACKED_BOUNDARIES
    assert batch["packed_seq_params"] == ["thd", boundaries, boundaries, 4, 4]
    assert batch["allowed"] is None


@pytest.mark.parametrize(
    "option", ["pack_documents", "sft", "dataloader_inter_document_masking", "mtp_num_layers"]
)
def test_middle_stages_read_where_every_layer_needs_the_data(read, option):
    batches = read(3, {"pipeline_model_parallel_size": 3}, **{option: 1})

    assert [batch["tokens"] for batch in batches] == [TOKENS] * 3


def test_middle_stages_read_nothing_of_plain_batches(read):
    batches = read(3, {"pipeline_model_parallel_size": 3})

    assert [batch["tokens"] for batch in batches] == [TOKENS, None, TOKENS]
    assert [batch["allowed"] for batch in batches] == [None] * 3


@pytest.mark.parametrize("options", [{"pack_documents": True}, {"reset_attention_mask": True}, {}])
def test_tensor_parallel_ranks_receive_what_the_first_one_reads(read, options):
    [alone] = read(1, {}, **options)
    batches = read(2, {"tensor_model_parallel_size": 2}, **options)

    assert alone["tokens"] == TOKENS
    assert batches == [alone, alone]


def test_context_parallel_ranks_share_the_ends_and_the_middle(read):
    batches = read(2, {"context_parallel_size": 2})

    assert [batch["tokens"] for batch in batches] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    assert [batch["position_ids"] for batch in batches] == [[[2, 3, 8, 9]], [[4, 5, 6, 7]]]
    assert [batch["labels"] for batch in batches] == [[[1, 2, 7, 8]], [[3, 4, 5, 6]]]
