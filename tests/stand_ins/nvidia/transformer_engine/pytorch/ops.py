"""Names in annotations of Megatron's fused MLP, which no test builds."""

FusibleOperation = Sequential = None
