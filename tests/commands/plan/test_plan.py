"""Parts of a plan: the largest work of a stage, live memory, phases, balanced experts, and the command."""

from __future__ import annotations

import importlib.util
import json
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.cli import app
from megarl.commands.plan import build
from megarl.commands.plan.command import plan
from megarl.commands.plan.count.libraries import NOT_COUNTED
from megarl.commands.plan.count.live_tensors import MemoryCounter
from megarl.commands.plan.count.rank_client import RankClient, RankRequest
from megarl.commands.plan.count.stages import (
    Counted,
    built_from,
    ends,
    inner_stages,
    interpolated,
    stages_of,
)
from megarl.commands.plan.count.types import Activations, PipelineStage, RankMemory, Suggestion
from megarl.commands.plan.count.workload import Workload, first_ranks, image_grid, image_tokens, peak_workload
from megarl.commands.plan.meta_device import KnownValues, rms_norm
from megarl.commands.plan.options import PlanOptions, device_of
from megarl.commands.plan.search.suggest import Suggestions
from megarl.errors import InputError
from megarl.exit_status import guarded
from megarl.hf import published
from megarl.platform.device_kind import DeviceKind
from megarl.platform.kinds import kind_of
from megarl.preflight.load import load_recipe
from megarl.recipe.schema import ClusterConfig, Recipe
from tests.support.count_ranks import count_stages

ROOT = Path(__file__).parents[3]
HELD = RankMemory(parameters=10, trained=10, weights=20, buffers=1, gradients=40, masters=30, moments=60, reference=21)
BEYOND = Activations(forward=3, update=9, kept=5, optimizer=50)


def recipe(tokens: int, prompt: int, response: int, **megatron: object) -> Recipe:
    recipe = Recipe()
    recipe.actor.max_tokens_per_micro_batch = tokens
    recipe.data.max_prompt_length, recipe.rollout.max_response_length = prompt, response
    for name, value in megatron.items():
        setattr(recipe.megatron, name, value)
    return recipe


def test_without_vllm_the_route_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The route of a run elsewhere is unknown, since vLLM there may allow sharded updates."""
    run_recipe = recipe(1000, 100, 300)
    counts = Counted([PipelineStage("actor", 0, 0, HELD, BEYOND, None)], [])
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    monkeypatch.setattr(build, "counted", lambda *_, **__: counts)
    monkeypatch.setattr(build, "engines", lambda *_: [])
    plan = build.make_plan(run_recipe, {"rollout": published.read("Qwen3-8B")}, None)
    assert plan.weight_sync is None and any("not known here: vLLM is not installed" in note for note in plan.notes)


def test_missing_packages_are_noted_only_where_the_devices_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of a laptop say nothing about a cluster."""
    lacking = replace(kind_of("cuda"), installation_notices=lambda: ["Transformer Engine is not installed"])
    monkeypatch.setattr(build, "kind_of", lambda _: lacking)
    for here, notes in ((True, ["On this machine Transformer Engine is not installed."]), (False, [])):
        monkeypatch.setattr(DeviceKind, "is_here", lambda self, here=here: here)
        assert build._of_device(ClusterConfig(device="cuda"), None) == notes


@pytest.mark.parametrize("route", ["auto", "sharded"])
def test_a_model_that_cannot_be_sharded_uses_the_full_route_if_allowed(
    monkeypatch: pytest.MonkeyPatch, route: Any
) -> None:
    """A run with `weight_sync.route: auto` uses the fallback too; `sharded` would refuse to start."""

    def refused(*_: Any) -> Any:
        raise ValueError("layer 0 is not a box")

    run_recipe = recipe(1000, 100, 300)
    run_recipe.weight_sync.route = route
    counts = Counted([PipelineStage("actor", 0, 0, HELD, BEYOND, None)], [])
    monkeypatch.setattr(build, "planned_from", refused)
    monkeypatch.setattr(build, "counted", lambda *_, **__: counts)
    monkeypatch.setattr(build, "engines", lambda *_: [])
    plan = build.make_plan(run_recipe, {"rollout": published.read("Qwen3-8B")}, None)
    (note,) = (note for note in plan.notes if "layer 0 is not a box" in note)
    if route == "auto":
        assert plan.weight_sync is not None and plan.weight_sync.route == "full" and "use the full route" in note
    else:
        assert plan.weight_sync is None and "not known" in note


def test_the_largest_micro_batch_is_full() -> None:
    assert peak_workload(recipe(1000, 100, 300), 0).lengths == [333, 333, 334]
    assert peak_workload(recipe(1000, 100, 300, context_parallel=2), 0).lengths == [400] * 5


def test_a_sequence_longer_than_a_micro_batch_is_alone() -> None:
    assert peak_workload(recipe(1000, 500, 1500), 0).lengths == [2000]
    assert peak_workload(recipe(1000, 500, 1500, packing=False), 0).lengths == [2000]


