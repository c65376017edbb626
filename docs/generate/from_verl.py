"""Write docs/from_verl.md from the table of options: ``python -m docs.generate.from_verl``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.commands.convert_verl.entry_points import ENTRY_POINTS
from megarl.commands.convert_verl.fully_async import FULLY_ASYNC, FULLY_ASYNC_DEFAULTS
from megarl.commands.convert_verl.gkd import GKD, GKD_DEFAULTS
from megarl.commands.convert_verl.option import Option
from megarl.commands.convert_verl.sampling import ASYNC_FLOW, ASYNC_FLOW_DEFAULTS, PARTIAL_ROLLOUT
from megarl.commands.convert_verl.sft import SFT, SFT_DEFAULTS
from megarl.commands.convert_verl.table import DEFAULTS, RL, TRAINER

PAGE = Path(__file__).resolve().parents[1] / "from_verl.md"

HEAD = """# From verl

A verl script becomes a recipe in six steps:

```bash
cd my-project                                                                        # 1. the folder where the script runs
python -m megarl convert-config run_grpo.sh --rows 7473 --out grpo.yaml              # 2. read the script, write the recipe
python -m megarl plan grpo.yaml --device H100                                        # 3. settings, data, memory; or 910B, ...
python -m megarl doctor grpo.yaml                                                    # 4. this machine, with the reward function
python -m megarl rehearse grpo.yaml                                                  # 5. a tiny copy on this machine's CPU
python -m megarl train grpo.yaml                                                     # 6.
```

Between 2 and 3 read the notes and set each `???`. Steps 3 and 5 need no weights: without them, name the shape of a
[published model](rehearsal.md) (a line `# Shape: Qwen2.5-7B-Instruct` in the recipe, or `rehearse --shape`). `rehearse` reads the columns of the data:
without the files, give others (`data.train_files='["rows.parquet"]'`).

## Script

