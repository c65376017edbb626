"""Model and lengths for the benchmarks: a small dense model with the proportions of a large model, and lengths as in GSM8K."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 1024
"""With 4 layers of width 256 the output layer is 8 % of the multiplications, as in an 8 B model."""

LENGTHS = [212, 96, 341, 178, 133, 264, 158, 119, 402, 187, 145, 231, 108, 296, 171, 205]
"""Tokens of 16 samples, prompt and answer: mean 203, with a long tail as in GSM8K."""


def write_dense(directory: Path, vocabulary: int = VOCABULARY) -> Path:
    """Write a random Qwen3 to `directory`."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )
    transformers.utils.logging.disable_progress_bar()
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory
