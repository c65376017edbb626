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

```bash
python -m megarl convert-config run_grpo.sh --rows 7473 --out grpo.yaml
python -m megarl convert-config run_sft.sh 1=8 2=out/sft MODEL_PATH=models/Qwen3-8B megatron.tensor_parallel=2
```

`convert-config` reads a verl script, or a command line from standard input (`-`), and writes the recipe. It runs nothing of the
script. [shfmt](https://github.com/mvdan/sh) parses it (`pip install 'megarl[convert]'`; the files in `launch/` install it), and
megarl evaluates variables, arrays, arithmetic, `if`, `case`, loops, functions and here-documents as bash does.

| in the script | value |
|---|---|
| `${NAME:-default}`, and tests such as `[ "$NAME" = x ]` | variables of the environment count as unset, with a note; with `set -u` a test of one is unknown |
| `$NAME` or `$1` that the script does not set, in a path or a number of devices | `???` (below) |
| the same elsewhere in the training command | an error that lists all such variables; names of runs lose it, and options without counterpart keep it |
| `$HOME`, `$(pwd)`, `$0`, `$(date)` | values of this machine at the time of the conversion, with a note if the training command uses them |
| `python3 -c 'import NAME'` | whether the package is installed on this machine, with a note |
| `$(command)`, `[ -f FILE ]`, the success of a command | unknown: both paths are followed, and an error if the training command depends on it |
| a path with a slash that `[ -d FOLDER ]` chooses | `???`, as above |
| a check that exits if an argument or a file is missing | skipped |

`set -e` ends the script as in bash. A value that needs one of these forms is unknown: brace expansion, `$'...\\n'`, `${!NAME}`,
`$((A ? B : C))`, associative arrays, and variables set by `read`, `mapfile`, `getopts`, `printf -v` or
`BASH_REMATCH`. `;&` in a `case`, and scripts above 200,000 characters, are refused.

To supply a value, add `NAME=value` after the file; it overrides the script's. `1=value` is the script's first argument. An
argument with a dot in its name is a setting of the recipe and overrides the converted one. Files that the script sources are
not read.

A recipe may contain `???`: the script takes a path or a number of devices from its environment or its arguments, or its data files
are in another format. The first notes list these keys with the script's text. `plan`, `train` and all other commands refuse
such a recipe until the key has a value, in the file or as `model.path=...` on the command line.

The command may run these modules: main_ppo, main_ppo_sync, main_ppo_split, main_dapo, main_dynamo, main_entropy, fully_async_main,
reward_queue.main, the main_ppo of one_step_off_policy and of partial_rollout, grpo_main (async_flow), main_gkd, gvpo_main_ppo,
main_sppo, fsdp_sft_trainer, sft_trainer or sft_trainer_ray. Comments at the top of the recipe, and stderr, list each option that is changed or has no
counterpart, with its line. An option without counterpart that affects the computation is an error, and so is an option that
verl lacks: add the recipe's setting after the file, or `--accept OPTION` to leave it out. An option that the command does not set has verl's default where it differs from megarl's. `--rows` is the number of rows of the training data, which
converts epochs to steps. The recipe is loaded before it is written, and an invalid one is an error with its remedy. For models
with a config.json in `megarl/hf/published/`, a note reports a layout that does not divide the model.

A run that only evaluates (`trainer.val_only`) becomes a recipe without training data: `python -m megarl eval grpo.yaml`.

A script with FSDP has no Megatron layout: choose `megatron.tensor_parallel` if the script has no sequence parallelism.

Then `python -m megarl plan grpo.yaml --device H100` (or `910B`, ...) checks the recipe, the data and the memory, and `python -m megarl rehearse grpo.yaml` runs a
tiny copy of it on this machine.

## Data

verl's parquet files are read as they are: `prompt`, `data_source`, `reward_model`, `extra_info`, `images`, and `messages` for SFT.
Keys such as `data.prompt_key` become `data.columns` ([data.md](data.md)); for answers in a separate column add
`data.columns.ground_truth=answer` after the file. A dataset class (`data.custom_cls`) runs once, before the run: a note has the
command, and the recipe names the file that it writes ([data.md](data.md#a-dataset-class-of-verl)). Samplers (`data.sampler`) and
generated data (`data.datagen`) are errors.

## Rewards

`custom_reward_function.path`, `name` and `reward_kwargs` become `reward.function` and `reward.arguments`, and the file
[runs unchanged](rewards.md#a-reward-function-of-verl). Without one, the `data_source` of a row selects the scorer, as in verl;
[rewards.md](rewards.md) has the table. The managers naive, dapo, prime and gdpo score each sample separately, as megarl does; others
are errors. A reward file that imports verl needs verl on PYTHONPATH.

A reward model (`reward.reward_model.enable`, formerly `reward_model.enable`) becomes the scorer
[`reward_model`](rewards.md#a-reward-model). verl serves the model itself, on the run's devices or on others; megarl's run needs a
server on other devices: a note has the command, and `reward.remote.url` is `???` until you give its URL. With a
custom_reward_function, the function asks the model: `reward.arguments.reward_router_address` is the server's HOST:PORT.

## Tools

The YAML file of `multi_turn.tool_config_path` becomes `agent.tools`, and its classes
[run unchanged](agents.md#tools-of-verl). A sample has an instance of a class for all its calls, so rewards may depend on earlier
ones; verl's tool agent loop creates an instance for each call. As in verl, the rewards of tools reach the reward function
(`extra_info["tool_rewards"]`) and are not added to the reward: `agent.tool_rewards: scorer`. For other tools give
`agent.tools='["my_tools:search"]'` after the file ([agents.md](agents.md#write-a-tool)); verl's code sandbox is
`code_interpreter`. The limits of turns and of calls per turn are converted. MCP entries of the YAML file (use `agent.mcp`) are errors.

The YAML file of `multi_turn.interaction_config_path` becomes `agent.interaction`, and its classes
[run unchanged](interactions.md#interactions-of-verl). As in verl, the scores of turns reach the reward function
(`extra_info["turn_scores"]`) and are not added to the reward. verl's response ends with the reply that ends the conversation, masked;
megarl's ends before it.

The YAML file of `agent_loop_config_path` becomes `agent.loop`, and its classes
[run unchanged](agent_loops.md#agent-loops-of-verl), with the options of `multi_turn` as `agent.loop_arguments`. A row without
`agent_name` has the file's only loop; in verl it has `single_turn_agent`. Managers of your own (`agent_loop_manager_class`), and tools of
`tool_config_path` in such a loop, are errors.

## Asynchronous runs

| verl | placement | `rollout.max_staleness` | `rollout.at_update` |
|---|---|---|---|
| one_step_off_policy | disaggregated | 1 | drain |
| fully_async_main, reward_queue | disaggregated | staleness_threshold | refresh; without partial_rollout drain |
| partial_rollout | colocated | 1 | refresh |
| trainer.v1.trainer_mode=colocate_async | colocated | num_warmup_batches | refresh |
| trainer.v1.trainer_mode=separate_async | disaggregated | num_warmup_batches | refresh |
| async_flow | disaggregated | staleness | refresh; with wait_for_inflight_requests drain |
| main_gkd, one_step_off or two_step_off | disaggregated | 1 or 2 | drain |

[asynchrony.md](asynchrony.md) describes these settings. With fully_async_main a step of the recipe is the time between two updates of
the engines' weights:

| verl | megarl |
|---|---|
| ppo_mini_batch_size x require_batches x trigger_parameter_sync_step | `data.prompts_per_step` |
| require_batches x trigger_parameter_sync_step | `actor.mini_batches` |
| staleness_threshold | `rollout.max_staleness` |
| partial_rollout | `rollout.at_update`: `refresh`; without it `drain` |
| total_rollout_steps, in prompts | `train.steps` |
| test_freq and save_freq, in updates of the engines | `evaluation.every`, `train.save_every` |
| lr_warmup_steps and lr_decay_steps, in updates of the actor | `warmup_steps`, `decay_steps`, in optimizer steps |

Six differences remain. verl trains on groups in the order of their arrival; in megarl a group overtakes older ones only within
`rollout.window`. verl runs at most concurrent_samples_per_replica groups per engine; megarl's engines get all admitted groups. The
actor's updates start when all groups of a step have arrived. Statistics of a batch, such as the mean for whitening, are of the
step; in verl they are of an update of the actor. Without partial_rollout, verl's documentation lets requests finish before an
update, as `drain` does, but its code ends them and trains on the cut responses. verl builds the learning-rate schedule before it
knows the number of steps: a warm-up by ratio has no effect, and a decay with FSDP is an error here. So is
optim.total_training_steps, which gives the schedule a length in updates. The order of arrival and the statistics of a batch also
differ with trainer_mode=separate_async and in async_flow.

## Distillation, GVPO, SPPO

| verl | `algorithm` |
|---|---|
| distillation.enabled, policy gradient of k1 | `advantage: on_policy_distillation` |
| distillation.enabled, task rewards | a KL to the teacher: `reference: teacher`, `kl_coef` |
| distillation.enabled, forward_kl_topk | `loss: gkd`, `distill_rest: false`; log_prob_min_clamp is `distill_min_log_prob` |
| recipe/gkd | `loss: gkd`, `distill_rest: false`, `distill_top_k: 256` |
| recipe/gvpo | `loss: gvpo` with `advantage: grpo` |
| recipe/sppo | `loss: sppo` with `advantage: soft_mean` |

`python -m benchmarks.verl_losses` compares loss and gradient of gvpo, sppo and forward_kl_topk with verl's functions. Named teachers
become `teacher.by_source`, if `teacher_key` is data_source and their tensor_model_parallel_size and gpu_memory_utilization are equal;
a single one scores every row, as in verl. The teacher of recipe/gkd runs in a server, and the script does not name its model: `teacher.path` is `???`. Its
loss is a mean over the tokens of each micro batch, in megarl over the tokens of a step, and its gradient takes the probability of the
teacher's top tokens as 1 in total. The gradient of recipe/gvpo is a sum over the samples of a micro batch:
`actor.optimizer.clip_grad` is divided by that factor, on which AdamW's update does not depend.

## Launch scripts of verl

Scripts that become a recipe as they stand, without arguments, of all scripts that start a training:

| repository | commit | recipes |
|---|---|---|
| verl-project/verl | 1dda039 | 156 of 170 |
| verl-project/verl-recipe | 48ea0a7 | 75 of 104 |
| verl-project/verl, January 2026 | b178a3c | 174 of 187 |

`python -m benchmarks.verl_scripts verl verl-recipe` counts them in checkouts and lists the reasons of the others. They are:

| reason | verl | verl-recipe | January 2026 |
|---|---|---|---|
| another trainer: diffusion models, PRIME, FlowRL, SPIN, SPO, Atropos, exploration bonuses | - | 10 | - |
| managers of agent loops, and a manager of rewards with its agent loop | - | 4 | - |
| layers for multi-token prediction | 5 | - | 1 |
| engines with fp8 weights | - | 4 | - |
| training with simulated quantization (QAT) | - | 4 | - |
| a value that the script takes from the environment or its arguments | 3 | - | 4 |
| training in float16 | - | 2 | - |
| environments of robots | - | - | 2 |
| custom samplers | - | - | 2 |
| two training commands, depending on the machine | 2 | - | - |
| fewer devices than the layout needs, unless the environment sets their number | - | 2 | - |
| log-probs at another temperature than 1 with top_p | - | 1 | - |
| evaluation alone, of a checkpoint from an argument | - | 1 | - |
| token rewards from a teacher without old log-probs | 1 | - | - |
| weights of the correction with mean 1 in a loss without old log-probs | 1 | - | 1 |
| a vision tower that is not trained | - | - | 1 |
| training of adapters from a file | - | - | 1 |
| experts that drop tokens above a capacity | - | 1 | - |
| two KL terms | 1 | - | - |
| fewer prompts than a step has | 1 | - | - |
| an argument that hydra refuses | - | - | 1 |

A value that a script lacks can be given after the file.

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

[algorithms.md](algorithms.md#where-megarl-differs-from-others) lists names that compute something else. Three differences apply to
every run:

- Prompts are never truncated.
- A sample has no reward if its scorer fails; in verl the exception ends the run.
- Each step trains on `data.prompts_per_step` groups: a dropped group is replaced.

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
