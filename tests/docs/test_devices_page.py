"""docs/devices.md, accept.md and cuda.md: every command is accepted, and every file that a recipe reads has a command that makes it."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import typer

from megarl.cli import app
from megarl.commands.accept.catalogue import BUNDLE, OF_ALL_NODES, STAGES
from megarl.platform.device_table import device_named
from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.text import hardware_of
from tests.support.docs_pages import broken_links, unknown_settings

ROOT = Path(__file__).parents[2]
NAMES = ["devices.md", "devices_reference.md", "accept.md", "cuda.md"]
PAGES = {name: (ROOT / "docs" / name).read_text() for name in NAMES}
LAUNCHERS = ("launch/multinode.sh", "launch/ssh.sh")


def variables(first: str) -> list[dict[str, str]]:
    """Return the lines of step 0 that begin with this variable, as mappings."""
    lines = [line for line in PAGES["devices.md"].splitlines() if line.startswith(f"{first}=")]
    return [dict(word.split("=", 1) for word in shlex.split(line, comments=True)) for line in lines]


CHOICES, CHOICES_OF_MANY = variables("KIND"), variables("MANY")


def blocks(page: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", PAGES[page], re.M | re.S)


def commands(page: str) -> list[list[str]]:
    """Words of each command of megarl or a launcher, for each choice of devices and of several nodes."""
    unique: dict[tuple[str, ...], None] = {}
    for line in "\n".join(blocks(page)).replace("\\\n", " ").splitlines():
        for choice, many in itertools.product(CHOICES, CHOICES_OF_MANY):
            text = line
            for name, value in {**choice, **many}.items():
                text = text.replace(f"${name}", value)
            unique[tuple(shlex.split(text, comments=True))] = None
    return [list(words) for words in unique if "megarl" in words or any(word in LAUNCHERS for word in words)]


def of_megarl(words: list[str]) -> list[str] | None:
    """Return the words after `megarl` of a command, or None for other commands, e.g. with a container named megarl."""
    if "megarl" not in words or words[0] in ("git", "docker", "while", "ssh"):
        return None
    at = words.index("megarl")
    return words[at + 1 :] if at == 0 or words[at - 1] == "-m" else None


@cache
def loaded(path: str, settings: tuple[str, ...] = ()) -> Recipe:
    return load_recipe(ROOT / path, list(settings))


@pytest.mark.parametrize("page", NAMES)
class TestPage:
    def test_blocks_are_bash(self, page: str) -> None:
        for block in blocks(page):
            done = subprocess.run([shutil.which("bash") or "", "-n", "-c", block], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr

    def test_commands_are_accepted(self, page: str) -> None:
        accepted = 0
        for words in commands(page):
            rest = of_megarl(words)
            if rest is None:
                continue
            command = typer.main.get_command(app)
            while hasattr(command, "commands"):
                command, rest = command.commands[rest[0]], rest[1:]
            command.make_context("megarl", rest)
            accepted += 1
        assert accepted > 3

    def test_recipes_load_with_the_settings_shown(self, page: str) -> None:
        for words in commands(page):
            at = next((index for index, word in enumerate(words) if word.startswith("recipes/")), None)
            if at is not None:
                loaded(words[at], tuple(word for word in words[at + 1 :] if re.match(r"[\w.]+=", word)))

    def test_files_and_build_arguments_exist(self, page: str) -> None:
        for name in re.findall(
            r"(?<![\w/])(?:launch|recipes|tests|megarl)/[\w./-]+\.(?:yaml|sh|env|py|txt)", PAGES[page]
        ):
            assert (ROOT / name).is_file(), name
        arguments = " ".join(path.read_text() for path in ROOT.glob("Dockerfile.*"))
        for name in re.findall(r"(?:--build-arg |[`(])([A-Z]+(?:_[A-Z]+)*)=(?=\w)", PAGES[page]):
            variables = (ROOT / "launch" / "container.sh").read_text() + (ROOT / "launch" / "multinode.sh").read_text()
            assert f"ARG {name}" in arguments or name in variables, name

    def test_links_lead_somewhere(self, page: str) -> None:
        assert not broken_links(ROOT / "docs" / page)

    def test_settings_exist(self, page: str) -> None:
        assert not unknown_settings(PAGES[page])

    def test_every_model_and_data_set_of_a_recipe_has_its_command(self, page: str) -> None:
        """A reader who runs the page's commands in order has every file that the page's recipes read."""
        text, words = PAGES[page], [word for words in commands(page) for word in words]
        if page in ("accept.md", "devices_reference.md"):
            pytest.skip("an acceptance needs no files, and a laptop has generated ones")
        if page == "devices.md":  # it refers to the reference for DeepSeek-V3
            text += PAGES["devices_reference.md"]
        folders = set(re.findall(r"--(?:local-dir|out) ([\w./-]+)", text))
        used = [word for word in dict.fromkeys(words) if word.startswith("recipes/")]
        assert len(used) >= 2
        for path in used:
            recipe = loaded(path)
            header = (ROOT / path).read_text()
            assert recipe.model.path in folders or recipe.model.path in header.split("\nbase:")[0], (
                path,
                recipe.model.path,
            )
            for file in [*recipe.data.train_files, *recipe.data.eval_files]:
                assert str(Path(file).parent) in folders, (path, file)


def test_each_choice_of_devices_has_recipes_for_them() -> None:
    assert {choice["KIND"] for choice in CHOICES} == {"npu", "cuda"} and len(CHOICES) >= 4
    for choice in CHOICES:
        device = device_named(choice["DEVICE"])
        assert device.kind == choice["KIND"], choice
        for name in ("RECIPE", "FIRST"):
            machine = hardware_of(ROOT / choice[name])
            assert machine is not None and machine[1] == 1, "the first recipes are for one node"
            assert loaded(choice[name]).cluster.device == choice["KIND"]


def test_the_stages_are_those_of_the_acceptance() -> None:
    section = PAGES["devices.md"].split("\n## 6. Accept\n")[1].split("\n## ")[0]
    names = re.findall(r"^\| (\d) ([\w ]+) \|", section, re.M)
    assert names == [*((str(stage.number), stage.name) for stage in STAGES), (str(BUNDLE), "bundle")]
    assert "only stages 0 and 3 use them" in section and OF_ALL_NODES == (0, 3)


def test_recipes_of_several_nodes_use_all_devices_of_their_nodes() -> None:
    """An acceptance with another number of nodes than the recipe's fails in stage 0."""
    assert {loaded(many["MANY"]).cluster.device for many in CHOICES_OF_MANY} == {choice["KIND"] for choice in CHOICES}
    for many in CHOICES_OF_MANY:
        recipe, machine = loaded(many["MANY"]), hardware_of(ROOT / many["MANY"])
        assert machine is not None and machine[1] == int(many["NODES"]) > 1
        assert recipe.cluster.trainers == machine[1] * machine[2]
        if "DEVICE" in many:
            assert device_named(many["DEVICE"]).kind == recipe.cluster.device
    accepted = [words for words in commands("devices.md") if "--nodes" in words]
    shown = {(words[words.index("accept") + 1], words[words.index("--nodes") + 1]) for words in accepted}
    assert shown == {(many["MANY"], many["NODES"]) for many in CHOICES_OF_MANY}


