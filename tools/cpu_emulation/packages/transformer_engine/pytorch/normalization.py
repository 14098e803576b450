"""LayerNorm and RMSNorm over the last dimension, computed in float32."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..refusal import NotOffered


def normalized(
    value: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    kind: str,
    eps: float,
    zero_centered_gamma: bool,
) -> torch.Tensor:
    """Return ``value`` normalized and scaled, in the dtype of ``value``.

    Args:
        value: Of shape [..., hidden].
        weight: Of shape [hidden].
        bias: Of shape [hidden], or None.
        kind: ``LayerNorm`` or ``RMSNorm``.
        eps: Added to the variance.
        zero_centered_gamma: Whether the scale is ``1 + weight``.
    """
    scale = weight.float() + 1 if zero_centered_gamma else weight.float()
    shift = None if bias is None else bias.float()
    if kind == "LayerNorm":
        result = functional.layer_norm(value.float(), weight.shape, scale, shift, eps)
    elif kind == "RMSNorm":
        result = functional.rms_norm(value.float(), weight.shape, scale, eps)
    else:
        raise NotOffered("normalization", kind, "take LayerNorm or RMSNorm")
    return result.to(value.dtype)


class _Norm(nn.Module):
    kind: str

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        initial = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = nn.Parameter(initial(normalized_shape, dtype=params_dtype or dtype))
        bias = torch.zeros(normalized_shape, dtype=params_dtype or dtype)
        self.bias = nn.Parameter(bias) if self.kind == "LayerNorm" else None
        # The base sums the gradients of marked parameters over the ranks of tensor parallelism.
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value``, of shape [..., hidden], normalized."""
        return normalized(
            value,
            self.weight,
            self.bias,
            kind=self.kind,
            eps=self.eps,
            zero_centered_gamma=self.zero_centered_gamma,
        )


class LayerNorm(_Norm):
    """Normalizes to mean 0 and variance 1."""

    kind = "LayerNorm"


class RMSNorm(_Norm):
    """Normalizes to a root mean square of 1."""

    kind = "RMSNorm"
