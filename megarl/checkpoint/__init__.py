"""Checkpoints of a run: written whole or not at all, found, verified, resumed."""
