"""Seconds of a step."""
