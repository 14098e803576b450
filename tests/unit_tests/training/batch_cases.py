"""What ranks read as a batch; every function runs in a process of its own."""

from argparse import Namespace
from typing import Any

TOKENS = 8
PACKED_BOUNDARIES = [0, 3, 7, 8]


def batch_on_every_rank(sizes: dict[str, int], **options: Any) -> dict[str, Any]:
    """Read one batch as each rank of a run with such parallel sizes; return it as plain lists.

    Tensor parallel rank 0 has a data iterator and the others have none, as in training.
    """
    import torch

    from gpt_batch import forbidden_attention, read_batch
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**sizes)
    args = Namespace(
        **{
            "pack_documents": False,
            "sft": False,
            "dataloader_inter_document_masking": False,
            "reset_attention_mask": False,
            "mtp_num_layers": None,
            "transformer_impl": "local",
            "context_parallel_size": sizes.get("context_parallel_size", 1),
            **options,
        }
    )
    sample = {
        "tokens": torch.arange(TOKENS)[None],
        "labels": torch.arange(TOKENS)[None] + 1,
        "position_ids": torch.arange(TOKENS)[None] + 2,
        "loss_mask": torch.tensor([[1.0, 0.0] * (TOKENS // 2)]),
        # As the base's datasets give them: the last one repeated.
        "cu_seqlens": torch.tensor([[*PACKED_BOUNDARIES, TOKENS, TOKENS]], dtype=torch.int32),
        "attention_mask": forbidden_attention(torch.tensor([0, 4, TOKENS])),
    }
    reads = parallel_state.get_tensor_model_parallel_rank() == 0
    return _plain(read_batch(iter([sample]) if reads else None, args, vp_stage=None))


def _plain(batch: Any) -> dict[str, Any]:
    params = batch.packed_seq_params
    tensors = {
        name: getattr(batch, name)
        for name in ("tokens", "labels", "position_ids", "loss_mask", "document_boundaries")
    }
    mask = batch.attention_mask
    return {
        **{name: tensor if tensor is None else tensor.tolist() for name, tensor in tensors.items()},
        "dtypes": {str(tensor.dtype) for tensor in tensors.values() if tensor is not None},
        "allowed": None if mask is None else (~mask[0, 0]).int().tolist(),
        "packed_seq_params": params
        and [
            params.qkv_format,
            params.cu_seqlens_q.tolist(),
            params.cu_seqlens_kv.tolist(),
            params.max_seqlen_q,
            params.max_seqlen_kv,
        ],
    }
