"""The keeper: workers that outlive a controller which dies, and nothing that outlives the keeper."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.cluster.keeper import VARIABLE, KeeperAddress, KeeperProcess, digest_of
from megarl.cluster.ray.env import authentication
from megarl.cluster.ray.keeper_main import Unattended
from megarl.errors import ProcessFailure
from tests.support.cluster_workers import alive, wait_until
from tests.support.kept_controller import Controller
from tests.support.slow import slow_except


def test_workers_end_after_their_time_without_a_controller() -> None:
    unattended = Unattended(10.0)
    alone = {"lives": False, "has_workers": True}
    assert not unattended.is_over(**alone, now=100.0)
    assert not unattended.is_over(**alone, now=109.0)
    assert not unattended.is_over(lives=True, has_workers=True, now=109.5)  # another controller
    assert not unattended.is_over(**alone, now=110.0)
    assert unattended.is_over(**alone, now=120.0)
    assert not unattended.is_over(lives=False, has_workers=False, now=200.0)
    assert not unattended.is_over(**alone, now=201.0)


def test_the_keepers_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, address = (
        tmp_path / "keeper.json",
        KeeperAddress("127.0.0.1:1", "n", "m", True, (("raylet", 7, "log"),), 30.0),
    )
    assert KeeperAddress.of_environment({}) is None
    address.write(file)
    assert KeeperAddress.of_environment({VARIABLE: f"{os.getpid()}:{file}"}) == address
    KeeperAddress(problem="no memory").write(file)
    with pytest.raises(ProcessFailure, match=r"train\.keep_workers\) has failed: no memory"):
        KeeperAddress.of_environment({VARIABLE: f"{os.getpid()}:{file}"})
    with pytest.raises(ProcessFailure, match="has ended, or was killed"):
        KeeperAddress.of_environment({VARIABLE: f"{1 << 30}:{tmp_path / 'missing'}"})
    monkeypatch.setattr("megarl.cluster.keeper.START_SECONDS", 0.0)
    with pytest.raises(ProcessFailure, match="has not started Ray within 0 s"):
        KeeperAddress.of_environment({VARIABLE: f"{os.getpid()}:{tmp_path / 'missing'}"})


def test_the_digest_of_settings() -> None:
    assert digest_of(1, "a") == digest_of(1, "a") != digest_of(1, "b")
    assert digest_of(object()) != digest_of(object()), "an object without a readable repr is never equal"


@pytest.fixture
def environ() -> dict[str, str]:
    return {**os.environ, **authentication({})}


@pytest.fixture
def keeper(environ: dict[str, str]) -> Iterator[KeeperProcess]:
    process = KeeperProcess("", 60.0, environ)
    yield process
    process.close()


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.timeout(1200)
def test_workers_of_a_controller_that_dies(keeper: KeeperProcess, environ: dict[str, str], tmp_path: Path) -> None:
    """The next controller takes them, also after a call that runs; not after a call that has failed, or with other settings."""
    environ = environ | keeper.env
    first = Controller(tmp_path, environ)
    trainers, (engine0, engine1), *kept = first.workers()
    assert kept == [False, [False, False], []]
    first.end("busy")
    second = Controller(tmp_path, environ)
    again, (engine0_again, engine1_again), *kept = second.workers()
    refused = "service engine1 cannot serve another controller: a call to it has failed, or its engine has"
    assert (again, engine0_again, kept) == (trainers, engine0, [True, [True, False], [refused]])
    assert not any(map(alive, engine1)) and engine1_again != engine1, "its release has refused"
    second.end("fail")
    third = Controller(tmp_path, environ)
    new, (engine0_again, _), *kept = third.workers()
    of_trainer = f"trainer rank 0 {refused.split(' ', 2)[2]}, so that all 2 of them start again"
    assert kept == [False, [True, False], [refused, of_trainer]] and engine0_again == engine0
    assert not any(map(alive, trainers)) and not {*new} & {*trainers}
    third.end("die")
    fourth = Controller(tmp_path, environ)
    newer, _, *kept = fourth.workers()
    assert kept == [
        False,
        [True, False],
        [refused, "trainer rank 1 has ended, so that all 2 of them start again"],
    ] and not any(map(alive, new))
    fourth.end("")
    last = Controller(tmp_path, environ, "other settings")
    *_, trainers_kept, engines_kept, not_taken = last.workers()
    assert [trainers_kept, *engines_kept] == [False, False, False]
    assert sum(" has other settings" in text for text in not_taken) == 3, not_taken  # two trainers, one engine
    assert not any(map(alive, [*newer, *engine0]))
    last.end("end")
    assert fourth.process.returncode == -9 and last.process.returncode == 0 and keeper.alive()


@pytest.mark.stack
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", slow_except("killed".__eq__, ["closed", "killed", "joined"]))
def test_nothing_outlives_the_keeper(how: str, environ: dict[str, str], tmp_path: Path) -> None:
    """ "joined": the keeper has joined a Ray cluster instead of starting one. Here another keeper has started the cluster."""
    cluster = KeeperProcess("", 60.0, environ) if how == "joined" else None
    address = KeeperAddress.of_environment(cluster.env) if cluster is not None else KeeperAddress()
    assert address is not None
    if (
        how == "joined"
    ):  # that cluster listens on 127.0.0.1, which Ray would otherwise replace by the machine's outer address
        environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    keeper = KeeperProcess(address.address, 60.0, environ)
    controller = Controller(tmp_path, environ | keeper.env)
    trainers, engines, *_ = controller.workers()
    processes = psutil.Process(keeper._process.pid).children(recursive=True)
    workers = [*trainers, *(pid for engine in engines for pid in engine)]
    if how == "closed":  # as the end of `megarl train` closes it, when the controller has ended
        controller.end("")
        assert all(map(alive, workers))
        keeper.close()
    else:
        keeper._process.kill()
    pids = [*workers, *(each.pid for each in processes)]
    wait_until(lambda: not any(map(alive, pids)), 30)
    left = [(pid, psutil.Process(pid).cmdline()) for pid in pids if alive(pid)]
    assert not left
    controller.process.kill()
    controller.process.communicate()
    keeper.close()
    if cluster is not None:
        assert cluster.alive()
        cluster.close()


@pytest.mark.slow
@pytest.mark.stack
def test_devices_of_the_next_controller(one_ray, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """With simulated NPUs: the next controller takes the reservation, unless it needs other devices."""
    from megarl.cluster.device_map import Demand
    from megarl.cluster.ray.devices import RayDevices
    from megarl.cluster.ray.nursery import Nursery
    from tests.support.ray_services import free_npus

    nursery = one_ray.remote(Nursery).options(num_cpus=0).remote()

    def create(bundles, selectors):  # type: ignore[no-untyped-def]
        return one_ray.get(nursery.reserve.remote(bundles, selectors))

    def devices(engines: int) -> RayDevices:
        return RayDevices("NPU", "ASCEND_RT_VISIBLE_DEVICES", Demand(2, engines, shared=False, engines_leave=True))

    changes: list[None] = []
    first = devices(1)
    first.reserve(create, lambda: changes.append(None))
    one_ray.get(nursery.remember.remote(first.reservation()))
    assert first.next_engine(1)[0].id == "2" and free_npus() == 1
    reservation = one_ray.get(nursery.attach.remote(7)).reservation
    second = devices(1)
    assert second.adopt(reservation) and [each.id for each in second.of_group("trainer")] == ["0", "1"]
    assert second.next_engine(1)[0].id == "2" and free_npus() == 1 and not changes
    assert not devices(2).adopt(reservation)
    first.give_back(first.claim(1))
    assert len(changes) == 2
    assert one_ray.get(nursery.controller.remote()) == (7, True)
    one_ray.get(nursery.end.remote())
    assert wait_until(lambda: free_npus() == 4, 10)
    assert one_ray.get(nursery.attach.remote(8)).reservation is None
    one_ray.kill(nursery)
