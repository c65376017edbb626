"""Sample sources: inference engines (RL, with staleness and dynamic sampling) or data set rows (SFT, DPO)."""
