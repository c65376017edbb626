"""Checkpoints of a run: atomic writes, verification, retention and resume."""
