"""A verl script becomes a recipe with the same meaning, or an error that names the unknown part."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generate.from_verl import PAGE, document
from megarl import load_recipe
from megarl.cli import app
from megarl.commands.convert_verl.command import convert
from megarl.commands.convert_verl.conversion import value_of
from megarl.commands.convert_verl.parser import read_command
from megarl.commands.convert_verl.table import RL, SFT, TRAINER, Option
from megarl.errors import InputError
from megarl.exit_status import guarded
from megarl.preflight.recipe.data import COLUMNS
from megarl.recipe.load import flat_settings, to_yaml
from megarl.recipe.schema import Recipe

ROOT = Path(__file__).parents[3]
SCRIPT = (ROOT / "tests" / "fixtures" / "verl" / "dapo_megatron.sh").read_text()
# The documents that verl publishes for Ascend, with scripts in them.
DOCUMENTS = Path(os.environ.get("MEGARL_VERL_DOCS", "verl-documents-are-not-here"))
GRPO = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=m data.train_files=a.parquet actor_rollout_ref.rollout.n=2"
VALUES = ["1=run-7", "HOME=/h"]


def settings(text: str, *overrides: str, rows: int | None = None) -> dict[str, Any]:
    """Settings of the converted recipe, by dotted key."""
    flat: dict[str, Any] = {}

    def walk(content: dict[str, Any], prefix: str) -> None:
        for name, value in content.items():
            walk(value, f"{prefix}{name}.") if isinstance(value, dict) else flat.update({f"{prefix}{name}": value})

    walk(yaml.safe_load(convert(text, overrides, rows=rows).text), "")
    return flat


SFT_RUN = "torchrun --nproc-per-node=2 -m verl.trainer.{} model.path=m data.train_files=a.parquet trainer.total_training_steps=1"


@pytest.mark.parametrize(
    ("trainer", "options", "columns"),
    [
        ("fsdp_sft_trainer", "", {"prompt": "question", "response": "answer"}),
        ("fsdp_sft_trainer", "data.prompt_key=prompt data.response_key=response", {}),
        (
            "fsdp_sft_trainer",
            "data.prompt_key=extra_info data.response_key=extra_info +data.prompt_dict_keys=['question'] "
            "+data.response_dict_keys=['answer']",
            {"prompt": "extra_info.question", "response": "extra_info.answer"},
        ),
        ("fsdp_sft_trainer", "data.multiturn.enable=true data.multiturn.messages_key=turns", {"messages": "turns"}),
        ("sft_trainer", "data.messages_key=prompt", {"messages": "prompt"}),
        ("sft_trainer", "data.messages_key=messages data.tools_key=functions", {"tools": "functions"}),
    ],
)
def test_columns_of_demonstrations(trainer: str, options: str, columns: dict[str, str]) -> None:
    converted = settings(f"{SFT_RUN.format(trainer)} {options}")
    assert {key: value for key, value in converted.items() if key.startswith("data.columns")} == {
        f"data.columns.{name}": column for name, column in columns.items()
    }


def test_columns_of_prompts() -> None:
    same = settings(f"{GRPO} data.prompt_key=prompt data.image_key=images data.reward_fn_key=data_source")
    assert not [key for key in same if key.startswith("data.columns")]
    other = settings(f"{GRPO} data.prompt_key=question data.reward_fn_key=source")
    assert (other["data.columns.prompt"], other["data.columns.data_source"]) == ("question", "source")


@pytest.mark.parametrize("prefix", ["", "reward."])
def test_a_reward_function_with_its_arguments(prefix: str) -> None:
    options = f"{prefix}custom_reward_function.path=rewards/mine.py {prefix}custom_reward_function.name=score_it"
    arguments = f"+{prefix}custom_reward_function.reward_kwargs.strict=True"
    converted = settings(f"{GRPO} {options} {arguments}")
    assert converted["reward.function"] == "rewards/mine.py:score_it"
    assert converted["reward.arguments.strict"] is True
    default = settings(f"{GRPO} {prefix}custom_reward_function.path=pkg://my.rewards")
    assert default["reward.function"] == "my.rewards:compute_score"
    more = [
        f"+{prefix}custom_reward_function.reward_kwargs.{pair}"
        for pair in ("none=null", "empty=", "on=on", "time=12:30")
    ]
    assert settings(f"{GRPO} {options} {' '.join(more)}", rows=9999) == settings(f"{GRPO} {options}", rows=9999) | {
        "reward.arguments.none": None,
        "reward.arguments.empty": "",
        "reward.arguments.on": "on",
        "reward.arguments.time": "12:30",
    }
    mapping = f"+{prefix}custom_reward_function.reward_kwargs='{{a: 1, b: {{c: x}}}}'"
    assert settings(f"{GRPO} {options} {mapping}")["reward.arguments.b.c"] == "x"
    for wrong in ("hdfs://x/r.py", "rewards/mine"):
        with pytest.raises(InputError, match="nor pkg://"):
            settings(f"{GRPO} {prefix}custom_reward_function.path={wrong}")
    package = settings(f"{GRPO} {prefix}custom_reward_function.path=pkg://my/rewards")
    assert package["reward.function"] == "my.rewards:compute_score"
    unused = convert(f"{GRPO} {arguments}", [])
    assert "reward:" not in unused.text and "custom_reward_function.path" in "".join(unused.notes)
    with pytest.raises(InputError, match=r"rewards/mine is neither a \.py file nor pkg://"):
        settings(f"{GRPO} {prefix}custom_reward_function.path=rewards/mine")


@pytest.mark.parametrize(
    "option",
    [
        "reward_model.reward_manager=batch",
        "reward.reward_manager.name=collabllm",
        "reward.reward_manager.source=importlib",
        "data.custom_cls.path=my/dataset.py",
        "reward_model.reward_loop_class_name=Mine",
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        "actor_rollout_ref.rollout.multi_turn.interaction_config_path=a.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop=my_agent",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=a.yaml",
    ],
)
def test_what_scores_or_reads_otherwise_is_refused_unless_accepted(option: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(InputError, match=f"--accept {name}"):
        convert(f"{GRPO} {option}", [])
    accepted = convert(f"{GRPO} {option}", [], accepted=[name])
    assert any(option in note for note in accepted.notes)
    for harmless in (
        "reward_model.reward_manager=dapo",
        "reward.reward_manager.name=null",
        "data.custom_cls.path=null",
    ):
        assert not any(harmless.partition("=")[0] in note for note in convert(f"{GRPO} {harmless}", []).notes)


def test_all_refused_options_are_listed_with_one_line_to_accept_them() -> None:
    options = ["data.custom_cls.path=a.py", "reward_model.reward_manager=batch"]
    with pytest.raises(InputError) as refused:
        convert(f"{GRPO} {' '.join(options)}", [])
    *reasons, last = str(refused.value).splitlines()
    assert len(reasons) == 2 and last == "--accept data.custom_cls.path --accept reward_model.reward_manager"
    with pytest.raises(InputError, match=r"no such option; did you mean 'data\.custom_cls\.path'"):
        convert(f"{GRPO} {options[0]}", [], accepted=["data.custom_cl.path"])


def test_a_variable_that_the_script_lacks_is_refused() -> None:
    script = f"export MODEL_PATH=m\nexport HCCL_TIMEOUT=60\n{GRPO.replace('path=m', 'path=$MODEL_PATH')}\n"
    with pytest.raises(InputError, match=r"MODEL_PTH.*did you mean 'MODEL_PATH'"):
        convert(script, ["MODEL_PTH=x"])
    converted = convert(script, ["MODEL_PATH=x"])
    assert yaml.safe_load(converted.text)["model"]["path"] == "x"
    (exported,) = [note for note in converted.notes if "cluster.environment.all" in note]
    assert exported.endswith(": HCCL_TIMEOUT"), "the command uses MODEL_PATH"


def test_too_few_rows_for_a_step_are_refused() -> None:
    with pytest.raises(InputError, match="--rows 20: a step has 1024 prompts"):
        convert(GRPO, rows=20)


def test_validation_samples_at_its_temperature() -> None:
    """verl's agent loop reads val_kwargs.temperature, and not do_sample."""
    values = "actor_rollout_ref.rollout.val_kwargs."
    sampled = settings(f"{GRPO} data.val_files=b.parquet trainer.test_freq=5 {values}temperature=1.0 {values}n=30")
    assert sampled["evaluation.samples"] == 30 and sampled.get("evaluation.temperature", 1.0) == 1.0
    greedy = settings(f"{GRPO} data.val_files=b.parquet trainer.test_freq=5 {values}do_sample=True")
    assert greedy["evaluation.temperature"] == 0.0


