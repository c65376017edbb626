"""Trainer processes, and the handles through which the controller calls them."""
