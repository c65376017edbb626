"""Placement of trainers and engines on simulated machines, and errors before any process starts."""

import importlib.util
import sys
import types

import pytest

from megarl.cluster import connect
from megarl.cluster.device_map import Demand, FixedEngines, place, place_on_cpus
from megarl.cluster.ray import env
from megarl.recipe.schema import Recipe


def machines_of(free, demand):
    """Machine of each trainer and of each engine, after checks that hold for every plan."""
    plan = place([(f"10.0.0.{i}", count) for i, count in enumerate(free)], demand, "NPU")
    devices = [slot for engine in plan.engines for slot in engine]
    assert (len(plan.trainers), len(devices)) == (demand.trainers, demand.engine_devices)
    assert len(set(plan.trainers)) == len(plan.trainers) and len(set(devices)) == len(devices)
    assert plan.trainers == sorted(plan.trainers)  # ranks go machine by machine
    assert all(len({machine for machine, _ in engine}) == 1 for engine in plan.engines)
    assert set(devices) <= set(plan.trainers) if demand.shared else not set(devices) & set(plan.trainers)
    per_machine = plan.per_machine(len(free))
    assert all(count <= have for count, have in zip(per_machine, free, strict=True))
    assert all(number < per_machine[machine] for machine, number in plan.trainers + devices)
    return [machine for machine, _ in plan.trainers], [engine[0][0] for engine in plan.engines]


@pytest.mark.parametrize(
    ("free", "demand", "trainers", "engines"),
    [
        # Separate devices: engines do not fragment the trainers' machine.
        ([8, 8], Demand(8, 2, 4), [0] * 8, [1, 1]),
        ([8, 8], Demand(12, 1, 4), [0] * 8 + [1] * 4, [1]),
        ([4, 8], Demand(8, 1, 4), [1] * 8, [0]),
        ([3, 4], Demand(4, 0, trainer_block=4), [1] * 4, []),
        ([3, 3], Demand(4, 1, 1, trainer_block=2), [0, 0, 1, 1], [1]),
        ([8, 8], Demand(4, 2, 6), [0, 0, 1, 1], [0, 1]),  # trainers on the devices that engines leave
        ([2, 2], Demand(4, 0, trainer_block=4), [0, 0, 1, 1], []),  # no machine holds a group of four
        ([0, 4], Demand(0, 2, 2), [], [1, 1]),
        # Time-shared: engines spread over the trainers' devices.
        ([2], Demand(2, 2, shared=True), [0, 0], [0, 0]),
        ([3, 3], Demand(4, 2, 2, shared=True), [0, 0, 1, 1], [0, 1]),
        ([8, 8], Demand(16, 4, 4, trainer_block=2, shared=True), [0] * 8 + [1] * 8, [0, 0, 1, 1]),
        ([8], Demand(8, 1, 2, shared=True), [0] * 8, [0]),
    ],
)
def test_a_demand_that_fits_is_placed(free, demand, trainers, engines):
    assert machines_of(free, demand) == (trainers, engines)


@pytest.mark.parametrize(
    ("free", "demand", "message"),
    [
        ([4, 4], Demand(8, 1, 4), r"cluster\.trainers = 8 .* 1 x 4 .* need 12 of NPU.*: 4 on 10\.0\.0\.0, 4 on 10"),
        ([3, 3], Demand(2, 1, 4), r"each engine in one machine\) need 6 of NPU"),
        ([3, 3], Demand(4, 1, 2, trainer_block=2), r"each megatron\.tensor_parallel = 2 of them in one machine"),
        ([3, 3], Demand(6, 2, 3, trainer_block=2, shared=True), r"on the same devices"),
        ([8], Demand(2, 3, shared=True), r"3 x 1 = 3 devices, .*: cluster\.trainers = 2.*placement=disaggregated"),
        ([], Demand(1, 0), r"need 1 of NPU.*: none"),
    ],
)
def test_a_demand_that_does_not_fit_is_refused_with_the_arithmetic(free, demand, message):
    with pytest.raises(ValueError, match=message):
        machines_of(free, demand)


