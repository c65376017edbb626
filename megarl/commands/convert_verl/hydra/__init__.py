"""Hydra's side of a verl command: overrides, and configuration files that --config-name names."""
