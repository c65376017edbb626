"""Megatron models: building through mbridge, weights by the family's table, layers that Megatron lacks, and fixes of Megatron."""
