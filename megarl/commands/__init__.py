"""Commands that no training run imports."""