@pytest.mark.parametrize("packing", [True, False])
def test_a_group_that_a_loss_compares_is_one_micro_batch(packing: bool) -> None:
    config = recipe(1000, 100, 300, packing=packing)
    config.algorithm.loss, config.rollout.samples_per_prompt = "gvpo", 4
    assert peak_workload(config, 0).lengths == [400] * 4


def test_padding_counts_as_tokens() -> None:
    assert peak_workload(recipe(1000, 100, 300, packing=False), 0).lengths == [400, 400]


def test_earlier_stages_have_more_micro_batches_in_flight() -> None:
    piped = recipe(10, 5, 5, pipeline_parallel=4)
    assert [peak_workload(piped, stage).micro_batches for stage in range(4)] == [4, 3, 2, 2]
    interleaved = recipe(10, 5, 5, pipeline_parallel=4, virtual_pipeline=2)
    assert peak_workload(interleaved, 3) == Workload([10], 8, None)
    assert first_ranks(piped.megatron, 32) == [0, 8, 16, 24]


def test_the_largest_image() -> None:
    """The largest image fills the prompt or the pixel limit (28 x 28 a token), nearly square, in whole tokens."""
    run_recipe = recipe(1000, 100, 300)
    assert image_tokens(run_recipe.data, 28 * 28) == 100
    run_recipe.data.max_pixels = 28 * 28 * 30 + 1
    assert image_tokens(run_recipe.data, 28 * 28) == 30
    assert image_grid(30, 2) == (10, 12) and image_grid(1, 2) == (2, 2) and image_grid(7, 1) == (2, 3)


def test_the_backward_pass_of_a_norm_without_a_weight() -> None:
    """Delta nets normalise queries and keys without one."""
    x = torch.empty(2, 4, device="meta", requires_grad=True)
    rms_norm(x, (4,)).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


def test_host_values_are_followed_through_meta_tensors() -> None:
    """The trace goes through views, sums, in-place operations and operations with data-dependent sizes, and no further."""
    meta = torch.device("meta")
    grids = torch.empty(2, 3, dtype=torch.int64, device=meta)
    grids._on_host = torch.tensor([[1, 4, 6], [1, 8, 4]])
    with KnownValues():
        assert [torch.arange(rows * columns).numel() for _, rows, columns in grids] == [24, 32]
        sizes = torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0])
        sizes += 1
        offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
        assert offsets.device == meta and offsets._on_host.tolist() == [0, 25, 58]
        assert int(sizes.max()) == 33 and sizes.cpu().tolist() == [25, 33]
        unknown = torch.empty(2, dtype=torch.int64, device=meta)
        with pytest.raises((RuntimeError, NotImplementedError)):
            int((sizes + unknown).sum())


