"""The scorer `reward_model` against a server that answers as vLLM's /classify, and refused settings."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.preflight.load import load_recipe
from megarl.recipe import RecipeError
from megarl.recipe.remote import RemoteConfig
from megarl.rewards import RewardError, Score, ScoreRequest, ScorerSettings, find, score_awaited
from tests.rewards.test_remote import Answer, Service

QUESTION = {"role": "user", "content": "2 + 2?"}
REQUEST = ScoreRequest("It is 4", None, "mine", prompt_text="<s>2 + 2?", uid="row/7", messages=(QUESTION,))
# As vLLM 0.32 answered for a model with one output.
ANSWER = {
    "id": "classify-8d4e", "object": "list", "created": 1764125771, "model": "/models/reward",
    "data": [{"index": 0, "label": "LABEL_0", "probs": [-3.25], "num_classes": 1}],
    "usage": {"prompt_tokens": 30, "total_tokens": 30, "completion_tokens": 0, "prompt_tokens_details": None},
}  # fmt: skip


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def score_of(service: Service, request: ScoreRequest = REQUEST) -> Score:
    settings = ScorerSettings(RemoteConfig(url=service.url, model="/models/reward", timeout=2.0))
    return asyncio.run(score_awaited(find("reward_model", settings), request))


def test_the_score_is_the_models_output_for_the_conversation(service: Service) -> None:
    service.answers = [Answer(ANSWER)]
    assert score_of(service) == Score(-3.25)
    ((_, _, _, body),) = service.calls
    assert body == {
        "model": "/models/reward",
        "messages": [QUESTION, {"role": "assistant", "content": "It is 4"}],
        "use_activation": False,
    }


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ({"data": [{"probs": [0.25, 0.75]}]}, "the model has 2 outputs, and a reward model has one"),
        ({"data": [{"probs": []}]}, "the model has 0 outputs"),
        ({"data": [{"probs": ["high"]}]}, "its answer is not of vLLM's /classify: {'data': "),
        ({"data": []}, "its answer is not of vLLM's /classify"),
        ({"score": 1.0}, "its answer is not of vLLM's /classify"),
        (0.5, "its answer is not of vLLM's /classify: 0.5"),
    ],
)
def test_another_answer_is_a_failure(service: Service, answer: Any, cause: str) -> None:
    service.answers = [Answer(answer)]
    with pytest.raises(RewardError) as raised:
        score_of(service)
    assert raised.value.cause.startswith(f"it raised ServiceError: {cause}")


NAMED = ("reward.function=reward_model", "reward.timeout=100")
URL, MODEL = "reward.remote.url=https://models.example.com/classify", "reward.remote.model=/models/reward"


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ((*NAMED, MODEL), "reward.remote.url", "uses the scorer `reward_model`, but its URL is unset"),
        ((*NAMED, URL), "reward.remote.model", "names the model in its requests"),
        (("reward.function=remote", "reward.timeout=100", URL, MODEL), "reward.remote.model", "only the scorer"),
        (
            ("reward.functions={remote: 1.0, reward_model: 0.5}", "reward.timeout=100", URL, MODEL),
            "reward.functions",
            "describes one service",
        ),
        ((URL, MODEL), "reward.remote", "does not use the scorer `remote` or `reward_model`"),
        (("reward.function=reward_model", URL, MODEL), "reward.timeout", "the scorer `reward_model` may take 80 s"),
    ],
)
def test_contradictory_settings_are_refused(tmp_path: Path, overrides: tuple[str, ...], key: str, words: str) -> None:
    (tmp_path / "recipe.yaml").write_text("model: {path: some/model}\n")
    with pytest.raises(RecipeError) as raised:
        load_recipe(tmp_path / "recipe.yaml", overrides)
    assert raised.value.key == key and words in str(raised.value)
    assert load_recipe(tmp_path / "recipe.yaml", (*NAMED, URL, MODEL)).reward.services == ["reward_model"]
