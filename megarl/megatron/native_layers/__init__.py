"""Layers on torch's kernels, for platforms without Transformer Engine."""
