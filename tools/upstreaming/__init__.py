"""The fork's change as a branch of a Megatron-LM checkout."""
