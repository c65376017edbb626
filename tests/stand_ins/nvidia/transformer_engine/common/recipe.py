class DelayedScaling:
    """A base class of Megatron's; no test computes in FP8."""
