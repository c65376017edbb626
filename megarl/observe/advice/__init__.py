"""Advice: faults of a run, and the setting to change. `advise` applies the rules; docs/advice.md lists them."""
