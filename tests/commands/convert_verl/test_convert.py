"""A verl script becomes a recipe with the same meaning, or an error that names the unknown part."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megarl.commands.convert_verl.command import convert
from megarl.commands.convert_verl.shell.parser import read_command
from megarl.commands.convert_verl.table import RL, TRAINER
from megarl.commands.data.command import app as data_app
from megarl.data.rows import iterate_rows, write_parquet
from megarl.errors import InputError

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
        "data.sampler.class_path=my/sampler.py",
        "data.datagen.path=my/datagen.py",
        "reward_model.reward_loop_class_name=Mine",
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "actor_rollout_ref.rollout.multi_turn.function_tool_path=tools.py",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        "actor_rollout_ref.rollout.agent.default_agent_loop=my_agent",
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class=my.Manager",
        "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts=3",
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
    options = ["data.sampler.class_path=a.py", "reward_model.reward_manager=batch"]
    with pytest.raises(InputError) as refused:
        convert(f"{GRPO} {' '.join(options)}", [])
    *reasons, last = str(refused.value).splitlines()
    assert len(reasons) == 2 and last == "--accept data.sampler.class_path --accept reward_model.reward_manager"
    with pytest.raises(InputError, match=r"no such option; did you mean 'data\.sampler\.class_path'"):
        convert(f"{GRPO} {options[0]}", [], accepted=["data.sampler.clas_path"])


@pytest.mark.parametrize("name", ["2024", "0.5"])
def test_texts_that_look_like_numbers_stay_texts(name: str) -> None:
    """Shells and hydra have no types. A recipe does, and refuses a number for a text."""
    steps = f"{GRPO} trainer.total_training_steps=1 data.train_batch_size=1"
    assert settings(f"{steps} trainer.project_name={name}")["observe.project"] == name
    for text in ("007", "12e3"):
        assert settings(steps, f"observe.project={text}")["observe.project"] == text


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


def test_quantized_engines_have_verls_correction() -> None:
    """megarl corrects for quantized engines by default, and verl does not, so the recipe says so."""
    command = f"{GRPO} +actor_rollout_ref.rollout.quantization="
    converted = settings(f"{command}fp8")
    assert converted["rollout.quantization"] == "fp8" and converted["algorithm.correction.weights"] == "none"
    weighted = settings(f"{command}fp8 algorithm.rollout_correction.rollout_is=token")
    assert weighted["algorithm.correction.weights"] == "token"
    assert not {"rollout.quantization", "algorithm.correction.weights"} & settings(f"{command}null").keys()
    with pytest.raises(InputError, match=r"quantization=torchao: this value has no counterpart; supported: fp8"):
        settings(f"{command}torchao")


def test_an_evaluation_alone_is_a_recipe_without_training_data() -> None:
    """verl evaluates model.path before the first step and ends; the number of training rows does not matter."""
    command = f"{GRPO} data.val_files=b.parquet trainer.val_only=True data.train_max_samples=1"
    converted = convert(command, [])
    recipe = yaml.safe_load(converted.text)
    assert recipe["data"]["eval_files"] == ["b.parquet"] and "train_files" not in recipe["data"]
    assert any("megarl eval RECIPE" in note for note in converted.notes)
    trains = convert(f"{GRPO} data.val_files=b.parquet trainer.val_only=True trainer.val_before_train=False", [])
    assert "train_files" in trains.text, "verl reads val_only after the evaluation before the first step"
    accepted = convert(f"{GRPO} data.val_files=b.parquet trainer.val_only=True", [], accepted=["trainer.val_only"])
    assert "train_files" in accepted.text
    with pytest.raises(InputError, match=r"--accept data\.train_max_samples"):
        convert(command.replace("val_only=True", "val_only=False"))


def test_files_of_another_format_leave_their_setting_open() -> None:
    """megarl reads .parquet and .jsonl: the recipe waits for the name of a converted file."""
    command = f"{GRPO} data.train_files=a.csv data.val_files=b.parquet trainer.test_freq=5"
    assert settings(command)["data.train_files"] == "???"
    assert "data.train_files=a.csv, not .parquet, .jsonl" in "\n".join(convert(command, []).notes)


def test_verls_dataset_class_is_carried_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noted commands write the files that the recipe names, with the options that the class reads."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text((ROOT / "tests/support/verl_datasets.py").read_text())
    for name in ("a", "b"):
        write_parquet(tmp_path / f"{name}.parquet", [{"question": f"{name}?", "answer": 1}])
    command = f"{GRPO} data.train_files=[a.parquet,b.parquet] data.val_files=b.parquet trainer.test_freq=5"
    command += " data.custom_cls.path=own.py data.custom_cls.name=HintedDataset data.prompt_key=prompt +data.hint=Go data.shuffle=False"
    converted = settings(command)
    assert converted["data.train_files"] == ["data/HintedDataset/train.parquet"]
    assert converted["data.eval_files"] == ["data/HintedDataset/test.parquet"]
    assert not [key for key in converted if key.startswith("data.columns")]
    commands = [
        note.partition("python -m megarl ")[2] for note in convert(command, []).notes if "before the run" in note
    ]
    assert len(commands) == 2 and all("shuffle" not in each for each in commands)
    for each in commands:
        arguments = [argument for argument in shlex.split(each)[1:] if not argument.startswith("--model=")]
        ran = CliRunner().invoke(data_app, arguments)
        assert ran.exit_code == 0, ran.output
    rows = list(iterate_rows(Path("data/HintedDataset/train.parquet"), ("prompt",)))
    assert [row.values["prompt"][0]["content"] for row in rows] == ["Go", "Go"]
    with pytest.raises(InputError, match=r"data\.custom_cls\.path needs data\.custom_cls\.name"):
        settings(f"{GRPO} data.custom_cls.path=own.py")
    left_out = convert(f"{GRPO} data.custom_cls.path=own.py", [], accepted=["data.custom_cls.path"])
    assert yaml.safe_load(left_out.text)["data"]["train_files"] == ["a.parquet"]


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
            "algorithm.dynamic_sampling.oversample": 3.0,
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
