"""Faults in the quickstart's files: each function damages one thing in its folder (data/*.parquet, model/)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[Path], None]


def no_config(here: Path) -> None:
    (here / "model" / "config.json").unlink()


def config_cut_short(here: Path) -> None:
    path = here / "model" / "config.json"
    path.write_text(path.read_text()[:100])


def config_is_a_list(here: Path) -> None:
    (here / "model" / "config.json").write_text("[1]")


def configured(**fields: Any) -> Damage:
    def damage(here: Path) -> None:
        path = here / "model" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    damage.__name__ = "_".join(fields)
    return damage


def without_field(name: str) -> Damage:
    def damage(here: Path) -> None:
        path = here / "model" / "config.json"
        fields = json.loads(path.read_text())
        del fields[name]
        path.write_text(json.dumps(fields))

    damage.__name__ = f"without_{name}"
    return damage


def no_weights(here: Path) -> None:
    (here / "model" / "model.safetensors").unlink()


def weights_cut_short(here: Path) -> None:
    path = here / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def weights_are_no_tensors(here: Path) -> None:
    (here / "model" / "model.safetensors").write_bytes(b"\xff" * 64)


def a_shard_is_missing(here: Path) -> None:
    _index(here, {"lm_head.weight": "model-00002-of-00002.safetensors"})


def a_tensor_is_not_in_the_index(here: Path) -> None:
    _index(here, {}, leave_out="model.layers.1.self_attn.q_proj.weight")


def _index(here: Path, placed: dict[str, str], leave_out: str = "") -> None:
    from safetensors import safe_open

    with safe_open(here / "model" / "model.safetensors", framework="np") as file:
        names = dict.fromkeys(file.keys(), "model.safetensors")
    names = {name: file for name, file in {**names, **placed}.items() if name != leave_out}
    (here / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def index_is_no_json(here: Path) -> None:
    (here / "model" / "model.safetensors.index.json").write_text("{")


def no_tokenizer(here: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (here / "model" / name).unlink(missing_ok=True)


def tokenizer_cut_short(here: Path) -> None:
    path = here / "model" / "tokenizer.json"
    path.write_text(path.read_text()[: len(path.read_text()) // 2])


ROW = {"prompt": "1+1?", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "2"}}


def rows(name: str, *changes: dict[str, Any] | str) -> Damage:
    def damage(here: Path) -> None:
        lines = [line if isinstance(line, str) else json.dumps(line) for line in changes]
        (here / "data" / "rows.jsonl").write_text("\n".join(lines) + "\n")

    damage.__name__ = name
    return damage


def no_parquet(here: Path) -> None:
    (here / "data" / "train.parquet").write_bytes(b"no parquet")


def a_run_there(here: Path) -> None:
    (here / "runs" / "quickstart").mkdir(parents=True)
    (here / "runs" / "quickstart" / "metrics.jsonl").write_text('{"step": 1}\n')


def runs_is_a_file(here: Path) -> None:
    (here / "runs").write_text("")


def own_scorer(source: str) -> Damage:
    def damage(here: Path) -> None:
        (here / "own_scorer.py").write_text(source)

    damage.__name__ = source.splitlines()[-1].strip().replace(" ", "_")
    return damage
