"""Checkpoint of one trainer rank: shards of full tensors that any parallel layout can read."""
