"""Rewards from a model that judges responses (LLM as a judge)."""
