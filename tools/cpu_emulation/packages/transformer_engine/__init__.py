"""Stand-in for Transformer Engine: pure PyTorch, for the CPU emulation only.

It offers what the base and mcore-bridge need to build and train a model, computes it in plain
PyTorch, and refuses the rest (fp8, context parallelism, dropout, windows, fused kernels). It is not
part of the wheel, and cannot be imported unless the emulation is on.
"""

import torch

if torch.cuda.get_device_name.__module__.partition(".")[0] != "tools":
    raise ImportError(
        "this transformer_engine is a stand-in for the CPU emulation, which is not on: run the "
        "command under `python -m tools.cpu_emulation --transformer-engine`, or take the "
        "emulation's packages folder off PYTHONPATH to use the real one."
    )

from . import common, pytorch

__all__ = ["common", "pytorch"]
# The base asks for 2.3; from 2.7 on it expects fused kernels that are not offered here.
__version__ = "2.6.0"
