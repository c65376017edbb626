"""Errors in the section `algorithm`, and algorithms from a user's module."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from megarl.algorithms.catalogue import ADVANTAGES, LOSSES
from megarl.preflight import user_functions
from megarl.preflight.load import load_recipe
from megarl.preflight.user_functions import try_user_functions
from megarl.recipe import RecipeError
from megarl.recipe.algorithm import AlgorithmConfig
from megarl.recipe.text import to_yaml
from tests.support.loss_cases import inputs, outcomes


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text("model: {path: some/model}\n")
    return file


def refused(recipe: Path, overrides: list[str], key: str, words: str) -> None:
    """Assert an error; overrides without a section are settings of `algorithm`."""
    base_overrides = [
        override if override.startswith(("actor.", "train.")) else f"algorithm.{override}" for override in overrides
    ]
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, base_overrides)
    assert caught.value.key == f"algorithm.{key}" and words in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "setting", "words"),
    [
        (["advantage=rloo", "normalize_by_std=false"], "normalize_by_std", "only gdpo, grpo, grpo_passk or grpo_process reads it"),
        (["pass_k=2"], "pass_k", "only pass_at_k reads it"),
        (["loss=sapo", "clip_high=0.3"], "clip_high", "algorithm.loss 'sapo'; only cispo, clip_cov, dppo_kl"),
        (["loss=gmpo", "dual_clip=3"], "dual_clip", "only gspo, gspo_token or ppo_clip"),
        (["tau_negative=2"], "tau_negative", "only sapo reads it"),
        (["loss=cispo", "ratio_cap=2"], "ratio_cap", "only dppo_kl or dppo_tv"),
        (["loss=reinforce", "old_log_probs=current"], "old_log_probs", "which reads no old log-probs"),
        (["kl_estimator=kl"], "kl_estimator", "algorithm.kl_coef is 0"),
        (["kl_straight_through=true"], "kl_straight_through", "algorithm.kl_coef is 0"),
        (["kl_in_reward=true"], "kl_in_reward", "algorithm.kl_coef is 0"),
        (["kl_importance=true"], "kl_importance", "algorithm.kl_coef is 0"),
        (["kl_coef=0.1", "kl_in_reward=true", "kl_importance=true"], "kl_importance", "has no gradient"),
        (["log_ratio_coef=0.1"], "log_ratio_coef", "only dppo_kl, dppo_tv or dro reads it"),
        (["kl_target=0.1"], "kl_target", "algorithm.kl_coef is 0"),
        (["refresh_reference_every=5"], "refresh_reference_every", "reads no reference policy"),
        (["kl_coef=0.1", "reference=teacher", "refresh_reference_every=5"], "refresh_reference_every", "weights are fixed"),
        (["kl_coef=0.1", "refresh_reference_every=-1"], "refresh_reference_every", "at least 0"),
        (["tail_baseline=zero"], "tail_baseline", "only optimal_token_baseline reads it"),
        (["advantage=optimal_token_baseline", "whiten_advantages=false"], "whiten_advantages", "only gae, on_policy"),
        (["advantage=optimal_token_baseline", "old_log_probs=rollout"], "old_log_probs", "squared probabilities"),
        (["advantage=optimal_token_baseline", "loss=reinforce", "old_log_probs=current"], "old_log_probs", "skips this pass"),
        (["kl_coef=0.1", "kl_horizon=10"], "kl_horizon", "algorithm.kl_target is unset"),
        (["kl_coef=0.1", "kl_in_reward=true", "kl_straight_through=true"], "kl_straight_through", "has no gradient"),
        (["advantage=reinforce_plus_plus", "lam=0.5"], "lam", "only gae reads it"),
        (["correction.truncate=3"], "correction.truncate", "algorithm.correction.weights is none"),
        (["correction.normalize=true"], "correction.normalize", "algorithm.correction.weights is none"),
    ],
)  # fmt: skip
def test_a_setting_without_effect_is_refused(recipe: Path, overrides: list[str], setting: str, words: str) -> None:
    refused(recipe, overrides, setting, words)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["old_log_probs=current", "actor.mini_batches=2"], "old_log_probs", "the policy changes within a step"),
        (["advantage=pass_at_k", "pass_k=9"], "pass_k", "a group has 8 samples"),
        (["correction.reject.token_ratio=[5, 5]"], "correction.reject.token_ratio", "no ratio is between 5.0 and 5.0"),
        (["correction.reject.token_ratio=5"], "correction.reject.token_ratio", "are [low, high]"),
        (["correction.reject.mean_k3=[0, 1]"], "correction.reject.mean_k3", "a number above 0"),
        (["correction.reject.mean_k3=-1"], "correction.reject.mean_k3", "a number above 0"),
        (
            ["correction.reject.token_k1=0.1"],
            "correction.reject.token_k1",
            "this criterion is unknown; did you mean token_ratio",
        ),
        (["correction.icepop=[5, 0.5]"], "correction.icepop", "with 0 < low < high"),
        (["correction.icepop=[0.5, 5]", "correction.truncate=2"], "correction.truncate", "sets it to 5.0"),
        (
            ["correction.icepop=[0.5, 5]", "correction.reject.token_ratio=[0.5, 4]"],
            "correction.reject",
            "icepop=[0.5, 5.0] sets it to",
        ),
        (["correction.weights=token", "old_log_probs=rollout"], "correction.weights", "would apply it twice"),
        (
            ["loss=reinforce", "correction.weights=token", "correction.normalize=true"],
            "correction.normalize",
            "has no such pass",
        ),
        (["kl_coef=0.1", "kl_in_reward=true", "old_log_probs=rollout"], "kl_in_reward", "skips the pass"),
        (["advantage=pass_at_k", "kl_coef=0.1", "kl_in_reward=true"], "kl_in_reward", "which must contain no KL"),
        (["advantage=grpo_process", "kl_coef=0.1", "kl_in_reward=true"], "kl_in_reward", "reads rewards of steps"),
        (["kl_coef=0.1", "kl_target=0.1", "kl_horizon=255"], "kl_horizon", "a step has 256 samples"),
        (["train.source=sft", "loss=sft", "advantage=remax"], "advantage", "no rewards"),
        (["train.source=sft", "loss=sft", "entropy_coef=0.1"], "entropy_coef", "has no samples and no rewards"),
        (
            ["train.source=sft", "loss=sft", "dynamic_sampling.enabled=true"],
            "dynamic_sampling",
            "has no samples and no rewards",
        ),
        (["train.source=preferences", "loss=dpo"], "aggregation", "a mean over sequences of whole groups"),
        (["loss=gvpo", "aggregation=token_mean"], "aggregation", "a mean over sequences of whole groups"),
        (["train.source=preferences", "loss=sft"], "loss", "the loss needs train.source=sft"),
        (["loss=dpo", "aggregation=seq_mean_token_mean"], "loss", "the loss needs train.source=preferences"),
        (["advantage=gdpo"], "reward_parts", "normalizes each part"),
        (["reward_parts={accuracy: 1}"], "reward_parts", "only gdpo reads it"),
        (
            ["advantage=gdpo", "reward_parts={accuracy: 1}", "overlong.penalty_buffer=8"],
            "reward_parts",
            "overlong_penalty, which is not among them",
        ),
        (["aggregation_divisor=8"], "aggregation_divisor", "which divides by counts"),
        (["kl_coef=0.1", "kl_straight_through=true", "kl_importance=true"], "kl_importance", "replaces the gradient"),
        (["options.share=1"], "options", "algorithm.modules is empty"),
        (["modules=[no.such.module]"], "modules", "No module named 'no'"),
    ],
)
def test_an_unsupported_combination_is_refused(recipe: Path, overrides: list[str], key: str, words: str) -> None:
    refused(recipe, overrides, key, words)


def test_demonstrations_have_no_mismatch_to_correct(recipe: Path) -> None:
    sft = ["train.source=sft", "loss=sft", "advantage=none", "correction.reject.mean_k3=0.1"]
    refused(recipe, sft, "correction", "has no samples and no rewards")


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss=gspo", "clip_low=3e-4", "clip_high=4e-4", "aggregation=seq_mean_token_mean"],
        ["loss=dppo_kl", "old_log_probs=rollout", "correction.reject.token_ratio=[0.5, 5]"],
        [
            "loss=reinforce",
            "correction.weights=token",
            "correction.reject={sequence_ratio: [0.5, 5], worst_ratio: [1e-4, null]}",
        ],
        ["advantage=reinforce_plus_plus", "loss=reinforce", "kl_coef=0.1", "kl_in_reward=true", "gamma=0.9"],
        ["advantage=gae", "kl_coef=0.1", "kl_in_reward=true", "kl_target=0.05", "kl_horizon=500"],
        ["old_log_probs=current", "correction.weights=sequence"],
        ["correction.weights=token", "correction.normalize=true"],
        ["advantage=pass_at_k", "pass_k=8", "kl_coef=0.1", "kl_straight_through=true"],
        ["advantage=gdpo", "reward_parts={accuracy: 1, overlong_penalty: 1}", "overlong.penalty_buffer=8"],
        ["kl_coef=0.1", "kl_importance=true", "aggregation=token_sum", "aggregation_divisor=64"],
    ],
)
def test_supported_combinations_are_accepted(recipe: Path, overrides: list[str]) -> None:
    load_recipe(recipe, [f"algorithm.{override}" for override in overrides])


def test_icepop_is_weights_inside_an_interval(recipe: Path, tmp_path: Path) -> None:
    overrides = ["algorithm.correction.icepop=[0.5, 4]", "algorithm.correction.reject.mean_k3=0.1"]
    loaded = load_recipe(recipe, overrides)
    correction = loaded.algorithm.correction
    assert (correction.weights, correction.truncate) == ("token", 4.0)
    assert correction.reject == {"token_ratio": [0.5, 4.0], "mean_k3": 0.1}
    (tmp_path / "resolved.yaml").write_text(to_yaml(loaded))
    assert load_recipe(tmp_path / "resolved.yaml").algorithm == loaded.algorithm


MODULE = """
from megarl.algorithms.advantages import advantage
from megarl.algorithms.losses import policy_loss


