"""docs/tutorials/: the files that a reader writes work, and the commands are accepted; tests/runs/test_tutorials.py runs them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from megarl.cli import app
from megarl.data import load_tokenizer
from megarl.preflight.data import read_data
from megarl.preflight.hub_inputs import fetch_inputs, training_inputs
from megarl.preflight.load import load_recipe
from megarl.preflight.survey import prepare_training
from megarl.preflight.user_functions import try_user_functions
from megarl.recipe.paths import with_absolute_paths
from megarl.rewards import ScoreRequest
from tests.support.docs_pages import broken_links, unknown_settings
from tests.support.fake_hub import folder_files, running_hub, use_hub
from tests.support.gsm8k import SAMPLE, rewards_of_solutions
from tests.support.tutorials import (  # fmt: skip
    FOLDER,
    ONLY_PARSED,
    PAGES,
    ROOT,
    blocks,
    commands,
    files,
    forget_user_functions,
    reason_not_to_run,
    workspace,
    write_files,
)

MOST_WORDS = 600
SHELL_WORDS = {"source", "export", "docker", "hf", "nvidia-smi", "npu-smi", "sbatch", "kubectl"}


@pytest.fixture
def place(tmp_path: Path, quickstart_data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = workspace(tmp_path, quickstart_data)
    forget_user_functions(monkeypatch)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), str(ROOT), *sys.path])
    return folder


def megarl_words(words: list[str]) -> list[str] | None:
    """Return the arguments of the megarl command in a command line, or None."""
    at = next((i for i in range(len(words) - 2) if words[i : i + 3] == ["python", "-m", "megarl"]), None)
    return None if at is None else words[at + 3 :]


@pytest.mark.parametrize("page", PAGES)
class TestPage:
    def test_it_is_short(self, page: str) -> None:
        assert len((FOLDER / page).read_text(encoding="utf-8").split()) <= MOST_WORDS

    def test_commands_are_accepted(self, page: str, place: Path) -> None:
        """megarl's arguments parse, scripts and recipes exist, and recipes load with the settings shown."""
        write_files(page, place)
        for line in commands(page):
            words = shlex.split(line)
            arguments = megarl_words(words)
            program = next((word for word in words if "=" not in word), "")
            if program == "bash" or (program == "python" and words[1].endswith(".py")):
                script = next(word for word in words if word.endswith((".sh", ".py")))
                assert (place / script).is_file(), line
            elif arguments is None:
                assert program in SHELL_WORDS, f"{line}: add its program to this test"
            if arguments is not None:
                command, rest = typer.main.get_command(app), list(arguments)
                while hasattr(command, "commands"):
                    command, rest = command.commands[rest[0]], rest[1:]
                command.make_context("megarl", rest)
            recipe = next((i for i, word in enumerate(words) if word.endswith(".yaml") and "init" not in words), None)
            if recipe is not None and not words[recipe].startswith("launch/"):
                load_recipe(words[recipe], [word for word in words[recipe + 1 :] if re.match(r"[a-z_.]+=", word)])

    def test_each_command_is_run_or_has_a_reason(self, page: str) -> None:
        for line in commands(page):
            assert reason_not_to_run(line) or line.startswith("python "), f"{line}: run it, or add it to ONLY_PARSED"

    def test_files_load(self, page: str, place: Path) -> None:
        write_files(page, place)
        for name, content in files(page).items():
            if name.endswith(".py"):
                compile(content, name, "exec")
            else:
                load_recipe(name)

    def test_links_and_settings_exist(self, page: str) -> None:
        text = (FOLDER / page).read_text(encoding="utf-8")
        assert not broken_links(FOLDER / page) and not unknown_settings(text)
        named = re.findall(r"(?<![\w/.])(?:launch|recipes|examples)/[\w./-]+\.(?:yaml|sh|py)", text)
        assert not [path for path in named if not (ROOT / path).is_file()]


def test_reasons_are_of_commands_on_the_pages() -> None:
    lines = [line for page in PAGES for line in commands(page)]
    assert not [pattern for pattern in ONLY_PARSED if not any(re.match(pattern, line) for line in lines)]
    assert sum(not reason_not_to_run(line) for line in lines) > 20


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".zh.md")])
def test_both_languages_have_the_same_blocks_headings_and_links(page: str) -> None:
    english = page.replace(".zh", "")
    assert blocks(page) == blocks(english)
    texts = [re.sub(r"^```.*?^```", "", (FOLDER / name).read_text(encoding="utf-8"), flags=re.M | re.S) for name in (page, english)]  # fmt: skip
    ranks = [[len(marks) for marks in re.findall(r"^(#+) ", text, re.M)] for text in texts]
    assert ranks[0] == ranks[1]
    found = [re.findall(r"\]\(([^)]+)\)", text) for text in texts]
    # A numbered heading has the same number in both languages.
    links = [
        sorted(re.sub(r"(#\d+-).*", r"\1", link.replace(".zh", "")) for link in page_links) for page_links in found
    ]
    assert links[0] == links[1]
    pages = [link.partition("#")[0] for link in found[0] if ".zh.md" not in link]
    translated = [name for name in pages if (FOLDER / name).with_suffix(".zh.md").is_file() and name != english]
    assert not translated, "link the Chinese page where there is one"