`convert-config` reads a script, or a command line from standard input (`-`). It parses the script and evaluates it as bash does, and runs nothing
of it. [shfmt](https://github.com/mvdan/sh) is the parser (`pip install shfmt-py==4.2.0`; the files in `launch/` install it).

```bash
python -m megarl convert-config run_sft.sh 1=8 2=out/sft MODEL_PATH=models/Qwen3-8B megatron.tensor_parallel=2
```

| after the file | meaning |
|---|---|
| `NAME=value`, `1=value` | a variable, or the first argument, of the script; overrides the script's |
| `section.key=value` | a setting of the recipe; overrides the converted one |
| `--rows 7473` | rows of the training data: epochs become steps |
| `--accept OPTION` | leave out an option although the run then computes something else |
| `--machine H100` | name of the machines in the recipe's line `# Hardware:`, which `plan` reads; their number is the script's |

**Notes.** Comments at the top of the recipe, and stderr, list each option that is changed or has no counterpart, with its line: differences
first, then options without effect on what the run computes. Options that the command does not set have verl's defaults.

**Errors.** An option without counterpart that changes the result is an error. So are an option that verl lacks (`trainer.total_epoch`), a
switch that is neither True nor False, and a reference `${...}` to other options. Unknown options of `trainer`, `ray_kwargs`, `global_profiler`,
`checkpoint` and `hydra` are left out with a note, unless verl has a similar name.

**`???`** stands for a path or a number of devices that the script takes from its environment, for a placeholder (`/path/to/model`, `<model>`),
and for data files in another format. Markdown's fences around a pasted script are left out, with a note. All
commands refuse the recipe until you set the key, in the file or as `model.path=...` after it.

**Variables of the environment** count as unset, except `$HOME`: defaults of the script apply, and a test of one has a note. Variables that sbatch sets from `#SBATCH` lines have its values. `$(command)` and tests of files are unknown: an error if the command depends on them.
Sourced files are not read. [The reference](from_verl_reference.md#forms-of-bash) lists all forms.

**Configuration files.** A file of yours that `--config-name` names is read, with the files in its `defaults`; the command's options override it.
It must be here: convert in the folder where the script runs. If the path does not exist, but its last folders exist
in the script's folder, the file there is read, with a note. verl's own files (`ppo_megatron_trainer`, ...) are the tables below.

**Layout.** With Megatron the parallel sizes are verl's. A script with FSDP has none: choose `megatron.tensor_parallel` if it has no sequence
parallelism either.

**Ascend.** `trainer.device=npu` becomes `cluster.device: npu`; without it, megarl takes the devices that are there. Fields of
`override_transformer_config` that MindSpeed defines (`use_flash_attn`) become `megatron.extra`. megarl sets the environment of each process
itself ([ascend.md](ascend.md)): a note lists the script's exports, and `cluster.environment.all` takes the ones to keep. Weights come from the
Hugging Face folder, not from `dist_checkpointing_path`.

**Modules.** main_ppo, main_ppo_sync, main_ppo_split, main_dapo, main_dynamo, main_entropy, main_rep_exp
(without its bonus), spo_main_ppo (METHOD=GRPO), fully_async_main, reward_queue.main, the main_ppo of
one_step_off_policy and of partial_rollout, grpo_main (async_flow), main_gkd, gvpo_main_ppo, main_sppo, fsdp_sft_trainer, sft_trainer and
sft_trainer_ray. A run that only evaluates (`trainer.val_only`) becomes a recipe for `python -m megarl eval grpo.yaml`.

## Data

verl's parquet files are read as they are: `prompt`, `data_source`, `reward_model`, `extra_info`, `images`, `videos` (as frames), and `messages` for SFT.

| verl | megarl |
|---|---|
| `data.prompt_key` and other keys | `data.columns` ([data.md](data.md)) |
| answers in a separate column | `data.columns.ground_truth=answer` after the file |
| `data.custom_cls` | the class runs once, before the run: a note has the [command](data.md#a-dataset-class-of-verl) |
| `data.train_max_samples`, samplers, `data.datagen` | errors |

## Rewards

`custom_reward_function.path`, `name` and `reward_kwargs` become `reward.function` and `reward.arguments`, and the file
[runs unchanged](rewards.md#a-reward-function-of-verl). Without one, the `data_source` of a row selects the scorer, as in verl
([table](rewards.md)).

- **Failures.** If the function raises or returns None, NaN or a dict without `score`, its sample has no reward: the group is dropped, counted
  (`rollout/scoring_failed`) and replaced. If too many fail (`reward.max_failed_share`), the run ends with the last cause. In verl the
  exception ends the run.
- **Imports.** A file that imports verl needs a checkout of verl on PYTHONPATH, without the packages of verl's trainers: megarl then skips
  verl's own `__init__`. A package that a module itself imports must be installed.
- **Managers** naive, dapo, prime and gdpo score each sample separately, as megarl does; others are errors.
- **Reward models** (`reward.reward_model.enable`) become the scorer [`reward_model`](rewards.md#a-reward-model). verl serves the model itself;
  here a server on other devices does: a note has the command, and `reward.remote.url` is `???`. With a custom_reward_function,
  `reward.arguments.reward_router_address` is the server's HOST:PORT.

## Tools

The YAML file of `multi_turn.tool_config_path` becomes `agent.tools`, and its classes [run unchanged](agents.md#tools-of-verl). Classes that verl
itself has (`verl.tools.gsm8k_tool`) need a checkout of verl on PYTHONPATH, as rewards do.

- **Rows.** Every row has the tools; in verl only rows with `agent_name: tool_agent`. Rows with another `agent_name` are an error.
- **Instances.** A sample has an instance of a class for all its calls, so rewards may depend on earlier ones; verl's tool agent loop creates
  an instance for each call.
- **Rewards** of tools reach the reward function (`extra_info["tool_rewards"]`) and are not added to the reward, as in verl.
- **Errors.** If `execute` raises, the policy reads the message, as in verl. If `create` or `release` raises, the sample is sampled again.
- **Limits.** Turns and calls per turn are verl's. A long answer is cut at `agent.max_answer_tokens` tokens; verl cuts at 256 characters.
- MCP entries are errors: use `agent.mcp`. So are function tools: [write them](agents.md#write-a-tool) and give `agent.tools='["my_tools:search"]'`
  after the file. verl's code sandbox is `code_interpreter`.

`multi_turn.interaction_config_path` becomes `agent.interaction`, and its classes [run unchanged](interactions.md#interactions-of-verl). As in
verl, scores of turns reach the reward function (`extra_info["turn_scores"]`) and are not added. verl's response ends with the reply that ends
the conversation, masked; megarl's ends before it.

`agent_loop_config_path` becomes `agent.loop`, and its classes [run unchanged](agent_loops.md#agent-loops-of-verl), with the options of
`multi_turn` as `agent.loop_arguments`. A row without `agent_name` has the file's only loop; in verl it has `single_turn_agent`. Managers
(`agent_loop_manager_class`) are errors.

## Metrics

`critic/*`, `actor/*`, `timing_s/*`, `perf/*`, `prompt_length/*` and `response_length/*` have verl's names where they mean the same
([metrics.md](metrics.md)). Others differ:

| verl | megarl |
|---|---|
| `val-core/SOURCE/acc/mean@N` | `eval/SOURCE/pass@1`; `eval/pass@1` with one source |
| `val-core/SOURCE/acc/best@N/mean` | `eval/SOURCE/pass@N`, without bootstrapping |
| `val-core/SOURCE/acc/maj@N/mean` | `eval/SOURCE/maj@N` |
| `val-aux/*` | `eval/SOURCE/rewards/mean` |
| `rollout_corr/*` | `rollout/mismatch_*`, `rollout/correction_*` |

## What differs

In every run:

- Prompts are never truncated: rows that are too long are refused, or filtered if the script truncates or filters.
- Each step trains on `data.prompts_per_step` groups: a dropped group is replaced.
- Engines are separate processes; the reference policy runs in the actor's.
- Defaults are the ones of verl in August 2026 (1dda039). Since January 2026 (b178a3c) one has changed: `bypass_mode` of fully_async_main, from False
  to True.
- Checkpoints are in `runs/NAME/`. `trainer.resume_mode=resume_path` is an error: give the exported weights as `model.path`.

Of some algorithms: [names that compute something else](algorithms.md#where-megarl-differs-from-others); [asynchronous
runs](from_verl_reference.md#asynchronous-runs); [distillation, GVPO and SPPO](from_verl_reference.md#distillation-gvpo-sppo).

How many of verl's own scripts become a recipe, and why others do not: [launch scripts](from_verl_reference.md#launch-scripts-of-verl).

# Options
"""


def document() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for title, table in (
        ("RL", RL),
        ("fully_async_main (before the options of RL)", FULLY_ASYNC),
        ("partial_rollout (before the options of RL)", PARTIAL_ROLLOUT),
        ("async_flow (before the options of RL)", ASYNC_FLOW),
        ("main_gkd (before the options of RL)", GKD),
        ("Trainer (RL and SFT)", TRAINER),
        ("SFT", SFT),
    ):
        head = "| verl | megarl | remark |\n|---|---|---|\n"
        parts.append(f"## {title}\n\n{head}" + "\n".join(map(_row, table)) + "\n")
    parts.append(
        "## Defaults of verl\n\nThe converter uses them for options that a command does not set.\n\n" + _defaults()
    )
    parts.append(
        "\n`python -m docs.generate.from_verl` writes this page from `megarl/commands/convert_verl/`: `table.py`, `rewards.py`, `sampling.py`, `fully_async.py`, `gkd.py` and `sft.py`.\n"
    )
    return "\n".join(parts)


def _row(option: Option) -> str:
    to = ", ".join(f"`{key}`" for key in option.to.split(", ")) if option.to else "-"
    names = [f"{old} is {new}" for old, new in option.names.items() if str(old) != str(new)]
    remark = "; ".join([part for part in (option.remark, ", ".join(names)) if part])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{option.verl}`", to, remark)) + " |"


def _defaults() -> str:
    changed = {name: value for name, value in FULLY_ASYNC_DEFAULTS.items() if DEFAULTS.get(name) != value}
    kinds = {"RL": DEFAULTS, "fully_async_main": changed, "grpo_main": ASYNC_FLOW_DEFAULTS, "main_gkd": GKD_DEFAULTS}
    kinds |= {entry.module: dict(entry.defaults) for entry in ENTRY_POINTS if entry.defaults} | SFT_DEFAULTS
    rows: Sequence[str] = [
        f"| {kind} | `{name}` | `{value}` |" for kind in kinds for name, value in kinds[kind].items()
    ]
    return "| | option | value |\n|---|---|---|\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(document())
    print(f"wrote {PAGE}")
