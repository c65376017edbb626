"""A user who wants some number of cups, and a warm-up: the policy asks "How many?" in half of its samples, and else guesses.

python -m examples.own_interaction.user    # writes data/own_interaction, and the model to runs/own-interaction-sft/hf
"""

import random
from pathlib import Path

from megarl import load_recipe, train
from megarl.agents import Context, Reply, interaction

DATA = Path("data/own_interaction")
REQUEST = "Bring me cups."
QUESTION = "How many?"


@interaction
class Customer:
    """Answers a question with the number, and ends the conversation when the policy names one."""

    def start(self, context: Context) -> None:
        self.number = context.ground_truth

    def reply(self, messages: list[dict]) -> Reply:
        text = messages[-1]["content"].strip()
        if text == self.number:
            return Reply("Thank you.", reward=1.0, ends=True)
        if text.isdigit():
            return Reply("No.", reward=-0.5, ends=True)
        return Reply(self.number, reward=-0.1)  # a question costs a little


def row(random_numbers, index):
    """Return a row of RL: the policy sees the request, and the user knows the number."""
    return {
        "data_source": "examples/cups",
        "prompt": [{"role": "user", "content": REQUEST}],
        "reward_model": {"style": "rule", "ground_truth": str(random_numbers.randrange(10))},
        "extra_info": {"index": index},
    }


def conversation(random_numbers, index):
    """Return a conversation of SFT: with the question, or with a guess."""
    number = str(random_numbers.randrange(10))
    turns = [("user", REQUEST), ("assistant", number)]
    if random_numbers.random() < 0.5:
        turns = [("user", REQUEST), ("assistant", QUESTION), ("user", number), ("assistant", number)]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def prepare(steps=300):
    """Write rows of RL and conversations, and train the quickstart's random model on the conversations."""
    from megarl.data.rows import write_parquet

    for name, make, rows in (("sft", conversation, 4000), ("train", row, 512), ("test", row, 128)):
        random_numbers = random.Random(name)
        write_parquet(DATA / f"{name}.parquet", [make(random_numbers, index) for index in range(rows)])
    lengths = ["data.chat_template=true", "data.max_prompt_length=64", "rollout.max_response_length=96"]
    layout = ["cluster.trainers=1", "megatron.expert_parallel=1"]
    warm_up = ["name=own-interaction-sft", f"data.train_files=[{DATA}/sft.parquet]", f"train.steps={steps}"]
    train(load_recipe("recipes/quickstart_sft.yaml", [*lengths, *layout, *warm_up]))


if __name__ == "__main__":
    prepare()
