"""Advantages, policy losses, aggregation and KL: pure functions in registries.

Adding one is one decorated function in a file of this package (or, later, of the user's own).
"""
