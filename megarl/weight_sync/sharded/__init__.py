"""Sharded weight sync: each slice of the weights goes from a trainer rank that holds it to the engine ranks that need it."""
