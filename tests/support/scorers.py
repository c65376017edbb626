"""User-defined rewards, named in a recipe as reward.function=tests.support.scorers:letters."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megarl.rewards import ScoreRequest, ScorerUnavailable


def letters(request: ScoreRequest) -> dict[str, float]:
    """The share of letters: it differs between samples even of a random model, and can be learned."""
    share = sum(character.isalpha() for character in request.response) / max(len(request.response), 1)
    return {"score": share, "accuracy": float(share > 0.5)}


def word_of_the_color(request: ScoreRequest) -> dict[str, float]:
    """1 if the response is a word "wN" and N modulo 4 is the color's number. A random word is right in one of four cases."""
    word = request.response.strip()
    right = word[:1] == "w" and word[1:].isdigit() and int(word[1:]) % 4 == int(request.ground_truth)
    return {"score": float(right), "accuracy": float(right)}


def graded_letters(request: ScoreRequest) -> dict[str, float]:
    """The share of letters, also as the part that an algorithm over several parts reads."""
    share = letters(request)["score"]
    return {"score": share, "accuracy": share}


def mostly_letters(request: ScoreRequest) -> float:
    """1 if the response has more letters than most samples of a random model, else 0."""
    return float(letters(request)["score"] > 0.7)


def pieces(request: ScoreRequest) -> dict[str, object]:
    """Score each piece of six characters (the last may be shorter) as `letters` does, plus half a point if the complete
    response is letters."""
    text = request.response
    ends = [*range(6, len(text), 6), len(text)] if text else []
    steps = [
        (end, sum(c.isalpha() for c in text[start:end]) / 60) for start, end in zip([0, *ends], ends, strict=False)
    ]
    return {"score": 0.5 * text.isalpha(), "accuracy": float(text.isalpha()), "steps": steps}


def raises(request: ScoreRequest) -> float:
    raise ZeroDivisionError("no such luck")


def not_a_number(request: ScoreRequest) -> float:
    return math.nan


def faulty(request: ScoreRequest) -> float:
    """Fail as the row's extra_info["what"] names: hang, exit, be killed or raise; otherwise score."""
    fault = request.extra_info["what"]
    if fault == "hang":
        time.sleep(1000)
    elif fault == "exit":
        os._exit(3)
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raise":
        raise ZeroDivisionError("no such luck")
    elif fault == "leave":
        sys.exit(4)
    elif fault == "huge":
        return 1e300
    elif fault == "nan":
        return math.nan
    elif fault == "child":  # hang with a child process, and write its pid to a file
        child = subprocess.Popen(["sleep", "1000"])
        Path(request.extra_info["file"]).write_text(str(child.pid))
        time.sleep(1000)
    elif fault == "slow":
        time.sleep(0.1)
    return 1.0


def fails_once(request: ScoreRequest) -> float:
    """Raise in the first call for a sample, and score in the second."""
    place = Path(request.extra_info["file"])
    if not place.exists():
        place.touch()
        raise ConnectionError("the service was away")
    return 1.0


def needs_file(request: ScoreRequest) -> float:
    """Need a file `index` in the current directory, as other scorers need a service."""
    if not Path("index").exists():
        raise ScorerUnavailable("the index is being built")
    return 1.0


async def awaited(request: ScoreRequest) -> dict[str, object]:
    await asyncio.sleep(0.001)
    return {"score": 0.5, "answer": request.response}


_crowd = 0


async def crowd(request: ScoreRequest) -> float:
    """Return the number of samples scored concurrently in this process."""
    global _crowd
    _crowd += 1
    await asyncio.sleep(0.2)
    current = _crowd
    await asyncio.sleep(0.2)
    _crowd -= 1
    return float(current)


def modules(request: ScoreRequest) -> dict[str, object]:
    """Return the heavy packages that the scoring process has imported."""
    heavy = {"torch", "vllm", "ray", "transformers", "megatron", "pyarrow"} & set(sys.modules)
    return {"score": float(len(heavy)), "answer": " ".join(sorted(heavy))}


def brevity(request: ScoreRequest) -> dict[str, float]:
    """1 for an empty response, falling to 0 at 100 characters."""
    return {"score": max(0.0, 1 - len(request.response) / 100)}


def last_turn(request: ScoreRequest) -> dict[str, float | str]:
    """Score 1 if the policy's last turn is the ground truth."""
    text = [turn.text for turn in request.turns if turn.role == "assistant"][-1]
    right = float(text == request.ground_truth)
    return {"score": right, "accuracy": right, "reason": f"it said {text!r}"}
