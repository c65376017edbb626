"""A training API: steps of a run that a caller makes from Python (`session.py`), or over HTTP with the Tinker client."""
