"""Compare converted recipes with the configuration that verl composes for the same scripts.

    git clone https://github.com/verl-project/verl
    python -m venv hydra && hydra/bin/pip install hydra-core      # it needs an older omegaconf than megarl
    python -m benchmarks.verl_parity --hydra hydra/bin/python verl verl/examples/**/*.sh

hydra composes a script's options with verl's own YAML files, so that defaults which no script names count. Every setting is
compared. The expected value is the composed one, converted by the table (`megarl/commands/convert_verl/table.py`), or the result
of a second formula for settings that the converter derives from several options. A difference is silent unless a note of the conversion is about the option or the setting.
Exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.agents.custom.verl_loops import verl_settings
from megarl.commands.convert_verl.command import convert
from megarl.commands.convert_verl.fully_async import FULLY_ASYNC
from megarl.commands.convert_verl.hydra.config_files import ConfigFile, read_config
from megarl.commands.convert_verl.hydra.overrides import read_options
from megarl.commands.convert_verl.inputs import SGLANG
from megarl.commands.convert_verl.open_settings import stand_ins
from megarl.commands.convert_verl.option import Option
from megarl.commands.convert_verl.shell.parser import read_command
from megarl.commands.convert_verl.shell.values import ScriptContext, without_absent
from megarl.commands.convert_verl.table import RL, TRAINER
from megarl.errors import InputError
from megarl.preflight.load import load_recipe
from megarl.recipe.load import OPEN
from megarl.recipe.schema import Recipe
from megarl.recipe.text import flat_settings, settings_of

_CONFIGS = {
    "verl.trainer.main_ppo": ("verl/trainer/config", "ppo_trainer"),
    "verl.trainer.main_ppo_sync": ("verl/trainer/config", "ppo_trainer"),
    "verl.experimental.one_step_off_policy.main_ppo": (
        "verl/experimental/one_step_off_policy/config",
        "one_step_off_ppo_trainer",
    ),
    "verl.experimental.fully_async_policy.fully_async_main": (
        "verl/experimental/fully_async_policy/config",
        "fully_async_ppo_trainer",
    ),
}
"""Folder and name of an entry point's configuration."""
_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MULTI_TURN = f"{_R}.multi_turn."
_DISTILLATION = "distillation.distillation_loss"
_MISSING = "<missing>"
_MODE = "trainer.v1.trainer_mode"
_SYNC = "async_training.trigger_parameter_sync_step"
_SWITCHES = {
    f"{_R}.multi_turn.enable": [f"{_R}.multi_turn.*"],
    "algorithm.filter_groups.enable": ["algorithm.filter_groups.*"],
    f"{_R}.val_kwargs.do_sample": [f"{_R}.val_kwargs.top_p", f"{_R}.val_kwargs.n"],
    "algorithm.rollout_correction.rollout_is": ["algorithm.rollout_correction.rollout_is_*"],
}
"""Options that verl reads only if a switch is on, by the switch."""
_SUBJECT = re.compile(r"(?:line \d+: |\S+\.ya?ml: )?([\w.@*-]+)(?:=| \()")
_VLLM = tuple(f"{_R}.{name}" for name in SGLANG)
_OPEN = (
    "data.chat_template_args",
    "megatron.extra",
    "megatron.ddp",
    "critic.megatron.ddp",
    "rollout.engine_args",
    "reward.arguments",
)
_OF_THE_MACHINE = (
    "cluster.timeout", "cluster.device", "weight_sync.bucket_mb", "observe.project", "megatron.extra.attention_backend",
    "critic.megatron.extra.attention_backend",
    "rollout.engine_args.enable_prefix_caching", "rollout.engine_args.enable_chunked_prefill", "rollout.engine_args.enforce_eager",
    "rollout.engine_args.disable_cuda_graph",
)  # fmt: skip
"""Settings of speed and place: verl's defaults do not count (the last three are also vLLM's), only what a script says."""


@dataclass(frozen=True)
class Difference:
    """A setting of the recipe that differs from its expected value. `note`: the converter's note about it, or ""."""

    option: str
    verl: Any
    key: str
    expected: Any
    recipe: Any
    note: str


_COMPOSE = """
import json, sys
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

folder, name, *overrides = sys.argv[1:]
with initialize_config_dir(folder, version_base=None):
    config = compose(name, overrides=overrides)

def value_at(option):
    try:
        value = OmegaConf.select(config, option)
    except Exception:  # resolvers that verl registers, and mandatory values
        return "<missing>"
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

def flatten(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, prefix + str(name) + ".")
        else:
            yield prefix + str(name), value

flat = dict(flatten(OmegaConf.to_container(config, resolve=False)))
print(json.dumps({key: value_at(key) if isinstance(value, str) and "${" in value else value for key, value in flat.items()}))
"""