def test_sglang_has_arguments_of_its_own() -> None:
    rollout = "actor_rollout_ref.rollout."
    command = f"{GRPO} {rollout}name=sglang {rollout}gpu_memory_utilization=0.6 {rollout}enable_prefix_caching=True"
    converted = settings(f"{command} {rollout}engine_kwargs.sglang.attention_backend=fa3")
    assert converted["rollout.engine"] == "sglang"
    arguments = {key: value for key, value in converted.items() if key.startswith("rollout.engine_args.")}
    assert arguments == {
        "rollout.engine_args.mem_fraction_static": 0.6,
        "rollout.engine_args.max_running_requests": 256,
        "rollout.engine_args.attention_backend": "fa3",
    }


def test_a_run_with_tools_needs_megarls_tools() -> None:
    options = "multi_turn.enable=True multi_turn.max_assistant_turns=5 multi_turn.format=hermes multi_turn.max_parallel_calls=2"
    command = f"{GRPO} " + " ".join(f"actor_rollout_ref.rollout.{option}" for option in options.split())
    with pytest.raises(InputError, match=r"give agent\.tools=VALUE after the file, or --accept"):
        settings(command)
    limits = convert(GRPO + " actor_rollout_ref.rollout.multi_turn.enable=True", ["agent.tools=[code_interpreter]"])
    assert yaml.safe_load(limits.text)["agent"]["max_calls_per_turn"] == 1, "verl's default"
    assert sum("multi_turn.max_" in note for note in limits.notes) == 2
    converted = settings(command, "agent.tools=[code_interpreter]")
    agent = {"tools": ["code_interpreter"], "max_turns": 5, "format": "hermes", "max_calls_per_turn": 2}
    assert {key: value for key, value in converted.items() if key.startswith("agent.")} == {
        f"agent.{name}": value for name, value in agent.items()
    }
    assert not [key for key in settings(command.replace("enable=True", "enable=False")) if key.startswith("agent.")]


