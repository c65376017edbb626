"""Read NVIDIA's Megatron-Bridge in a separate process, for `megarl model table`."""