def composed(hydra: str, verl: Path, trainer: str, config: ConfigFile, overrides: list[str]) -> dict[str, Any]:
    """Return verl's configuration of a run by dotted option. `hydra`: a Python with hydra-core. Raises ValueError."""
    folder, name = _CONFIGS[trainer]
    place = config.file.parent if config.file else verl / folder
    name = config.file.stem if config.file else config.base or name
    search = f"hydra.searchpath=[file://{(verl / 'verl/trainer/config').resolve()}]"
    command = [hydra, "-c", _COMPOSE, str(place.resolve()), name, *overrides, search]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
        raise ValueError(next((line for line in lines if "Error" in line or "Exception" in line), lines[-1]))
    flat: dict[str, Any] = json.loads(done.stdout)
    return flat


def unused(options: Mapping[str, Any]) -> list[str]:
    """Return patterns of options that verl does not read in this run (verl/trainer/ppo/core_algos.py, ray_trainer.py)."""
    loss = options.get(f"{_A}.policy_loss.loss_mode", "vanilla")
    patterns = [f"{_A}.policy_loss.{mode}*" for mode in ("clip_cov", "kl_cov") if mode != loss]
    patterns += [] if loss == "kl_cov" else [f"{_A}.policy_loss.ppo_kl_coef"]
    patterns += [] if loss == "vanilla" else [f"{_A}.clip_ratio_c"]
    patterns += [f"{_A}.loss_agg_mode"] if loss in ("gspo", "sapo", "geo_mean") else []
    patterns += [] if loss == "sapo" else [f"{_A}.tau_*"]
    patterns += [f"{_A}.clip_ratio_*"] if loss in ("gpg", "sapo", "kl_cov", "dro") else []
    if options.get("algorithm.adv_estimator") != "gae":
        patterns += ["critic.*", "trainer.critic_warmup", "algorithm.lam"]
    if options.get("distillation.enabled") and not options.get(f"{_DISTILLATION}.use_task_rewards"):
        patterns += ["algorithm.adv_estimator", f"{_A}.policy_loss.*", f"{_A}.clip_ratio_*"]
    if not options.get(f"{_R}.multi_turn.tool_config_path"):
        patterns += [f"{_R}.multi_turn.max_parallel_calls"]
    if (options.get(f"{_R}.multi_turn.max_user_turns") or math.inf) < (
        options.get(f"{_R}.multi_turn.max_assistant_turns") or 0
    ):
        patterns += [f"{_R}.multi_turn.max_assistant_turns"]  # the other limit is reached first
    for switch, names in _SWITCHES.items():
        if options.get(switch) in (None, False, 0):
            patterns += names
    if options.get(f"{_A}.router_replay.mode") == "disabled":
        patterns += [f"{_A}.router_replay.mode"]  # verl reads the engine's, if it has one
    if options.get("data.custom_cls.path"):
        patterns += ["data.train_files", "data.val_files"]  # the class reads them, before the run
    if not (options.get("trainer.val_before_train") or (options.get("trainer.test_freq") or -1) > 0):
        patterns += [f"{_R}.val_kwargs.*", "data.val_files"]
    if options.get(f"{_A}.strategy") == "megatron":
        patterns += ["*.model.enable_gradient_checkpointing", f"{_A}.grad_clip", "critic.grad_clip"]
    return patterns


