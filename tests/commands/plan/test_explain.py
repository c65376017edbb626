"""The weight sync of a recipe before a run: bytes by link, from config.json and the layouts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megarl.cli import app
from megarl.commands.plan import build, explain, explain_command
from megarl.commands.plan.count.types import Links
from megarl.commands.plan.weight_flows import flows, totals
from megarl.exit_status import guarded
from megarl.hf import published
from megarl.hf.shape import model_shape
from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.weight_sync.sharded.plan import Hosts, TransferPlan, plan_transfers
from megarl.weight_sync.sharded.slices import SliceTable, SliceTableBuilder, held_tensors

RECIPES = Path(__file__).parents[3] / "recipes"
HALF = 3 * 4 * 2  # bytes of half a tensor


def description(*names: str, rows: tuple[int, int] = (0, 6)) -> SliceTable:
    """Describe tensors of shape [6, 4] in bfloat16."""
    builder = SliceTableBuilder()
    for name in names:
        part = (rows[0], 0, rows[1], 4)
        builder.add(builder.tensor(name, (6, 4)), part, builder.parameter(name, "bfloat16"), 0, 4)
    return builder.build()


def run(*arguments: str) -> int:
    return guarded(lambda: app(args=list(arguments), standalone_mode=False), debug=False)


def small_plan() -> TransferPlan:
    """Two stages on two machines, the second's holds an expert; two engines, one on each machine."""
    engine = description("a", "b.experts.1")
    return plan_transfers(
        [description("a"), description("b.experts.1", rows=(0, 3)), description("b.experts.1", rows=(3, 3))],
        [engine, engine],
        Hosts(["n0", "n1", "n1"], ["n0", "n1"]),
        1 << 20,
    )


def test_bytes_by_link() -> None:
    """a: on n0, and from there to n1. b: on n1; to n0 as well, which comes first in the order of relays."""
    plan = small_plan()
    first, second = flows(plan, ["stage 0", "stage 1", "stage 1"])
    assert (first.source, first.weights, first.audience, first.senders) == ("stage 0", "others", (2, 2), 1)
    assert (first.sent, first.relayed, first.between_hosts, first.buckets) == (2 * HALF, 2 * HALF, 2 * HALF, 1)
    assert (second.source, second.weights, second.audience, second.senders) == ("stage 1", "experts", (1, 1), 2)
    assert (second.sent, second.sent_by_rank, second.relayed) == (4 * HALF, 2 * HALF, 0)
    assert (second.received_by_rank, second.between_hosts, second.buckets) == (2 * HALF, 2 * HALF, 4)
    summary = totals(plan)
    assert (summary.sent, summary.received, summary.received_by_rank) == (6 * HALF, 8 * HALF, 4 * HALF)
    assert (summary.relayed_by_rank, summary.between_hosts, summary.streams, summary.buckets) == (
        2 * HALF,
        4 * HALF,
        5,
        5,
    )


@pytest.mark.parametrize(
    ("transport", "way"),
    [
        ("auto", "out of memory"),
        ("ipc", "out of memory"),
        ("collective", "from the previous rank"),
        ("device", "from the previous rank"),
    ],
)
def test_relays_are_named_after_the_transport(transport, way) -> None:
    """Ranks of a machine read the same memory only where the transport shares it."""
    assert way in explain_command._relays(transport)


def test_buckets_of_rows_add_up_to_the_total() -> None:
    """Buckets of all rows add up to the total, except buckets that mix experts and other weights: both rows count them."""
    both = description("a", "b.experts.1")
    mixed = plan_transfers([both], [both, both], Hosts(["n0"], ["n0", "n0"]), 1 << 20)
    for plan, rows, total, noted in (
        (small_plan(), [1, 4], 5, ""),
        (mixed, [1, 1], 1, ", of which 1 is in two rows"),
    ):
        edges = flows(plan, ["stage 0"] * len(plan.hosts.trainers))
        assert ([flow.buckets for flow in edges], totals(plan).buckets) == (rows, total)
        assert explain_command._shared(edges, totals(plan)) == noted


def test_ranks_are_placed_on_nodes_by_placement() -> None:
    recipe = Recipe()
    recipe.cluster.trainers, recipe.rollout.engines, recipe.rollout.tensor_parallel = 4, 2, 2
    assert explain.hosts(recipe, 2).engines == ["node 0", "node 0", "node 1", "node 1"]
    recipe.cluster.placement = "disaggregated"
    assert explain.hosts(recipe, 2).engines == ["node 2", "node 2", "node 3", "node 3"]
    assert set(explain.hosts(recipe, None).engines) == {"node 0"}
    recipe.algorithm.advantage, recipe.critic.trainers = "gae", 2
    assert explain.hosts(recipe, 2).engines == ["node 3", "node 3", "node 4", "node 4"], "the critic comes before"
    assert set(explain.hosts(recipe, None).engines) == {"node 0"}


def test_a_plan_with_device_transport_notes_uncounted_connections() -> None:
    recipe, model = Recipe(), published.read("Qwen3-8B")
    assert build.OF_CONNECTIONS not in build._notes(recipe, [], [], model)
    recipe.weight_sync.transport = "device"
    assert build.OF_CONNECTIONS in build._notes(recipe, [], [], model)


