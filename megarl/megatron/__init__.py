"""The trainer: Megatron-core models built through mbridge, their forward and backward pass, optimizer and checkpoints."""
