"""The modules for PyTorch."""

from . import distributed, fp8, ops, tensor
from .dot_product import DotProductAttention
from .fp8 import fp8_autocast, fp8_model_init
from .linear import GroupedLinear, LayerNormLinear, Linear
from .normalization import LayerNorm, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
    "tensor",
]