def test_host_values_end_at_collectives() -> None:
    """A collective over ranks makes a value unknown on the meta device, even if this rank's part is known: the router's losses sum
    numbers of tokens over ranks."""
    tokens = torch.empty((), device="meta")
    tokens._on_host = torch.tensor(3.0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with KnownValues():
            dist.all_reduce(tokens)
    finally:
        dist.destroy_process_group()
    assert not hasattr(tokens, "_on_host")


def test_device_only_dispatchers_are_replaced_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with DeepEP's dispatcher is built with another dispatcher of equal size; its activations are not counted."""
    requests: list[RankRequest] = []

    class Answers:
        def __enter__(self) -> Answers:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def submit(self, question: RankRequest) -> Future[dict[str, object]]:
            requests.append(question)
            future: Future[dict[str, object]] = Future()
            future.set_result({"held": asdict(HELD), "largest": question.rank})
            return future

    monkeypatch.setattr("tests.support.count_ranks.RankClient", Answers)
    path, model = ROOT / "recipes" / "dapo_qwen3_30b.yaml", published.read("Qwen3-30B-A3B")
    extra = (
        "megatron.extra={moe_token_dispatcher_type: flex, moe_flex_dispatcher_backend: deepep, moe_grouped_gemm: true}"
    )
    listed = count_stages(load_recipe(path, [extra]), model, model)
    assert requests[0].work is None
    assert requests[0].recipe.megatron.extra == {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
    assert "moe_token_dispatcher_type=flex" in str(listed[0].not_counted) and listed[0].activations is None


def test_live_memory_counts_each_storage_once() -> None:
    meta = torch.device("meta")
    weight = torch.empty(100, 100, device=meta, requires_grad=True)
    with MemoryCounter(meta) as live:
        weight.detach().zero_()
        assert live.now == 0, "earlier tensors do not count"
        tensor = torch.empty(10, 100, device=meta)
        view = tensor.view(100, 10)
        del tensor
        assert live.now == 4000
        product = view.view(10, 100) @ weight
        del view
        loss = product.relu().sum()
        assert live.kept == 0
        loss.backward()
        assert live.kept == 4000 + 4000 + 4000 + 4 + 4, "input, product, its relu, the sum, its gradient"
    assert weight.grad is not None and live.peak >= live.kept + weight.grad.nbytes


def test_a_device_is_too_small(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With sleeping engines, a trainer needs 151 GiB, and 50 GiB more in the optimizer step."""
    held, beyond = (type(memory)(**{k: v << 30 for k, v in asdict(memory).items()}) for memory in (HELD, BEYOND))
    stage = PipelineStage("actor", 0, 0, held, beyond, None)
    monkeypatch.setattr("megarl.commands.plan.build.counted", lambda *_, **__: Counted([stage]))
    monkeypatch.setattr("megarl.commands.plan.build.engines", lambda *_: [])
    monkeypatch.setattr(
        "megarl.commands.plan.build.suggest",
        lambda *_, **__: Suggestions([Suggestion("megatron.pipeline_parallel=2", 1.234)], stopped),
    )
    monkeypatch.setattr("megarl.commands.plan.build.counted_libraries", lambda *_: NOT_COUNTED)
    stopped = True
    path = ROOT / "recipes" / "grpo_qwen2.5_7b.yaml"
    assert plan(path, [], PlanOptions(memory=151 + 50)) == 0
    assert plan(path, [], PlanOptions(memory=151 + 48)) == 1
    printed = capsys.readouterr().out
    assert "2.0 short" in printed and "actor 0 needs 201.0 GiB in update_actor, Adam: optimizer 90.0" in " ".join(
        printed.split()
    )
    assert "  fits, with 1.23 x the seconds of a step: megatron.pipeline_parallel=2\n" in printed
    words = " ".join(printed.split())
    assert "and found 1; plan --search searches longer (--seconds)." in words
    assert max(len(line) for line in printed.splitlines() if " megarl plan " not in line) <= 100
    *_, verdict, following, command = printed.splitlines()
    assert verdict == "Verdict: does not fit, for 1 reason (REFUSED above)."
    assert following == "Next: the first layout above that fits:"
    assert command.endswith(f"plan {path} megatron.pipeline_parallel=2 --memory 199")


def test_an_invalid_calibration_file_is_reported_before_a_missing_device(tmp_path: Path) -> None:
    """Errors in the calibration file come first, then the missing device of a recipe without a machine."""
    path = ROOT / "recipes" / "retool.yaml"
    assert device_of(path, None, None)[0] is None
    with pytest.raises(InputError, match=r"none\.yaml: no such file"):
        plan(path, [], PlanOptions(calibration=tmp_path / "none.yaml"))
    good = tmp_path / "good.yaml"
    good.write_text("schema: 1\ndevice: 910B\nsource: here\n")
    with pytest.raises(InputError, match=r"--calibration has measured rates .* Give --device as well"):
        plan(path, [], PlanOptions(calibration=good))


def test_a_plan_with_uncounted_activations_does_not_claim_to_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = PipelineStage("actor", 0, 0, HELD, None, "images")
    monkeypatch.setattr("megarl.commands.plan.build.counted", lambda *_, **__: Counted([stage]))
    monkeypatch.setattr("megarl.commands.plan.build.engines", lambda *_: [])
    monkeypatch.setattr("megarl.commands.plan.build.counted_libraries", lambda *_: NOT_COUNTED)
    monkeypatch.setattr("megarl.commands.plan.build.hosts_of", lambda *_: [])
    path = ROOT / "recipes" / "grpo_qwen2.5_7b.yaml"
    assert plan(path, [], PlanOptions(memory=3)) == 0
    printed = capsys.readouterr().out
    assert "not known" in printed and " left" not in printed and "Activations are not counted: images." in printed


def test_the_recipes_head_sets_the_devices_per_machine(tmp_path: Path) -> None:
    """A machine has 16 devices, which affects a tenth of a step's seconds. A user's number has precedence."""
    path = ROOT / "recipes" / "grpo_deepseek_v3.yaml"
    for name in (None, "910B", "910b"):
        device, notes = device_of(path, name, None)
        assert (
            device is not None
            and device.per_node == 16
            and notes == ["910B: 16 devices a machine, as the recipe's head says."]
        )
    other, notes = device_of(path, "H100", None)
    assert other is not None and other.per_node == 8 and "as the table of devices has it" in notes[0]
    user_file = tmp_path / "own.yaml"
    user_file.write_text("910B: {like: 910B, per_node: 4}")
    device, notes = device_of(path, None, user_file)
    assert device is not None and device.per_node == 4 and f"as {user_file} says" in notes[0]


_DAPO = "recipes/dapo_qwen3_30b.yaml"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recipes/dapo_qwen3_30b.yaml", "--device", "H10O"], "Nearest: H100"),
        (["recipes/tiny/TINY", "--device", "H100"], "does not exist"),
        (
            ["recipes/dapo_qwen3_30b.yaml", "--model", "Qwen3-30B"],
            "no config.json of 'Qwen3-30B'. Nearest: Qwen3-30B-A3B",
        ),
        (["recipes/dapo_qwen3_30b.yaml", "cluster.trainers=12"], "12 processes do not divide by"),
        (["recipes/dapo_qwen3_30b.yaml", "cluster.trainers=12"], "divides   megarl.instead=1"),
        (["recipes/quickstart.yaml", "--search"], "give --device"),
        (
            [_DAPO, "--out", "x.yaml"],
            "--out writes the calibration that --calibrate fits. Give --calibrate RUN as well",
        ),
        ([_DAPO, "--seconds", "5"], "--seconds limits the time of --search. Give --search as well"),
        ([_DAPO, "--search", "--html", "x.html"], "--html writes the page of a plan; --search prints"),
        (
            [_DAPO, "--calibrate", "runs/x", "--html", "x.html"],
            "--html writes the page of a plan; --calibrate",
        ),
        ([_DAPO, "--calibrate", "runs/x", "--json"], "--json prints a plan"),
        ([_DAPO, "--calibrate", "runs/x", "--response", "9"], "--response sets the mean response"),
        ([_DAPO, "--calibrate", "runs/x", "--search"], "--search searches for layouts; --calibrate"),
        (["recipes/quickstart.yaml", "--response", "9"], "Give --device as well"),
        (["recipes/quickstart.yaml", "--devices", "megarl/platform/devices.yaml"], "Give --device as well"),
        (["recipes/quickstart.yaml", "--devices", "there/is/none.yaml"], "there/is/none.yaml: no such file"),
    ],
)
def test_bad_input_is_reported(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("megarl.commands.plan.search.suggest.uncounted_layouts", lambda _: ["megarl.instead=1"])
    assert guarded(lambda: app(args=["plan", *arguments], standalone_mode=False), debug=False) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.stack
def test_ranks_of_deepseek_v3_hold_its_published_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    """Summed over pipeline stages and expert-parallel ranks, the ranks hold the published 671 billion parameters."""
    run_recipe, model = load_recipe(ROOT / "recipes" / "grpo_deepseek_v3.yaml"), published.read("DeepSeek-V3")
    listed = count_stages(run_recipe, model, model)
    experts = 3 * model["hidden_size"] * model["moe_intermediate_size"] * model["n_routed_experts"]
    layers = model["num_hidden_layers"] - model["first_k_dense_replace"]
    local = layers * experts // run_recipe.megatron.expert_parallel
    total = sum(stage.held.parameters for stage in listed) - local + layers * experts
    assert total == pytest.approx(671e9, rel=0.001)
    assert all(stage.activations is not None for stage in listed)
    assert json.dumps([stage.rank for stage in listed]) == json.dumps([32 * number for number in range(8)])


def test_stages_with_equal_layers_are_interpolated() -> None:
    held = {1: "dense", 2: "sparse", 3: "sparse", 4: "sparse"}
    assert ends(held) == (2, 4)
    first, last = Activations(3, 90, 50, 7, 1, 2), Activations(3, 50, 10, 7, 1, 2)
    assert interpolated(3, (2, 4), first, last) == Activations(3, 70, 30, 7, 1, 2)
    run_recipe = recipe(10, 5, 5, pipeline_parallel=5)
    assert inner_stages(run_recipe.megatron) == [1, 2, 3]
    run_recipe.megatron.virtual_pipeline = 2
    assert inner_stages(run_recipe.megatron) == []


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "DeepSeek-V3"])
def test_interpolated_stages_equal_counted_stages(model: str, tmp_path: Path) -> None:
    """DeepSeek-V3's second stage has a dense layer, which the later stages do not have."""
    run_recipe = recipe(4096, 1024, 3072, pipeline_parallel=7, expert_parallel=2, recompute="selective")
    run_recipe.cluster.trainers = 14
    layers = {"num_hidden_layers": 14} | ({"first_k_dense_replace": 3} if model == "DeepSeek-V3" else {})
    config = published.read(model) | layers
    built = built_from(run_recipe, config, tmp_path / "model")
    with RankClient() as client:
        short = stages_of("actor", built, run_recipe.megatron, client)
        full = stages_of("actor", built, run_recipe.megatron, client, numbers=list(range(7)))
    assert [stage.activations for stage in short] == [stage.activations for stage in full]
    assert len({stage.activations for stage in short[1:6]}) > 3
