"""Writes docs/from_verl.md from the table of options: ``python -m docs.generate.from_verl``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.commands.convert_verl.table import DEFAULTS, RL, SFT, SFT_DEFAULTS, TRAINER, Option

PAGE = Path(__file__).parents[2] / "docs" / "from_verl.md"

HEAD = """# From verl

```bash
python -m megarl convert-config run_grpo.sh --rows 7473 --out grpo.yaml
python -m megarl convert-config run_sft.sh 1=8 2=out/sft MODEL_PATH=models/Qwen3-8B megatron.tensor_parallel=2
```

`convert-config` reads a verl script, or a command line from standard input (`-`), and writes the recipe. The script is never
run: variables, `${NAME:-default}`, arrays and `$((arithmetic))` are put in by reading. What only a shell could know (`$(date)`,
a variable that the script takes from the environment, an assignment within an `if`) is an error where the command needs it, with
its line; `NAME=value` behind the file gives the value, and `1=value` a script's own arguments. A name with a dot is a setting of
the recipe, and wins. `$HOME` is this machine's; `$@` is nothing.

The command runs main_ppo, main_dapo, one-step-off's main_ppo, fsdp_sft_trainer or sft_trainer. Options that have no counterpart,
or become something else, are named with their lines, as comments at the recipe's head and on stderr. What a command leaves out
counts with verl's default where megarl's is another one. `--rows` says how many rows the training data has: megarl counts
steps, not epochs. The recipe is loaded before it is written, and one that could not be run is refused with what to change; of
models whose config.json megarl keeps (`megarl/model_configs/`), a layout that does not divide is noted, too.

What no conversion can do: FSDP needs no layout and Megatron does, so `megatron.tensor_parallel` wants a choice where a script
has no sequence parallel; `model.path` is a folder, not a name on the hub; rows are read in [verl's columns](data.md).
"""


def document() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, table in (("RL", RL), ("The trainer, of RL and SFT", TRAINER), ("SFT", SFT)):
        parts.append(f"## {title}\n\n| verl | megarl | |\n|---|---|---|\n" + "\n".join(map(_row, table)) + "\n")
    parts.append("## verl's defaults\n\nThose that count where a command does not say otherwise.\n\n" + _defaults())
    parts.append(
        "\nThis page is made by `python -m docs.generate.from_verl` from `megarl/commands/convert_verl/table.py`.\n"
    )
    return "\n".join(parts)


def _row(option: Option) -> str:
    to = ", ".join(f"`{key}`" for key in option.to.split(", ")) if option.to else "-"
    names = [f"{old} is {new}" for old, new in option.names.items() if str(old) != str(new)]
    why = "; ".join([part for part in (option.why, ", ".join(names)) if part])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{option.verl}`", to, why)) + " |"


def _defaults() -> str:
    kinds = {"RL": DEFAULTS, **SFT_DEFAULTS}
    rows: Sequence[str] = [
        f"| {kind} | `{name}` | `{value}` |" for kind in kinds for name, value in kinds[kind].items()
    ]
    return "| | option | value |\n|---|---|---|\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(document())
    print(f"wrote {PAGE}")
