"""Data sets and small models made ready for recipes: ``python -m megarl data``."""