class TestScript:
    def test_every_setting_by_hand(self) -> None:
        """Each setting has its own option and scale."""
        assert settings(SCRIPT, *VALUES, rows=100) == {
            "name": "run-7",
            "model.path": "/h/models/Qwen3-30B-A3B",
            "data.train_files": ["/h/data/dapo.parquet"],
            "data.eval_files": ["a.parquet", "b.parquet"],
            "data.prompts_per_step": 16,
            "data.max_prompt_length": 2048,
            "data.overlong_prompts": "filter",  # nothing is cut
            "rollout.samples_per_prompt": 16,
            "rollout.max_response_length": 20480,
            "rollout.tensor_parallel": 4,
            "rollout.engines": 8,  # 2 x 16 devices / 4
            "rollout.engine_args.enforce_eager": True,
            "rollout.engine_args.gpu_memory_utilization": 0.5,  # verl's default
            "rollout.engine_args.max_num_seqs": 256,  # verl's default
            "rollout.engine_args.max_num_batched_tokens": 8192,  # verl's default
            "algorithm.clip_high": 0.28,
            "algorithm.dual_clip": 10.0,
            "algorithm.aggregation": "seq_mean_token_sum",
            "algorithm.kl_coef": 0.001,  # verl's default
            "algorithm.dynamic_sampling.enabled": True,
            "algorithm.dynamic_sampling.metric": "accuracy",
            "algorithm.dynamic_sampling.max_attempts": 30,  # 10 batches of 48 prompts are 30 of 16
            "algorithm.overlong.penalty_buffer": 4096,
            "actor.mini_batches": 8,  # 16 prompts / 2
            "actor.max_tokens_per_micro_batch": 22528,
            "actor.optimizer.warmup_steps": 80,  # verl's schedule moves once in 8 mini batches
            "megatron.tensor_parallel": 4,
            "megatron.pipeline_parallel": 2,
            "megatron.expert_parallel": 2,
            "megatron.expert_tensor_parallel": 4,  # Megatron's own default is the tensor-parallel size
            "megatron.recompute": "full",
            "megatron.offload": True,
            "megatron.extra.moe_grouped_gemm": True,
            "cluster.trainers": 32,
            "train.steps": 18,  # 3 epochs of 100 // 16 whole batches
            "train.save_every": 20,
            "train.resume": "auto",
            "evaluation.every": 5,
            "evaluation.at_end": True,
            "evaluation.temperature": 0.0,  # verl's validation is greedy
            "observe.trackers": ["wandb"],
        }

    def test_notes_name_line_and_reason(self) -> None:
        """Every dropped option has a note with its line and the reason."""
        notes = "\n".join(convert(SCRIPT, VALUES).notes)
        assert "data.truncation=left: no truncation" in notes
        assert re.search(r"line \d+: trainer\.not_an_option=1: unknown option", notes)
        assert re.search(r"yarn_scaling_factor=40: no counterpart: the model's config.json determines it", notes)
        assert "trainer.total_epochs=3: the length of a run is train.steps" in notes
        line = SCRIPT.splitlines().index(next(text for text in SCRIPT.splitlines() if "yarn_" in text)) + 1
        assert f"line {line}: actor_rollout_ref.actor.megatron.override_transformer_config.yarn_scaling_factor" in notes

    def test_every_option_is_converted_or_noted(self) -> None:
        """Every value of the script is in the recipe or in a note."""
        notes = "\n".join(convert(SCRIPT, VALUES).notes)
        table = [*RL, *TRAINER]
        for argument in read_command(SCRIPT, {"1": "x", "HOME": "/h"}).arguments:
            name = argument.text.lstrip("+").split("=")[0]
            matched = any(
                (option.to or option.same) and re.fullmatch(option.verl.replace("*", ".*"), name) for option in table
            )
            assert matched or name in notes or name.startswith("--"), name

    def test_settings_after_the_file_override_it(self) -> None:
        converted = settings(SCRIPT, *VALUES, "megatron.expert_parallel=4", "NNODES=1")
        assert converted["megatron.expert_parallel"] == 4 and converted["cluster.trainers"] == 16

    @pytest.mark.parametrize(
        ("command", "epochs", "batch"),
        [
            (GRPO, 30, 1024),
            ("torchrun --nproc_per_node=2 -m verl.trainer.sft_trainer model.path=m data.train_files=a.parquet", 4, 256),
        ],
    )
    def test_epochs_have_verls_default(self, command: str, epochs: int, batch: int) -> None:
        assert settings(command, rows=2048)["train.steps"] == 2048 // batch * epochs
        notes = "\n".join(convert(command).notes)
        assert f"set it to rows x {epochs} / {batch}, or pass --rows" in notes
        assert settings(f"{command} trainer.total_epochs=2", rows=2048)["train.steps"] == 2048 // batch * 2

    @pytest.mark.parametrize(
        ("options", "key", "value", "note"),
        [
            (("optim.clip_grad=0.5", "grad_clip=2.0"), "actor.optimizer.clip_grad", 0.5, "verl reads optim.clip_grad"),
            (("grad_clip=2.0",), "actor.optimizer.clip_grad", 2.0, ""),
            (("grad_clip=2.0", "strategy=megatron"), "actor.optimizer.clip_grad", None, "verl reads optim.clip_grad"),
            (
                ("optim.lr_decay_style=linear", "optim.lr_scheduler_type=cosine"),
                "actor.optimizer.decay",
                "cosine",
                "optim.lr_scheduler_type also sets actor.optimizer.decay",
            ),
        ],
    )
    @pytest.mark.parametrize("order", [1, -1])
    def test_two_options_of_one_setting(
        self, options: tuple[str, ...], key: str, value: Any, note: str, order: int
    ) -> None:
        if "also sets" in note and order == -1:
            value, note = "linear", note.replace("lr_scheduler_type", "lr_decay_style")
        text = " ".join([GRPO, *(f"actor_rollout_ref.actor.{option}" for option in options[::order])])
        assert settings(text).get(key) == value
        assert note in "\n".join(convert(text).notes)

    @pytest.mark.parametrize("order", [1, -1])
    def test_the_seed_of_the_data_is_verls_seed(self, order: int) -> None:
        text = " ".join([GRPO, *["data.seed=3", "trainer.seed=4"][::order]])
        assert settings(text)["train.seed"] == 3
        assert "trainer.seed=4: not used: verl's RL trainers read data.seed" in "\n".join(convert(text).notes)

    def test_a_default_does_not_replace_an_option(self) -> None:
        command = "torchrun --nproc_per_node=2 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=m data.train_files=a.jsonl"
        constant = settings(f"{command} optim.lr_scheduler_type=constant")
        assert settings(command)["actor.optimizer.decay"] == "cosine"
        assert constant.get("actor.optimizer.decay", "constant") == "constant"

    @pytest.mark.parametrize(
        ("options", "groups", "spread"),
        [
            ({"data_parallel_size": 4, "expert_parallel_size": 16}, 4, None),
            ({"expert_parallel_size": 4}, None, True),
            ({"engine_kwargs.vllm.enable_expert_parallel": True}, None, True),
            ({"data_parallel_size": 1, "expert_parallel_size": 1}, None, None),
        ],
    )
    def test_experts_spread_over_engines(
        self, options: dict[str, Any], groups: int | None, spread: bool | None
    ) -> None:
        """Experts are spread over engines, since a whole copy might not fit into each engine."""
        added = "".join(f"    actor_rollout_ref.rollout.{name}={value} \\\n" for name, value in options.items())
        place = "    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\\n"
        assert place in SCRIPT
        converted = settings(SCRIPT.replace(place, place + added), *VALUES)
        assert converted.get("rollout.data_parallel") == groups and converted.get("rollout.expert_parallel") == spread

    def test_a_layout_that_does_not_divide_is_noted(self) -> None:
        """A note names the 4 key/value heads of Qwen3-30B-A3B."""
        notes = convert(SCRIPT, [*VALUES, "megatron.tensor_parallel=8", "megatron.expert_tensor_parallel=8"]).notes
        assert any("megatron.tensor_parallel=8 does not divide the model's 4 key/value heads" in note for note in notes)


