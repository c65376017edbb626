"""Reward functions written for verl run unchanged: their arguments, their results, their files."""

import asyncio
import inspect
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl import load_recipe
from megarl.agents.trajectory import Trajectory
from megarl.errors import RecipeError
from megarl.recipe.schema import RewardConfig
from megarl.rewards import Score, ScoreRequest, ScorerSettings, find, score, score_awaited
from megarl.rewards.scoring import Scoring
from megarl.rewards.weighted import terms_of
from megarl.rollout.assemble import score_request
from megarl.types import Prompt, Turn

REQUEST = ScoreRequest("so #### 4", "4", "openai/gsm8k", {"index": 3}, "2 + 2?", "openai/gsm8k/3")

# As in verl's examples: a dict with texts, defaults for every argument, further keyword arguments.
GSM8K = """
import re
from dataclasses import dataclass


@dataclass
class Found:
    text: str | None


def extract(solution):
    numbers = re.findall("#### (-?[0-9.,]+)", solution)
    return Found(numbers[-1] if numbers else None)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_score=0.0):
    found = extract(solution_str)
    if found.text is None:
        return {"score": 0, "acc": False, "pred": None, "explanation": "no number"}
    right = found.text == ground_truth
    return {"score": 1.0 if right else format_score, "acc": right, "pred": found.text, "explanation": "compared"}


def only_defaults(data_source="", solution_str="", ground_truth="", extra_info=None, **kwargs):
    return float(solution_str.endswith(ground_truth) and extra_info["index"] == 3 and not kwargs)


async def awaited(data_source, solution_str, ground_truth, extra_info, bonus=0.0, **kwargs):
    return float(ground_truth in solution_str) + bonus


def seen(data_source, solution_str, ground_truth, extra_info):
    raise ValueError(f"{data_source} {solution_str} {ground_truth} {sorted(extra_info.items(), key=str)}")


def of_megarl(request, weight=1.0):
    return weight * len(request.response)


def batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0] * len(solution_strs)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "math.py"  # a name of the standard library, as users have them
    path.write_text(GSM8K)
    return path


def scorer(file, name, **arguments):
    path = f"{file}:{name}"
    return find(path, ScorerSettings(arguments={path: arguments}))


def test_a_dict_becomes_score_accuracy_and_answer(file):
    assert score(scorer(file, "compute_score"), REQUEST) == Score(1.0, {"acc": 1.0, "accuracy": 1.0}, "4")
    wrong = ScoreRequest("#### 5", "4", "openai/gsm8k")
    assert score(scorer(file, "compute_score", format_score=0.1), wrong).value == 0.1
    nothing = ScoreRequest("five", "4", "openai/gsm8k")
    assert score(scorer(file, "compute_score"), nothing) == Score(0.0, {"acc": 0.0, "accuracy": 0.0}, None)


def test_arguments_with_defaults_are_passed_by_name(file):
    assert score(scorer(file, "only_defaults"), REQUEST) == Score(1.0, {"accuracy": 1.0})
    assert score(scorer(file, "only_defaults", other=1), REQUEST).value == 0.0


def test_an_async_function_is_awaited(file):
    function = scorer(file, "awaited", bonus=0.5)
    assert function.awaited
    assert asyncio.run(score_awaited(function, REQUEST)).value == 1.5


def test_a_function_sees_verls_values(file):
    with pytest.raises(ValueError) as error:
        score(scorer(file, "seen"), REQUEST)
    expected = "openai/gsm8k so #### 4 4 [('index', 3), ('num_turns', 2), ('rollout_reward_scores', {}), ('tool_rewards', []), ('turn_scores', [])]"
    assert expected in str(error.value)
    assert REQUEST.extra_info == {"index": 3}
    # two calls in the first turn, one in the second: verl counts prompt, 3 policy turns, 2 batches of tool answers
    roles = ("assistant", "tool", "tool", "assistant", "tool", "assistant")
    agent = ScoreRequest("x", "4", "s", turns=tuple(Turn(role, "", reward=0.5) for role in roles))
    with pytest.raises(ValueError, match=r"'num_turns', 6\).*'tool_rewards', \[0.5, 0.5, 0.5\]"):
        score(scorer(file, "seen"), agent)


def test_a_function_sees_the_values_that_an_agent_loop_reports(file):
    """They replace megarl's, which cannot know a loop's tools; a row's values of the same names do not."""
    loop = {"num_turns": 6, "tool_rewards": [0.5]}
    turns = (Turn("assistant", "a", 1),)
    done = Trajectory(np.zeros(1), np.zeros(1), np.ones(1, bool), turns, (1,), "stop", extra_info=loop)
    row = Prompt("row/1", (1,), "?", "s", extra_info={"index": 3, "num_turns": 9, "turn_scores": [9.0]})
    request = score_request(row, done, with_tools=True)
    assert request.extra_info == {"index": 3, "turn_scores": [9.0], **loop}
    with pytest.raises(ValueError, match=r"'num_turns', 6\).*'tool_rewards', \[0.5\]\), \('turn_scores', \[\]\)"):
        score(scorer(file, "seen"), request)


