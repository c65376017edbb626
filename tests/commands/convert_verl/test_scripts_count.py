"""The count of launch scripts in a checkout of verl: what counts, and the causes of refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.verl_scripts import cause_of, is_launch_script, report
from tests.commands.convert_verl.test_whole_scripts import PPO


@pytest.mark.parametrize(
    ("text", "launches"),
    [
        (PPO, True),
        ("torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer a=b", True),
        ("python3 recipe/prime/main_prime.py a=b", True),
        ("cd recipe/spin\npython main_spin.py", True),
        (f"# {PPO}", False),
        ("python3 -m verl.trainer.main_eval a=b", False),
        ("python3 -m verl.trainer.main_generation a=b", False),
        ("python3 examples/data_preprocess/gsm8k.py", False),
    ],
)
def test_a_launch_script_names_a_training_module(text: str, launches: bool) -> None:
    assert is_launch_script(text) == launches


def test_the_report_groups_scripts_by_cause(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(PPO)
    (tmp_path / "b.sh").write_text(f"\n{PPO} actor_rollout_ref.model.mtp.enable=True")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "c.sh").write_text(f"{PPO} actor_rollout_ref.model.mtp.enable=True")
    (tmp_path / "d.sh").write_text("echo")
    text, crashed = report(tmp_path)
    assert not crashed
    assert text.splitlines() == [
        f"{tmp_path}: 1 of 3 launch scripts become recipes",
        "   2  actor_rollout_ref.model.mtp.enable",
        "        b.sh",
        "        folder/c.sh",
    ]


def test_a_crash_is_not_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.verl_scripts.convert", lambda *_, **__: 1 / 0)
    (tmp_path / "a.sh").write_text(PPO)
    text, crashed = report(tmp_path)
    assert crashed and "0 of 1" in text and "CRASH" in text and "ZeroDivisionError" in text


def test_the_cause_is_what_refusals_share() -> None:
    assert cause_of("line 3: x=1: no counterpart. --accept x to leave the option out") == "x"
    assert cause_of("invalid recipe:\n  key    actor.mini_batches\n  what   odd") == "recipe: actor.mini_batches"
    assert cause_of("lines 3, 5: the value of $A is unknown\nmore") == "the value of $A is unknown"
