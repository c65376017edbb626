"""Small tokenizers with chat templates in the tool-calling formats of several models: few words, the same structure."""

from __future__ import annotations

import atexit
import json
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from megarl.commands.data.tiny_tokenizer import make_tiny_tokenizer
from megarl.data.tokenizer import Tokenizer, load_tokenizer

# As in Qwen3's tokenizer: each tag is one token, but not a special token.
QWEN_TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
QWEN3 = """{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {%- set content = message.content if message.content is string else '' %}
        {%- if message.role == "assistant" and '</think>' in content and not loop.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{ call.function.arguments }}
            {%- else %}{{ call.function.arguments | tojson }}{% endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

DEEPSEEK_TOKENS = [
    f"<｜tool▁{part}｜>"
    for part in (
        "calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin", "outputs▁end", "output▁begin",
        "output▁end",
    )
]  # fmt: skip
# DeepSeek-V3 writes calls only if the message has no content, with the arguments as text. The end of the answers
# follows all messages, and the policy's turn has no header.
DEEPSEEK_V3 = """{%- set ns = namespace(is_tool=false) -%}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}{% set ns.is_tool = false %}{% endif %}
    {%- if message.role == 'assistant' and message.content is none %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for call in message.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
            {{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}{{ '<｜tool▁calls▁end｜><｜im_end|>' }}
    {%- endif %}
    {%- if message.role == 'assistant' and message.content is not none %}
        {{- '<｜Assistant｜>' + message.content + '<|im_end|>' }}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {%- if not ns.is_tool %}{{ '<｜tool▁outputs▁begin｜>' }}{% else %}{{ '\\n' }}{% endif %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}{% set ns.is_tool = true %}
    {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜>' }}{% endif %}""".replace(
    "<｜im_end|>", "<|im_end|>"
)


GPT_OSS_TOKENS = [f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")]
# gpt-oss: a message names its recipient, a tool message takes its sender from the last call, and <|end|> ends no turn.
GPT_OSS = """{%- set called = namespace(name=none) -%}
{%- for tool in tools or [] %}{{ '<|start|>developer<|message|>namespace functions: ' + tool.function.name + '<|end|>' }}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}{% set called.name = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


@cache
def _made(template: str, added: tuple[str, ...]) -> Tokenizer:
    folder = Path(mkdtemp(prefix="agent-tokenizer-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    make_tiny_tokenizer(folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.add_tokens(list(added), special_tokens=False)
    tokenizer.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return load_tokenizer(folder)


def qwen3() -> Tokenizer:
    return _made(QWEN3, tuple(QWEN_TAGS))


def gpt_oss(stops: tuple[str, ...] = ("<|return|>", "<|call|>")) -> Tokenizer:
    """`stops`: the tokens at which engines stop, in the model's generation_config.json."""
    folder = _made(GPT_OSS, tuple(GPT_OSS_TOKENS)).directory
    model = Path(mkdtemp(prefix="agent-model-"))
    atexit.register(rmtree, model, ignore_errors=True)
    ids = _made(GPT_OSS, tuple(GPT_OSS_TOKENS)).tokens()
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[stop] for stop in stops]}))
    return load_tokenizer(folder, model)


def deepseek_v3() -> Tokenizer:
    return _made(DEEPSEEK_V3, tuple([*DEEPSEEK_TOKENS, "<｜User｜>", "<｜Assistant｜>"]))
