"""Advantages, policy losses, aggregation and KL: pure functions in registries.

Adding one is one decorated function in a file of this package (named in catalogue.py), or in a module of the user's own that
the recipe names in `algorithm.modules`.
"""
