"""The work of one trainer rank: Megatron models built through mbridge, forward and backward passes, optimizer, checkpoints."""
