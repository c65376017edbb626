"""Checks that need nothing but the recipe."""
