"""Order in which a search counts layouts, its summary of rejected layouts, and that its candidates fit."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from megarl.commands.plan import command
from megarl.commands.plan.build import make_plan
from megarl.commands.plan.count.devices import Occupants
from megarl.commands.plan.count.rank_client import RankClient, RankRequest
from megarl.commands.plan.count.stages import built_from, stages_of
from megarl.commands.plan.count.types import Activations, PipelineStage, RankMemory
from megarl.commands.plan.options import PlanOptions
from megarl.commands.plan.progress import Report
from megarl.commands.plan.search import search as module
from megarl.commands.plan.search import suggest
from megarl.commands.plan.search.fits import FitChecker, HostTooSmallError, Subject, too_large
from megarl.commands.plan.search.forecast import Forecast
from megarl.commands.plan.search.layouts import Choice, EngineLayout, apply_choice, choice_of, overrides
from megarl.commands.plan.search.lower_bound import largest_parts, min_held_bytes, min_peak_bytes
from megarl.commands.plan.search.search import SearchResult, families, require_device, search
from megarl.commands.plan.show.search_console import name_of, show, summary_lines, why
from megarl.commands.plan.time.estimate import estimate
from megarl.engines.routes import WeightRoute
from megarl.errors import InputError, RecipeError
from megarl.preflight.findings import Survey
from megarl.preflight.load import load_recipe
from megarl.preflight.models import POLICY
from megarl.recipe.schema import Recipe
from megarl.recipe.text import to_yaml
from tests.support.layout_search import DENSE, H100, NO_CLIENT, SPARSE, FakeFitChecker, recipe, subject

ROOT = Path(__file__).parents[3]


def run(task: Subject, checker: FakeFitChecker, *, seconds: float = 60.0, count: int = 10) -> SearchResult:
    return module._Search(task, checker, time.monotonic() + seconds, count).run()  # type: ignore[arg-type]


def everything(result: SearchResult) -> int:
    rejected = result.too_large + result.unlikely + result.counted_too_large + sum(result.refused.values())
    rejected += result.hosts_too_small
    return len(result.best) + rejected + result.slower + result.not_reached + result.not_examined


def test_candidates_are_sorted_by_time_with_one_per_shape() -> None:
    result = run(subject(), FakeFitChecker(), count=1000)
    assert len(result.best) > 5 and result.not_reached == 0
    assert [candidate.seconds for candidate in result.best] == sorted(candidate.seconds for candidate in result.best)
    shapes = [candidate.choice.layout.shape for candidate in result.best]
    assert len(set(shapes)) == len(shapes)
    assert all(candidate.choice.recompute == "full" for candidate in result.best), (
        "others were counted, and are too large"
    )
    assert result.counted_too_large > 0
    assert everything(result) == result.possible


def test_the_first_candidate_is_the_fastest_that_fits() -> None:
    """The first candidate is the fastest of all layouts that fit."""
    task = subject()
    first = run(task, FakeFitChecker(), count=1).best[0]
    fitting = [
        task.step_seconds(apply_choice(task.recipe, choice))
        for family in families(task)
        for choice in family.choices
        if choice.recompute == "full" and choice.layout.pipeline_parallel < 4
    ]
    assert first.seconds == pytest.approx(min(fitting), rel=0.02)


def test_refused_and_unlikely_layouts_are_counted_in_the_result() -> None:
    result = run(subject(), FakeFitChecker(refuses=(1, 1, 1, 1, 1), doubts=(2, 1, 1, 1, 1)), count=1000)
    assert result.refused["not this one"] > 0
    fitting = {candidate.choice.layout.shape for candidate in result.best}
    assert (1, 1, 1, 1, 1) not in fitting
    assert (2, 1, 1, 1, 1) in fitting, "with time left, unlikely layouts are counted"
    assert len(fitting) == len(result.best), "one candidate per shape"
    assert everything(result) == result.possible


def test_a_layout_that_hosts_cannot_hold_is_not_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search rejects it with the reason; a plan proposes other layouts."""

    class TooSmallHosts(FakeFitChecker):
        def peak(self, choice: Choice) -> int:
            if choice.offload:
                raise HostTooSmallError("the host of node 0 needs 99 GiB; there are 64. use more machines")
            return super().peak(choice)

    result = run(subject(), TooSmallHosts(), count=1000)
    assert result.best and not any(candidate.choice.offload for candidate in result.best)
    assert result.hosts_too_small > 0 and everything(result) == result.possible
    (line,) = (line for line in summary_lines(result) if line.startswith("Fit the devices, but not their hosts"))
    assert f": {result.hosts_too_small}; the first: the host of node 0 needs 99 GiB" in line
    monkeypatch.setattr(suggest, "FitChecker", TooSmallHosts)
    task = subject(recompute="none", offload=False)
    engines = EngineLayout(4, 1, 1, None), None
    suggested = suggest.suggest(task, NO_CLIENT, engines=engines, seconds=30.0)
    assert suggested.suggestions and not any(
        "offload=true" in suggestion.overrides for suggestion in suggested.suggestions
    )


