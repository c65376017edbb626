"""Every layout gives the results of one process and of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import held_ranks, holdings_check, megatron_critic
from tests.support.megatron_layouts import (
    OPTIONS,
    PARITY,
    RESHARD_FOUR,
    RESHARD_MORE_FOUR,
    RESHARD_MORE_ONE,
    RESHARD_MORE_TWO,
    RESHARD_ONE,
    RESHARD_OTHER_ONE,
    RESHARD_OTHER_TWO,
    RESHARD_TWO,
    RESUME,
    SWAP,
)
from tests.support.megatron_models import LENGTHS, MODELS, global_batch, reference_model, write_model
from tests.support.megatron_runs import (
    SAME_CHANGE,
    SAME_CHANGE_OF_DELTA_NETS,
    WORKER,
    cases,
    check_gradient,
    check_weights,
    checkpoint_tensors,
    launch,
    log_probs_of,
    of_transformers,
    only_layouts,
    selected,
)

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1800)]  # the first test waits for all launches


@pytest.mark.slow
def test_checkpoints_move_between_more_layouts(tmp_path: Path) -> None:
    for model in ("qwen3_moe", "qwen2_tied"):
        write_model(model, tmp_path / "models")
    for processes, some in ((2, RESHARD_MORE_TWO), (1, RESHARD_MORE_ONE), (4, RESHARD_MORE_FOUR)):
        launch(processes, some, tmp_path)
    held_ranks.check(tmp_path, [*RESHARD_MORE_TWO, *RESHARD_MORE_ONE, *RESHARD_MORE_FOUR])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt_oss", "gemma3_text", "deepseek_v32"])
def test_checkpoints_of_other_layers_move_between_layouts(model: str, tmp_path: Path) -> None:
    """Sinks and biases of experts; norms after sublayers; indexers, which are not trained."""
    write_model(model, tmp_path / "models")
    for processes, some in ((2, RESHARD_OTHER_TWO), (1, RESHARD_OTHER_ONE)):
        launch(processes, [{**case, "model": model} for case in some], tmp_path)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with models/ and the workers' results. One launch for each number of processes.

    `-k mixtral` launches Mixtral's layouts alone: checks of checkpoints and critics run only with their tests.
    """
    directory = tmp_path_factory.mktemp("megatron")
    cases = selected(request, [*PARITY, *OPTIONS])
    checks: dict[int, list[dict[str, Any]]] = {  # two processes first: the later launches read their checkpoints
        2: [*RESUME, *RESHARD_TWO, *megatron_critic.TWO, SWAP],
        1: [*RESHARD_ONE, *megatron_critic.ONE],
        4: RESHARD_FOUR,
    }
    if only_layouts(request, cases):
        checks = {processes: [] for processes in checks}
    for model in {case["model"] for case in cases} if only_layouts(request, cases) else MODELS:
        write_model(model, directory / "models")
    for processes, more in checks.items():
        if some := [*(case for case in cases if case["processes"] == processes), *more]:
            launch(processes, some, directory)
    return directory


@cases(PARITY[:1])
def test_trainers_on_a_cpu_print_no_warning(results: Path, case: dict[str, Any]) -> None:
    """Warnings that are expected on a CPU are suppressed: a user could not act on them."""
    logs = list(results.glob(f"{WORKER}-*.log"))
    assert logs
    for log in logs:
        assert "Warning" not in log.read_text(), log.read_text()


@pytest.mark.slow
def test_the_planners_bytes_equal_the_ranks(request: pytest.FixtureRequest, results: Path) -> None:
    """The planner's bytes of weights, gradients, master weights and moments are exact on every rank of every case."""
    critics = [*megatron_critic.ONE, *megatron_critic.TWO]
    held_ranks.check(results, [*selected(request, [*PARITY, *OPTIONS]), *RESUME, *critics])


@pytest.mark.slow
def test_the_planners_slices_equal_the_ranks(request: pytest.FixtureRequest, results: Path) -> None:
    """The planner's slice table of each rank equals the rank's, which the rank has checked against mbridge's export."""
    holdings_check.check_planned(results, selected(request, [*PARITY, *OPTIONS]))


