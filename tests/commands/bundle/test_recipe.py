"""Settings of a recipe that a bundle leaves out, because they usually contain secrets."""

from __future__ import annotations

from pathlib import Path

from megarl.commands.bundle.recipe import bundled_recipe
from megarl.recipe.load import read_recipe, to_yaml

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
