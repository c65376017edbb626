"""Checks of a recipe, its models, data and machine, run before any process starts."""
