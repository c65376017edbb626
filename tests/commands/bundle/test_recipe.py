"""Settings of a recipe that a bundle leaves out, because they usually contain secrets; settings that megarl does not have."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from megarl.commands.bundle.contents import DESCRIPTION
from megarl.commands.bundle.pack import pack
from megarl.commands.bundle.recipe import bundled_recipe
from megarl.commands.bundle.unpack import unpack
from megarl.errors import RecipeError
from megarl.recipe.load import read_recipe
from megarl.recipe.text import to_yaml
from tests.commands.bundle.run import RecordedRun

RECIPE = """
rollout:
  engine_args:
    max_num_seqs: 8
    hf-auth: SECRET-1
    kv_transfer_config: {kv_role: both, extra: [{passwd: SECRET-2, port: 1}], store: "redis://me:SECRET-3@cache:6379/0"}
judge:
  engine_args: {service_credential: SECRET-4, access_key: {id: SECRET-5}}
agent:
  mcp:
    search: {command: [search-server, --api-key, SECRET-6], env: {SEARCH_KEY: SECRET-7}}
    web: {url: "https://me:SECRET-8@tools.example.com:8000/mcp?key=SECRET-9#part"}
    plain: {url: "https://tools.example.com/mcp"}
reward:
  function: remote
  remote: {url: "https://SECRET-10@judge.example.com/score?token=SECRET-11"}
"""


def test_secrets_reach_neither_the_recipe_nor_the_texts(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe = read_recipe(tmp_path / "recipe.yaml").recipe
    bundled, left_out = bundled_recipe(recipe, {})
    assert "SECRET" in to_yaml(recipe) and "SECRET" not in to_yaml(bundled)
    assert left_out == [
        "rollout.engine_args.hf-auth: it may be a secret",
        "rollout.engine_args.kv_transfer_config.extra.passwd: it may be a secret",
        "rollout.engine_args.kv_transfer_config.store: redis://cache:6379/0 without its name, password and query",
        "judge.engine_args.service_credential: it may be a secret",
        "judge.engine_args.access_key: it may be a secret",
        "agent.mcp.search: search-server without its arguments, with SEARCH_KEY in its environment",
        "agent.mcp.web: https://tools.example.com:8000/mcp without its name, password and query",
        "agent.mcp.plain: https://tools.example.com/mcp",
        "reward.remote.url: https://judge.example.com/score without its name, password and query",
    ]
    assert bundled.rollout.engine_args == {
        "max_num_seqs": 8,
        "kv_transfer_config": {"kv_role": "both", "extra": [{"port": 1}], "store": "redis://cache:6379/0"},
    }
    assert bundled.agent.mcp["search"].command == ["search-server"]
    assert bundled.agent.mcp["web"].url == "https://tools.example.com:8000/mcp"
    assert bundled.agent.mcp["plain"] == recipe.agent.mcp["plain"]
    assert bundled.reward.remote.url == "https://judge.example.com/score"


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    run = RecordedRun(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here" / "code")
    return run


def test_a_run_with_an_unknown_setting_is_not_packed(recorded: RecordedRun, tmp_path: Path) -> None:
    """Its recipe would be written without the setting."""
    file = recorded.run.tape / "recipe-1.yaml"
    file.write_text(file.read_text().replace("rollout:\n", "rollout:\n  of_a_later_megarl: 3\n"))
    with pytest.raises(RecipeError, match=r"rollout\.of_a_later_megarl") as error:
        pack(recorded.run.path, tmp_path / "step.tar", None)
    assert error.value.origin == str(file) and not (tmp_path / "step.tar").exists()


def test_a_bundle_with_unknown_settings_is_not_unpacked(recorded: RecordedRun, tmp_path: Path) -> None:
    pack(recorded.run.path, tmp_path / "step.tar", None)
    with tarfile.open(tmp_path / "step.tar") as archive:
        files = {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
    added = b"rollout:\n  of_a_later_megarl: 3\n  temperature: hot\n"
    recipe = files["recorded/tape/recipe-1.yaml"]
    replaced = recipe.replace(b"rollout:\n", added).replace(b"  temperature: 1.0\n", b"")
    files["recorded/tape/recipe-1.yaml"] = replaced
    description = json.loads(files[DESCRIPTION])
    description["size"] += len(replaced) - len(recipe)
    files[DESCRIPTION] = json.dumps(description).encode()
    with tarfile.open(tmp_path / "later.tar", "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    words = r"later\.tar cannot be unpacked: .*rollout\.of_a_later_megarl = 3: .*; rollout\.temperature = 'hot': .* the megarl that wrote it"
    with pytest.raises(ValueError, match=words):
        unpack(tmp_path / "later.tar", tmp_path / "out")
    assert not (tmp_path / "out").exists()