def test_every_engine_rank_receives_the_whole_model_on_the_full_route() -> None:
    recipe = Recipe()
    recipe.cluster.trainers, recipe.rollout.engines, recipe.rollout.tensor_parallel = 4, 2, 2
    recipe.model.dtype = "bfloat16"
    model = published.read("Qwen3-8B")
    whole = 2 * model_shape(model).total
    assert explain.full_links(recipe, model, 2) == Links("full", whole, whole, 4 * whole, whole)
    recipe.weight_sync.transport = "collective"
    assert explain.full_links(recipe, model, 2).between_nodes == 2 * whole, "each rank of the other node gets its own"
    recipe.weight_sync.transport = "auto"
    assert explain.full_links(recipe, model, None).between_nodes == 0


def test_experts_of_later_ranks_have_later_numbers() -> None:
    names = ("model.layers.1.mlp.experts.2.up", "model.layers.1.mlp.experts.3.up", "model.layers.1.mlp.gate")
    later = explain._later(description(*names), 3)
    assert later.tensors == ("model.layers.1.mlp.experts.8.up", "model.layers.1.mlp.experts.9.up", names[2])


def test_tensors_are_sorted_by_layer() -> None:
    names = ["m.10.experts.2.w", "m.9.experts.10.w", "m.9.experts.2.w", "lm_head"]
    held = held_tensors([description(*names[:2]), description(*names[1:])])
    assert [name for name, *_ in held] == ["lm_head", *reversed(names[:3])]
    assert held[0][1:] == ((6, 4), "bfloat16")


def test_the_command_prints_flows_between_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket_sizes = []
    monkeypatch.setattr(
        explain_command, "plan_of_recipe", lambda *arguments: bucket_sizes.append(arguments[2]) or small_plan()
    )
    monkeypatch.setattr(explain_command, "_kinds", lambda recipe: ["stage 0", "stage 1", "stage 1"])
    recipe = str(RECIPES / "dapo_qwen3_30b.yaml")
    assert run("weight-sync", recipe) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100 and bucket_sizes == [16], "the head says 16 devices a machine"
    assert "stage 1" in text and "Sent by 3 trainer ranks" in text and "5 buckets of at most" in text
    assert "A rank has at most 2 connections, over gloo." in text
    apart = ["cluster.placement=disaggregated", "megatron.offload=false", "weight_sync.route=sharded"]
    assert run("weight-sync", recipe, *apart, "weight_sync.transport=device") == 0
    assert "A rank has at most 4 connections, device to device." in capsys.readouterr().out
    bucket_sizes.pop()
    assert run("weight-sync", recipe, "--json", "--per-node", "4") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["totals"]["sent"] == 6 * HALF and len(report["flows"]) == 2 and bucket_sizes[1] == 4


def test_the_former_command_still_works_with_a_notice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explain_command, "plan_of_recipe", lambda *arguments: small_plan())
    monkeypatch.setattr(explain_command, "_kinds", lambda recipe: ["stage 0", "stage 1", "stage 1"])
    assert run("exchange", "--explain", str(RECIPES / "dapo_qwen3_30b.yaml"), "weight_sync.route=auto") == 0
    printed = capsys.readouterr()
    assert "Sent by 3 trainer ranks" in printed.out and "is now megarl weight-sync" in printed.err


def test_without_a_recipe_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("weight-sync") == 2
    assert "RECIPE" in capsys.readouterr().err


def test_training_without_engines_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("weight-sync", str(RECIPES / "quickstart_sft.yaml")) == 2
    assert "no engines" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, model, settings, received",
    [
        ("dapo_qwen3_30b", "Qwen3-30B-A3B", ["rollout.tensor_parallel=4", "rollout.engines=4"], 15.285e9),
        ("grpo_deepseek_v3", "DeepSeek-V3", [], 25.812e9),
    ],
)
def test_engine_ranks_receive_the_bytes_they_hold(name: str, model: str, settings: list[str], received: float) -> None:
    """The expected figures come from a trace of vLLM's loader by another script, and from the sizes of the tensors."""
    recipe = load_recipe(RECIPES / f"{name}.yaml", settings)
    plan = explain.plan_of_recipe(recipe, published.read(model), 16)
    assert totals(plan).received_by_rank == pytest.approx(received, rel=1e-4)
    for rank in (0, len(plan.hosts.engines) - 1):
        need = plan.needed.tables[plan.needed.class_of[rank]]
        got = sum(
            int(stream.bucket_elements.sum()) * (4 if stream.dtype == "float32" else 2)
            for stream in plan.streams_to(rank)
        )
        assert got == need.nbytes
    sent = np.bincount(plan.sources, plan.stream_bytes, len(plan.hosts.trainers))
    assert sent.max() <= 1.2 * sent.mean()


def test_a_recipe_that_a_run_refuses_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """`explain` refuses within a second, with the message of `plan`, before vLLM starts."""
    assert run("weight-sync", str(RECIPES / "dapo_qwen3_30b.yaml"), "rollout.engines=5") == 2
    assert "rollout.engines x rollout.tensor_parallel = 5 x 4" in capsys.readouterr().err


def test_a_recipe_with_the_full_route_gets_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explain_command, "plan_of_recipe", lambda *_: small_plan())
    monkeypatch.setattr(explain_command, "_kinds", lambda recipe: ["stage 0", "stage 1", "stage 1"])
    assert run("weight-sync", str(RECIPES / "dapo_qwen3_30b.yaml"), "weight_sync.route=full") == 0
    assert "does not use this route: weight_sync.route=full" in " ".join(capsys.readouterr().out.split())
