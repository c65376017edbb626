"""Examples at the end of each command's `--help`."""

from __future__ import annotations

import typer

EXAMPLES: dict[str, tuple[str, ...]] = {
    "quickstart": ("megarl quickstart", "megarl quickstart train.seed=1"),
    "train": (
        "megarl train recipes/quickstart.yaml name=first train.steps=20",
        "megarl train recipes/quickstart.yaml --quiet",
        "megarl train recipes/quickstart.yaml --json > events.jsonl",
    ),
    "eval": ("megarl eval recipes/quickstart.yaml model.path=runs/first/hf",),
    "export": ("megarl export runs/first --out models/first",),
    "serve": ("megarl serve recipes/quickstart.yaml --name tiny",),
    "view": ("megarl view runs/first --follow", "megarl view runs/first runs/second"),
    "report": ("megarl report runs/first",),
    "compare": (
        "megarl compare runs/first runs/second --html compare.html",
        "megarl compare runs/first verl.log --steps 1:100",
    ),
    "keys": ("megarl keys temperature", "megarl keys 'rollout.*' --json"),
    "init": (
        "megarl init mine.yaml",
        "megarl init mine.yaml --task sft --devices '8 H100' --defaults",
    ),
    "doctor": ("megarl doctor recipes/quickstart.yaml", "megarl doctor runs/first"),
    "engines": ("megarl engines runs/first", "megarl engines runs/first +1"),
    "accept": ("megarl accept --expect", "megarl accept recipes/quickstart.yaml --nodes 2"),
    "rehearse": ("megarl rehearse recipes/dapo_qwen3_30b.yaml",),
    "replay": ("megarl replay runs/first", "megarl replay runs/first --bundle step.tar --step 12"),
    "reproduce": ("megarl reproduce runs/first --print", "megarl reproduce runs/first --name second"),
    "plan": (
        "megarl plan recipes/dapo_qwen3_30b.yaml --html plan.html",
        "megarl plan recipes/dapo_qwen3_30b.yaml --search",
    ),
    "simulate": ("megarl simulate recipes/dapo_qwen3_30b.yaml --devices 8",),
    "weight-sync": ("megarl weight-sync recipes/dapo_qwen3_30b.yaml",),
    "convert-weights": ("megarl convert-weights models/DeepSeek-V3 --out models/DeepSeek-V3-bf16",),
    "convert-config": ("megarl convert-config run_qwen3_8b.sh --out mine.yaml --rows 7473",),
}


def add_examples(app: typer.Typer) -> None:
    """Show the examples of each command of `app` below its options."""
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        if name in EXAMPLES:
            lines = EXAMPLES[name]
            command.epilog = "\n\n".join([f"Example{'s' * (len(lines) > 1)}:", *lines])