@pytest.mark.parametrize(
    ("free", "demand", "critics"),
    [
        ([8, 8], Demand(4, 1, 4, critics=2), [(0, 4), (0, 5)]),  # after the trainers
        ([4, 4], Demand(2, 0, critics=4, critic_block=4), [(1, 0), (1, 1), (1, 2), (1, 3)]),  # neighbours together
        ([4], Demand(1, 2, critics=1), [(0, 1)]),
        ([4], Demand(4, 1, 2, shared=True, critics=2), [(0, 0), (0, 1)]),  # on the first of the trainers' devices
    ],
)
def test_the_critic_is_placed(free, demand, critics):
    plan = place([(f"10.0.0.{i}", count) for i, count in enumerate(free)], demand, "NPU")
    assert plan.critics == critics
    used = [*plan.trainers, *plan.critics, *(slot for engine in plan.engines for slot in engine)]
    assert demand.shared or len(set(used)) == len(used) == demand.devices


def test_a_critic_beyond_the_trainers_devices_is_refused():
    with pytest.raises(ValueError, match=r"critic\.trainers = 2.*cluster\.trainers = 1"):
        place([("a", 8)], Demand(1, 1, shared=True, critics=2), "NPU")
    with pytest.raises(ValueError, match=r"and critic\.trainers = 4 .*need 6 of NPU"):
        place([("a", 5)], Demand(1, 1, critics=4), "NPU")


@pytest.mark.parametrize(
    ("free", "demand", "teachers"),
    [
        ([8], Demand(4, 2, shared=True, fixed=(FixedEngines("teacher", 2, 2),)), [[(0, 4), (0, 5)], [(0, 6), (0, 7)]]),
        ([8, 4], Demand(8, 2, shared=True, fixed=(FixedEngines("teacher", 1, 4),)), [[(1, 0), (1, 1), (1, 2), (1, 3)]]),
        # Trainers first would leave no machine with four devices, so the teacher is placed first.
        ([4, 4], Demand(3, 1, fixed=(FixedEngines("teacher", 1, 4),)), [[(1, 0), (1, 1), (1, 2), (1, 3)]]),
        ([4], Demand(1, 1, critics=1, fixed=(FixedEngines("teacher", 1),)), [[(0, 3)]]),
    ],
)
def test_a_teachers_engines_have_separate_devices(free, demand, teachers):
    plan = place([(f"10.0.0.{i}", count) for i, count in enumerate(free)], demand, "NPU")
    assert plan.fixed == teachers
    run_slots = {*plan.trainers, *plan.critics, *(slot for engine in plan.engines for slot in engine)}
    teacher_slots = [slot for engine in plan.fixed for slot in engine]
    assert not run_slots & set(teacher_slots) and len(run_slots) + len(teacher_slots) == demand.devices
    assert plan.per_machine(len(free)) == [
        sum(m == i for m, _ in {*run_slots, *teacher_slots}) for i in range(len(free))
    ]


def test_engines_of_several_fixed_models_are_separate_and_in_order():
    """The teacher starts first, but the judge's larger engine is placed first."""
    both = (FixedEngines("teacher", 1, 2), FixedEngines("judge", 1, 4))
    plan = place([("a", 4), ("b", 6)], Demand(2, 1, 2, fixed=both), "NPU")
    assert [len(engine) for engine in plan.fixed] == [2, 4]
    devices = [*plan.trainers, *(slot for engine in [*plan.engines, *plan.fixed] for slot in engine)]
    assert len(set(devices)) == len(devices) == 10
    assert all(len({machine for machine, _ in engine}) == 1 for engine in plan.fixed)
    message = (
        r"teacher\.tensor_parallel = 1 x 2 .* and judge\.engines x judge\.tensor_parallel = 1 x 4 .*need 10 of NPU"
    )
    with pytest.raises(ValueError, match=message):
        place([("a", 4), ("b", 5)], Demand(2, 1, 2, fixed=both), "NPU")


def test_a_teacher_without_enough_devices_is_refused():
    message = r"teacher\.engines x teacher\.tensor_parallel = 1 x 2 .* need 6 of NPU.*: 5 on a"
    with pytest.raises(ValueError, match=message):
        place([("a", 5)], Demand(4, 1, shared=True, fixed=(FixedEngines("teacher", 1, 2),)), "NPU")


