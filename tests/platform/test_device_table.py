"""The table of devices, and files that add to it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from docs.generate.planner import fields_of_file
from megarl.errors import InputError
from megarl.platform.device_table import Device, device_named, devices


def test_every_device_of_the_table_is_complete_and_has_a_source() -> None:
    table = devices()
    assert {"910B", "910C", "A100", "H100", "H200"} <= set(table)
    for device in table.values():
        assert device.source and device.memory < device.host_memory
        assert device.network <= device.link < device.bandwidth < device.flops
        assert 0 < device.train_share < 1 and device.layer_seconds < 1e-2
    words = [word for device in table.values() for word in device.torch]
    assert len(words) == len(set(words)) and [name for name, device in table.items() if not device.torch] == ["CPU"]


def test_an_entry_inherits_fields_from_the_entry_it_is_like(tmp_path: Path) -> None:
    user_file = tmp_path / "own.yaml"
    user_file.write_text("Mine: {like: Base, memory: 96}\nBase: {like: H100, flops: 1e14, factors: {gen: 1.5}}\n")
    mine, h100 = devices(user_file)["Mine"], devices()["H100"]
    assert (mine.memory, mine.flops, mine.link, mine.per_node) == (96, 1e14, h100.link, h100.per_node)
    assert mine.factors == {"gen": 1.5} and mine.torch == ()
    assert "own.yaml" in mine.source and "H100" in mine.source
    assert "Mine" not in devices()


def test_devices_of_a_full_mesh_share_one_link_with_each_other_device(tmp_path: Path) -> None:
    """An Atlas A2: 7 links of 28 GB/s. Its meshes, in a machine of 16, are joined by PCIe."""
    a2 = device_named("910B")
    rates = {members: a2.link_rate(range(members)) / 1e9 for members in (1, 2, 4, 8, 16)}
    assert rates == pytest.approx({1: 196, 2: 28, 4: 84, 8: 196, 16: 64})
    assert a2.link_rate((0, 8)) == a2.host_link, "one device of each mesh"
    assert a2.link_rate((0, 1, 8, 9)) == pytest.approx(28e9), "the links between the two of a mesh"
    assert a2.link_rate((1, 3, 5, 7)) == pytest.approx(84e9)
    for name in ("910B1", "910B2", "910B2C", "910B4"):
        assert device_named(name).link_rate((0, 1)) == pytest.approx(28e9)
    for name in ("910C", "910C 20 cores", "H100", "A100", "CPU"):
        switched = device_named(name)
        assert switched.link_rate((0, 1)) == switched.link_rate(range(16)) == switched.link
    user_file = tmp_path / "own.yaml"
    user_file.write_text("Switched: {like: 910B, mesh: 0}\nFour: {like: 910B, mesh: 4, link: 90e9}\n")
    table = devices(user_file)
    assert table["Switched"].link_rate((0, 1)) == 196e9
    assert table["Four"].link_rate((0, 1)) == pytest.approx(30e9)


def test_a_users_entry_replaces_one_of_the_table(tmp_path: Path) -> None:
    user_file = tmp_path / "own.yaml"
    user_file.write_text("H100: {like: H100, train_share: 0.25}\n")
    assert devices(user_file)["H100"].train_share == 0.25 != devices()["H100"].train_share
    assert devices(user_file)["H100"].flops == devices()["H100"].flops
    assert device_named("h100", user_file).train_share == 0.25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Mine: {like: H100, memry: 96}", "Mine has no field 'memry'. Nearest: memory"),
        ("Mine: {like: H10, memory: 96}", "Mine is like H10, which is unknown. Nearest: H100"),
        ("Mine: {memory: 96}", "Mine lacks source, flops, .* `like: NAME`"),
        ("Mine: {like: H100, memory: lots}", "Mine.memory is 'lots'; it must be a number"),
        ("Mine: {like: H100, memory: 0}", "must be a number above 0"),
        ("Mine: {like: H100, memory: true}", "must be a number above 0"),
        ("Mine: {like: H100, memory: .inf}", "must be a number above 0"),
        ("Mine: {like: H100, train_share: 40}", "Mine.train_share is 40; a share must be at most 1"),
        ("Mine: {like: H100, per_node: 7.5}", "Mine.per_node is 7.5; it must be a whole number"),
        ("Mine: {like: H100, mesh: 7.5}", "Mine.mesh is 7.5; it must be a whole number"),
        (
            "Mine: {like: H100, mesh: 1}",
            r"Mine.mesh is 1; it must be 0 \(a switch\), or the devices of a mesh: at least 2",
        ),
        ("Mine: {like: H100, mesh: -8}", "Mine.mesh is -8; it must be a number above 0"),
        ("Mine: {like: H100, factors: 2}", "Mine.factors is 2; it must be a mapping"),
        ("Mine: {like: H100, factors: {gen: fast}}", "Mine.factors.gen is 'fast'"),
        ("A: {like: B}\nB: {like: A}", "A is like B is like A, which is a cycle"),
        ("[H100]", "is not a table of devices"),
        ("H100: 80", "is not a table of devices"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_an_invalid_device_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    user_file = tmp_path / "own.yaml"
    user_file.write_text(text)
    with pytest.raises(InputError, match=message):
        devices(user_file)


def test_devices_in_place_of_the_file_are_refused(tmp_path: Path) -> None:
    """`plan --devices '4 x 16 910C'` has the form of `init --devices`."""
    with pytest.raises(InputError, match=r"4 x 16 910C: no such file.*--device selects.*# Hardware: H100, 2 x 8"):
        devices(Path("4 x 16 910C"))


def test_all_errors_of_a_table_are_reported_together(tmp_path: Path) -> None:
    """Each error is listed once, even if several entries share it."""
    user_file = tmp_path / "own.yaml"
    user_file.write_text(
        "Mine: {like: H100, memry: 96, flops: fast, train_share: 40, factors: {gen: 0}}\n"
        "Like: {like: Mine, link: -1}\nOther: {like: H10}\nLast: {memory: 1, per_node: 2.5}\nFine: {like: H100}\n"
        "A: {like: B}\nB: {like: C}\nC: {like: A}\n"
    )
    with pytest.raises(InputError) as raised:
        devices(user_file)
    first, *rest = str(raised.value).splitlines()
    assert first.startswith(f"{user_file}: Mine has no field 'memry'")
    assert [line.strip().split(".")[0] for line in rest] == [
        "Mine", "Mine", "Mine", "Like", "Last", "Other is like H10, which is unknown", "A is like B is like C is like A, which is a cycle",
        "Last lacks source, flops, bandwidth, link, network, host_link, host_memory, train_share, prefill_share, "
        "decode_share, link_share, layer_seconds",
    ]  # fmt: skip


def test_every_field_has_a_unit_and_a_description() -> None:
    listed = {key.name: key for key in fields_of_file()}
    assert set(listed) == {"like", *(key.name for key in fields(Device) if key.name != "name")}
    assert all(key.unit and key.about for key in listed.values())
    assert [name for name, key in listed.items() if not key.needed] == [
        "like", "mesh", "host_network", "communicator", "context", "graphs", "process_memory", "offload_link", "adam_bandwidth", "torch", "factors"
    ]  # fmt: skip


def test_the_pages_examples_load(tmp_path: Path) -> None:
    """One of them says every field."""
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    section = page.partition("### A device of your own")[2].partition("\n### ")[0]
    examples = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    named = set()
    for number, example in enumerate(examples):
        user_file = tmp_path / f"{number}.yaml"
        user_file.write_text(example)
        named |= set(devices(user_file))
        assert number == 0 or set(yaml.safe_load(example)["Prototype"]) == {key.name for key in fields_of_file()} - {
            "like"
        }
    assert {"H100-cloud", "Prototype", "Prototype-2"} <= named and len(examples) == 2


def test_an_unknown_device_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"910D is unknown; .* Nearest: 910"):
        device_named("910D")
    with pytest.raises(InputError, match=r"A3 is unknown; .* Atlas A3 machines have 910C devices: name 910C or"):
        device_named("A3")
