"""Checks that can refuse a run before any process starts."""