def test_the_index_lists_every_page() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w.]+\.md)\)", index)) == set(PAGES)
    assert not broken_links(FOLDER / "index.md")


class TestWhatTheReaderWrites:
    def test_rows(self, place: Path) -> None:
        write_files("your_data.md", place)
        subprocess.run([sys.executable, "make_rows.py"], check=True, cwd=place)
        prepared = prepare_training(
            load_recipe("my_data.yaml", ["model.path=data/quickstart/model", "data.cache=null"])
        )
        assert prepared.prompts is not None and len(prepared.prompts) == 256
        numbers = [int(number) for number in re.findall(r"\d+", prepared.prompts[0].question)]
        assert int(prepared.prompts[0].ground_truth or "") == numbers[0] + numbers[1] * numbers[2]

    def test_a_renamed_column_is_refused_with_the_columns_of_the_file(self, place: Path) -> None:
        write_files("your_data.md", place)
        subprocess.run([sys.executable, "make_rows.py"], check=True, cwd=place)
        without = ["model.path=data/quickstart/model", "data.cache=null", "data.columns={}"]
        with pytest.raises(ValueError, match=r"question"):
            prepare_training(load_recipe("my_data.yaml", without))

    def test_a_reward(self, place: Path) -> None:
        write_files("your_reward.md", place)
        done = subprocess.run(
            [sys.executable, "my_rewards.py"], cwd=place, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert done.stdout.splitlines() == [
            "{'score': 1.0, 'accuracy': True, 'answer': '12'}",
            "{'score': 0.5, 'accuracy': False, 'answer': '13'}",
        ], done.stderr
        scope: dict = {"__name__": "my_rewards"}
        exec(compile(files("your_reward.md")["my_rewards.py"], "my_rewards.py", "exec"), scope)
        assert scope["close"](ScoreRequest("12", "12", "mine"))["score"] == 0.0
        prepare_training(load_recipe("my_reward.yaml", ["model.path=data/quickstart/model", "data.cache=null"]))

    def test_an_algorithm(self, place: Path) -> None:
        """Loss and advantage run on the small batch of a start; a missing option is reported."""
        write_files("your_algorithm.md", place)
        try_user_functions(load_recipe("my_algorithm.yaml").algorithm)
        recipe = (place / "my_algorithm.yaml").read_text()
        (place / "without.yaml").write_text(re.sub(r"^  options:.*\n", "", recipe, flags=re.M))
        with pytest.raises(ValueError, match="rest"):
            try_user_functions(load_recipe("without.yaml").algorithm)

    def test_a_model(self, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for line in commands("your_model.md"):
            if " model check " in line and not reason_not_to_run(line):
                assert app(args=megarl_words(shlex.split(line)), standalone_mode=False) == 0
                assert capsys.readouterr().out.endswith("megarl trains this model.\n")


def test_the_recipe_with_names_of_the_hub(place: Path, quickstart_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines change my_model.yaml: its base reads files of `megarl data gsm8k`."""
    write_files("your_model.md", place)
    (lines,) = [content for language, title, content in blocks("your_model.md") if language == "yaml" and not title]
    Path("by_name.yaml").write_text(f"base: my_model.yaml\n{lines}")
    with running_hub() as server:
        use_hub(monkeypatch, server.url, place / "home")
        server.model("Qwen/Qwen3-8B").commit(folder_files(quickstart_data / "model"))
        rows = {f"main/{name}.jsonl": (SAMPLE / f"{name}.jsonl").read_bytes() for name in ("train", "test")}
        server.dataset("openai/gsm8k").commit(rows)
        recipe = with_absolute_paths(load_recipe("by_name.yaml"))
        local = fetch_inputs(recipe, training_inputs(recipe)).recipe
    prepared = read_data(local, load_tokenizer(local.model.path), training=True)
    assert len(prepared.prompt_sets) == 2
    for prompts in prepared.prompt_sets:
        assert set(rewards_of_solutions(local, prompts)) == {1.0}
