"""Where the figures of docs/numerics.md come from: each module prints one of its tables."""
