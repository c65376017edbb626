"""Layouts that fit, the fastest first."""
