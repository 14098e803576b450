"""Attention, packed or not, one document or sequence after the other."""

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..refusal import NotOffered, refuse

_REMEDIES = {
    "attention_dropout": "add --attention-dropout 0 (ms-swift: --attention_dropout 0)",
    "cp_group": "leave out --context-parallel-size (ms-swift: --context_parallel_size)",
    "return_max_logit": "leave out --qk-clip and --log-max-attention-logit",
}
_WHOLE = (-1, -1)
_CAUSAL = ("causal", "padding_causal")
_UNMASKED = ("no_mask", "padding")


class DotProductAttention(nn.Module):
    """Softmax attention with grouped queries, and heads of keys and values of two sizes.

    Args:
        num_attention_heads: Number of heads of all ranks together.
        kv_channels: Size of a head; or a pair of sizes, of keys and of values.
        softmax_scale: Factor of the scores; by default one over the root of the keys' head size.
        attn_mask_type: ``causal``, ``no_mask``, ``padding_causal``, ``padding`` or ``arbitrary``.
        qkv_format: ``sbhd``, ``bshd`` or ``thd``.
        window_size: Only the whole sequence is offered.
        softmax_type: Only ``vanilla`` is offered.
        attention_dropout: Only 0 is offered.
        **others: Everything about kernels is ignored.

    Raises:
        NotOffered: Dropout, windows, context parallelism, or another softmax.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        *,
        softmax_scale: float | None = None,
        attn_mask_type: str = "causal",
        qkv_format: str = "sbhd",
        window_size: tuple[int, int] | None = None,
        softmax_type: str = "vanilla",
        attention_dropout: float = 0.0,
        **others: Any,
    ) -> None:
        super().__init__()
        refuse({"attention_dropout": attention_dropout, **others}, _REMEDIES)
        if window_size is not None and tuple(window_size) not in (_WHOLE, (-1, 0)):
            raise NotOffered("window_size", window_size, "leave out --window-size")
        if softmax_type != "vanilla":
            raise NotOffered("softmax_type", softmax_type, "leave out --softmax-type")
        self.softmax_scale = softmax_scale
        self.attn_mask_type = attn_mask_type
        self.qkv_format = qkv_format

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        window_size: tuple[int, int] | None = None,
        core_attention_bias: torch.Tensor | None = None,
        **ignored: Any,
    ) -> torch.Tensor:
        """Return the weighted values, heads and their channels in one last dimension.

        Args:
            query_layer: Of shape [tokens, batch, heads, channels] (``sbhd``), [batch, tokens,
                heads, channels] (``bshd``), or [tokens, heads, channels] (``thd``).
            key_layer: The same with as many heads or a divisor of that.
            value_layer: As ``key_layer``; its channels may be others.
            attention_mask: True where a query must not look; broadcast to [batch, heads, queries,
                keys]. Used with the mask type ``arbitrary``.
            qkv_format: Overrides the constructor's.
            cu_seqlens_q: With ``thd`` the documents' starts and the last one's end. Rows behind
                that are padding; their output is zero.
            cu_seqlens_kv: Must be the same as ``cu_seqlens_q``.
            attn_mask_type: Overrides the constructor's.
            cu_seqlens_q_padded: Must be the same as ``cu_seqlens_q``.
            cu_seqlens_kv_padded: Must be the same as ``cu_seqlens_q``.
            window_size: Only the whole sequence is offered.
            core_attention_bias: Not offered.
            **ignored: Hints for kernels, such as the longest document.

        Raises:
            NotOffered: A bias, another mask type or format, or queries other than the keys'.
        """
        if core_attention_bias is not None:
            raise NotOffered("core_attention_bias", "a tensor", "leave the bias out")
        mask_type = attn_mask_type or self.attn_mask_type
        layout = qkv_format or self.qkv_format
        for name, padded in (
            ("cu_seqlens_q_padded", cu_seqlens_q_padded),
            ("cu_seqlens_kv_padded", cu_seqlens_kv_padded),
        ):
            if padded is not None and not (
                cu_seqlens_q is not None and torch.equal(padded, cu_seqlens_q)
            ):
                raise NotOffered(name, padded, "put no padding between documents")
        if window_size is not None and tuple(window_size) not in (_WHOLE, (-1, 0)):
            raise NotOffered("window_size", window_size, "leave out --window-size")
        if layout != "thd" and mask_type.startswith("padding") and attention_mask is not None:
            raise NotOffered("attn_mask_type", mask_type, "take arbitrary, or thd with cu_seqlens")
        if layout == "thd":
            if cu_seqlens_q is None or not torch.equal(
                cu_seqlens_q, _or(cu_seqlens_kv, cu_seqlens_q)
            ):
                raise NotOffered("cu_seqlens_kv", cu_seqlens_kv, "give cu_seqlens_q, and the same")
            return self._packed(query_layer, key_layer, value_layer, cu_seqlens_q, mask_type)
        if layout not in ("sbhd", "bshd"):
            raise NotOffered("qkv_format", layout, "take sbhd, bshd or thd")
        order = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
        back = (2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)
        q, k, v = (part.permute(order) for part in (query_layer, key_layer, value_layer))
        return self._attend(q, k, v, mask_type, attention_mask).permute(back).flatten(2)

    def _packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bounds: torch.Tensor,
        mask_type: str,
    ) -> torch.Tensor:
        limits = bounds.tolist()
        documents = []
        for start, end in itertools.pairwise(limits):
            q, k, v = (part[start:end].transpose(0, 1)[None] for part in (query, key, value))
            documents.append(self._attend(q, k, v, mask_type, None)[0].transpose(0, 1))
        padding = query.new_zeros(query.shape[0] - limits[-1], query.shape[1], value.shape[2])
        return torch.cat([*documents, padding]).flatten(1)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask_type: str,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend within [batch, heads, tokens, channels]."""
        if mask_type == "arbitrary":
            if attention_mask is None:
                raise NotOffered("attention_mask", None, "give one with the mask type arbitrary")
            allowed: torch.Tensor | None = ~attention_mask
        elif mask_type in (*_CAUSAL, *_UNMASKED):
            allowed = None
        else:
            raise NotOffered("attn_mask_type", mask_type, "take causal, no_mask or arbitrary")
        if mask_type in _CAUSAL and query.shape[2] != key.shape[2]:
            raise NotOffered("key_layer", tuple(key.shape), "give as many keys as queries")
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=allowed,
            is_causal=mask_type in _CAUSAL,
            scale=self.softmax_scale,
            enable_gqa=True,
        )


def _or(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    return second if first is None else first