@pytest.mark.parametrize(
    "result, expected",
    [
        (True, Score(1.0, {"accuracy": 1.0})),
        (np.float32(0.5), Score(0.5, {"accuracy": 0.5})),
        (torch.tensor(0.25), Score(0.25, {"accuracy": 0.25})),
        ({"score": np.int64(1), "format": np.bool_(True)}, Score(1.0, {"format": 1.0})),
        ({"score": -1.0, "acc": 0, "pred": 7, "log": ["a"]}, Score(-1.0, {"acc": 0.0, "accuracy": 0.0}, "7")),
        ({"score": 1.0, "acc": 1.0, "length": np.nan}, Score(1.0, {"acc": 1.0, "accuracy": 1.0})),
        ({"score": 1.0, "accuracy": 1, "acc": 0, "reason": "x"}, Score(1.0, {"accuracy": 1.0, "acc": 0.0})),
    ],
)
def test_results(result, expected, tmp_path, monkeypatch):
    path = tmp_path / "results.py"
    path.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return RESULT\n")
    function = scorer(path, "compute_score")
    monkeypatch.setattr(_module_of(path), "RESULT", result, raising=False)
    assert score(function, REQUEST) == expected


def _module_of(path):
    return next(module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == str(path))


@pytest.mark.parametrize(
    "result, cause", [({"acc": 1}, "no 'score'"), ({"score": None}, "None"), (None, "None"), ([1.0], "list")]
)
def test_a_result_without_a_number_is_a_failure(result, cause, tmp_path, monkeypatch):
    path = tmp_path / "results.py"
    path.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return RESULT\n")
    function = scorer(path, "compute_score")
    monkeypatch.setattr(_module_of(path), "RESULT", result, raising=False)
    with pytest.raises(ValueError, match=cause):
        score(function, REQUEST)


def test_a_function_of_any_keywords_is_verls(tmp_path):
    path = tmp_path / "any.py"
    path.write_text("def compute_score(**sample):\n    return sample['solution_str'] == sample['ground_truth']\n")
    assert score(scorer(path, "compute_score"), ScoreRequest("4", "4", "s")).value == 1.0


def test_a_builtin_is_refused():
    with pytest.raises(ValueError, match=r"'builtins:max' is not a function written in Python"):
        find("builtins:max")


def test_only_the_users_function_has_the_arguments(file):
    """The first scorer is megarl's, which `rehearse` adds."""
    own_function, coin = f"{file}:of_megarl", "megarl.commands.rehearse.scorer:coin"
    reward = RewardConfig(functions={coin: 1.0, own_function: 1.0}, arguments={"weight": 3.0})
    (terms,) = terms_of(None, reward.functions, ["s"], ScorerSettings.of(reward)).values()
    assert [score(term.scorer, REQUEST).value for term in terms][1] == 27.0


@pytest.mark.parametrize("arguments", ["{a: {1: 2}}", "{a: .nan}"])
def test_arguments_that_do_not_survive_json_are_refused(arguments, file):
    recipe = Path(__file__).parents[2] / "recipes" / "grpo_qwen3_8b.yaml"
    with pytest.raises(RecipeError, match="as JSON with text keys"):
        load_recipe(recipe, [f"reward.function={file}:compute_score", f"reward.arguments={arguments}"])


