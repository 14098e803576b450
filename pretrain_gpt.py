"""Train a GPT model with Megatron's training loop.

The flags are those of ``megatron.training``; ``docs/pretrain_gpt.md`` describes the few that this
script adds. Every rank of the job runs it, usually through torchrun.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model

try:
    from megatron.training import get_args, get_timers, get_tokenizer, pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.datasets.sft_dataset import SFTDataset
    from megatron.training.training import update_seqlen_stats_from_cu_seqlens
    from megatron.training.utils import get_blend_and_blend_per_split, is_last_rank
except ImportError as error:
    raise ImportError(
        "pretrain_gpt.py needs megatron.training as of base release 0.19; installed is "
        f"megatron-core {version('megatron-core')}. Install the fork over its default base."
    ) from error

from gpt_arguments import (
    add_arguments,
    apply_arguments,
    document_multiple,
    microbatch_multiple,
)
from gpt_batch import GPTBatch, read_batch, reads_data
from packed_documents import PackedDocumentConfig, PackedDocumentDataset

LossAndReport = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


class MicrobatchLengthLog:
    """Prints the lengths of an iteration's microbatches once the last of them has been read."""

    def __init__(self) -> None:
        self._microbatches: list[str] = []

    def add(self, boundaries: torch.Tensor, args: Namespace) -> None:
        """Take note of one microbatch; the last rank calls this in its last model chunk.

        Args:
            boundaries: The microbatch's document boundaries, ``[documents + 1]``.
            args: The run's arguments.
        """
        self._microbatches.append(f"{int(boundaries[-1])} in {len(boundaries) - 1}")
        if len(self._microbatches) == get_num_microbatches():
            iteration = args.curr_iteration + 1
            if iteration % args.log_interval == 0:
                lengths = ", ".join(self._microbatches)
                print(f" iteration {iteration:8d} tokens in documents: {lengths}", flush=True)
            self._microbatches.clear()


_microbatch_lengths = MicrobatchLengthLog()


def loss_of_batch(batch: GPTBatch, token_losses: torch.Tensor) -> LossAndReport:
    """Sum the losses of a microbatch's tokens; the last pipeline stage calls this.

    Args:
        batch: The microbatch.
        token_losses: The model's output, ``[microbatch size, tokens]``.

    Returns:
        The sum over the tokens that count; their number, an integer; and for the log that sum and
        number once more, from which the base takes the mean over all ranks and microbatches.
    """
    args = get_args()
    assert batch.loss_mask is not None, "the last stage reads data"
    mask = batch.loss_mask.flatten().float()
    loss = torch.sum(token_losses.flatten().float() * mask)
    number_of_tokens = mask.sum().detach().to(torch.int)
    if args.check_for_nan_in_loss_and_grad:
        for name, rejects in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejects,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        get_rerun_state_machine().validate_result(
            result=loss / number_of_tokens.clamp(min=1),
            rejection_func=partial(
                get_rerun_state_machine().is_unexpectedly_large, threshold=10, context="loss"
            ),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    report = torch.stack([loss.detach(), number_of_tokens.float()])
    return loss, number_of_tokens, {"lm loss": report}


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None,
    model: GPTModel,
    return_schedule_plan: bool = False,
) -> tuple[Any, Callable[[torch.Tensor], LossAndReport]]:
    """Run one microbatch through one model chunk; the base's schedules call this on every rank.

    Args:
        data_iterator: The chunk's microbatches; None where it reads none.
        model: The chunk.
        return_schedule_plan: Return the chunk's plan for the schedule that overlaps expert
            communication instead of running it.

    Returns:
        The chunk's output, or its plan, and the function that turns the last chunk's into a loss.
    """
    args = get_args()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = read_batch(data_iterator, args, vp_stage)
    timers("batch-generator").stop()
    if model.training and batch.document_boundaries is not None:
        _take_note_of_lengths(batch.document_boundaries, model, args, vp_stage)
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch.tokens,
        batch.position_ids,
        batch.attention_mask,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed_seq_params,
    )
    return output, partial(loss_of_batch, batch)


def _take_note_of_lengths(
    boundaries: torch.Tensor, model: GPTModel, args: Namespace, vp_stage: int | None
) -> None:
    """Count a microbatch's tokens for the logged throughput, and print lengths if asked to."""
    if not vp_stage:
        update_seqlen_stats_from_cu_seqlens(boundaries)
    is_last_chunk = get_attr_wrapped_model(model, "post_process")
    if args.log_microbatch_lengths and is_last_chunk and is_last_rank():
        _microbatch_lengths.add(boundaries, args)


def build_datasets(num_samples: list[int | None], vp_stage: int | None = None) -> list[Any]:
    """Build the training, validation and test datasets; every rank calls this once per model chunk.

    Args:
        num_samples: Fewest samples of each split; None for one epoch.
        vp_stage: Number of the model chunk on this rank, None without virtual stages.

    Returns:
        The three datasets, each None where nothing of it is wanted or the chunk reads no data.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    options = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "tokenizer": get_tokenizer(),
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "allow_ambiguous_pad_tokens": args.allow_ambiguous_pad_tokens,
    }
    if args.pack_documents:
        dataset_class = PackedDocumentDataset
        config = PackedDocumentConfig(
            **options,
            documents_per_microbatch=args.documents_per_microbatch,
            document_multiple=document_multiple(args),
            microbatch_multiple=microbatch_multiple(args),
        )
    else:
        dataset_class = _fixed_length_dataset_class(args)
        config = GPTDatasetConfig(
            **options,
            reset_position_ids=args.reset_position_ids,
            reset_attention_mask=args.reset_attention_mask,
            eod_mask_loss=args.eod_mask_loss,
            # A plain causal mask is what attention applies by itself.
            create_attention_mask=args.reset_attention_mask,
            context_parallel_size=args.context_parallel_size,
            inter_document_masking=args.dataloader_inter_document_masking,
            object_storage_cache_path=args.object_storage_cache_path,
            fast_cache_load=args.dataloader_fast_cache_load,
            defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        )

    def is_built_on_rank() -> bool:
        return get_tensor_model_parallel_rank() == 0 and reads_data(args, vp_stage)

    datasets = BlendedMegatronDatasetBuilder(
        dataset_class, num_samples, is_built_on_rank, config
    ).build()
    # A run without evaluation asks for no samples of a split; the base rejects an empty dataset.
    return [
        None if size == 0 else dataset for size, dataset in zip(num_samples, datasets, strict=True)
    ]


# The base otherwise calls it on tensor parallel rank 0 only, and the builder waits for all ranks.
build_datasets.is_distributed = True  # type: ignore[attr-defined]


def _fixed_length_dataset_class(args: Namespace) -> type[GPTDataset] | type[SFTDataset]:
    """Return the base's dataset for microbatches of ``--seq-length`` tokens."""
    if args.sft:
        return SFTDataset
    return MockGPTDataset if args.mock_data else GPTDataset


def main() -> None:
    """Parse the command line and train."""
    args = parse_and_validate_args(
        extra_args_provider=add_arguments, args_defaults={"tokenizer_type": "GPT2BPETokenizer"}
    )
    try:
        apply_arguments(args)
    except ValueError as error:
        # One rank speaks for all of them.
        sys.exit(f"pretrain_gpt.py: error: {error}" if args.rank == 0 else 2)
    pretrain(
        pretrain_cfg_container_from_args(args, model_cfg=gpt_config_from_args(args)),
        build_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
    )


if __name__ == "__main__":
    main()
