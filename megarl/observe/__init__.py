"""Output of a run for people: metrics, console, traces, samples and the report.

Everything here runs in the controller's process, imports no torch, and writes into one run directory
(`RunDirectory`). The controller calls `RunLog`, which owns the other parts.
"""