def copied(options: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Iterate over (option, key, expected value) of the options that the table copies under another name or value."""
    left_out, table = unused(options), [*(FULLY_ASYNC if _SYNC in options else []), *RL, *TRAINER]
    for name, value in options.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in left_out):
            continue
        row = next((row for row in table if fnmatch.fnmatchcase(name, row.verl)), None)
        if row is None or row.to is None or row.derived or value in (None, _MISSING, ""):
            continue
        key = _key(row, name)
        if options.get(f"{_R}.name") == "sglang":
            key = f"rollout.engine_args.{SGLANG.get(key.rpartition('.')[2], '')}" if name.startswith(_VLLM) else key
        if not key.endswith("."):
            yield name, key, row.names.get(value, _MISSING) if row.names else value


def _key(row: Option, name: str) -> str:
    assert row.to is not None
    return row.to[:-1] + name[len(row.verl) - 1 :] if row.to.endswith(".*") else row.to


def derived(options: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Iterate over (option, key, expected value) of settings that follow from several options."""
    get = options.get
    devices = options["trainer.nnodes"] * options["trainer.n_gpus_per_node"]
    prompts, mini, syncs = _batch(options), options[f"{_A}.ppo_mini_batch_size"], get(_SYNC, 1)
    longest = options["data.max_prompt_length"] + options["data.max_response_length"]
    megatron = get(f"{_A}.strategy") == "megatron"
    yield "trainer.nnodes", "cluster.trainers", devices
    yield f"{_A}.ppo_mini_batch_size", "actor.mini_batches", max(prompts // mini, 1)
    sequence = 1 if megatron else get(f"{_A}.ulysses_sequence_parallel_size") or 1
    micro = get(f"{_A}.ppo_micro_batch_size_per_gpu")
    if get(f"{_A}.use_dynamic_bsz") or not micro:
        tokens = options[f"{_A}.ppo_max_token_len_per_gpu"] * sequence
    else:
        context = get(f"{_A}.megatron.context_parallel_size") or 1 if megatron else 1
        tokens = -(-micro * longest // context)
    yield f"{_A}.ppo_max_token_len_per_gpu", "actor.max_tokens_per_micro_batch", tokens
    rank = get("actor_rollout_ref.model.lora.rank") if megatron else get("actor_rollout_ref.model.lora_rank")
    yield "actor_rollout_ref.model.lora_rank", "lora.rank", rank or 0
    if rank:
        alpha = get("actor_rollout_ref.model.lora.alpha") if megatron else get("actor_rollout_ref.model.lora_alpha")
        yield "actor_rollout_ref.model.lora_alpha", "lora.alpha", alpha
    if not megatron:
        yield f"{_A}.ulysses_sequence_parallel_size", "megatron.tensor_parallel", sequence
    in_loss, in_reward = get(f"{_A}.use_kl_loss"), get("algorithm.use_kl_in_reward")
    coefficient = get(f"{_A}.kl_loss_coef") if in_loss else get("algorithm.kl_ctrl.kl_coef") if in_reward else 0
    if get("distillation.enabled"):
        by_gradient = get(f"{_DISTILLATION}.use_policy_gradient")
        in_reward = by_gradient
        coefficient = 1.0 if by_gradient else 0
        if get(f"{_DISTILLATION}.use_task_rewards"):
            coefficient = get(f"{_DISTILLATION}.distillation_loss_coef")
    yield f"{_A}.use_kl_loss", "algorithm.kl_coef", coefficient
    yield "algorithm.use_kl_in_reward", "algorithm.kl_in_reward", bool(in_reward and coefficient)
    size = options[f"{_R}.tensor_model_parallel_size"]
    yield f"{_R}.tensor_model_parallel_size", "rollout.tensor_parallel", size
    separate = get(_MODE) == "separate_async"
    if separate:
        engines = options[f"{_R}.nnodes"] * options[f"{_R}.n_gpus_per_node"]
        yield f"{_R}.nnodes", "rollout.engines", engines // size
        yield _MODE, "cluster.placement", "disaggregated"
    elif "one_step_off" not in str(get("trainer.project_name")) and "rollout.nnodes" not in options:
        yield f"{_R}.tensor_model_parallel_size", "rollout.engines", devices // size
    if get(f"{_A}.policy_loss.loss_mode") in ("dppo_tv", "dppo_kl"):
        yield f"{_A}.clip_ratio_c", "algorithm.ratio_cap", get(f"{_A}.clip_ratio_c")
    warmup = get(f"{_A}.optim.lr_warmup_steps") or -1
    if warmup > 0:
        syncs = options[f"trainer.v1.{get(_MODE)}.parameter_sync_step"] if separate else syncs
        updates = max(prompts // mini, 1) // syncs * options[f"{_A}.ppo_epochs"]
        yield f"{_A}.optim.lr_warmup_steps", "actor.optimizer.warmup_steps", warmup * updates
    if _SYNC in options:
        yield from _asynchronous(options, prompts)
    yield "trainer.save_freq", "train.save_every", max(get("trainer.save_freq") or 0, 0)
    if get("algorithm.adv_estimator") == "gae":
        yield "critic.ppo_epochs", "critic.epochs", get("critic.ppo_epochs")


def _batch(options: Mapping[str, Any]) -> int:
    """Return the prompts of a step. In fully asynchronous runs a step lasts until the engines receive weights."""
    if _SYNC not in options:
        return int(options["data.train_batch_size"])
    return int(options[f"{_A}.ppo_mini_batch_size"] * options["async_training.require_batches"] * options[_SYNC])


def _asynchronous(options: Mapping[str, Any], prompts: int) -> Iterator[tuple[str, str, Any]]:
    engines = options["rollout.nnodes"] * options["rollout.n_gpus_per_node"]
    yield _SYNC, "data.prompts_per_step", prompts
    yield "rollout.nnodes", "rollout.engines", engines // options[f"{_R}.tensor_model_parallel_size"]
    yield "rollout.nnodes", "cluster.placement", "disaggregated"
    yield "rollout.total_rollout_steps", "train.steps", options["rollout.total_rollout_steps"] // prompts
    if options["async_training.staleness_threshold"]:
        rule = "refresh" if options["async_training.partial_rollout"] else "drain"
        yield "async_training.partial_rollout", "rollout.at_update", rule


def differences(
    options: Mapping[str, Any], script_options: Collection[str], recipe: Mapping[str, Any], notes: list[str]
) -> Iterator[Difference]:
    """Iterate over settings that differ from their expected value.

    given: the options of the script. recipe: settings by dotted key.
    """
    for option, key, expected in [*copied(options), *derived(options)]:
        names = key.split(", ")
        if key in _OF_THE_MACHINE and option not in script_options:
            continue
        values = [_value(recipe, name) for name in names]
        if option.startswith(_MULTI_TURN) and recipe.get(
            "agent.loop"
        ):  # the loop reads verl's options, and counts turns itself
            defaults = verl_settings(Recipe())["actor_rollout_ref"]["rollout"]["multi_turn"]
            values = [recipe["agent.loop_arguments"].get(option, defaults.get(option.removeprefix(_MULTI_TURN)))]
        if any(_same(expected, value) for value in values):
            continue
        about = {match[1]: note for note in notes if (match := _SUBJECT.match(note))}
        note = next((about[name] for name in (option, *names) if name in about), "")
        yield Difference(option, options.get(option), key, expected, values[0], note)


def _value(recipe: Mapping[str, Any], key: str) -> Any:
    if key == "rollout.dtype":
        return recipe[key] or recipe["model.dtype"]
    if key.startswith("data.columns."):
        return recipe["data.columns"].get(key.rpartition(".")[2], key.rpartition(".")[2])
    section = next((name for name in _OPEN if key.startswith(f"{name}.")), None)
    if section is None:
        return recipe.get(key, _MISSING)
    value: Any = recipe[section]
    for name in key.removeprefix(f"{section}.").split("."):
        value = value.get(name, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def _same(expected: Any, value: Any) -> bool:
    if isinstance(expected, (int, float)) and isinstance(value, (int, float)):
        return float(expected) == float(value)
    if isinstance(value, list) and not isinstance(expected, list):
        return [str(expected)] == [str(each) for each in value]
    return bool(expected == value or str(expected) == str(value))


def parity(hydra: str, verl: Path, script: Path) -> list[Difference] | str:
    """Return the differences of a script's recipe; text if it cannot be converted or composed."""
    text, context = script.read_text(errors="replace"), ScriptContext(str(script))
    try:
        converted = convert(text, source=script.name, context=context)
        command = read_command(text, {"HOME": str(Path.home())}, context)
    except InputError as error:
        return f"refused: {str(error).splitlines()[0]}"
    if command.trainer not in _CONFIGS:
        return f"no configuration of {command.trainer}"
    words = [without_absent(argument.text) for argument in command.arguments]
    flags = read_options(command.arguments)[1]
    values = {flags.name, flags.path, flags.folder}
    overrides = [word for word in words if not word.startswith("-") and word not in values]
    try:
        options = composed(hydra, verl, command.trainer, read_config(flags, command, context), overrides)
    except ValueError as error:  # an option that verl no longer has
        return f"verl refuses it: {error}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(converted.text)
        flat = flat_settings(converted.text)
        stand_in = stand_ins(
            {**flat, **{f"reward.arguments.{name}": value for name, value in flat.get("reward.arguments", {}).items()}}
        )
        recipe = settings_of(load_recipe(path, [f"{key}={value}" for key, value in stand_in.items()]))
    recipe |= dict.fromkeys(stand_in, OPEN)
    script_options = {word.lstrip("+").partition("=")[0] for word in words}
    return list(differences(options, script_options, recipe, converted.notes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hydra", default=sys.executable, help="a Python with hydra-core")
    parser.add_argument("verl", type=Path, help="a checkout of verl")
    parser.add_argument("scripts", type=Path, nargs="+")
    arguments = parser.parse_args()
    silent, compared = 0, 0
    for script in arguments.scripts:
        result = parity(arguments.hydra, arguments.verl, script)
        if isinstance(result, str):
            print(f"{script}: {result}")
            continue
        compared += 1
        for each in result:
            silent += not each.note
            kind = "noted" if each.note else "SILENT"
            print(f"{script}: {kind} {each.option}={each.verl}: {each.key} is {each.recipe}, not {each.expected}")
    print(f"{compared} of {len(arguments.scripts)} scripts compared, {silent} silent differences")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
