"""Agent loops written for verl run unchanged, without verl."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.agents.custom.find import find_loop
from megarl.agents.custom.verl_loops import AGENT_NAME, verl_settings
from megarl.agents.trajectory import Trajectory
from megarl.recipe.schema import Recipe
from tests.agents.test_agent_loops import ROW, InThisProcess, Policy, play
from tests.agents.test_verl_tools import ENTRIES
from tests.support.agent_tokenizers import qwen3

OWN = "tests.support.verl_loops"
TURNS = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns"
TOOLS = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 3}}\n</tool_call>'
MESSAGES = ({"role": "user", "content": "How much?"},)


def asked(**extra_info: Any) -> Any:
    text = qwen3().render_text(MESSAGES, True, {}, True)
    return replace(ROW, tokens=tuple(qwen3().encode(text)), messages=MESSAGES, extra_info=extra_info)


def settings_of_verl() -> dict[str, Any]:
    recipe = Recipe()
    recipe.model.path, recipe.data.max_prompt_length, recipe.rollout.max_response_length = "some/model", 100, 200
    return verl_settings(recipe)


def run(name: str, policy: Policy, prompt: Any, **arguments: Any) -> tuple[Trajectory, InThisProcess]:
    path = name if name.endswith(".yaml") else f"{OWN}:{name}"
    return play(path, policy, prompt=prompt, arguments=arguments, verl=settings_of_verl())


def write(folder: Path, *entries: dict[str, Any]) -> str:
    (folder / "loops.yaml").write_text(yaml.safe_dump(list(entries)))
    return str(folder / "loops.yaml")


def test_a_loop_with_tools_hand_worked() -> None:
    """The prompt is the row's, the tool's message is between two turns, and log-probs are the engine's."""
    policy = Policy([CALL, "It is 4"])
    done, _ = run("SumLoop", policy, asked())
    first, second = (answer.tokens.tolist() for answer in policy.answers)
    assert done.failure is None, done.failure
    between = done.tokens[len(first) : -len(second)].tolist()
    assert "<tool_response>\n4\n</tool_response>" in qwen3().decode(between, special=True)
    assert done.tokens.tolist() == [*first, *between, *second]
    assert done.sampled.tolist() == [True] * len(first) + [False] * len(between) + [True] * len(second)
    assert done.log_probs[-len(second) :].tolist() == policy.answers[1].log_probs.tolist()
    assert done.prompt is None and done.outcome == 1.0
    assert done.extra_info == {"tool_rewards": [0.5], "num_turns": 4}
    assert policy.requests[0].prompt.tokens == asked().tokens
    assert [request.sampling.temperature for request in policy.requests] == [0.7, 0.7]


def test_options_of_verl_reach_a_loop() -> None:
    policy = Policy([CALL])
    done, _ = run("SumLoop", policy, asked(scored=True), **{TURNS: 2})
    assert len(policy.requests) == 2 and done.outcome is None  # scorers reward it


def test_a_row_chooses_a_loop_of_a_file(tmp_path: Path) -> None:
    entries = [
        {"name": "sums", "_target_": f"{OWN}.SumLoop", "bonus": 2.0},
        {"name": "again", "_target_": f"{OWN}.AskAgainLoop"},
    ]
    file = write(tmp_path, *entries)
    done, _ = run(file, Policy(["It is 4"]), asked(**{AGENT_NAME: "sums"}))
    assert done.outcome == 3.0  # a keyword of the entry
    done, _ = run(file, Policy(["It is 4", "Four"]), asked(**{AGENT_NAME: "again"}))
    assert [turn.text for turn in done.turns][::2] == ["It is 4", "Four"] and done.outcome is None
    done, _ = run(file, Policy(["It is 4"]), asked(), **{"actor_rollout_ref.rollout.agent.default_agent_loop": "sums"})
    assert done.outcome == 3.0
    for row, words in (({}, "agent_name is None"), ({AGENT_NAME: "tool_agent"}, "verl's own loops are not run here")):
        done, _ = run(file, Policy(["It is 4"]), asked(**row))
        assert done.failure is not None and words in done.failure.cause and "sums, again" in done.failure.cause
    done, _ = run(write(tmp_path, entries[0]), Policy(["It is 4"]), asked())
    assert done.outcome == 3.0  # the only one


