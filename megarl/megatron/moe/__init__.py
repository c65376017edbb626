"""Mixture of experts: auxiliary losses of routers, and replay of recorded expert choices."""
