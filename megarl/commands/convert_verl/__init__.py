"""Converter from verl's scripts and command lines to recipes."""
