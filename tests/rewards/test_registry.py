"""The choice of a scorer, and the failure of a scorer that breaks its contract."""

import copy
import math
import sys

import numpy as np
import pytest

from megarl.registry import Registry
from megarl.rewards import RewardError, Score, Scorer, ScoreRequest, base, resolve, score, scorer

REQUEST = ScoreRequest("#### 4", "4", "openai/gsm8k", uid="openai/gsm8k/17")


def scored(result):
    def function(request):
        if isinstance(result, Exception):
            raise result
        return result

    return score(Scorer("mine", function), REQUEST)


@pytest.mark.parametrize(
    "result, expected",
    [
        (1, Score(1.0)),
        (0.25, Score(0.25)),
        (True, Score(1.0)),
        (np.float32(0.5), Score(0.5)),
        (np.bool_(False), Score(0.0)),
        ({"score": -1, "accuracy": True}, Score(-1.0, {"accuracy": 1.0})),
        # Steps are earned besides: 1 + 0.25 - 0.5.
        (
            {"score": 1, "steps": [(2, 0.25), [np.int64(6), np.float32(-0.5)]]},
            Score(0.75, {"steps": -0.25}, steps=((2, 0.25), (6, -0.5))),
        ),
        ({"score": 1, "steps": []}, Score(1.0, {"steps": 0.0})),
        # The sum of the steps is exact, unlike (0.1 + 0.2) + 0.3 in floats.
        (
            {"score": 0, "steps": [(1, 0.1), (2, 0.2), (3, 0.3)]},
            Score(0.6, {"steps": 0.6}, steps=((1, 0.1), (2, 0.2), (3, 0.3))),
        ),
    ],
)
def test_numbers_and_dicts_are_scores(result, expected):
    got = scored(result)
    assert got == expected
    assert type(got.value) is float and all(type(part) is float for part in got.parts.values())


@pytest.mark.parametrize(
    "result, cause",
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (np.float32("nan"), "nan"),
        ({"score": 1, "length": math.inf}, "'length' is inf"),
        (None, "None (NoneType)"),
        ("1.0", "'1.0' (str)"),
        ([1.0], "[1.0] (list)"),
        ({"accuracy": 1.0}, "no 'score', but ['accuracy']"),
        ({"score": 1.0, "pred": "72"}, "'pred' is '72'"),
        # The response has 6 characters.
        ({"score": 1, "steps": 0.5}, "'steps' is 0.5 (float), not a list of (end, reward)"),
        ({"score": 1, "steps": [0.5]}, "steps[0] is 0.5, not (end, reward)"),
        ({"score": 1, "steps": [(1, 0.5, 2)]}, "steps[0] is (1, 0.5, 2), not (end, reward)"),
        ({"score": 1, "steps": [(1, 0.5), (2.0, 1)]}, "steps[1] ends at 2.0 (float), not at a whole number"),
        ({"score": 1, "steps": [(True, 0.5)]}, "steps[0] ends at True (bool)"),
        ({"score": 1, "steps": [(0, 0.5)]}, "steps[0] ends at character 0, and the response has 6"),
        ({"score": 1, "steps": [(2, 1), (7, 1)]}, "steps[1] ends at character 7, and the response has 6"),
        ({"score": 1, "steps": [(4, 1), (4, 1)]}, "steps[1] ends at character 4, and the step before it at 4"),
        ({"score": 1, "steps": [(4, "good")]}, "the reward of steps[0] is 'good' (str), not a number"),
        ({"score": 1, "steps": [(4, math.nan)]}, "the reward of steps[0] is nan"),
        ({"steps": [(4, 1)]}, "no 'score', but ['steps']"),
        (KeyError("answer"), "KeyError: 'answer'"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
)
def test_a_broken_scorer_names_itself_the_row_and_the_cause(result, cause):
    with pytest.raises(RewardError) as caught:
        scored(result)
    assert "'mine'" in str(caught.value) and "'openai/gsm8k/17'" in str(caught.value) and cause in str(caught.value)


def test_reward_errors_can_be_pickled():
    with pytest.raises(RewardError) as caught:
        scored(None)
    again = copy.copy(caught.value)  # by the protocol that pickle uses
    assert str(again) == str(caught.value) and again.uid == "openai/gsm8k/17"


def test_each_data_source_gets_its_scorer():
    chosen = resolve(None, ["openai/gsm8k", "megarl/word_problems"])
    assert {source: entry.name for source, entry in chosen.items()} == {
        "openai/gsm8k": "gsm8k",
        "megarl/word_problems": "gsm8k",
    }
    assert resolve("gsm8k", ["anything"])["anything"].name == "gsm8k"


def test_unknown_names_are_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="'openai/gms8k'; did you mean 'openai/gsm8k'"):
        resolve(None, ["openai/gsm8k", "openai/gms8k"])
    with pytest.raises(ValueError, match="'gsm8'; did you mean 'gsm8k'"):
        resolve("gsm8", ["openai/gsm8k"])


def test_an_exact_source_has_precedence_over_a_pattern(monkeypatch):
    monkeypatch.setattr(base, "SCORERS", Registry("scorer"))
    monkeypatch.setattr(base, "_sources", {})
    scorer("years", sources=("aime*",))(lambda request: 0.0)
    scorer("one_year", sources=("aime2024",))(lambda request: 1.0)
    chosen = resolve(None, ["aime2023", "aime2024"])
    assert (chosen["aime2023"].name, chosen["aime2024"].name) == ("years", "one_year")
    scorer("rivals", sources=("*2023",))(lambda request: 0.0)
    with pytest.raises(ValueError, match=r"\['rivals', 'years'\]"):
        resolve(None, ["aime2023"])
    with pytest.raises(ValueError, match="scorer 'years' is already registered"):
        scorer("years")(lambda request: 0.0)


def test_a_user_function_is_a_scorer(tmp_path, monkeypatch):
    (tmp_path / "my_own_scorers.py").write_text(
        "def half(request):\n    return {'score': 0.5, 'length': len(request.response)}\n\n\n"
        "def two(response, truth):\n    return 0\n\n\nhalve = 3\n"
    )
    (tmp_path / "my_broken_scorers.py").write_text("import there_is_no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    chosen = resolve("my_own_scorers:half", ["a", "b"])
    assert chosen["a"] is chosen["b"]
    assert score(chosen["a"], REQUEST) == Score(0.5, {"length": 6.0})
    with pytest.raises(ValueError, match="no function 'hafl'; did you mean 'half'"):
        resolve("my_own_scorers:hafl", ["a"])
    with pytest.raises(ValueError, match="no function 'halve'"):
        resolve("my_own_scorers:halve", ["a"])
    with pytest.raises(ValueError, match=r"one argument, a ScoreRequest, but its signature is two\(response, truth\)"):
        resolve("my_own_scorers:two", ["a"])
    with pytest.raises(ValueError, match="there_is_no_such_module"):
        resolve("my_broken_scorers:half", ["a"])
    with pytest.raises(ValueError, match="importing 'nowhere_at_all' failed"):
        resolve("nowhere_at_all:half", ["a"])
