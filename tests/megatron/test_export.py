"""An exported directory has the trained weights and, copied from the source, the layers that are not trained."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl import atomic_files
from megarl.megatron import export
from megarl.megatron.export import ExportChange, ExportComparison, compare_with_hf, save_hf

TRAINED = ["model.embed_tokens.weight", "model.layers.0.up.weight", "model.layers.1.up.weight"]
EXTRA = [
    "model.layers.2.up.weight",  # of a multi-token-prediction layer
    "model.layers.2.eh_proj.weight",
    "model.layers.0.self_attn.rotary_emb.inv_freq",  # a buffer: Moonlight's and Kimi-K2's published weights hold one per layer
]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    save_file({name: torch.full((2, 2), float(i)) for i, name in enumerate(TRAINED)}, directory / "a.safetensors")
    save_file({name: torch.full((2, 2), -1.0) for name in EXTRA}, directory / "b.safetensors")
    configure(directory, num_nextn_predict_layers=1)
    return directory


def configure(directory: Path, **settings: object) -> None:
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": 2, **settings}))


def trained(*names: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights as mbridge exports them: also the tied output layer, which `source` does not have."""
    for name in (*names, "lm_head.weight"):
        yield name, torch.full((2, 2), 10.0 + len(name))


def test_untrained_layers_are_copied_and_counted(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_hf(out, source, trained(*TRAINED))
    written = load_file(out / "model.safetensors")
    assert sorted(written) == sorted(TRAINED + EXTRA)
    assert all((written[name] == 10 + len(name)).all() for name in TRAINED)
    assert all((written[name] == -1).all() for name in EXTRA)
    assert compare_with_hf(out, trained(*TRAINED), source) == ExportComparison(equal=3, untrained=3)


def test_a_separate_tokenizer_replaces_the_sources(source: Path, tmp_path: Path) -> None:
    """`model.tokenizer`: with the source's tokenizer or template, users would be served with other ids than those that were trained."""
    separate = tmp_path / "tokenizer"
    for folder, names_of_files in (
        (source, ["vocab.json", "merges.txt"]),
        (separate, ["tokenizer.model", "config.json"]),
    ):
        (folder / "additional_chat_templates").mkdir(parents=True)
        (folder / "additional_chat_templates" / f"of_{folder.name}.jinja").touch()
        for name in ["tokenizer_config.json", "preprocessor_config.json", *names_of_files]:
            if not (folder / name).exists():
                (folder / name).write_text(folder.name)
    save_hf(tmp_path / "out", source, trained(*TRAINED), ExportChange(tokenizer=separate))
    expected = [
        "additional_chat_templates",
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.model",
    ]
    assert names(tmp_path / "out") == [*expected, "tokenizer_config.json"]
    assert names(tmp_path / "out" / "additional_chat_templates") == ["of_tokenizer.jinja"]
    for name, origin in {"tokenizer_config.json": "tokenizer", "preprocessor_config.json": "source"}.items():
        assert (tmp_path / "out" / name).read_text() == origin
    assert "num_hidden_layers" in (tmp_path / "out" / "config.json").read_text()
    save_hf(tmp_path / "out", source, trained(*TRAINED))
    assert names(tmp_path / "out" / "additional_chat_templates") == ["of_source.jinja"]


def test_a_trained_tensor_missing_from_the_export_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"1 tensors of .*not among the exported weights: model.layers.0.up.weight"):
        save_hf(tmp_path / "out", source, trained(TRAINED[0], TRAINED[2]))
    assert not (tmp_path / "out" / "model.safetensors").exists()
    configure(source, num_nextn_predict_layers=0)  # then layer 2 is a layer that should have been trained
    with pytest.raises(RuntimeError, match=r"2 tensors .*: model.layers.2.eh_proj.weight, model.layers.2.up.weight\."):
        save_hf(tmp_path / "out", source, trained(*TRAINED))


def test_a_stored_copy_of_a_tied_output_layer_follows_the_embedding(source: Path, tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(2, 2)}, source / "c.safetensors")
    configure(source, num_nextn_predict_layers=1, tie_word_embeddings=True)
    weights = [item for item in trained(*TRAINED) if item[0] != "lm_head.weight"]
    save_hf(tmp_path / "out", source, iter(weights))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
    assert compare_with_hf(tmp_path / "out", iter(weights), source) == ExportComparison(equal=4, untrained=3)


def test_every_tensor_of_the_directory_is_compared(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_hf(out, source, trained(*TRAINED))
    with pytest.raises(RuntimeError, match=r"no weights to compare with 1 tensors of .*: model.layers.1.up.weight"):
        compare_with_hf(out, trained(*TRAINED[:2]), source)
    good = load_file(out / "model.safetensors")
    for name, owner in ((TRAINED[1], "the trainer's weight"), (EXTRA[0], "the original model's")):
        damaged = {**good, name: good[name].clone()}
        damaged[name][0, 0] += 1e-6 * damaged[name][0, 0]
        save_file(damaged, out / "model.safetensors")
        with pytest.raises(RuntimeError, match=rf"{name} in .* is not {owner}"):
            compare_with_hf(out, trained(*TRAINED), source)
    save_file({name: good[name] for name in TRAINED}, out / "model.safetensors")
    with pytest.raises(RuntimeError, match="do not hold the same tensors"):
        compare_with_hf(out, trained(*TRAINED), source)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_killed_export_leaves_only_a_partial_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_SHARD_BYTES", 16)  # a tensor a file

    def killed() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(trained(*TRAINED))[:2]
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        save_hf(tmp_path / "out", source, killed())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert names(tmp_path) == [".out.partial", "source"]
    stale = tmp_path / ".out.partial" / "part-9.safetensors"
    save_file({TRAINED[0]: torch.zeros(2, 2)}, stale)
    save_hf(tmp_path / "out", source, trained(*TRAINED))
    assert names(tmp_path) == ["out", "source"]
    assert compare_with_hf(tmp_path / "out", trained(*TRAINED), source) == ExportComparison(equal=3, untrained=3)


def test_a_failed_export_keeps_the_earlier_one_and_a_new_one_replaces_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    save_hf(out, source, trained(*TRAINED))
    (out / "part-0.safetensors").touch()  # of an attempt before exports were atomic
    before = names(out)
    with pytest.raises(RuntimeError, match="not among the exported weights"):
        save_hf(out, source, trained(TRAINED[0]))
    assert names(tmp_path) == ["out", "source"] and names(out) == before

    synced, sync = [], atomic_files.sync

    def record(path: Path) -> None:
        synced.append(path)
        sync(path)

    monkeypatch.setattr(atomic_files, "sync", record)
    save_hf(out, source, trained(*TRAINED), ExportChange(config=lambda config: {**config, "architectures": ["Critic"]}))
    assert names(out) == ["config.json", "model.safetensors"] and names(tmp_path) == ["out", "source"]
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Critic"]
    partial = tmp_path / ".out.partial"
    assert set(synced) == {partial / "config.json", partial / "model.safetensors", partial, tmp_path}


def test_a_link_is_followed_and_a_mount_point_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk" / "out"
    disk.mkdir(parents=True)
    (tmp_path / "link").symlink_to(disk)
    save_hf(tmp_path / "link", source, trained(*TRAINED))
    assert names(disk.parent) == ["out"] and "model.safetensors" in names(tmp_path / "link")
    monkeypatch.setattr(Path, "is_mount", lambda path: path == disk)
    with pytest.raises(ValueError, match=r"is a mount point, .*: choose a folder in it"):
        save_hf(disk, source, trained(*TRAINED))
    assert names(disk.parent) == ["out"]
