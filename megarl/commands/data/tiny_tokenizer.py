"""A small byte-level BPE tokenizer for tiny models. It encodes any text, with one token per digit."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

from megarl.commands.data import word_problems

PAD, TURN_START, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, EOS_ID = 0, 2
FIRST_IMAGE_ID = 3  # id of the first of IMAGE_TOKENS; the others follow
VOCAB_LIMIT = 512
CORPUS = 3000  # problems to learn the merges from

# Qwen's format of tool calls, with a shorter description: a token of the tiny model is only a few characters long.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.description }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    '{% for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Tokens of images and videos in the chat template of Qwen2.5-VL.
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEXT = "{{ message.content or '' }}"
_TEXT_AND_IMAGES = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' or 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)


def make_tiny_tokenizer(out: Path, *, images: bool = False) -> int:
    """Write a Hugging Face tokenizer directory, always with the same bytes. Return its number of ids (at most 512).

    images: also add `IMAGE_TOKENS`, with ids after the other special tokens, and a chat template that uses them.
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
    """Train the tokenizer. Return the text of tokenizer.json and the number of ids."""
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
