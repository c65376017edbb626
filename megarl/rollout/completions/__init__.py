"""Engines that return completions as they are, without scores: for a caller's own training loop."""
