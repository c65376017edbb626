"""A reward function: the right answer, and a bonus for a short solution."""

import re

LONGEST_BONUS = 0.5
CHARACTERS_WITHOUT_BONUS = 60


def right_and_brief(request):
    """Return 1 for the right number after `####`, and up to 0.5 more the shorter the response is."""
    numbers = re.findall(r"#### (-?\d+)", request.response)
    right = bool(numbers) and numbers[-1] == request.ground_truth
    brevity = max(0.0, 1 - len(request.response) / CHARACTERS_WITHOUT_BONUS)
    return {
        "score": right * (1 + LONGEST_BONUS * brevity),
        "accuracy": float(right),  # what evaluation counts
        "brevity": brevity,  # a separate curve: critic/score/brevity/mean
        "answer": numbers[-1] if numbers else None,  # what majority votes count
    }