@advantage("twice")
def twice(outcomes, settings):
    return outcomes.rewards * settings.options["factor"]


@policy_loss("squared", needs_old_log_probs=False)
def squared(inputs, settings):
    return inputs.log_probs.square(), {"mine/log_prob": inputs.log_probs.detach()}
"""


@pytest.fixture
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a test's registrations after it."""
    for registry in (ADVANTAGES, LOSSES):
        monkeypatch.setattr(registry, "_entries", {name: registry[name] for name in registry.names()})


def own_module(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / "my_ideas_for_this_test.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_ideas_for_this_test", raising=False)
    return "algorithm.modules=[my_ideas_for_this_test]"


@pytest.mark.usefixtures("own_registries")
def test_user_functions_are_registered_and_run(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [own_module(MODULE, tmp_path, monkeypatch), "algorithm.advantage=twice", "algorithm.loss=squared"]
    algorithm = load_recipe(recipe, [*overrides, "algorithm.options.factor=2"]).algorithm
    load_recipe(recipe, overrides)  # a second time: it is imported once
    batch = outcomes([1.0, 3.0], [0, 0])
    np.testing.assert_array_equal(ADVANTAGES[algorithm.advantage].function(batch, algorithm), [2, 6])
    loss, metrics = LOSSES[algorithm.loss].function(inputs([0.5], [1.0]), algorithm)
    assert loss.item() > 0 and list(metrics) == ["mine/log_prob"]


@pytest.mark.usefixtures("own_registries")
def test_a_user_function_can_read_any_setting(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's loss may read a setting that only megarl's advantages read."""
    text = MODULE.replace("needs_old_log_probs=False", "needs_old_log_probs=False, settings=('gamma',)")
    overrides = [own_module(text, tmp_path, monkeypatch), "algorithm.loss=squared", "algorithm.gamma=0.5"]
    assert load_recipe(recipe, overrides).algorithm.gamma == 0.5


@pytest.mark.parametrize("advantage", [name for name in ADVANTAGES.names() if ADVANTAGES[name].needs_siblings])
def test_one_sample_per_prompt_is_refused_for_group_advantages(recipe: Path, advantage: str) -> None:
    overrides = [f"algorithm.advantage={advantage}", "rollout.samples_per_prompt=1", "algorithm.pass_k=1"]
    overrides = overrides if advantage == "pass_at_k" else overrides[:2]
    with pytest.raises(RecipeError, match="a single sample always has advantage 0"):
        load_recipe(recipe, overrides)


def test_one_sample_per_prompt_is_refused_with_dynamic_sampling(recipe: Path) -> None:
    overrides = ["algorithm.advantage=remax", "rollout.samples_per_prompt=1"]
    load_recipe(recipe, overrides)
    with pytest.raises(RecipeError, match="a group with a single sample is always dropped"):
        load_recipe(recipe, [*overrides, "algorithm.dynamic_sampling.enabled=true"])


@pytest.mark.usefixtures("own_registries")
def test_the_documented_example_runs(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (module,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (section,) = re.findall(r"```yaml\n(algorithm: {modules.*?)```", page, re.DOTALL)
    (tmp_path / "my_ideas.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_ideas", raising=False)
    recipe.write_text(recipe.read_text() + section)
    algorithm = load_recipe(recipe).algorithm
    loss, _ = LOSSES["half_clip"].function(inputs([1.05, 1.3], [1.0, 1.0]), algorithm)
    assert loss.tolist() == pytest.approx([-1.05, -1.1])
    above = ADVANTAGES["above_median"].function
    assert above is not None and above(outcomes([3, 1, 2, 5, 5], [0, 0, 0, 1, 1]), algorithm).tolist() == [
        1,
        -1,
        0,
        0,
        0,
    ]
    try_user_functions(algorithm)


@pytest.mark.usefixtures("own_registries")
@pytest.mark.parametrize(
    ("slip", "key", "words"),
    [
        (("settings.options[", "settings.options['x'] + settings.options["), "loss", "failed in line 12: KeyError: 'x'"),
        (("-inputs.advantages * ratio", "ratio.detach()"), "loss", "does not depend on log_probs"),
        (("-inputs.advantages * ratio.clamp", "(-inputs.advantages * ratio).mean().clamp"), "loss", "an array of shape []"),
        (('"actor/ratio": ratio.detach()', '"actor/ratio": ratio.mean()'), "loss", "as the metric 'actor/ratio' an array"),
        ((", {\"actor/ratio\": ratio.detach()}", ""), "loss", "returned Tensor, expected a tuple (loss of each token, dict"),
        (("np.sign(outcomes.rewards -", "np.sign(outcomes.rewards[1:] -"), "advantage", "failed in line 20: ValueError"),
        (("return np.sign", "return list(medians) or np.sign"), "advantage", "returned list, expected one number for each of 4 samples"),
    ],
)  # fmt: skip
def test_an_error_in_a_user_function_is_found_before_the_start(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slip: tuple[str, str], key: str, words: str
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (module,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (section,) = re.findall(r"```yaml\n(algorithm: {modules.*?)```", page, re.DOTALL)
    assert slip[0] in module
    (tmp_path / "my_ideas.py").write_text(module.replace(*slip))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_ideas", raising=False)
    recipe.write_text(recipe.read_text() + section)
    algorithm = load_recipe(recipe).algorithm
    with pytest.raises(RecipeError) as caught:
        try_user_functions(algorithm)
    assert caught.value.key == f"algorithm.{key}" and words in str(caught.value), str(caught.value)
    assert str(tmp_path / "my_ideas.py") in str(caught.value)


def test_built_in_functions_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_functions, "_UserFunction", lambda *_: pytest.fail("a built-in function was tried"))
    try_user_functions(AlgorithmConfig(loss="ppo_clip", modules=["json"]))


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("1 +", "broken", ["broken.py", "SyntaxError", "correct the module"]),
        (
            "import nothing_of_this_name",
            "lacking",
            ["lacking.py:1", "No module named 'nothing_of_this_name'", "correct the module"],
        ),
        ("x = 1\ny = x.z", "slipped", ["slipped.py:2", "AttributeError", "correct the module"]),
        ("x = 1", "elsewhere", ["No module named", "directory where megarl starts"]),
        ("x = 1", "named.py", ["name the module, not the file: named"]),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str, words: list[str]
) -> None:
    (tmp_path / (f"{name}.py" if name != "elsewhere" else "other.py")).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, [f"algorithm.modules=[{name}]"])
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.usefixtures("own_registries")
def test_an_unknown_setting_of_a_user_function_is_refused(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = MODULE.replace("needs_old_log_probs=False", "needs_old_log_probs=False, settings=('clip_hi',)")
    with pytest.raises(RecipeError, match=r"'clip_hi' is not a setting.*did you mean 'clip_high'"):
        load_recipe(recipe, [own_module(text, tmp_path, monkeypatch), "algorithm.loss=squared"])
