"""Low-rank adapters (LoRA) on frozen weights: a matrix A and a matrix B for each adapted Hugging Face linear.

`targets`: which linears a recipe means. `layers`: an adapter's mathematics under tensor and expert parallel.
`attach`: adapters into a model's chunks, and back out as merged weights. `peft`: a directory that PEFT reads.
"""
