"""Prompts, demonstrations, tokenizers, and the order in which rows are drawn."""

from megarl.data.prompts import PromptDataset
from megarl.data.sampler import Sampler
from megarl.data.sft import Example, SFTDataset
from megarl.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer

__all__ = ["Example", "PromptDataset", "SFTDataset", "Sampler", "Tokenizer", "check_vocabulary", "load_tokenizer"]