def test_own_functions_take_arguments_too(file):
    assert score(scorer(file, "of_megarl", weight=2.0), REQUEST).value == 18.0


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("compute_score", {"formatscore": 1}, "verl's four arguments and reward.arguments .formatscore.*unexpected"),
        ("of_megarl", {"wieght": 1}, "a ScoreRequest and reward.arguments .wieght.*unexpected"),
        ("batched", {}, "one argument, a ScoreRequest, .*missing a required argument"),
        ("compute_scores", {}, "no function 'compute_scores'; did you mean 'compute_score'"),
    ],
)
def test_a_call_that_cannot_work_is_refused_at_the_start(name, arguments, message, file):
    with pytest.raises(ValueError, match=message):
        scorer(file, name, **arguments)


def test_a_file_is_imported_once_under_a_name_of_its_own(file):
    import math

    first, second = scorer(file, "seen"), scorer(file, "seen")
    assert inspect.getclosurevars(first.function).nonlocals == inspect.getclosurevars(second.function).nonlocals
    assert sys.modules["math"] is math


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.py.*no such file"):
        find(f"{tmp_path}/nowhere.py:compute_score")
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    for _ in range(2):  # a failed import is not kept as a module
        with pytest.raises(ValueError, match="No module named 'no_such_package'"):
            find(f"{tmp_path}/broken.py:compute_score")


def test_scorer_processes_import_the_file(file):
    reward = RewardConfig(function=f"{file}:compute_score", arguments={"format_score": 0.25}, processes=1)
    terms = terms_of(reward.function, reward.functions, ["openai/gsm8k"], ScorerSettings.of(reward))
    scoring = Scoring(terms, reward)
    scoring.start()
    try:
        outcomes = asyncio.run(scoring.score([REQUEST, ScoreRequest("#### 5", "4", "openai/gsm8k")]))
    finally:
        scoring.close()
    assert [outcome.value for outcome, _ in outcomes] == [1.0, 0.25]


def test_a_function_gets_the_tokenizer_of_a_reward_model(tmp_path, quickstart_data):
    """verl passes the tokenizer of the reward model that it serves; a recipe names its folder."""
    path = tmp_path / "judged.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer):\n"
        "    tokens = reward_model_tokenizer.encode(solution_str)\n"
        "    return {'score': len(tokens), 'pred': reward_model_tokenizer.decode(tokens) + reward_router_address}\n"
    )
    folder = str(quickstart_data / "model")
    function = scorer(path, "compute_score", reward_router_address="host:1", reward_model_tokenizer=folder)
    function.prepare()
    scored = score(function, REQUEST)
    assert scored.answer == "so #### 4host:1" and 1 < scored.value <= len("so #### 4")
    missing = scorer(path, "compute_score", reward_router_address="host:1", reward_model_tokenizer=str(tmp_path / "no"))
    with pytest.raises(OSError, match="no"):
        missing.prepare()
    of_megarl = "def compute_score(data_source, solution_str, ground_truth, extra_info, text):\n    return len(text)\n"
    (tmp_path / "own.py").write_text(of_megarl)
    own_scorer = scorer(tmp_path / "own.py", "compute_score", text=folder)
    own_scorer.prepare()
    assert score(own_scorer, REQUEST).value == len(folder)


@pytest.fixture
def verl_without_its_packages(tmp_path, monkeypatch):
    """A checkout of verl on PYTHONPATH. As verl's, its __init__ imports the trainers' packages, which are not installed."""
    package = tmp_path / "checkout" / "verl"
    (package / "utils" / "reward_score").mkdir(parents=True)
    (package / "__init__.py").write_text("import tensordict_of_verl\n")
    (package / "utils" / "reward_score" / "sums.py").write_text("def value(text):\n    return float(text == '4')\n")
    monkeypatch.syspath_prepend(tmp_path / "checkout")
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]


@pytest.mark.usefixtures("verl_without_its_packages")
def test_a_file_imports_modules_of_a_verl_whose_packages_are_not_installed(tmp_path):
    path = tmp_path / "of_verl.py"
    path.write_text(
        "from verl.utils.reward_score import sums\n\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return sums.value(ground_truth)\n"
    )
    assert score(find(f"{path}:compute_score"), REQUEST).value == 1.0


def test_a_missing_package_of_a_module_of_verl_is_named(verl_without_its_packages, tmp_path):
    (verl_without_its_packages / "utils" / "reward_score" / "sums.py").write_text("import absent_package\n")
    path = tmp_path / "of_verl_2.py"
    path.write_text("from verl.utils.reward_score import sums\n")
    with pytest.raises(ValueError, match=r"No module named 'absent_package'"):
        find(f"{path}:compute_score")