def test_a_turn_ends_at_a_stop_string(tmp_path: Path) -> None:
    """Engines sample beyond the string, and the tokens after it are left out. In a long turn the string may be in a later piece."""
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [ENTRIES[0]]}))
    arguments = {
        TOOLS: str(file),
        "sampling_params.stop": "</code>",
        "sampling_params.include_stop_str_in_output": True,
    }
    policy = Policy(["Try <code>1 + 3</code> or not"])
    done, _ = run("CodeLoop", policy, asked(), **arguments)
    assert done.failure is None and done.extra_info["turn"].startswith("Try <code>1 + 3</code>"), done.failure
    kept = len(done.tokens)
    assert "or" not in done.extra_info["turn"] and 0 < kept < len(policy.answers[0].tokens)
    assert done.tokens.tolist() == policy.answers[0].tokens[:kept].tolist()
    assert done.log_probs.tolist() == policy.answers[0].log_probs[:kept].tolist()

    long = Policy(["one two " * 300, "three</code> four"], cut=True)
    done, _ = play(f"{OWN}:CodeLoop", long, prompt=asked(), room=600, arguments=arguments, verl=settings_of_verl())
    assert [request.sampling.max_tokens for request in long.requests] == [256, 256]
    assert len(done.tokens) > 256 and done.extra_info["turn"].endswith("three</code>")
    assert done.log_probs[256:].tolist() == long.answers[1].log_probs[: len(done.tokens) - 256].tolist()


def test_tools_of_a_file_reach_a_loop(tmp_path: Path) -> None:
    """In the constructor's `tools`, and under the option that earlier classes read."""
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [ENTRIES[0]]}))
    done, _ = run("CodeLoop", Policy(["It is 4"]), asked(), **{TOOLS: str(file)})
    assert done.failure is None, done.failure
    assert done.extra_info["answer"] == "hit" and done.extra_info["turn"].startswith("It is 4")


@pytest.mark.parametrize(
    ("extra_info", "words"),
    [
        ({"params": {"temperature": 0.1}}, "sampled with temperature 0.1"),
        ({"params": {"repetition_penalty": 1.1}}, "repetition_penalty=1.1"),
        ({"request": {"image_data": [1]}}, "its request has image_data"),
        ({"images": True}, "multi_modal_data"),
        ({"reads": True}, "it reads verl's option actor_rollout_ref.rollout.custom: give it in agent.loop_arguments"),
    ],
)
def test_what_a_loop_cannot_have_fails_the_sample(extra_info: dict[str, Any], words: str) -> None:
    done, _ = run("AskAgainLoop", Policy(["It is 4", "Four"]), asked(**extra_info))
    assert done.failure is not None and words in done.failure.cause, done.failure
    assert done.failure.source == "agent loop 'AskAgainLoop'"


def test_the_last_request_of_a_loop_may_be_short() -> None:
    policy = Policy(["It is 4", "Four"])
    done, _ = run("AskAgainLoop", policy, asked(params={"max_tokens": 2}, request={"priority": 3}))
    assert policy.requests[1].sampling.max_tokens == 2 and done.finish_reason == "length"


SUMS = {"name": "sums", "_target_": f"{OWN}.SumLoop"}


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        ({"nemo_gym": {}}, {}, "is not a list of loops"),
        ([{**SUMS, "_target_": f"{OWN}.Missing"}], {}, "importing tests.support.verl_loops.Missing failed"),
        ([{**SUMS, "_target_": "tests.support.agent_loops.SecondLook"}], {}, "not derived from verl's AgentLoopBase"),
        ([{**SUMS, "_target_": "verl.experimental.fully_async_policy.x.Y"}], {}, "verl is not installed"),
        ([SUMS, SUMS], {}, "its name is 'sums', and each loop needs one"),
        ([SUMS], {"max_user_turns": 2}, "'max_user_turns' is not an option of verl"),
        (
            [SUMS],
            {"actor_rollout_ref.rollout.multi_turn.function_tool_path": "tools.py"},
            "function tools are not passed to loops",
        ),
        ([SUMS], {TOOLS: "no.yaml"}, "no.yaml cannot be read as YAML of verl's tools"),
        ([SUMS], {"actor_rollout_ref.rollout.agent.default_agent_loop": "other"}, "is 'other', and"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    tmp_path: Path, content: Any, arguments: dict[str, Any], words: str
) -> None:
    (tmp_path / "loops.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError) as caught:
        find_loop(str(tmp_path / "loops.yaml"), arguments, settings_of_verl(), qwen3())
    assert words in str(caught.value), caught.value


def test_settings_of_verl_are_plain_values() -> None:
    assert json.loads(json.dumps(settings_of_verl())) == settings_of_verl()
