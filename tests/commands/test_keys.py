"""`megarl keys`: every setting of the schema with its facts, by name or by meaning."""

from __future__ import annotations

import json

import pytest

from megarl.cli import app
from megarl.commands.keys.describe import sections
from megarl.exit_status import guarded
from megarl.recipe.load import all_keys


@pytest.fixture(autouse=True)
def _no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "100")


def keys(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = guarded(lambda: app(args=["keys", *arguments], standalone_mode=False), debug=False)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_every_key_of_the_schema_is_described() -> None:
    described = [key for section in sections() for key in section.keys]
    assert [key.key for key in described if key.key not in set(all_keys())] == []
    assert len(described) == len(list(all_keys())) == len({key.key for key in described})
    assert all(key.meaning and key.type for key in described)


def test_without_a_pattern_all_settings_have_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = keys(capsys)
    lines = out.splitlines()
    assert status == 0 and [line.split()[0] for line in lines] == [key.key for s in sections() for key in s.keys]
    assert max(map(len, lines)) == 100 and any(line.endswith("...") for line in lines)


def test_a_setting_as_a_block(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = keys(capsys, "train.steps")
    assert out == "train.steps\n  type     int (at least 1)\n  default  1\n  Number of controller steps.\n"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("RESPONSE_LENGTH", ["rollout.max_response_length"]),
        ("rollout.top*", ["rollout.top_p", "rollout.top_k"]),
        ("top*", None),  # a pattern with * is of the whole name, and no meaning has it
        ("DingTalk", ["observe.alerts.format"]),  # no name has it, a meaning does
        ("learning_rate", ["actor.optimizer.lr"]),  # of other frameworks
    ],
)
def test_patterns(pattern: str, expected: list[str] | None, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, error = keys(capsys, pattern, "--json")
    if expected is None:
        assert status == 2 and "no setting matches 'top*'" in error
    else:
        assert status == 0 and [key["key"] for key in json.loads(out)] == expected


def test_json_has_types_choices_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = keys(capsys, "rollout.*", "--json")
    by_name = {key.pop("key"): key for key in json.loads(out)}
    seeded = by_name["rollout.seeded"]
    assert (seeded["type"], seeded["default"]) == ("auto | true | false", "auto")
    assert seeded["choices"] == ["auto", "true", "false"] and seeded["bounds"] == []
    assert by_name["rollout.dtype"]["choices"] == ["float32", "bfloat16", "float16"], "of an optional value"
    assert by_name["rollout.engine_args"]["default"] == {} and by_name["rollout.refresh_after"]["default"] is None
    assert by_name["rollout.top_p"]["bounds"] == ["above 0", "at most 1"]


def test_an_unknown_name_has_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, error = keys(capsys, "temprature")
    assert (status, out) == (2, "") and "did you mean 'temperature'?" in error
