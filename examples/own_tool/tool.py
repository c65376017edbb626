"""A tool, the task that needs it, and a warm-up: the policy calls the tool in half of its samples, and guesses in the others.

python -m examples.own_tool.tool    # writes data/own_tool, and the warmed-up model to runs/own-tool-sft/hf
"""

import random
from pathlib import Path

from megarl import load_recipe, train
from megarl.agents import Context, find, tool

DATA = Path("data/own_tool")
ITEMS = ["pens", "cups", "hats", "keys"]


@tool
def price(item: str, context: Context) -> str:
    """Return the price of an item.

    Args:
        item: The item's name.
    """
    prices = context.extra_info["prices"]  # of the row; hidden from the policy
    if item not in prices:
        raise KeyError(f"no price of {item}")  # the policy reads this message
    return str(prices[item])


def right(request):
    """Return 1 if the policy's last turn is the price and nothing else."""
    answer = request.turns[-1].text.strip()
    return {"score": float(answer == request.ground_truth), "answer": answer}


def question(random_numbers, index):
    """Return a row of RL: only the tool sees `prices`."""
    prices = {item: random_numbers.randrange(10) for item in ITEMS}
    item = random_numbers.choice(ITEMS)
    return {
        "data_source": "examples/prices",
        "prompt": [{"role": "user", "content": f"Price of {item}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(prices[item])},
        "extra_info": {"index": index, "prices": prices, "item": item},
    }


def demonstration(random_numbers, index):
    """Return a conversation of SFT: with a call and its answer, or with a guess."""
    row = question(random_numbers, index)
    item, answer = row["extra_info"]["item"], row["reward_model"]["ground_truth"]
    call = {"id": "call_0", "type": "function", "function": {"name": "price", "arguments": f'{{"item": "{item}"}}'}}
    turns = [("assistant", "", [call]), ("tool", answer, []), ("assistant", answer, [])]
    if random_numbers.random() < 0.5:
        turns = [("assistant", str(random_numbers.randrange(10)), [])]
    turns = [("user", row["prompt"][0]["content"], []), *turns]
    messages = [{"role": role, "content": content, "tool_calls": calls} for role, content, calls in turns]
    return {"messages": messages, "tools": [find("examples.own_tool.tool:price").schema]}


def prepare(steps=300):
    """Write rows of RL and demonstrations, and train the quickstart's random model on the demonstrations."""
    from megarl.data.rows import write_parquet

    for name, make, rows in (("sft", demonstration, 4000), ("train", question, 512), ("test", question, 128)):
        random_numbers = random.Random(name)
        write_parquet(DATA / f"{name}.parquet", [make(random_numbers, index) for index in range(rows)])
    lengths = ["data.chat_template=true", "data.max_prompt_length=96", "rollout.max_response_length=128"]
    layout = ["cluster.trainers=1", "megatron.expert_parallel=1"]
    warm_up = ["name=own-tool-sft", f"data.train_files=[{DATA}/sft.parquet]", f"train.steps={steps}"]
    train(load_recipe("recipes/quickstart_sft.yaml", [*lengths, *layout, *warm_up]))


if __name__ == "__main__":
    prepare()
