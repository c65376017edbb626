"""Engines that may die while the run goes on (`rollout.min_engines`)."""