def test_processes_without_devices_are_always_placed():
    colocated = place_on_cpus([1, 1], Demand(2, 1, shared=True, critics=3))
    assert [machine for machine, _ in colocated.critics] == [0, 1, 0]
    assert [machine for machine, _ in place_on_cpus([1, 1], Demand(2, 0)).trainers] == [0, 1]
    assert [machine for machine, _ in place_on_cpus([1, 1], Demand(5, 0)).trainers] == [0, 0, 0, 1, 1]
    assert [machine for machine, _ in place_on_cpus([0, 1], Demand(3, 0)).trainers] == [1, 1, 1]
    assert place_on_cpus([0], Demand(1, 1, 4)).engines == [[(0, number) for number in range(1, 5)]]
    shared = place_on_cpus([1, 1], Demand(2, 5, 1, shared=True))
    assert [engine[0][0] for engine in shared.engines] == [0, 1, 0, 1, 0]  # on the trainers' machines
    assert len(place_on_cpus([2], Demand(2, 1, shared=True, fixed=(FixedEngines("teacher", 3),))).fixed) == 3


def npus():
    return types.SimpleNamespace(
        kind=types.SimpleNamespace(ray_resource="NPU", visible="X"),
        trainer_env=lambda timeout: {},
        engines_env=lambda deterministic: {},
    )  # any other attribute raises


@pytest.fixture
def recipe(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return Recipe()


def test_engines_beyond_the_trainers_devices_are_refused_on_every_transport(recipe, monkeypatch):
    recipe.rollout.engines, recipe.rollout.tensor_parallel, recipe.cluster.trainers = 2, 2, 3
    with pytest.raises(ValueError, match=r"2 x 2 = 4 devices.*cluster\.trainers = 3"):
        connect(recipe, npus())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"2 x 2 = 4 devices.*cluster\.trainers = 3"):
        connect(recipe, npus())


def test_processes_that_a_command_does_not_start_need_no_devices(recipe):
    recipe.cluster.trainers, recipe.rollout.engines, recipe.rollout.tensor_parallel = 4, 2, 2
    assert Demand.of(recipe, trainers=True, engines=True).devices == 4
    assert Demand.of(recipe, trainers=False, engines=True) == Demand(0, 2, 2)
    assert Demand.of(recipe, trainers=True, engines=False).devices == 4
    recipe.cluster.placement = "disaggregated"
    assert Demand.of(recipe, trainers=True, engines=True).devices == 8


def test_a_missing_ray_is_refused_with_the_remedy(recipe, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"Ray is not installed: pip install ray, or start with torchrun"):
        connect(recipe, npus())


@pytest.fixture
def ray_of_the_tests():
    """Set Ray's variables for a private cluster: Ray reads them once, at import, and later test files start such a cluster."""
    env.prepare(private=True)


@pytest.mark.stack
@pytest.mark.usefixtures("ray_of_the_tests")
@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r"cannot join a Ray cluster at 127\.0\.0\.1:1 .*multinode"),
        ("ray://127.0.0.1:10001", r"client or jobs server"),
        ("head", r"host:port"),
    ],
)
def test_an_unreachable_ray_is_refused_with_the_remedy(recipe, tmp_path, address, message):
    from megarl.platform import select

    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
    recipe.cluster.ray_address, recipe.runs_dir = address, str(tmp_path)
    with pytest.raises(ValueError, match=message):
        connect(recipe, select("cpu"))


@pytest.mark.usefixtures("ray_of_the_tests")
def test_the_object_store_leaves_shared_memory_to_weight_sync():
    pytest.importorskip("ray")
    from megarl.cluster.ray.start import MIB, _free_shared_memory, _memory, object_store_bytes

    assert object_store_bytes(1000 * MIB, 10000 * MIB) == 300 * MIB
    assert object_store_bytes(10000 * MIB, 1000 * MIB) == 300 * MIB
    assert object_store_bytes(64 * MIB, 10000 * MIB) == 256 * MIB  # Ray takes another directory then
    assert _free_shared_memory() > 0 and _memory() > 100 * MIB
