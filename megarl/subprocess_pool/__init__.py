"""Processes for what may hang, crash and be killed without harm to anything but its own call: scorers, tools."""
