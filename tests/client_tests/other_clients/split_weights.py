"""Weights that are the same however a GPT model is split into stages and chunks."""

import zlib
from collections.abc import Iterator

import torch


def set_weights(chunk: torch.nn.Module) -> None:
    """Gives every weight of a model chunk values that depend on its place in the whole model.

    The base's own initial values depend on the split, as every stage draws from its own generator.

    Args:
        chunk: A ``GPTModel`` without wrappers; its floating-point weights change in place.
    """
    for name, parameter in _named_by_whole_model(chunk):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(parameter.shape, generator=generator) / 5
        is_norm = "norm" in name and name.endswith("weight") and parameter.dim() == 1
        parameter.data.copy_(1 + values / 10 if is_norm else values)


def _named_by_whole_model(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for layer in chunk.decoder.layers:
        for name, parameter in layer.named_parameters():
            yield f"layer {layer.layer_number}: {name}", parameter
    for name, parameter in chunk.named_parameters():
        if not name.startswith("decoder.layers."):
            yield name, parameter