class Hosts(FitChecker):
    """Hosts of two machines of four devices for 8 trainers in 4 stages, with offloaded parts only."""

    def __init__(self, memory: float) -> None:
        task = subject(8, pipeline_parallel=4, offload=True)
        task.recipe.train.source = "sft"
        device = replace(H100, per_node=4, host_memory=memory, process_memory=0.0)
        self._subject, self._client = replace(task, device=device), NO_CLIENT

    def check(self, sizes: list[int], counted: int) -> None:
        """`sizes`: GiB of page-locked weights by stage; only the first `counted` stages are counted."""
        stages = [PipelineStage("actor", number, 0, held(size), None, None) for number, size in enumerate(sizes)]
        occupants = Occupants(self._subject.recipe, stages[:counted], {}, {}, 1, keeps_weights=True)
        self._check_hosts(occupants, stages[:counted], [])


def test_hosts_of_a_layout_that_fits_the_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts of a layout that is too large for the devices are not counted."""
    checker, beyond = Hosts(23.0), Activations(1, 1, 1, 1)
    chosen, critic = Future[Any](), Future[Any]()
    chosen.set_result((EngineLayout(1, 1, 1, None), None))
    critic.set_result([])
    checker._built, checker._shape = checker._subject.recipe, checker._subject.shape
    checker._chosen, checker._critic, checker._engine_candidates = chosen, critic, [EngineLayout(1, 1, 1, None)]
    stages = [PipelineStage("actor", number, 0, held(10), beyond, None) for number in range(4)]
    monkeypatch.setattr("megarl.commands.plan.search.fits.stages_of", lambda *_: stages)
    choice = choice_of(checker._subject.recipe)
    with pytest.raises(HostTooSmallError, match="the host of node 0 needs 40"):
        checker.peak(choice)
    checker._subject = replace(checker._subject, device=replace(checker._subject.device, memory=1e-9))
    assert checker.peak(choice) > checker._subject.limit
    checker._subject = replace(checker._subject, device=replace(checker._subject.device, memory=80.0, host_memory=50.0))
    assert 0 < checker.peak(choice) < checker._subject.limit


def held(size: int) -> RankMemory:
    return RankMemory(1, 1, 1, 0, 1, 1, 1, 0, weights_pinned=size * 2**30)


def test_hosts_of_a_searched_layout_equal_those_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks a stage, two stages a machine. Where hosts full of the largest stage fit, no other stage is counted."""
    choices = []

    def rest(role: str, recipe: Recipe, megatron: Any, client: Any, numbers: list[int]) -> list[PipelineStage]:
        choices.append(numbers)
        return [PipelineStage(role, number, 0, held(2), None, None) for number in numbers]

    monkeypatch.setattr("megarl.commands.plan.search.fits.stages_of", rest)
    Hosts(41.0).check([10, 2, 2, 2], counted=1)
    assert choices == []
    Hosts(39.0).check([10, 2, 2, 2], counted=1)
    assert choices == [[1, 2, 3]], "24 GiB in all of the first machine: 2 x 10 + 2 x 2"
    with pytest.raises(
        HostTooSmallError,
        match=r"host of node 0 needs 24\.0 GiB: offloaded 24\.0; there are 23\. megatron\.offload: set it",
    ):
        Hosts(23.0).check([10, 2, 2, 2], counted=1)
    with pytest.raises(HostTooSmallError, match="node 1 needs 30"):
        Hosts(29.0).check([1, 1, 5, 10], counted=4)


