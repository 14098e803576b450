"""Which flags go together, and what the others are told."""

import argparse

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")

PACKED = "--transformer-impl local --mock-data --seq-length 64 --variable-seq-lengths"
SFT = "--transformer-impl local --data-path chat.jsonl --seq-length 64 --sft"


@pytest.fixture
def parse():
    """A function that parses flags with the base's parser and this script's flags."""
    from megatron.training.arguments import add_megatron_arguments

    from gpt_arguments import add_arguments

    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))

    def parse(flags):
        args = parser.parse_args(["--micro-batch-size", "1", *flags.split()])
        # As the base's validation does.
        args.eval_micro_batch_size = args.eval_micro_batch_size or args.micro_batch_size
        args.variable_seq_lengths = False
        return args

    return parse


@pytest.fixture
def apply(parse):
    """A function that parses flags, applies them and returns the arguments."""
    from gpt_arguments import apply_arguments

    def apply(flags):
        args = parse(flags)
        apply_arguments(args)
        return args

    return apply


def test_packing_weighs_tokens_alike_and_exchanges_shapes(apply):
    args = apply(PACKED)

    assert args.variable_seq_lengths
    assert args.calculate_per_token_loss
    assert args.moe_token_dispatcher_type == "alltoall"


def test_without_packing_nothing_is_changed(parse, apply):
    flags = "--transformer-impl local --mock-data"

    assert vars(apply(flags)) == vars(parse(flags))


@pytest.mark.parametrize(
    "flags",
    [
        f"{PACKED} --documents-per-microbatch 3 --log-microbatch-lengths",
        f"{PACKED} --bf16 --no-masked-softmax-fusion",
        f"{PACKED} --num-experts 4 --moe-token-dispatcher-type alltoall",
        SFT,
    ],
)
def test_combinations_that_work(apply, flags):
    apply(flags)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--transformer-impl local --seq-length 64", "No data: give --data-path"),
        ("--mock-data", "transformer-engine, which is not installed"),
        (f"{SFT} --mock-data", "drop --mock-data"),
        (
            "--transformer-impl local --mock-data --documents-per-microbatch 2",
            "--documents-per-microbatch means nothing without --variable-seq-lengths",
        ),
        (
            "--transformer-impl local --mock-data --log-microbatch-lengths",
            "--log-microbatch-lengths means nothing without --variable-seq-lengths",
        ),
        (
            "--transformer-impl local --mock-data --context-parallel-size 2",
            "--context-parallel-size above 1 works with --transformer-impl transformer_engine",
        ),
        (f"{PACKED} --documents-per-microbatch 0", "--documents-per-microbatch 0: it must be"),
        (f"{PACKED} --micro-batch-size 2", "--micro-batch-size 2: a packed microbatch is one"),
        (f"{PACKED} --eval-micro-batch-size 4", "use --eval-micro-batch-size 1"),
        (f"{SFT} --micro-batch-size 2", "--micro-batch-size 2: a packed microbatch is one"),
        (f"{PACKED} --bf16", "add --no-masked-softmax-fusion"),
        (f"{SFT} --fp16", "add --no-masked-softmax-fusion"),
        (f"{PACKED} --window-size 8,0", "ignored by --window-size"),
        (f"{PACKED} --mtp-num-layers 1", "ignored by --mtp-num-layers"),
        (f"{SFT} --variable-seq-lengths", "do not go with --sft"),
        (f"{PACKED} --fim-data", "do not go with --fim-data"),
        (f"{PACKED} --dataloader-type external", "do not go with --dataloader-type external"),
        (f"{PACKED} --num-experts 4", "--moe-token-dispatcher-type allgather (use alltoall"),
        (f"{PACKED} --fp8-format e4m3", "do not go with --fp8-format"),
        (f"{PACKED} --tp-comm-overlap", "do not go with --tp-comm-overlap"),
        (f"{PACKED} --cuda-graph-impl local", "do not go with --cuda-graph-impl local"),
        (
            f"{PACKED} --tensor-model-parallel-size 3 --sequence-parallel",
            "--seq-length 64: .* so use a multiple of 3",
        ),
    ],
)
def test_combinations_that_do_not_work_are_refused_with_a_remedy(apply, flags, told):
    with pytest.raises(ValueError, match=told.replace("(", r"\(")):
        apply(flags)


@pytest.mark.parametrize(
    ("flags", "document", "microbatch"),
    [
        ("", 1, 1),
        ("--tensor-model-parallel-size 4", 1, 1),
        ("--tensor-model-parallel-size 4 --sequence-parallel", 1, 4),
        ("--context-parallel-size 2", 4, 4),
        ("--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", 4, 4),
        ("--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel", 4, 8),
    ],
)
def test_lengths_are_multiples_that_every_rank_gets_an_equal_part_of(
    parse, flags, document, microbatch
):
    from gpt_arguments import document_multiple, microbatch_multiple

    args = parse(flags)

    assert (document_multiple(args), microbatch_multiple(args)) == (document, microbatch)
