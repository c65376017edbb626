"""Estimated seconds of a step."""