def test_a_search_stops_at_its_time_limit() -> None:
    began = time.monotonic()
    result = run(subject(), FakeFitChecker(waits=0.3), seconds=1.0)
    assert time.monotonic() - began < 5
    assert result.not_reached > 0 and everything(result) == result.possible
    assert any("Not reached in" in line for line in summary_lines(result))


def test_a_search_that_found_enough_does_not_ask_for_more_time() -> None:
    result = run(subject(), FakeFitChecker(), count=2)
    assert result.not_examined > 0 == result.not_reached and everything(result) == result.possible
    lines = summary_lines(result)
    assert f"Not examined, since 2 layouts were found: {result.not_examined:,}." in lines
    assert not any("--seconds" in line or "All were examined" in line for line in lines)


def test_the_recipes_layout_is_counted_even_with_little_time() -> None:
    """The recipe's layout is the slowest here; all faster ones take long to count and are too large."""
    task = subject(pipeline_parallel=2, recompute="full", offload=True)
    recipe_choice = choice_of(task.recipe)

    class Slow(FakeFitChecker):
        def peak(self, choice: Choice) -> int:
            if choice == recipe_choice:
                return 2**30
            time.sleep(0.4)
            return 2**40

    result = run(task, Slow(), seconds=1.0)
    assert [candidate.choice.layout for candidate in result.best] == [recipe_choice.layout]
    assert everything(result) == result.possible
    assert run(task, Slow(refuses=recipe_choice.layout.shape), seconds=1.0).best == []


def test_resident_trainers_must_leave_memory_for_engines() -> None:
    """Engines take 0.9 of the device, and the trainers need a fifth, so they must offload."""
    task = subject()
    choice = replace(choice_of(task.recipe), recompute="full")
    resident = max(
        min_held_bytes(task.recipe, task.shape, part) for part in largest_parts(task.recipe.megatron, task.shape)
    )
    task.recipe.rollout.engine_args = {"gpu_memory_utilization": 0.9}
    task = replace(task, device=replace(H100, memory=5 * resident / 2**30))
    assert too_large(task, replace(choice, offload=False))
    assert not too_large(task, replace(choice, offload=True))


def test_equal_settings_are_counted_once(tmp_path: Path) -> None:
    """A setting is counted once for all context-parallel sizes above one, by the first thread that requests it."""

    class RecordingClient:
        def __init__(self) -> None:
            self.requests: list[RankRequest] = []

        def submit(self, request: RankRequest) -> Future[dict[str, Any]]:
            self.requests.append(request)
            time.sleep(0.01)
            answer: Future[dict[str, Any]] = Future()
            answer.set_result({"activations": asdict(Activations(2**20, 2**21, 2**20, 0))})
            return answer

    task, client = subject(8), RecordingClient()
    forecast = Forecast(client, task.recipe, task.model, task.shape, tmp_path)  # type: ignore[arg-type]
    with ThreadPoolExecutor(4) as threads:
        recipes = [
            replace(task.recipe, megatron=replace(task.recipe.megatron, context_parallel=size)) for size in (2, 4, 8, 2)
        ]
        assert min(threads.map(forecast.peak, recipes)) > 0
    assert len(client.requests) == 3, "two stages of a layer each, and one of two"
    forecast.peak(task.recipe)
    assert len(client.requests) == 6, "without context parallel, attention keeps other things"


