"""Generators of the tables in docs/numerics.md, one module per table."""
