class QuantizedTensor:
    """Tensors in FP8, of which there are none."""
