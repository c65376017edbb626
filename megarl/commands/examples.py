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
    "serve": ("megarl serve recipes/quickstart.yaml name=served --name tiny",),
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
    "data": (
        "megarl data quickstart --out data/quickstart",
        "megarl data gsm8k --source openai/gsm8k --out data/gsm8k",
    ),
    "data gsm8k": (
        "megarl data gsm8k --source openai/gsm8k --out data/gsm8k",
        "megarl data gsm8k --source downloads/gsm8k --out data/gsm8k",
    ),
    "data math": ("megarl data math --source DigitalLearningGmbH/MATH-lighteval --out data/math",),
    "data dapo_math": ("megarl data dapo_math --source BytedTsinghua-SIA/DAPO-Math-17k --out data/dapo_math",),
    "data deepscaler": (
        "megarl data deepscaler --source agentica-org/DeepScaleR-Preview-Dataset --out data/deepscaler",
    ),
    "data aime": (
        "megarl data aime --source Maxwell-Jia/AIME_2024 --out data/aime_2024 --year 2024",
        "megarl data aime --source math-ai/aime25 --split test --out data/aime_2025 --year 2025",
    ),
    "data geo3k": ("megarl data geo3k --source hiyouga/geometry3k --out data/geo3k",),
    "data retool_sft": ("megarl data retool_sft --source JoeYing/ReTool-SFT --out data/retool_sft",),
    "data verl_dataset": (
        "megarl data verl_dataset --class my/dataset.py:MyDataset --source data/raw.parquet --out data/train.parquet",
    ),
    "data quickstart": ("megarl data quickstart --out data/quickstart",),
    "model": ("megarl model check Qwen/Qwen3-8B",),
    "model check": ("megarl model check Qwen/Qwen3-8B", "megarl model check models/mine --json"),
    "model table": ("megarl model table models/mine --out mine_table.json",),
}


def add_examples(app: typer.Typer, group: str = "") -> None:
    """Show the examples of each command of `app`, and of its groups, below its options. `group`: the name of `app`, if it is a group."""
    for command in app.registered_commands:
        assert command.callback is not None
        name = f"{group} {command.name or command.callback.__name__}".strip()
        if name in EXAMPLES:
            command.epilog = _epilog(EXAMPLES[name])
    for info in app.registered_groups:
        assert info.typer_instance is not None and info.name is not None
        if info.name in EXAMPLES:
            info.epilog = _epilog(EXAMPLES[info.name])
        add_examples(info.typer_instance, info.name)


def _epilog(lines: tuple[str, ...]) -> str:
    return "\n\n".join([f"Example{'s' * (len(lines) > 1)}:", *lines])
