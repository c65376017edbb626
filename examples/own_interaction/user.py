"""A user who thinks of a digit, and a warm-up: the policy guesses at random, whatever the user replies.

    python -m examples.own_interaction.user    # writes data/own_interaction, and the model to runs/own-interaction-sft/hf
"""

import random
from pathlib import Path

from megarl import load_recipe, train
from megarl.agents import Context, Reply, interaction

DATA = Path("data/own_interaction")
QUESTION = "Guess my digit."
GUESSES = 4


@interaction
class Digit:
    """Replies "more" or "less" to a wrong guess, and ends the conversation after the right one."""

    def start(self, context: Context) -> None:
        self.digit = int(context.ground_truth)

    def reply(self, messages: list[dict]) -> Reply:
        guess = messages[-1]["content"].strip()
        if not guess.isdigit():
            return Reply("A digit, please.", reward=-0.5)
        if int(guess) == self.digit:
            return Reply("Yes!", reward=1.0, ends=True)
        return Reply("more" if int(guess) < self.digit else "less", reward=-0.1)


def row(random_numbers, index):
    """Return a row of RL: the policy sees the question, and the user knows the digit."""
    return {
        "data_source": "examples/digits",
        "prompt": [{"role": "user", "content": QUESTION}],
        "reward_model": {"style": "rule", "ground_truth": str(random_numbers.randrange(10))},
        "extra_info": {"index": index},
    }


def conversation(random_numbers, index):
    """Return a conversation of SFT: guesses at random, half of them as the replies allow."""
    digit, low, high = random_numbers.randrange(10), 0, 9
    careful = random_numbers.random() < 0.5
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(GUESSES):
        guess = random_numbers.randint(low, high) if careful else random_numbers.randrange(10)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == digit:
            break
        low, high = (max(low, guess + 1), high) if guess < digit else (low, min(high, guess - 1))
        messages.append({"role": "user", "content": "more" if guess < digit else "less"})
    if messages[-1]["role"] == "user":
        del messages[-1]
    return {"messages": messages}


def prepare(steps=300):
    """Write rows of RL and conversations, and train the quickstart's random model on the conversations."""
    from megarl.data.rows import write_parquet

    for name, make, rows in (("sft", conversation, 8000), ("train", row, 512), ("test", row, 128)):
        random_numbers = random.Random(name)
        write_parquet(DATA / f"{name}.parquet", [make(random_numbers, index) for index in range(rows)])
    lengths = ["data.chat_template=true", "data.max_prompt_length=64", "rollout.max_response_length=96"]
    layout = ["cluster.trainers=1", "megatron.expert_parallel=1"]
    warm_up = ["name=own-interaction-sft", f"data.train_files=[{DATA}/sft.parquet]", f"train.steps={steps}"]
    train(load_recipe("recipes/quickstart_sft.yaml", [*lengths, *layout, *warm_up]))


if __name__ == "__main__":
    prepare()