@pytest.mark.skipif(not DOCUMENTS.is_dir(), reason="verl's documents are not on this machine (MEGARL_VERL_DOCS)")
class TestPublishedScripts:
    @staticmethod
    def scripts() -> list[str]:
        """Cut scripts from each `set -x` to the end of the training command."""
        scripts = []
        for path in sorted(DOCUMENTS.glob("*.txt")):
            for text in path.read_text().split("set -x\n")[1:]:
                script: list[str] = []
                for line in text.splitlines():
                    script.append(line)
                    if "trainer." in " ".join(script[-6:]) and not line.rstrip().endswith("\\") and len(script) > 20:
                        break
                scripts.append("\n".join(script))
        return scripts

    def test_each_script_becomes_a_recipe_that_loads(self, tmp_path: Path) -> None:
        scripts = self.scripts()
        assert len(scripts) == 5
        recipes = []
        for number, script in enumerate(scripts):
            path = tmp_path / f"{number}.yaml"
            values = ["1=8", "2=out"] + ([] if "model.path" in script or "partial" in script else ["model.path=m"])
            path.write_text(convert(script, values, rows=7473).text)
            recipes.append(load_recipe(path))
        sft = next(recipe for recipe in recipes if recipe.train.source == "sft")
        assert (sft.lora.rank, sft.lora.alpha, sft.data.prompts_per_step, sft.cluster.trainers) == (32, 16, 512, 8)
        assert sft.train.steps == 14 and sft.actor.optimizer.warmup_steps == 1 and sft.actor.optimizer.decay == "cosine"
        first, large = recipes[0], next(recipe for recipe in recipes if "Qwen2-7B" in recipe.model.path)
        assert (first.actor.mini_batches, first.rollout.engines, first.algorithm.kl_coef) == (2, 4, 0.001)
        assert (large.actor.mini_batches, large.cluster.trainers, large.rollout.tensor_parallel) == (1, 16, 4)
        assert large.train.steps == 15 * (7473 // 16)


class TestMeaning:
    def test_gae_has_verls_lambda_and_the_actors_mini_batches(self) -> None:
        text = GRPO.replace("grpo", "gae") + " actor_rollout_ref.actor.ppo_mini_batch_size=512 critic.optim.lr=2e-5"
        converted = settings(text)
        assert (
            converted["algorithm.lam"] == 1.0
            and converted["critic.mini_batches"] == 2
            and converted["critic.optimizer.lr"] == 2e-5
        )
        assert converted["critic.trainers"] == 8

    def test_settings_of_an_unused_critic_are_omitted_with_a_note(self) -> None:
        done = convert(f"{GRPO} critic.optim.lr=2e-5")
        assert "critic.optim.lr=2e-05: not used: the run has no critic" in "\n".join(done.notes)

    def test_a_mini_batch_larger_than_the_batch(self) -> None:
        done = convert(f"{GRPO} data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=64")
        assert "a step has 16 prompts, all in one mini batch" in "\n".join(done.notes)

    def test_samples_of_a_micro_batch_become_tokens(self) -> None:
        """20 samples of up to 512 + 128 tokens."""
        converted = settings(
            f"{GRPO} actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=20 data.max_response_length=128"
        )
        assert converted["actor.max_tokens_per_micro_batch"] == 12800

    def test_sequence_parallel_multiplies_the_tokens_per_micro_batch(self) -> None:
        extra = "use_dynamic_bsz=True ppo_max_token_len_per_gpu=5632 ulysses_sequence_parallel_size=4"
        converted = settings(GRPO + "".join(f" actor_rollout_ref.actor.{option}" for option in extra.split()))
        assert converted["actor.max_tokens_per_micro_batch"] == 22528 and converted["megatron.tensor_parallel"] == 4

    def test_kl_in_the_reward(self) -> None:
        converted = settings(
            f"{GRPO} algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02 algorithm.kl_penalty=kl"
        )
        assert (
            converted["algorithm.kl_in_reward"]
            and converted["algorithm.kl_coef"] == 0.02
            and converted["algorithm.kl_estimator"] == "kl"
        )

    def test_one_step_off_becomes_disaggregated_placement(self) -> None:
        text = GRPO.replace("verl.trainer", "verl.experimental.one_step_off_policy")
        converted = settings(f"{text} trainer.n_gpus_per_node=8 rollout.n_gpus_per_node=4 rollout.nnodes=1")
        assert converted["cluster.placement"] == "disaggregated" and converted["rollout.max_staleness"] == 1
        assert converted["cluster.trainers"] == 8 and converted["rollout.engines"] == 2
        assert converted["rollout.at_update"] == "drain", "a batch of verl has samples of one version"

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            (
                "data.train_batch_size=10 actor_rollout_ref.actor.ppo_mini_batch_size=4",
                "is not a multiple of the mini batch size 4",
            ),
            (
                "actor_rollout_ref.rollout.tensor_model_parallel_size=3",
                "8 devices are not a multiple of rollout.tensor_model_parallel_size=3",
            ),
            ("actor_rollout_ref.actor.use_kl_loss=True algorithm.use_kl_in_reward=True", "both True"),
            (
                "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=full",
                "full has no counterpart",
            ),
            ("data.train_files=a.csv", "neither .parquet nor .jsonl"),
            ("~data.train_files", "deletes an option"),
            ("data.x='${data.y}'", "refers to other options"),
            ("words", "is not an override of the form key=value"),
            ("actor_rollout_ref.rollout.n=", "line 1: actor_rollout_ref.rollout.n= has no value"),
            ("data.train_batch_size=", "data.train_batch_size= has no value"),
        ],
    )
    def test_unsupported_options_are_refused(self, extra: str, message: str) -> None:
        with pytest.raises(InputError, match=re.escape(message)):
            convert(f"{GRPO} {extra}")

    def test_fields_of_ddp_are_carried_over_for_actor_and_critic(self) -> None:
        """DDP fields that megarl sets itself are left out, with a note."""
        text = f"{GRPO} algorithm.adv_estimator=gae"
        for role in ("actor_rollout_ref.actor", "critic"):
            text += f" +{role}.megatron.override_ddp_config.overlap_grad_reduce=True"
            text += f" +{role}.megatron.override_ddp_config.grad_reduce_in_fp32=True"
        converted = settings(text)
        assert (
            converted["megatron.ddp.overlap_grad_reduce"]
            is converted["critic.megatron.ddp.overlap_grad_reduce"]
            is True
        )
        assert not [key for key in converted if key.endswith("grad_reduce_in_fp32")]
        assert "critic.megatron.ddp.grad_reduce_in_fp32=True: omitted" in convert(text).text

    def test_every_key_of_the_table_is_a_key_of_recipes(self) -> None:
        """A renamed key of a recipe must be renamed in the table."""
        keys = flat_settings(to_yaml(Recipe())).keys()

        def exists(key: str) -> bool:
            fields = (
                "megatron.extra.",
                "megatron.ddp.",
                "critic.megatron.ddp.",
                "rollout.engine_args.",
                "teacher.engine_args.",
                "reward.arguments.",
            )
            if key.startswith("data.columns."):
                return key.removeprefix("data.columns.") in {*COLUMNS["rollout"], *COLUMNS["sft"]}
            return key in keys or key.startswith(fields)

        options: list[Option] = [*RL, *SFT, *TRAINER]
        assert not [key for option in options if option.to for key in option.to.split(", ") if not exists(key)]

    def test_page_is_up_to_date(self) -> None:
        assert PAGE.read_text() == document(), "run python -m docs.generate.from_verl"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("0.", 0.0),
        ("-1", -1),
        ("True", True),
        ("null", None),
        ("[q_proj,v_proj]", ["q_proj", "v_proj"]),
        ("[[6],[8]]", [[6], [8]]),
        ("a/b.parquet", "a/b.parquet"),
    ],
)
def test_values(text: str, value: Any) -> None:
    """YAML reads 1e-6 as a string."""
    assert value_of(text, 1) == value and type(value_of(text, 1)) is type(value)


