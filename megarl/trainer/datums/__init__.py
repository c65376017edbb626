"""Training on data that a caller gives step by step: types, the worker's calls and the controller's handle."""
