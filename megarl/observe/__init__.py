"""What a person sees of a run: metrics, console, traces, samples and the report.

Everything here runs in the controller's process alone, imports no torch, and writes into one run
directory (`RunDirectory`). The controller speaks to `RunLog`; the rest are its parts.
"""
