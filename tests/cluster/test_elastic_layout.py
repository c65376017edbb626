"""The layout of a run with fewer devices than its recipe states: it fits, keeps the recipe's proportions, and is the best one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import pytest

from megarl.cluster.device_map import Demand, fits, place
from megarl.cluster.elastic_layout import ElasticLayouts, LayoutSizes, replica_step
from megarl.recipe.schema import Recipe


def recipe_of(trainers: int = 1, engines: int = 1, *, shared: bool = False, **settings: int) -> Recipe:
    """Return a recipe. settings: tp, pp, cp, ep of megatron; engine_tp, group, least of rollout; critics."""
    recipe = Recipe()
    recipe.cluster.trainers, recipe.rollout.engines = trainers, engines
    recipe.cluster.placement = "colocated" if shared else "disaggregated"
    megatron, rollout = recipe.megatron, recipe.rollout
    names = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel", "ep": "expert_parallel"}
    for short, name in names.items():
        setattr(megatron, name, settings.get(short, 1))
    rollout.tensor_parallel, rollout.data_parallel = settings.get("engine_tp", 1), settings.get("group", 1)
    rollout.min_engines = settings.get("least")
    recipe.critic.trainers = settings.get("critics", 1)
    return recipe


def layouts_of(recipe: Recipe, *, critic: bool = False) -> ElasticLayouts:
    engines = recipe.train.source == "rollout"
    return ElasticLayouts(recipe, Demand.of(recipe, trainers=True, engines=engines, critic=critic))


def on(free: Sequence[int]) -> Callable[[Demand], bool]:
    return lambda demand: fits(free, demand)


@pytest.mark.parametrize(
    ("recipe", "free", "expected"),
    [
        (recipe_of(2, 2), [2, 2], (2, 2)),  # all are there
        (recipe_of(2, 2), [2, 1], (2, 1)),  # the same share either way: trainers first
        (recipe_of(2, 2), [1, 1], (1, 1)),
        (recipe_of(4, 4), [3, 3], (3, 3)),
        (recipe_of(16, 16, tp=2), [8, 8], (4, 8)),  # half of both
        (recipe_of(32, 16, tp=8), [20, 20], (3, 16)),  # 24 + 12, and 4 left for further engines
        (recipe_of(8, 8, least=6), [10], (4, 6)),  # the engines stop at rollout.min_engines
        (recipe_of(8, 8, group=4), [12], (8, 4)),  # engines in whole groups
        (recipe_of(8, 4, ep=4), [4, 4], (4, 4)),  # 8 or 4 replicas hold the experts
        (recipe_of(8, 4, ep=4, tp=2), [6, 3], (2, 4)),  # 4 replicas need 12 devices with the engines; 2 need 4
        (recipe_of(16, 4, shared=True, tp=2, engine_tp=4), [8, 4], (6, 3)),
        (recipe_of(16, 4, shared=True, tp=2, engine_tp=4), [8, 2], (5, 2)),
        (recipe_of(8, 1, shared=True, tp=2, engine_tp=2), [2], (1, 1)),
    ],
)
def test_layouts_by_hand(recipe: Recipe, free: list[int], expected: tuple[int, int]) -> None:
    sizes = layouts_of(recipe).choose(on(free))
    assert sizes is not None and (sizes.replicas, sizes.engines) == expected


def random_cases(count: int) -> Iterator[tuple[Recipe, bool, list[int]]]:
    choose = random.Random(7)
    for _ in range(count):
        tp, pp, cp = choose.choice([1, 1, 2]), choose.choice([1, 1, 2]), choose.choice([1, 1, 2])
        ep, replicas = choose.choice([1, 1, 2, 4]), choose.randint(1, 6)
        shared, group, engine_tp = choose.random() < 0.4, choose.choice([1, 1, 2]), choose.choice([1, 2, 4])
        trainers = tp * pp * cp * replicas * ep
        most = max(1, trainers // engine_tp // group) if shared else choose.randint(1, 5)
        engines = choose.randint(1, most) * group
        least = None if shared or choose.random() < 0.5 else choose.randint(1, engines)
        critics = choose.randint(1, 4)
        recipe = recipe_of(trainers, engines, shared=shared, tp=tp, pp=pp, cp=cp, ep=ep, group=group)
        recipe.rollout.min_engines, recipe.rollout.tensor_parallel = least, engine_tp
        recipe.critic.trainers = min(critics, trainers)
        yield recipe, choose.random() < 0.3, [choose.randint(0, 9) for _ in range(choose.randint(1, 4))]


def smallest_share(sizes: LayoutSizes, full: LayoutSizes) -> Fraction:
    return min(Fraction(count, whole) for count, whole in zip(sizes, full, strict=True) if whole)


def followed(full: LayoutSizes, replicas: int, recipe: Recipe) -> LayoutSizes:
    """Return the layout on shared devices with this number of replicas: critics and engines in the same proportion."""
    group = recipe.rollout.data_parallel
    critics = min(full.critic_replicas, max(1, full.critic_replicas * replicas // full.replicas))
    return LayoutSizes(replicas, critics, max(1, full.engines * replicas // full.replicas // group) * group)


@pytest.mark.parametrize(("recipe", "critic", "free"), random_cases(150))
def test_a_layout_fits_and_has_the_largest_share(recipe: Recipe, critic: bool, free: list[int]) -> None:
    layouts, shared = layouts_of(recipe, critic=critic), recipe.cluster.placement == "colocated"
    full, step = layouts.full, replica_step(recipe.megatron)
    sizes = layouts.choose(on(free))
    assert sizes == layouts_of(recipe, critic=critic).choose(on(free)), "the same devices give the same layout"
    if shared:
        layouts_by_hand = [
            followed(full, replicas, recipe) for replicas in range(full.replicas, 0, -1) if replicas % step == 0
        ]
        assert sizes == next((each for each in layouts_by_hand if fits(free, layouts.demand(each))), None)
    else:
        candidates = [
            LayoutSizes(*each)
            for each in itertools.product(*(range(1, whole + 1) if whole else [0] for whole in full))
            if each[0] % step == 0
            and each[2] % recipe.rollout.data_parallel == 0
            and each[2] >= (recipe.rollout.min_engines or 1)
            and fits(free, layouts.demand(LayoutSizes(*each)))
        ]
        assert (sizes is None) == (not candidates), "a start is refused only if no layout fits"
        if sizes is not None:
            assert smallest_share(sizes, full) == max(smallest_share(each, full) for each in candidates)
    if sizes is None:
        return
    demand, smaller = layouts.demand(sizes), layouts.recipe(sizes)
    assert demand.devices <= sum(free)
    assert all(count <= whole for count, whole in zip(sizes, full, strict=True)), "never more than the recipe has"
    plan = place([(str(number), count) for number, count in enumerate(free)], demand, "NPU")
    assert (len(plan.trainers), len(plan.critics), len(plan.engines)) == (
        demand.trainers,
        demand.critics,
        sizes.engines,
    )
    assert Demand.of(smaller, trainers=True, engines=True, critic=critic) == demand
    changed = {"cluster", "critic", "rollout"}
    rest = {name: value for name, value in vars(smaller).items() if name not in changed}
    assert rest == {name: value for name, value in vars(recipe).items() if name not in changed}
    assert smaller.data.prompts_per_step == recipe.data.prompts_per_step and smaller.actor == recipe.actor


def test_sft_has_no_engines_and_the_teacher_keeps_its_devices() -> None:
    recipe = recipe_of(4)
    recipe.train.source = "sft"
    layouts = layouts_of(recipe)
    assert layouts.full == LayoutSizes(4, 0, 0) and layouts.choose(on([3])) == LayoutSizes(3, 0, 0)
    assert layouts.recipe(LayoutSizes(3, 0, 0)).rollout.engines == recipe.rollout.engines
    recipe = recipe_of(2, 2)
    recipe.teacher.engines, recipe.teacher.tensor_parallel = 1, 2
    demand = Demand.of(recipe, trainers=True, engines=True, fixed=["teacher"])
    assert ElasticLayouts(recipe, demand).choose(on([4])) == LayoutSizes(1, 0, 1)
    assert ElasticLayouts(recipe, demand).choose(on([3])) is None


def test_a_critic_shrinks_with_the_actor() -> None:
    layouts = layouts_of(recipe_of(4, 2, critics=4), critic=True)
    assert layouts.full == LayoutSizes(4, 4, 2)
    assert layouts.choose(on([5])) == LayoutSizes(2, 2, 1)
    assert layouts.choose(on([2])) is None and layouts.demand(layouts.least).devices == 3
    recipe = recipe_of(4, 2, shared=True, critics=4)
    assert layouts_of(recipe, critic=True).choose(on([2])) == LayoutSizes(2, 2, 1)
    recipe.critic.megatron.tensor_parallel = 4
    assert layouts_of(recipe, critic=True).choose(on([3])) is None, "the critic needs the devices of 4 trainers"


def test_traces_of_missing_ranks_are_left_out() -> None:
    recipe = recipe_of(4, 4)
    recipe.observe.profile_steps, recipe.observe.profile_ranks, recipe.observe.profile_engines = [3], [1, 3], [2]
    smaller = layouts_of(recipe).recipe(LayoutSizes(2, 0, 2))
    assert (smaller.observe.profile_ranks, smaller.observe.profile_engines) == ([1], [])
    assert smaller.observe.profile_steps == [3] and recipe.observe.profile_ranks == [1, 3]
    recipe.observe.profile_ranks = [3]
    assert layouts_of(recipe).recipe(LayoutSizes(2, 0, 2)).observe.profile_steps == [], "nothing is left to trace"


def test_layouts_in_words() -> None:
    layouts = layouts_of(recipe_of(8, 2, tp=2, critics=2), critic=True)
    assert layouts.text(layouts.full) == "8 trainers (4 replicas), 2 critics and 2 engines"
    assert layouts.text(LayoutSizes(1, 1, 1)) == "2 trainers (1 replica), 1 critic and 1 engine"
    assert layouts_of(recipe_of(2, 2)).text(LayoutSizes(1, 0, 1)) == "1 trainer and 1 engine"
