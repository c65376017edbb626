"""The chat template of `data.chat_template`: its text from a file, by a name, or from the tokenizer."""

from __future__ import annotations

import os
from typing import Any

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMED = {"chatml": CHATML}
"""Templates with a name. A tokenizer may have further ones (additional_chat_templates/)."""

_TOKENS = {"chatml": ("<|im_start|>", "<|im_end|>")}


def is_text(template: str) -> bool:
    """Return whether a value of `data.chat_template` is a template's text."""
    return "{{" in template or "{%" in template


def read_template(template: bool | str) -> bool | str:
    """Return `data.chat_template` with the text of its file, if it names one. Raises ValueError for an unreadable file."""
    if isinstance(template, bool) or is_text(template):
        text = template
    elif template.endswith((".jinja", ".j2", ".txt")) or os.sep in template:
        path = os.path.expanduser(template)
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the file cannot be read: {getattr(error, 'strerror', None) or error}") from error
        if not is_text(text):
            raise ValueError("the file contains no Jinja template: neither {{ nor {%")
    else:
        text = template
    if isinstance(text, str) and "${" in text:
        raise ValueError("the template contains ${, which a recipe reads as a reference: write {{ '$' }}{")
    return text


def resolve(template: str, tokenizer_templates: Any, tokens: frozenset[str]) -> str:
    """Return the text of `template`, a text or a name.

    `tokenizer_templates`: the tokenizer's templates, a dictionary by name if there are several. `tokens`: its added tokens, each of which
    encodes to a single token. Raises ValueError for an unknown name, and for a named template with tokens that are missing.
    """
    if is_text(template):
        return template
    named = {**NAMED, **(tokenizer_templates if isinstance(tokenizer_templates, dict) else {})}
    if template not in named:
        raise ValueError(
            f"data.chat_template: there is no template {template!r}, but {', '.join(sorted(named))}: choose one of these, or "
            "give a .jinja file"
        )
    missing = [token for token in _TOKENS.get(template, ()) if token not in tokens] if template in NAMED else []
    if missing:
        raise ValueError(
            f"data.chat_template: the template {template!r} writes {' and '.join(missing)}, which the tokenizer would split "
            "into several tokens: choose another template, or a tokenizer with these special tokens"
        )
    return str(named[template])
