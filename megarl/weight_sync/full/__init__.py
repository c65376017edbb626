"""Rank 0 exports whole tensors and every engine reads all of them."""
