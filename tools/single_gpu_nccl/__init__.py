"""Several NCCL ranks on one GPU; see ``docs/gpu.md``."""
