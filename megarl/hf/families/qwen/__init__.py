"""Qwen: text models, delta nets, and models with a vision tower."""
