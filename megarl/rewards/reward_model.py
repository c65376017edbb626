"""Scorer `reward_model`: a model with one output that vLLM serves at its endpoint /classify."""

from __future__ import annotations

from typing import Any

from megarl.rewards.base import ScoreRequest, scorer
from megarl.rewards.remote import ServiceError, ask, prepare
from megarl.rewards.settings import ScorerSettings


@scorer("reward_model", prepare=prepare, settings=True, needs_ground_truth=False)
async def reward_model(request: ScoreRequest, settings: ScorerSettings) -> float:
    """Return the model's output, without an activation, for the row's messages and the response as the assistant's next one.

    The server renders the model's chat template. Raises ServiceError as `remote`, and if the model has several outputs.
    """
    messages = [*request.messages, {"role": "assistant", "content": request.response}]
    service = settings.remote
    return output_in(await ask(service, {"model": service.model, "messages": messages, "use_activation": False}))


def output_in(answer: Any) -> float:
    """Return the only output in an answer of /classify: ``{"data": [{"probs": [1.5], ...}], ...}``."""
    try:
        (item,) = answer["data"]
        outputs = [float(number) for number in item["probs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ServiceError(f"its answer is not of vLLM's /classify: {str(answer)[:300]}") from error
    if len(outputs) != 1:
        raise ServiceError(f"the model has {len(outputs)} outputs, and a reward model has one")
    return outputs[0]
