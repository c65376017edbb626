"""Errors in the recipe's section `agent`."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.preflight.load import load_recipe
from megarl.recipe import RecipeError

BASE = "model: {path: some/model}\n"


def load(tmp_path: Path, text: str) -> object:
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE + text)
    return load_recipe(path).agent


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("agent: {max_turns: 3}", "agent", "no tool, interaction or loop is named, so this section has no effect"),
        ("agent: {interaction: a, format: hermes}", "agent.format", "the policy calls no tool"),
        ("agent: {interaction: a, max_calls_per_turn: 2}", "agent.max_calls_per_turn", "the policy calls no tool"),
        ("agent: {interaction: a}\ndata: {chat_template: false}", "data.chat_template", "messages of tools and users"),
        ("agent: {loop: a, tools: [b]}", "agent.tools", "agent.loop=a decides what the policy reads"),
        ("agent: {loop: a, interaction: b}", "agent.interaction", "leave agent.loop out"),
        ("agent: {loop: a, retries: 1}", "agent.retries", "runs no tools"),
        ("agent: {loop: a, format: hermes}", "agent.format", "runs no tools"),
        ("agent: {loop: a}\nrollout: {ignore_eos: true}", "rollout.ignore_eos", "end at end-of-text tokens"),
        ("agent: {loop: a}\nmegatron: {routing_replay: rollout}", "megatron.routing_replay", "experts of all tokens"),
        ("agent: {tools: [a], loop_arguments: {b: 1}}", "agent.loop_arguments", "which names no class"),
        ("agent: {tools: [a, a]}", "agent.tools", "listed more than once: a"),
        ("agent: {tools: [a]}\ndata: {chat_template: false}", "data.chat_template", "need a chat template"),
        ("agent: {tools: [a]}\nrollout: {ignore_eos: true}", "rollout.ignore_eos", "end the policy's turns"),
        (
            "agent: {tools: [a]}\ntrain: {source: sft}\nalgorithm: {advantage: none, loss: sft}",
            "agent",
            "train.source=sft samples nothing",
        ),
        ("agent: {mcp: {s: {}}}", "agent.mcp.s", "one of the two"),
        ("agent: {mcp: {s: {url: 'http://x', command: [y]}}}", "agent.mcp.s", "one of the two"),
        ("agent: {mcp: {s: {url: 'http://x', env: {A: b}}}}", "agent.mcp.s.env", "does not start a server"),
        ("agent: {mcp: {s: {url: 'http://x', pass_env: [A]}}}", "agent.mcp.s.pass_env", "does not start a server"),
        ("agent: {mcp: {s: {command: [y], at_once: 0}}}", "agent.mcp.s.at_once", "at least 1"),
        ("agent: {tools: [a], max_turns: 0}", "agent.max_turns", "at least 1"),
        ("agent: {tools: [a], tool_timeout: 0}", "agent.tool_timeout", "above 0"),
        ("agent: {tools: [a], format: qwen}", "agent.format", "hermes"),
        ("agent: {tolls: [a]}", "agent.tolls", "did you mean"),
        ("agent: {mcp: {s: {comand: [y]}}}", "agent.mcp.s.comand", "did you mean agent.mcp.s.command?"),
    ],
)
def test_invalid_agent_settings_are_refused(tmp_path: Path, text: str, key: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text)
    assert caught.value.key == key and words in str(caught.value), caught.value


def test_valid_agent_settings_are_accepted(tmp_path: Path) -> None:
    text = (
        "agent: {tools: [code_interpreter], mcp: {s: {command: [python, -m, x], tools: [y]}, far: {url: 'http://x'}}}"
    )
    agent = load(tmp_path, text)
    assert agent.tools == ["code_interpreter"] and agent.mcp["s"].command == ["python", "-m", "x"]  # type: ignore[attr-defined]
