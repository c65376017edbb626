"""A small byte-level BPE tokenizer for tiny models: any text encodes, and each digit is a token of its own."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

from megarl.commands.data import word_problems

PAD, TURN_START, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, EOS_ID = 0, 2
FIRST_IMAGE_ID = 3  # of IMAGE_TOKENS, in their order
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

# Of a model that reads images: the tokens that its chat template writes for one, as Qwen2.5-VL calls them.
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEXT = "{{ message.content or '' }}"
_TEXT_AND_IMAGES = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)


def make_tiny_tokenizer(out: Path, *, images: bool = False) -> int:
    """Write a Hugging Face tokenizer directory, always the same; returns its number of ids (at most 512).

    images: it also has `IMAGE_TOKENS`, whose ids follow those of the other special tokens, and a template for them.
    """
    text, ids = _trained(images)
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(text, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE.replace(_TEXT, _TEXT_AND_IMAGES) if images else CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return ids


@cache
def _trained(images: bool) -> tuple[str, int]:
    """tokenizer.json, and how many ids it has."""
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
        special_tokens=[PAD, TURN_START, EOS, *(IMAGE_TOKENS if images else ())],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (f"{problem.prompt}{problem.worked}\nThe answer is" for problem in problems)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True), tokenizer.get_vocab_size()