@pytest.mark.parametrize("nested", [False, True])
def test_samples_of_a_forecast_are_valid_models(nested: bool, tmp_path: Path) -> None:
    """Fields per layer are shortened, and a text section does not override the number of layers."""
    text = {**DENSE, "head_dim": 8, "layer_types": ["full_attention"] * 6, "max_window_layers": 6}
    vision = {"hidden_size": 64, "num_heads": 2, "depth": 2, "out_hidden_size": 32}
    whole = {**text, "model_type": "qwen2_5_vl", "text_config": text, "vision_config": vision}
    task = subject(4, whole if nested else text)
    Forecast(NO_CLIENT, task.recipe, task.model, task.shape, tmp_path)
    for layers in (2, 3):
        read = transformers.AutoConfig.from_pretrained(tmp_path / f"of_{layers}").get_text_config()
        assert read.num_hidden_layers == len(read.layer_types) == layers and read.hidden_size == 32


def test_uncounted_engines_are_named() -> None:
    result = run(subject(), FakeFitChecker(), count=1)
    assert "Engines are not counted in the memory. rollout: nothing is known." in summary_lines(result)
    assert not any("not counted in the memory" in line for line in summary_lines(SearchResult()))


def test_step_times_equal_the_estimate() -> None:
    task = replace(subject(pipeline_parallel=2, recompute="full"), response=20.0)
    sampled = families(task)[::7]
    assert sampled
    for family in sampled:
        chosen_recipe = apply_choice(task.recipe, family.choices[0])
        assert task.step_seconds(chosen_recipe) == pytest.approx(
            estimate(chosen_recipe, {"rollout": task.model}, H100, response=20.0).seconds
        )


def test_a_search_without_a_device_is_refused() -> None:
    with pytest.raises(InputError, match="give --device"):
        require_device(None)


def search_command(route: str, monkeypatch: pytest.MonkeyPatch, as_json: bool = True) -> tuple[int, list[Subject]]:
    """Run `plan --search` where the expected route is full, with a search that finds nothing. Return the subjects."""
    subjects: list[Subject] = []

    def nothing(task: Subject, *, seconds: float, report: Report) -> SearchResult:
        subjects.append(task)
        return SearchResult()

    task = subject(4, DENSE)
    task.recipe.weight_sync.route = route  # type: ignore[assignment]
    look = Survey(task.recipe)
    look.unavailable("rewards: no judge here")
    look.notice("seeds differ")
    look.configs[POLICY] = task.model
    monkeypatch.setattr(command, "load_for_search", lambda *_: (task.recipe, task.recipe))
    monkeypatch.setattr(command, "checked", lambda *_: look)
    monkeypatch.setattr(command, "search", nothing)
    monkeypatch.setattr(command, "device_of", lambda *_: (H100, ["the device is H100, as the recipe says"]))
    full = WeightRoute("full", "this vLLM has no layerwise update", "vLLM 0.16")
    monkeypatch.setattr(command, "expected_routes", lambda *_: [full])
    return command.plan(Path("x.yaml"), [], PlanOptions(search=True, as_json=as_json)), subjects


def test_a_search_uses_the_expected_route_and_shows_the_notes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, subjects = search_command("auto", monkeypatch)
    assert status == 1 and [task.recipe.weight_sync.route for task in subjects] == ["full"]
    shown = json.loads(capsys.readouterr().out)
    assert shown["unchecked"] == ["rewards: no judge here"]
    assert shown["notes"][:2] == ["seeds differ", "the device is H100, as the recipe says"]
    assert [note.partition(":")[0] for note in shown["notes"][2:]] == ["Host memory"]
    search_command("auto", monkeypatch, as_json=False)
    printed = capsys.readouterr().out
    assert "Not checked: rewards: no judge here" in printed and "as the recipe says" in printed
    with pytest.raises(RecipeError, match="engines do not support it"):
        search_command("sharded", monkeypatch)