class TestCommandLine:
    def run(self, *words: str) -> int:
        return guarded(lambda: app(args=["convert-config", *words], standalone_mode=False), debug=False)

    def test_file_to_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        script, out = tmp_path / "run.sh", tmp_path / "recipe.yaml"
        script.write_text(SCRIPT)
        assert self.run(str(script), *VALUES, "--rows", "100", "--out", str(out)) == 0
        assert load_recipe(out).train.steps == 18
        output = capsys.readouterr()
        assert "data.truncation=left" in output.err and "# Converted from run.sh" in out.read_text()
        assert all(f"#   {line}" in out.read_text() for line in output.err.splitlines() if line.startswith("line "))
        assert self.run(str(script), *VALUES, "--out", str(out)) == 2
        assert "exists and would be overwritten" in capsys.readouterr().err
        assert [path.name for path in sorted(tmp_path.iterdir())] == ["recipe.yaml", "run.sh"]

    def test_a_missing_folder_is_refused_before_the_conversion(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run("no/such.sh", "--out", str(tmp_path / "none" / "recipe.yaml")) == 2
        error = capsys.readouterr().err
        assert "none does not exist" in error and "such.sh" not in error

    def test_standard_input(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(GRPO))
        assert self.run("-") == 0
        assert yaml.safe_load(capsys.readouterr().out)["model"]["path"] == "m"

    def test_errors_are_printed_as_one_block(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("no/such.sh") == 2
        assert "input error: no/such.sh cannot be read" in capsys.readouterr().err
