"""Calibration files: parsing, validation and their effect on an estimate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.commands.plan.time.calibration import RATES, Calibration, CalibrationEntry, read_calibration
from megarl.commands.plan.time.estimate import estimate
from megarl.errors import InputError
from megarl.platform.device_table import Device
from tests.support.estimate_cases import DEVICE, QWEN, recipe

HEAD = {"schema": 1, "device": "round", "source": "a test"}


def measured(value: float) -> CalibrationEntry:
    return CalibrationEntry(value, "measured", "a test")


def applied(**rates: float) -> Device:
    """Apply a calibration to DEVICE: 2e12 FLOP/s, 2e9 bytes/s of memory, links and the host; shares of 0.5."""
    return Calibration("round", "a test", {name: measured(value) for name, value in rates.items()}).apply(DEVICE)


def test_a_calibration_file_round_trips(tmp_path: Path) -> None:
    entry = CalibrationEntry(2.5, "fitted", "steps of a run")
    written = Calibration("910C", "a test", {"link": measured(1e11)}, {"gen": entry}, {"torch": "2.10"})
    written.write(tmp_path / "one.yaml")
    assert read_calibration(tmp_path / "one.yaml") == written


def test_fields_of_earlier_files_are_ignored(tmp_path: Path) -> None:
    entry = {"value": 2.5, "origin": "fitted", "how": "steps of a run"}
    observed = [{"name": "decode, 32 sequences", "value": 1850.0, "unit": "tokens/s", "how": "TP 1"}]
    plain = {**HEAD, "rates": {"link": entry}, "factors": {"gen": entry}}
    ranged = {**entry, "low": 2.0, "high": 3.0}
    (tmp_path / "now.yaml").write_text(yaml.safe_dump(plain))
    earlier = {**plain, "rates": {"link": ranged}, "factors": {"gen": ranged}, "observations": observed}
    (tmp_path / "earlier.yaml").write_text(yaml.safe_dump(earlier))
    assert read_calibration(tmp_path / "earlier.yaml") == read_calibration(tmp_path / "now.yaml")


def test_the_link_of_two_devices_is_not_taken_for_all_links_of_a_mesh() -> None:
    """Earlier versions measured one link of an Atlas A2, and saved it as the link."""
    earlier = CalibrationEntry(2.5e10, "measured", "rank 0 to rank 1, median of 5")
    for device in (replace(DEVICE, mesh=8), DEVICE):
        calibration = Calibration("round", "a test", {"link": earlier})
        if device.mesh:
            with pytest.raises(InputError, match=r"between two devices.*has 7 links.*stage 7 again"):
                calibration.apply(device)
        else:
            assert calibration.apply(device).link * device.link_share == 2.5e10


def test_a_phase_under_its_former_name_is_read(tmp_path: Path) -> None:
    Calibration("910C", "a test", {}, {"weight_exchange": measured(2.5)}).write(tmp_path / "former.yaml")
    assert read_calibration(tmp_path / "former.yaml").factors == {"weight_sync": measured(2.5)}


@pytest.mark.parametrize(
    ("rates", "changed"),
    [
        ({"train_flops": 5e11}, {"train_share": 0.25}),
        ({"prefill_flops": 5e11}, {"prefill_share": 0.25}),
        ({"decode_bandwidth": 5e8}, {"decode_share": 0.25}),
        # A bound lowers an assumed rate and never raises it; a rate measured for this link has precedence.
        ({"matmul_flops": 8e11}, {"train_share": 0.4, "prefill_share": 0.4}),
        ({"matmul_flops": 1.9e12}, {}),
        ({"matmul_flops": 8e11, "train_flops": 1.2e12}, {"train_share": 0.6, "prefill_share": 0.4}),
        ({"memory_bandwidth": 4e8}, {"decode_share": 0.2}),
        # A rate above the data sheet's: the peak is raised, and other shares remain the same rates.
        ({"train_flops": 4e12}, {"flops": 4e12, "train_share": 1.0, "prefill_share": 0.25}),
        ({"link": 1.5e9}, {"link": 3e9}),
        ({"host_link": 2e8}, {"host_link": 4e8}),
        ({"host_network": 1e9}, {"host_network": 2e9}),
        ({"offload_link": 1e8}, {"offload_link": 2e8}),
        ({"adam_bandwidth": 7e8}, {"adam_bandwidth": 7e8}),
        ({"layer_seconds": 0.25}, {"layer_seconds": 0.25}),
    ],
)
def test_rates_become_shares_and_links(rates: dict[str, float], changed: dict[str, float]) -> None:
    device = applied(**rates)
    expected = replace(DEVICE, **changed, source=device.source)  # type: ignore[arg-type]
    assert {name: pytest.approx(value) for name, value in vars(expected).items() if isinstance(value, float)} == {
        name: value for name, value in vars(device).items() if isinstance(value, float)
    }


def test_every_rate_changes_seconds() -> None:
    """Each rate affects the estimate; an unread rate would be an ignored option."""
    run_recipe = recipe(
        megatron__tensor_parallel=2,
        cluster__trainers=8,
        megatron__offload=True,
        weight_sync__route="full",
        algorithm__kl_coef=0.1,
        rollout__engines=8,
        cluster__device="cuda",
    )
    slow = {"matmul_flops": 1e10, "memory_bandwidth": 1e7, "layer_seconds": 1.0}

    def seconds(device: Device) -> float:
        return estimate(run_recipe, {"rollout": QWEN}, device).seconds

    plain = seconds(DEVICE)
    for name in RATES:
        assert seconds(applied(**{name: slow.get(name, 1e7)})) > plain * 1.0001, name


def test_factors_multiply_phases_and_replace_the_devices_factors() -> None:
    run_recipe = recipe(algorithm__kl_coef=0.1)
    device = replace(DEVICE, factors={"reference": 7.0})
    calibrated = Calibration("Round", "a test", factors={"update_actor": measured(2.0)}).apply(device)
    before = {phase.name: phase.seconds for phase in estimate(run_recipe, {"rollout": QWEN}, DEVICE).phases}
    after = {phase.name: phase.seconds for phase in estimate(run_recipe, {"rollout": QWEN}, calibrated).phases}
    assert after == before | {"update_actor": pytest.approx(2 * before["update_actor"])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema is 2; this version of megarl reads schema 1"),
        ({"device": None, "source": ""}, "source: is ''; give a text"),
        ({"rate": {}}, "has no section rate. There are schema, device"),
        ({"rates": [1]}, r"rates is \[1\]. Give a mapping"),
        ({"rates": {"link": 1e9}}, "rates.link is 1000000000.0. Give {value: NUMBER"),
        ({"rates": {"lnik": {"value": 1, "origin": "measured", "how": "x"}}}, "rates has no 'lnik'. Nearest: link"),
        (
            {"rates": {"link": {"value": -1, "origin": "measured", "how": "x"}}},
            "rates.link.value is -1.0; give a number",
        ),
        ({"rates": {"link": {"value": "fast", "origin": "measured", "how": "x"}}}, "value is 'fast'"),
        ({"rates": {"link": {"value": 1, "origin": "guessed", "how": "x"}}}, "origin is 'guessed'; there are measured"),
        ({"factors": {"gen": {"value": 1, "origin": "fitted", "how": ""}}}, "factors.gen.how is ''; give a text"),
        ({"factors": {"gen": {"value": 5, "origin": "fitted"}}}, "factors.gen is .* Give {value: NUMBER"),
    ],
)
def test_a_wrong_file_is_refused_with_its_path(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump({**HEAD, **change}))
    with pytest.raises(InputError, match=f"(?s)wrong.yaml: .*{message}"):
        read_calibration(file)
