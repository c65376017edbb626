"""Advantages, policy losses, aggregation and KL: pure functions in registries.

To add a function, decorate it in a file of this package (losses: losses/) that catalogue.py imports, or in a module that the recipe
names in `algorithm.modules`.
"""
