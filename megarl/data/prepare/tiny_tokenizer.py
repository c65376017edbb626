"""A small byte-level BPE tokenizer for tiny models: any text encodes, and each digit is a token of its own."""

from __future__ import annotations

import json
import random
from pathlib import Path

from megarl.data.prepare import word_problems

PAD, TURN_START, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, EOS_ID = 0, 2
VOCAB_LIMIT = 512
CORPUS = 3000  # problems that the merges are learned from

# With Qwen's way to call tools, told in fewer words: a tiny model's tokens are few characters each.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.description }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    '{% for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_tokenizer(out: Path) -> int:
    """Write a Hugging Face tokenizer directory, always the same; returns its number of ids (at most 512)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random("tiny tokenizer")
    problems = [word_problems.draw(rng, held_out=False) for _ in range(CORPUS)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_LIMIT,
        special_tokens=[PAD, TURN_START, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (f"{problem.prompt}{problem.worked}\nThe answer is" for problem in problems)
    tokenizer.train_from_iterator(texts, trainer)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return tokenizer.get_vocab_size()
