"""verl's tools and interactions: the file, the limits of turns, and refusals."""

from __future__ import annotations

import pytest
import yaml

from megarl.commands.convert_verl.command import convert
from megarl.errors import InputError
from tests.commands.convert_verl.test_convert import GRPO, settings


def test_a_run_with_tools_needs_megarls_tools() -> None:
    options = "multi_turn.enable=True multi_turn.max_assistant_turns=5 multi_turn.format=hermes multi_turn.max_parallel_calls=2"
    command = f"{GRPO} " + " ".join(f"actor_rollout_ref.rollout.{option}" for option in options.split())
    with pytest.raises(InputError, match=r"give agent\.tools=VALUE after the file, or --accept"):
        settings(command)
    limits = convert(GRPO + " actor_rollout_ref.rollout.multi_turn.enable=True", ["agent.tools=[code_interpreter]"])
    assert yaml.safe_load(limits.text)["agent"]["max_calls_per_turn"] == 1, "verl's default"
    assert sum("multi_turn.max_" in note for note in limits.notes) == 2
    converted = settings(command, "agent.tools=[code_interpreter]")
    agent = {"tools": ["code_interpreter"], "max_turns": 5, "format": "hermes", "max_calls_per_turn": 2}
    assert {key: value for key, value in converted.items() if key.startswith("agent.")} == {
        f"agent.{name}": value for name, value in agent.items()
    }
    gpt_oss = settings(command.replace("hermes", "gpt-oss"), "agent.tools=[code_interpreter]")
    assert gpt_oss["agent.format"] == "gpt_oss"
    assert not [key for key in settings(command.replace("enable=True", "enable=False")) if key.startswith("agent.")]


def test_verls_tools_are_carried_over() -> None:
    """verl's rewards of tools reach the reward function, and are not added to the reward."""
    command = f"{GRPO} actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml"
    converted = settings(command)
    assert converted["agent.tools"] == ["tools.yaml"] and converted["agent.tool_rewards"] == "scorer"
    assert converted["agent.max_calls_per_turn"] == 1
    assert any("an instance lasts for a sample" in note for note in convert(command, []).notes)
    replaced = settings(command, "agent.tools=[code_interpreter]")
    assert replaced["agent.tools"] == ["code_interpreter"] and "agent.tool_rewards" not in replaced
    dropped = convert(command, [], accepted=["actor_rollout_ref.rollout.multi_turn.tool_config_path"])
    assert "agent:" not in dropped.text


def test_verls_interactions_are_carried_over() -> None:
    """A user replies at most max_user_turns times; its scores reach the reward function and are not added to the reward."""
    option = "actor_rollout_ref.rollout.multi_turn."
    command = f"{GRPO} {option}interaction_config_path=user.yaml {option}max_user_turns=2 {option}max_parallel_calls=3"
    agent = {key: value for key, value in settings(command).items() if key.startswith("agent.")}
    assert agent == {"agent.interaction": "user.yaml", "agent.tool_rewards": "scorer", "agent.max_turns": 3}
    assert settings(f"{command} {option}enable=True {option}max_assistant_turns=2")["agent.max_turns"] == 2
    both = settings(f"{command} {option}tool_config_path=tools.yaml")
    assert (both["agent.tools"], both["agent.interaction"], both["agent.max_calls_per_turn"]) == (
        ["tools.yaml"],
        "user.yaml",
        3,
    )
    assert settings(command, "agent.interaction=my:User", "agent.max_turns=5")["agent.max_turns"] == 5
    dropped = convert(
        f"{command} {option}tool_config_path=tools.yaml", [], accepted=[f"{option}interaction_config_path"]
    )
    assert "interaction:" not in dropped.text and yaml.safe_load(dropped.text)["agent"]["tools"] == ["tools.yaml"]
    with pytest.raises(InputError, match="function tools are not read"):
        settings(f"{command} {option}function_tool_path=tools.py")


LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"


def test_verls_agent_loops_are_carried_over() -> None:
    """Options that a loop may read are loop_arguments; limits of megarl's loop are not set from verl's."""
    option = "actor_rollout_ref.rollout.multi_turn."
    command = (
        f"{GRPO} {LOOPS}=loops.yaml {option}max_user_turns=2 {option}max_parallel_calls=3 {option}num_repeat_rollouts=3"
    )
    agent = yaml.safe_load(convert(command, []).text)["agent"]
    assert agent == {
        "max_turns": 1000,
        "loop": "loops.yaml",
        "loop_arguments": {
            f"{option}max_user_turns": 2,
            f"{option}max_parallel_calls": 3,
            f"{option}num_repeat_rollouts": 3,
        },
    }
    default = "actor_rollout_ref.rollout.agent.default_agent_loop"
    named = yaml.safe_load(convert(f"{GRPO} {LOOPS}=loops.yaml {default}=mine", []).text)["agent"]
    assert named["loop_arguments"] == {default: "mine"}
    converted = settings(command, "agent.loop=my_loops:Mine", "agent.max_turns=5")
    assert converted["agent.loop"] == "my_loops:Mine" and converted["agent.max_turns"] == 5
    assert not any(key.startswith("agent.loop_arguments") for key in converted)
    dropped = convert(f"{GRPO} {LOOPS}=loops.yaml", [], accepted=[LOOPS])
    assert "agent:" not in dropped.text and any("megarl's agent loop" in note for note in dropped.notes)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("actor_rollout_ref.rollout.multi_turn.function_tool_path=tools.py", "not passed to agent loops"),
        ("actor_rollout_ref.rollout.agent.agent_loop_manager_class=my.Manager", "no manager of your own"),
        (
            "actor_rollout_ref.actor.megatron.router_replay.mode=R3",
            "the requests of agent.loop=loops.yaml are separate",
        ),
    ],
)
def test_what_agent_loops_cannot_have_is_refused(more: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        convert(f"{GRPO} {LOOPS}=loops.yaml {more}", [])


def test_a_path_that_a_file_on_the_runs_machine_chooses_stays_open() -> None:
    """Other options need its value."""
    chosen = 'm=$HOME/models/small\nif [ ! -d "$m" ]; then\n  m=Qwen/small\nfi\n'
    converted = convert(f"{chosen}{GRPO} actor_rollout_ref.model.path=$m", [])
    assert yaml.safe_load(converted.text)["model"]["path"] == "???"
    assert any("actor_rollout_ref.model.path=$m" in note for note in converted.notes)
    assert settings(f"{chosen}{GRPO} actor_rollout_ref.model.path=$m", "model.path=x/y")["model.path"] == "x/y"
    with pytest.raises(InputError, match="the value of \\$m is unknown: line 2 sets it under a condition"):
        convert(f"{chosen}{GRPO} algorithm.adv_estimator=$m", [])