def test_the_table_is_within_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    task = subject(8, pipeline_parallel=2)
    show(task, run(task, FakeFitChecker()))
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if not line.startswith("  megatron.")]  # lines to copy
    assert max(map(len, lines)) <= 100
    assert "Overrides of the first" in printed and "megatron.recompute=full" in printed


def test_names_of_layouts_and_reasons_of_speed() -> None:
    layout = choice_of(recipe(8, tensor_parallel=2, pipeline_parallel=2, virtual_pipeline=3)).layout
    assert name_of(layout) == "TP2 PP2x3"
    assert name_of(replace(layout, tensor_parallel=1, pipeline_parallel=1, virtual_pipeline=None)) == "DP"
    task = subject(pipeline_parallel=2)
    base = estimate(task.recipe, {"rollout": task.model}, H100)
    assert why(base, base) == "as the recipe"
    assert why(base, None) == "the recipe's layout cannot run"


# --- with everything counted ---------------------------------------------------------------------


def _peak(stage: PipelineStage) -> int:
    """Return the largest device memory of a phase, without other processes on the device."""
    held, beyond = stage.held, stage.activations
    assert beyond is not None
    return held.weights + held.buffers + held.gradients + held.masters + held.moments + beyond.peak


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.parametrize("model", [DENSE, SPARSE])
def test_no_layout_that_fits_is_pruned(model: dict[str, Any], tmp_path: Path) -> None:
    """The lower bound is at most the counted memory, and uncounted stages need no more than counted ones."""
    task = subject(4, model)
    every = [choice for family in families(task) for choice in family.choices]
    assert every
    built = built_from(task.recipe, task.model, tmp_path / "model")
    with RankClient() as client:
        forecast = Forecast(client, built, task.model, task.shape, tmp_path / "samples")
        for choice in every[:: max(1, len(every) // 16)]:
            chosen_recipe = apply_choice(built, choice)
            peaks = {
                stage.number: _peak(stage)
                for stage in stages_of("actor", chosen_recipe, chosen_recipe.megatron, client)
            }
            assert min_peak_bytes(chosen_recipe, task.shape) <= max(peaks.values()), choice
            looked_at = [part.number for part in largest_parts(chosen_recipe.megatron, task.shape)]
            assert max(peaks.values()) == max(peaks[number] for number in looked_at), (choice, peaks)
            assert forecast.peak(chosen_recipe) == pytest.approx(max(peaks.values()), rel=0.5), choice


@pytest.mark.slow
@pytest.mark.stack
def test_the_best_candidate_fits(tmp_path: Path) -> None:
    """`plan` accepts the best layouts of a search that also met layouts too large for the device. It counts the same memory."""
    task = subject(4, DENSE)
    task.recipe.rollout.max_response_length = 8160
    task = replace(task, device=replace(H100, memory=1.1))
    task.recipe.rollout.engine_args = {
        "kv_cache_memory_bytes": 2**24,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
    }
    (tmp_path / "recipe.yaml").write_text(to_yaml(task.recipe))
    result = search(task, seconds=120, count=3)
    assert result.best and result.counted_too_large
    for candidate in result.best:
        settings = overrides(task.recipe, apply_choice(task.recipe, candidate.choice))
        loaded = load_recipe(tmp_path / "recipe.yaml", settings)
        plan = make_plan(loaded, {"rollout": task.model}, task.device)
        assert not plan.refusals, (settings, plan.refusals)
        assert max(place.peak.total for place in plan.places) == candidate.peak
    assert json.dumps([candidate.seconds for candidate in result.best])
