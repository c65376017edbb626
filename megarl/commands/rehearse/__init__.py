"""A recipe's twin: the same recipe and model, so small that two CPU cores run it. ``python -m megarl rehearse``."""
