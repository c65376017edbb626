"""Megatron models: supported families, building through mbridge, and fixes of mbridge and Megatron."""
