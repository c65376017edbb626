"""Launch scripts in the shapes that people write convert as they stand: what decides is carried, and the rest has a note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl import load_recipe
from megarl.commands.convert_verl.command import Converted, convert
from megarl.commands.convert_verl.shell.values import ScriptContext
from megarl.errors import InputError, RecipeError

MACHINE = ScriptContext(script="scripts/run.sh", folder="/home/me/verl")
DATA = "data.train_files=a.parquet actor_rollout_ref.model.path=/models/m"
PPO = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {DATA} actor_rollout_ref.rollout.n=4"
ONE = f"python3 -m verl.trainer.main_ppo {DATA}"
SFT = "torchrun --nproc_per_node=$1 -m verl.trainer.sft_trainer data.train_files=a.parquet model.path=/models/m"
ASYNC = (
    f"python3 -m verl.experimental.fully_async_policy.fully_async_main algorithm.adv_estimator=grpo {DATA} "
    "actor_rollout_ref.rollout.n=4 data.train_batch_size=0 actor_rollout_ref.actor.ppo_mini_batch_size=8 "
    "rollout.total_rollout_steps=512"
)
ACTOR = "actor_rollout_ref.actor"
REWARD = "pkg://recipe.entropy.reward_score"

# name -> script, and the settings that the recipe must have
CARRIED: dict[str, tuple[str, dict[str, Any]]] = {
    "a model from the environment": (
        f"{PPO.replace('/models/m', '$MODEL_ROOT/qwen')}",
        {"model.path": "???"},
    ),
    "a model that the script requires": (
        f"M=${{MODEL:?set MODEL}}\n{PPO.replace('/models/m', '$M')}",
        {"model.path": "???"},
    ),
    "files below a folder from the environment": (
        PPO.replace("a.parquet", "\"['$ROOT/a.parquet', '$ROOT/b.parquet']\""),
        {"data.train_files": "???"},
    ),
    "no files yet": (f"FILE=''\n{PPO.replace('a.parquet', '$FILE')}", {"data.train_files": "???"}),
    "a folder as data": (PPO.replace("a.parquet", "/data/math"), {"data.train_files": "???"}),
    "an array with an open model": (
        f'ROOT=$HOME_OF_MODELS\nMODEL=(actor_rollout_ref.model.path="$ROOT/m")\n{PPO} "${{MODEL[@]}}"',
        {"model.path": "???"},
    ),
    "a log folder from the environment": (
        f"{PPO} trainer.default_local_dir=$CKPTS/run",
        {"model.path": "/models/m"},
    ),
    "a name with an unset part": (f"{PPO} trainer.experiment_name=grpo_$BACKEND", {"name": "grpo"}),
    "nodes of the scheduler": (
        f"{PPO} trainer.nnodes=$SLURM_JOB_NUM_NODES trainer.n_gpus_per_node=8",
        {"cluster.trainers": "???", "rollout.engines": "???"},
    ),
    "a test of a variable of the environment": (
        f'N=4\nif [ "$DEBUG" = 1 ]; then N=2; fi\n{PPO} actor_rollout_ref.rollout.n=$N',
        {"rollout.samples_per_prompt": 4},
    ),
    "supervised with arguments": (SFT, {"cluster.trainers": "???"}),
    "supervised with checked arguments": (
        f'set -e\nif [ "$#" -lt 2 ]; then echo usage; exit 1; fi\nN=$1\nOUT=$2\nshift 2\n'
        f'{SFT.replace("$1", "$N")} trainer.default_local_dir=$OUT "$@"',
        {"cluster.trainers": "???"},
    ),
    "the arguments after the first": (f'{PPO} "${{@:2}}"', {"rollout.samples_per_prompt": 4}),
    "items of an array": (
        f'A=(x {ACTOR}.ppo_epochs=2 data.seed=7 y)\n{PPO} "${{A[@]:1:2}}"',
        {"actor.epochs": 2, "train.seed": 7},
    ),
    "a conda environment": (f'eval "$(conda shell.bash hook)"\nconda activate verl\n{PPO}', {"algorithm.loss": None}),
    "the synchronous trainer": (PPO.replace("main_ppo", "main_ppo_sync"), {"rollout.samples_per_prompt": 4}),
    "covariance clipping": (
        f"{PPO.replace('verl.trainer.main_ppo', 'recipe.entropy.main_entropy')} {ACTOR}.policy_loss.loss_mode=clip_cov",
        {"algorithm.loss": "clip_cov", "reward.function": f"{REWARD[6:]}:_default_compute_score"},
    ),
    "a scorer of one's own with main_entropy": (
        f"{PPO.replace('verl.trainer.main_ppo', 'recipe.entropy.main_entropy')} custom_reward_function.path=mine.py "
        "custom_reward_function.name=score",
        {"reward.function": "mine.py:score"},
    ),
    "the loss named twice": (
        f"{PPO} {ACTOR}.loss_mode=gspo {ACTOR}.policy_loss.loss_mode=kl_cov",
        {"algorithm.loss": "kl_cov"},
    ),
    "one sample with grpo": (
        f"{ONE} algorithm.adv_estimator=grpo",
        {"algorithm.advantage": "reinforce_plus_plus", "algorithm.whiten_advantages": False},
    ),
    "one sample with rloo": (
        f"{ONE} algorithm.adv_estimator=rloo",
        {"algorithm.advantage": "reinforce_plus_plus", "algorithm.whiten_advantages": False},
    ),
    "a micro batch of all devices": (
        f"{PPO} {ACTOR}.ppo_micro_batch_size=16 trainer.n_gpus_per_node=8",
        {"actor.max_tokens_per_micro_batch": 2 * 1024},
    ),
    "a micro batch of all data-parallel ranks": (
        f"{PPO} model_engine=megatron {ACTOR}.ppo_micro_batch_size=16 {ACTOR}.megatron.tensor_model_parallel_size=4",
        {"actor.max_tokens_per_micro_batch": 8 * 1024},
    ),
    "taus of sapo that nothing reads": (
        f"{PPO} {ACTOR}.policy_loss.loss_mode=sapo {ACTOR}.policy_loss.tau_pos=3.0",
        {"algorithm.loss": "sapo", "algorithm.tau_positive": None},
    ),
    "replayed routes of older versions": (
        f"{PPO} {ACTOR}.router_replay.mode=R2",
        {"megatron.routing_replay": "old_log_probs"},
    ),
    "a seed of Megatron": (f"{PPO} {ACTOR}.megatron.seed=7", {"train.seed": None}),
    "padding of micro batches": (f"{PPO} {ACTOR}.pad_to_length=True", {"rollout.samples_per_prompt": 4}),
    "arguments of the chat template": (
        f"{PPO} +data.apply_chat_template_kwargs.enable_thinking=False",
        {"data.chat_template_args.enable_thinking": False},
    ),
    "betas in quotes": (
        f"O=\"optim.betas='[0.9,0.95]'\"\n{SFT} $O",
        {"actor.optimizer.betas": [0.9, 0.95]},
    ),
    "an evaluation after each epoch": (
        f"{SFT} data.val_files=b.parquet trainer.test_freq=after_each_epoch",
        {"evaluation.at_end": True},
    ),
    "no evaluation": (f"{PPO} trainer.test_freq=False trainer.val_before_train=False", {"evaluation.every": None}),
    "adapters of the language model": (
        f"{PPO} actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.exclude_modules='.*visual.*'",
        {"lora.rank": 8},
    ),
    "log-probs of the engines": (f"{ASYNC} async_training.use_rollout_log_probs=True", {"algorithm.old_log_probs": "rollout"}),
    "log-probs of the trainer": (
        f"{ASYNC} async_training.use_rollout_log_probs=True async_training.compute_prox_log_prob=True",
        {"algorithm.old_log_probs": None},
    ),
}  # fmt: skip

# name -> script, and what the error says
REFUSED = {
    "a number from the environment": (f"{PPO} {ACTOR}.ppo_mini_batch_size=$MINI", "does not set $MINI: add MINI=VALUE"),
    "a switch from the environment": (f"{PPO} {ACTOR}.use_kl_loss=$KL", "does not set $KL: add KL=VALUE"),
    "an engine from the environment": (f"{PPO} model_engine=$ENGINE", "does not set $ENGINE"),
    "a number in a sum": (f"L=$((1024 * FACTOR))\n{PPO} data.max_response_length=$L", "$FACTOR"),
    "a branch on a variable with set -u": (
        f'set -u\nN=4\nif [ "$MODE" = x ]; then N=2; fi\n{PPO} actor_rollout_ref.rollout.n=$N',
        "does not set $MODE",
    ),
    "a branch on an open value": (
        f'M=$MODE\nN=4\nif [ "$M" = x ]; then N=2; fi\n{PPO} actor_rollout_ref.rollout.n=$N',
        "does not set $MODE",
    ),
    "words of an unknown number": (f"{PPO} $EXTRA", "$EXTRA"),
    "a folder of an open path": (f"D=$(dirname $X)\n{PPO.replace('/models/m', '$D/m')}", "$(dirname $X)"),
    "a loop over an open value": (f"for f in $LIST; do N=2; done\n{PPO} actor_rollout_ref.rollout.n=$N", "$LIST"),
    "old log-probs of neither": (f"{ASYNC} async_training.use_rollout_log_probs=False", "use_rollout_log_probs"),
    "the loss in the older place alone": (f"{PPO} {ACTOR}.loss_mode=kl_cov", f"{ACTOR}.loss_mode=kl_cov"),
    "adapters elsewhere": (
        f"{PPO} actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.exclude_modules='.*mlp.*'",
        "exclude_modules",
    ),
    "another trainer": (PPO.replace("verl.trainer.main_ppo", "recipe.prime.main_prime"), "no training command"),
}  # fmt: skip


def converted(script: str, *arguments: str) -> Converted:
    return convert(script, ["HOME=/h", *arguments], context=MACHINE)


def value(content: Any, key: str) -> Any:
    """Return the value at a dotted key of nested mappings, or None."""
    for name in key.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    return content


@pytest.mark.parametrize("name", CARRIED)
def test_a_script_converts_as_it_stands(name: str) -> None:
    script, expected = CARRIED[name]
    content = yaml.safe_load(converted(script).text)
    assert {key: value(content, key) for key in expected} == expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_decides_is_asked_for(name: str) -> None:
    script, words = REFUSED[name]
    with pytest.raises(InputError) as caught:
        converted(script)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", CARRIED)
def test_no_private_character_reaches_a_recipe(name: str) -> None:
    text = converted(CARRIED[name][0]).text
    assert "\ue000" not in text and "ue000" not in text


class TestOpenSettings:
    SCRIPT = PPO.replace("/models/m", "$MODEL_ROOT/qwen")

    def test_the_first_note_says_what_to_give(self) -> None:
        done = converted(self.SCRIPT)
        note = "model.path=???: set it before the run; the script leaves it open: actor_rollout_ref.model.path=$MODEL_ROOT/qwen"
        assert done.notes[0] == note and done.text.splitlines()[1] == f"#   {note}"

    def test_a_recipe_with_one_is_refused_until_it_has_a_value(self, tmp_path: Path) -> None:
        path = tmp_path / "recipe.yaml"
        path.write_text(converted(self.SCRIPT).text)
        with pytest.raises(RecipeError, match="leaves this value open") as caught:
            load_recipe(path)
        assert caught.value.key == "model.path" and "add model.path=VALUE" in str(caught.value)
        assert load_recipe(path, ["model.path=/models/q"]).model.path == "/models/q"

    def test_the_variable_or_the_setting_closes_it(self) -> None:
        for argument in ("MODEL_ROOT=/models", "model.path=/models/qwen"):
            done = converted(self.SCRIPT, argument)
            assert "path: /models/qwen" in done.text and "???" not in done.text

    def test_the_rest_of_the_recipe_is_checked(self) -> None:
        with pytest.raises(InputError, match="invalid recipe"):
            converted(f"{self.SCRIPT} actor_rollout_ref.rollout.temperature=-1")


def test_epochs_of_a_known_length_set_the_interval() -> None:
    script = f"{SFT} data.train_batch_size=16 data.val_files=b.parquet trainer.test_freq=after_each_epoch"
    content = yaml.safe_load(convert(script, ["1=2"], rows=64).text)
    assert content["evaluation"]["every"] == 4