def test_every_stage_has_a_row_in_the_table_of_failures() -> None:
    section = PAGES["devices_reference.md"].split("\n## After a failure\n")[1].split("\n## ")[0]
    rows = set(re.findall(r"^\| (\d)[ ,]", section, re.M))
    assert rows == {str(stage.number) for stage in STAGES if stage.name != "speed"}, "stage 7 has no limits"


def test_a_resumed_acceptance_of_all_nodes_has_another_folder() -> None:
    """`--resume` keeps the number of nodes, so the folder of one node cannot serve for a test of all nodes."""
    folders = {words[0] == "megarl": words[words.index("--resume") + 1] for words in commands("devices.md") if "--resume" in words}  # fmt: skip
    assert len(folders) == 2 and folders[True] != folders[False]


def test_flashinfers_kernels_have_the_locked_version_and_vllms_command() -> None:
    lock = (ROOT / "launch" / "requirements-cuda.txt").read_text()
    version = re.search(r"^flashinfer-python==(\S+)$", lock, re.M)
    assert version is not None and f"flashinfer-python {version[1]}" in PAGES["cuda.md"]
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None and vllm.origin is not None
    command = (Path(vllm.origin).parent / "entrypoints" / "cli" / "download_kernels.py").read_text()
    assert 'name = "download-kernels"' in command and '"--dry-run"' in command