@cases(PARITY, OPTIONS)
def test_log_probs_equal_transformers(results: Path, case: dict[str, Any]) -> None:
    rows = log_probs_of(results, case["name"])
    assert sorted(rows) == list(range(len(LENGTHS)))
    for number, expected in enumerate(of_transformers(results / "models" / case["model"])):
        for value, reference in zip(rows[number], expected, strict=True):
            torch.testing.assert_close(value, reference, atol=2e-5, rtol=0)


@cases(PARITY, OPTIONS)
def test_export_is_bit_identical_to_the_original(results: Path, case: dict[str, Any]) -> None:
    """Load, export and write keep every tensor of the original, also untrained ones, and add none."""
    original = checkpoint_tensors(results / "models" / case["model"])
    exported = checkpoint_tensors(results / f"{case['name']}.hf")
    assert exported.keys() == original.keys()
    for name, weight in original.items():
        assert exported[name].dtype == weight.dtype and torch.equal(exported[name], weight), name
    if case["model"] == "deepseek_v3":
        assert "model.layers.4.eh_proj.weight" in original, "this test is to prove that MTP layers survive"


@cases(PARITY, OPTIONS)
def test_training_does_not_depend_on_the_layout(results: Path, case: dict[str, Any]) -> None:
    base, got = (torch.load(results / f"{name}.pt", weights_only=True) for name in (case["reference"], case["name"]))
    delta_nets = case["model"].startswith(("qwen3_next", "qwen3_5"))  # their decay's gradient is rounded more coarsely
    for step, (metrics, expected) in enumerate(zip(got["metrics"], base["metrics"], strict=True)):
        assert metrics["tokens"] == sum(LENGTHS)
        # Adam magnifies rounding of small gradients, so the second step begins with weights that differ by up to 1e-6.
        relative = (5e-5 if step else 1e-5) if delta_nets else 2e-6
        assert metrics == pytest.approx(expected, rel=relative), "a loss or gradient norm depends on the layout"
    same = SAME_CHANGE_OF_DELTA_NETS if delta_nets else SAME_CHANGE
    check_weights(got["after"], base["after"], checkpoint_tensors(results / "models" / case["model"]), same)


@cases([case for case in PARITY if case["processes"] == 1])
def test_gradient_equals_transformers(results: Path, case: dict[str, Any]) -> None:
    model = reference_model(results / "models" / case["model"])
    check_gradient(results, case["name"], model, [{"input_ids": tokens[None]} for tokens in global_batch()[0]])


@cases(RESUME)
def test_saved_hf_directory_equals_the_export(results: Path, case: dict[str, Any]) -> None:
    """The worker asserts that the resumed run is bit-identical; this test checks the directory that it wrote."""
    saved = checkpoint_tensors(results / f"{case['name']}.hf")
    weights = torch.load(results / f"{case['name']}.weights.pt", weights_only=True)
    original = checkpoint_tensors(results / "models" / case["model"])
    assert saved.keys() == original.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())
    assert (results / f"{case['name']}.hf" / "config.json").read_text() == (
        results / "models" / case["model"] / "config.json"
    ).read_text()


def test_a_swapped_optimizer_resumes_bit_identically(results: Path) -> None:
    """The worker asserts equality with and without the swap, and after offloading weights and gradients."""
    went_on = torch.load(results / f"{SWAP['name']}.went_on.pt", weights_only=True)
    assert len(went_on["metrics"]) == 2 and went_on["weights"]


@pytest.mark.parametrize("case", megatron_critic.ONE, ids=lambda case: case["name"])
def test_values_match_transformers(results: Path, case: dict[str, Any]) -> None:
    megatron_critic.check_against_transformers(results, case["name"])


@pytest.mark.parametrize("case", [*megatron_critic.ONE, *megatron_critic.TWO], ids=lambda case: case["name"])
def test_critic_does_not_depend_on_the_layout(results: Path, case: dict[str, Any]) -> None:
    megatron_critic.check_against_one_process(results, case)
