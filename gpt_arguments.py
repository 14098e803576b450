"""The flags that ``pretrain_gpt.py`` adds to the base's, and what combines with what."""

import math
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec

from megatron.training.utils import get_blend_and_blend_per_split


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add this script's flags to the base's parser and return it."""
    group = parser.add_argument_group("packed documents")
    group.add_argument(
        "--variable-seq-lengths",
        # The base resets its own argument of this name while it validates.
        dest="pack_documents",
        action="store_true",
        help="Pack whole documents into microbatches of varying length, each of at most "
        "--seq-length tokens.",
    )
    group.add_argument(
        "--documents-per-microbatch",
        type=int,
        metavar="N",
        help="With --variable-seq-lengths: at most N documents in a microbatch; 1 switches the "
        "packing off and keeps the varying length. Default: as many as fit.",
    )
    group.add_argument(
        "--log-microbatch-lengths",
        action="store_true",
        help="With --variable-seq-lengths: print the lengths of the microbatches of every "
        "iteration that is logged.",
    )
    return parser


def apply_arguments(args: Namespace) -> None:
    """Check the validated arguments and set those of the base that this script's flags imply.

    Raises:
        ValueError: A combination of flags does not work; the message names the flags and a remedy.
    """
    _check_data(args)
    if args.transformer_impl == "transformer_engine" and find_spec("transformer_engine") is None:
        raise ValueError(
            "--transformer-impl transformer_engine (the default) needs the package "
            "transformer-engine, which is not installed: install it, or use --transformer-impl "
            "local."
        )
    if args.context_parallel_size > 1 and args.transformer_impl == "local":
        raise ValueError(
            "--context-parallel-size above 1 works with --transformer-impl transformer_engine only."
        )
    if keeps_documents_apart(args):
        _check_attention(args)
    if args.pack_documents:
        _check_packing(args)
        args.variable_seq_lengths = True
        # Microbatches hold different numbers of tokens; only this weighs every token the same.
        args.calculate_per_token_loss = True
        if args.num_experts is None:
            # A dense model has no dispatcher, yet the base refuses the default one.
            args.moe_token_dispatcher_type = "alltoall"


def keeps_documents_apart(args: Namespace) -> bool:
    """Return whether the run's batches hold document boundaries for the attention."""
    return args.pack_documents or args.sft or args.dataloader_inter_document_masking


def document_multiple(args: Namespace) -> int:
    """Return what a packed document's length must be a multiple of.

    Context parallelism deals every document's halves to its ranks in two pieces each.
    """
    return 2 * args.context_parallel_size if args.context_parallel_size > 1 else 1


def microbatch_multiple(args: Namespace) -> int:
    """Return what a packed microbatch's length must be a multiple of.

    Sequence parallelism splits it evenly over tensor parallel ranks, after context parallelism has.
    """
    sequence_split = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return math.lcm(document_multiple(args), args.context_parallel_size * sequence_split)


def _check_data(args: Namespace) -> None:
    """Raise unless the run has data that its flags can read."""
    if args.mock_data and args.sft:
        raise ValueError("--sft reads conversations from --data-path: drop --mock-data.")
    if not args.mock_data and not any(get_blend_and_blend_per_split(args)):
        raise ValueError("No data: give --data-path PREFIX or --mock-data.")
    packing_only = {
        "--documents-per-microbatch": args.documents_per_microbatch is not None,
        "--log-microbatch-lengths": args.log_microbatch_lengths,
    }
    for flag, given in packing_only.items():
        if given and not args.pack_documents:
            raise ValueError(f"{flag} means nothing without --variable-seq-lengths: add it.")


def _check_attention(args: Namespace) -> None:
    """Raise unless every attention layer can keep the documents of a microbatch apart."""
    for flag, size in (
        ("--micro-batch-size", args.micro_batch_size),
        ("--eval-micro-batch-size", args.eval_micro_batch_size),
    ):
        if size != 1:
            raise ValueError(
                f"{flag} {size}: a packed microbatch is one long sequence, use {flag} 1 and let "
                "--seq-length set the amount of work."
            )
    if args.transformer_impl != "local":
        return
    mask_ignored_by = {
        "the fused softmax of --fp16 and --bf16: add --no-masked-softmax-fusion": (
            args.masked_softmax_fusion and (args.fp16 or args.bf16)
        ),
        "--window-size: drop it or use --transformer-impl transformer_engine": (
            args.window_size is not None
        ),
        "--mtp-num-layers: drop it or use --transformer-impl transformer_engine": bool(
            args.mtp_num_layers
        ),
    }
    for ignorer, present in mask_ignored_by.items():
        if present:
            raise ValueError(
                "With --transformer-impl local an attention mask keeps packed documents apart, "
                f"which is ignored by {ignorer}."
            )


def _check_packing(args: Namespace) -> None:
    """Raise unless everything in the run accepts microbatches of varying length."""
    limit = args.documents_per_microbatch
    if limit is not None and limit < 1:
        raise ValueError(f"--documents-per-microbatch {limit}: it must be at least 1.")
    fixed_length = {
        "--sft": args.sft,
        "--dataloader-inter-document-masking": args.dataloader_inter_document_masking,
        "--fim-data": args.fim_data,
        "--dataloader-type external": args.dataloader_type == "external",
        "--hybrid-context-parallel": args.hybrid_context_parallel,
        "--tp-comm-overlap": args.tp_comm_overlap,
        "--fp8-format": args.fp8 is not None,
        "--fp4-format": args.fp4 is not None,
        f"--cuda-graph-impl {args.cuda_graph_impl}": args.cuda_graph_impl != "none",
        "--moe-token-dispatcher-type allgather (use alltoall instead)": (
            args.num_experts is not None and args.moe_token_dispatcher_type == "allgather"
        ),
    }
    for flag, given in fixed_length.items():
        if given:
            raise ValueError(
                "--variable-seq-lengths makes microbatches of varying length, which do not go with "
                f"{flag}."
            )
    multiple = microbatch_multiple(args)
    if args.seq_length % multiple:
        raise ValueError(
            f"--seq-length {args.seq_length}: with this tensor, sequence and context parallelism "
            f"microbatches are padded to multiples of {multiple}, so use a multiple of {multiple}."
        )
