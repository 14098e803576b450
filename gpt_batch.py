"""One microbatch of a GPT model: from the data loader to what the model takes.

Tensor parallel rank 0 reads; the others receive from it, so that a microbatch is read once per
pipeline stage and all ranks of the stage agree on its length.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import broadcast_data
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training.utils import is_first_or_last_pipeline_stage

from gpt_arguments import keeps_documents_apart
from megatron.core import parallel_state


@dataclass(frozen=True)
class GPTBatch:
    """What ``GPTModel.forward`` takes for one microbatch, on the rank's device.

    Attributes:
        tokens: Token ids, int64, ``[microbatch size, tokens]``; None on a stage that needs no data.
        labels: Next token ids, as ``tokens``.
        loss_mask: 1 where a token counts in the loss, else 0, float32, as ``tokens``.
        position_ids: Positions, as ``tokens``.
        attention_mask: Bool, True where attention is forbidden, ``[1, 1, tokens, tokens]``; None
            for plain causal attention, and where ``packed_seq_params`` holds the boundaries.
        packed_seq_params: Boundaries of the packed documents for attention kernels that take them.
        document_boundaries: int32 ``[documents + 1]`` from 0 to the microbatch's length before it
            is split over context parallel ranks; None where documents are not kept apart.
    """

    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    packed_seq_params: PackedSeqParams | None = None
    document_boundaries: torch.Tensor | None = None


def reads_data(args: Namespace, vp_stage: int | None) -> bool:
    """Return whether this rank's model chunk ``vp_stage`` takes anything from the data.

    The embedding and the loss do. Boundaries between documents are the business of every layer, so
    with them every chunk reads, each from an iterator of its own over the same microbatches.
    """
    return (
        keeps_documents_apart(args)
        or args.reset_attention_mask
        or bool(args.mtp_num_layers)
        or is_first_or_last_pipeline_stage(vp_stage)
    )


def read_batch(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None,
    args: Namespace,
    vp_stage: int | None,
) -> GPTBatch:
    """Read the next microbatch; every rank of the stage calls this once per microbatch.

    Args:
        data_iterator: The chunk's microbatches on tensor parallel rank 0, not used on the others.
        args: The run's arguments.
        vp_stage: Number of the model chunk on this rank, None without virtual stages.

    Returns:
        The microbatch, or this context parallel rank's part of it; an empty one on a chunk that
        needs no data.
    """
    if not reads_data(args, vp_stage):
        return GPTBatch()
    keys = ["tokens", "labels", "position_ids", "loss_mask"]
    if keeps_documents_apart(args):
        keys.append("cu_seqlens")
    elif args.reset_attention_mask:
        keys.append("attention_mask")
    fields = _receive(data_iterator, keys)

    packed_seq_params = boundaries = None
    if "cu_seqlens" in fields:
        # The base's datasets repeat the last boundary to give all samples as many of them.
        boundaries = torch.unique_consecutive(fields["cu_seqlens"].flatten())
        if args.transformer_impl == "local":
            fields["attention_mask"] = forbidden_attention(boundaries)
        else:
            packed_seq_params = _packed_seq_params(boundaries)
        fields["cu_seqlens"] = boundaries.unsqueeze(0)
    if args.context_parallel_size > 1:
        fields = get_batch_on_this_cp_rank(
            {"cu_seqlens": None, "cu_seqlens_padded": None} | fields,
            is_hybrid_cp=False,
            cp_group=parallel_state.get_context_parallel_group(),
            use_per_sequence_balancing=args.dataloader_inter_document_masking,
        )
    return GPTBatch(
        tokens=fields["tokens"],
        labels=fields["labels"],
        loss_mask=fields["loss_mask"],
        position_ids=fields["position_ids"],
        attention_mask=fields.get("attention_mask"),
        packed_seq_params=packed_seq_params,
        document_boundaries=boundaries,
    )


def forbidden_attention(boundaries: torch.Tensor) -> torch.Tensor:
    """Return the block-diagonal causal mask of packed documents.

    Args:
        boundaries: Integers ``[documents + 1]``, from 0 to the number of tokens.

    Returns:
        Bool ``[1, 1, tokens, tokens]``, True where the token of the row may not see that of the
        column: one of another document, or a later one.
    """
    lengths = boundaries[1:] - boundaries[:-1]
    document = torch.repeat_interleave(
        torch.arange(len(lengths), device=boundaries.device), lengths
    )
    other_document = document.unsqueeze(1) != document.unsqueeze(0)
    later = torch.ones_like(other_document).triu(diagonal=1)
    return (other_document | later)[None, None]


def _packed_seq_params(boundaries: torch.Tensor) -> PackedSeqParams:
    """Return the documents' boundaries in the form that THD attention kernels take."""
    longest = int((boundaries[1:] - boundaries[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _receive(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, keys: list[str]
) -> dict[str, torch.Tensor]:
    """Return the next microbatch's ``keys`` on the device of every tensor parallel rank."""
    sample: dict[str, torch.Tensor] = {}
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None, "no dataset was built for a chunk that reads data"
        sample = next(data_iterator)
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return {key: sample[key].cuda(non_blocking=True) for key in keys}
    # One message of one type, whose sizes the receivers need not know.
    integers = {key: sample[key].long() for key in keys if sample}
    received = broadcast_data(keys, integers, torch.int64)
    dtypes = {"loss_mask": torch.float32, "cu_seqlens": torch.int32, "attention_mask": torch.bool}
    return {key: value.to(dtypes.get(key, torch.int64)) for key, value in received.items()}
