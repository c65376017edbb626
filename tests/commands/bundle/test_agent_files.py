"""Files that `agent.tools`, `agent.interaction` and `agent.loop` name, in a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from megarl.commands.bundle.pack import pack
from megarl.commands.bundle.repeat import repeat
from megarl.commands.bundle.unpack import unpack
from megarl.recipe.load import read_recipe
from megarl.recipe.schema import AgentConfig
from tests.commands.bundle.run import RecordedRun

CODE = "import class_helpers\n"
CLASSES = {"class_helpers.py": "", "my_classes.py": CODE}


def agent_of_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Mapping[str, str], *settings: str
) -> AgentConfig:
    """Pack a run whose folder has `files` and whose recipe has `settings`, unpack it, and return the section `agent`."""
    here = tmp_path / "here"
    run = RecordedRun(here, settings=[setting.replace("HERE", str(here / "code")) for setting in settings])
    for name, text in files.items():
        path = here / "code" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(here / "code")
    pack(run.run.path, tmp_path / "step.tar", None)
    here.rename(tmp_path / "gone")
    monkeypatch.chdir(tmp_path)
    unpack(tmp_path / "step.tar", tmp_path / "out")
    return read_recipe(tmp_path / "out/recorded/recipe.resolved.yaml").recipe.agent


def unpacked(name: str, tmp_path: Path) -> Path:
    """Return the unpacked file of `module:Class` or `file`, which exists in the bundle's folder."""
    path = Path(name.partition(":")[0])
    assert path.is_relative_to(tmp_path / "out/files/functions") and path.is_file(), name
    return path


def test_python_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three settings may name one file; what the files import is packed, too."""
    files = {"loops/mine.py": CODE, "class_helpers.py": ""}
    agent = agent_of_the_bundle(
        tmp_path, monkeypatch, files,
        "agent.loop=HERE/loops/mine.py:Loop", "agent.interaction=HERE/loops/mine.py:User",
        "agent.tools=[code_interpreter,HERE/loops/mine.py:search,my_rewards:short]",
    )  # fmt: skip
    assert agent.loop is not None and agent.interaction is not None
    for name in (agent.loop, agent.interaction, agent.tools[1]):
        assert unpacked(name, tmp_path).read_text() == CODE
    assert (agent.tools[0], agent.tools[2]) == ("code_interpreter", "my_rewards:short")
    assert len(list((tmp_path / "out/files/functions").iterdir())) == 2, "this file, and the scorer's"
    assert (tmp_path / "out/modules/class_helpers.py").is_file()


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("agent.tools=[HERE/of_verl.yaml]", "tools: [{class_name: my_classes.Search, config: {type: native}}]"),
        (
            "agent.tools=['HERE/of_verl.yaml:search']",
            "tools: [{class_name: my_classes.Search, config: {type: native}}]",
        ),
        ("agent.interaction=HERE/of_verl.yaml", "interaction: [{name: user, class_name: my_classes.User, config: {}}]"),
        ("agent.loop=HERE/of_verl.yaml", "- {name: mine, _target_: my_classes.Loop, depth: 2}"),
    ],
)
def test_files_of_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, text: str) -> None:
    """They are packed with the local modules of their classes."""
    agent = agent_of_the_bundle(tmp_path, monkeypatch, CLASSES | {"of_verl.yaml": text}, setting)
    (name,) = filter(None, [*agent.tools, agent.interaction, agent.loop])
    assert unpacked(name, tmp_path).read_text() == text
    assert {path.name for path in (tmp_path / "out/modules").glob("*cl*.py")} == set(CLASSES)


@pytest.mark.parametrize(
    ("files", "setting", "words"),
    [
        ({}, "agent.loop=HERE/mine.py:Loop", r"agent\.loop names .*mine\.py, which does not exist here"),
        ({}, "agent.tools=[HERE/tools.yaml]", r"agent\.tools names .*tools\.yaml, which does not exist here"),
        ({"tools.yaml": "{}"}, "agent.tools=[HERE/tools.yaml]", r"tools\.yaml has no list `tools`"),
        (
            {"tools.yaml": "tools: [{class_name: absent.Search}]"},
            "agent.tools=[HERE/tools.yaml]",
            r"tools\.yaml names the module 'absent', which is not in",
        ),
    ],
)
def test_a_file_that_cannot_be_packed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], setting: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        agent_of_the_bundle(tmp_path, monkeypatch, files, setting)


def test_a_replay_lists_the_files_with_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent_of_the_bundle(tmp_path, monkeypatch, {"mine.py": ""}, "agent.loop=HERE/mine.py:Loop")
    monkeypatch.setattr("megarl.commands.replay.run_child", lambda *_: 2)
    assert repeat(tmp_path / "step.tar", tmp_path / "again", []) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "it runs code of the bundle" in line]
    assert "files/functions/0/mine.py" in line and "modules/my_rewards.py" in line
