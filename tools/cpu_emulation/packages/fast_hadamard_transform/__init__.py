"""Stand-in for fast_hadamard_transform, a CUDA kernel that DSA attention rotates with."""

import torch
import transformer_engine

__all__ = ["hadamard_transform"]
# Refuses to be imported without the emulation, and so does this package.
__version__ = transformer_engine.__version__


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return ``x`` times the Hadamard matrix of Sylvester's order, times ``scale``.

    Args:
        x: Of shape [..., size]; the size is a power of two.
        scale: A factor.

    Raises:
        ValueError: The size is not a power of two, to which the kernel would pad it.
    """
    size = x.shape[-1]
    if size & (size - 1):
        raise ValueError(f"the size {size} of the last dimension of x is not a power of two.")
    result = x.float()
    half = 1
    while half < size:
        low, high = result.unflatten(-1, (-1, 2, half)).unbind(-2)
        result = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return (result * scale).to(x.dtype)
