"""The table of devices, and files that add to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.errors import InputError
from megarl.platform.devices import device_named, devices


def test_every_device_of_the_table_is_whole_and_says_its_source() -> None:
    table = devices()
    assert {"910B", "910C", "A100", "H100", "H200"} <= set(table)
    for device in table.values():
        assert device.source and device.memory < device.host_memory
        assert device.network <= device.link < device.bandwidth < device.flops
        assert 0 < device.train_share < 1 and device.layer_seconds < 1e-2
    words = [word for device in table.values() for word in device.torch]
    assert len(words) == len(set(words)) and [name for name, device in table.items() if not device.torch] == ["CPU"]


def test_an_entry_like_another_says_only_where_it_differs(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("Mine: {like: Base, memory: 96}\nBase: {like: H100, flops: 1e14, factors: {gen: 1.5}}\n")
    mine, h100 = devices(own)["Mine"], devices()["H100"]
    assert (mine.memory, mine.flops, mine.link, mine.per_node) == (96, 1e14, h100.link, h100.per_node)
    assert mine.factors == {"gen": 1.5} and mine.torch == ()
    assert "own.yaml" in mine.source and "H100" in mine.source
    assert "Mine" not in devices()


def test_an_entry_takes_the_place_of_one_of_the_table(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("H100: {like: H100, train_share: 0.25}\n")
    assert devices(own)["H100"].train_share == 0.25 != devices()["H100"].train_share
    assert devices(own)["H100"].flops == devices()["H100"].flops
    assert device_named("h100", own).train_share == 0.25


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Mine: {like: H100, memry: 96}", "Mine has no field 'memry'. Nearest: memory"),
        ("Mine: {like: H10, memory: 96}", "Mine is like H10, which is not known. Nearest: H100"),
        ("Mine: {memory: 96}", "Mine lacks source, flops, .* `like: NAME`"),
        ("Mine: {like: H100, memory: lots}", "Mine.memory is 'lots'. Give a number"),
        ("Mine: {like: H100, memory: 0}", "Give a number above 0"),
        ("Mine: {like: H100, memory: true}", "Give a number above 0"),
        ("Mine: {like: H100, memory: .inf}", "Give a number above 0"),
        ("Mine: {like: H100, train_share: 40}", "Mine.train_share is 40, a share of a rate: at most 1"),
        ("Mine: {like: H100, per_node: 7.5}", "Mine.per_node is 7.5. Give a whole number"),
        ("Mine: {like: H100, factors: 2}", "Mine.factors is 2. Give a mapping"),
        ("Mine: {like: H100, factors: {gen: fast}}", "Mine.factors.gen is 'fast'"),
        ("A: {like: B}\nB: {like: A}", "A is like B is like A, in a ring"),
        ("[H100]", "is not a table of devices"),
        ("H100: 80", "is not a table of devices"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_a_file_that_is_no_such_table_is_refused(text: str, said: str, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(text)
    with pytest.raises(InputError, match=said):
        devices(own)


def test_an_unknown_device_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"910D is not known; .* Nearest: 910"):
        device_named("910D")
