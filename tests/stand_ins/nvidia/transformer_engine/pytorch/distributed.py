import contextlib


class CudaRNGStatesTracker:
    """A base class of Megatron's."""


@contextlib.contextmanager
def activation_recompute_forward(**_):
    yield
