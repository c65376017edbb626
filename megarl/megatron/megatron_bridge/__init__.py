"""Read how NVIDIA's Megatron-Bridge maps a model, in a process of its own, for `megarl model table`."""
