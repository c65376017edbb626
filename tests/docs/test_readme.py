"""Commands, files, settings and metrics on the pages exist."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import time
from pathlib import Path

import pytest
import typer

from megarl import load_recipe
from megarl.cli import app
from megarl.observe.log import RunLog
from megarl.observe.run_dir import RunDirectory
from megarl.platform.load import DeviceSampler, HostLoad
from megarl.recipe.schema import Recipe
from tests.support.docs_pages import broken_links, unknown_settings

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md"]
INSIDE = [
    "docs/architecture.md",
    "docs/weight_sync_reference.md",
]  # how it works, by names of files
METRICS = (ROOT / "docs" / "metrics.md").read_text()


def modules_named(text: str) -> list[tuple[str, bool]]:
    """Modules and folders in backticks, and whether each exists."""
    parts = re.split(r"(?<!:)\n\n|\n\n(?!- )", text)  # a list after a colon belongs to the paragraph before
    blocks = [block for part in parts for block in (part.splitlines() if part.startswith("|") else [part])]
    named = []
    for block in blocks:
        folders = [ROOT / "megarl", ROOT]
        for name in re.findall(r"`([\w.*-]+(?:/[\w.*-]+)*(?:\.py|/))`", block):
            paths = [path for folder in folders for path in folder.glob(name.rstrip("/"))]
            of_found = [path if path.is_dir() else path.parent for path in paths]
            folders = list(dict.fromkeys([*folders, *of_found]))
            named.append((name, bool(paths)))
    return named


def commands(page: str) -> list[list[str]]:
    """The command lines of a page's bash blocks, as words, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def megarl_commands(page: str) -> list[list[str]]:
    """Commands that follow ``-m megarl``."""
    return [words[words.index("megarl") + 1 :] for words in commands(page) if "megarl" in words]


def table(heading: str) -> list[str]:
    """The first column of the tables under a heading of docs/metrics.md, down to the next of its rank."""
    rank = heading.split()[0]
    part = METRICS.split(f"{heading}\n", 1)[1].split(f"\n{rank} ", 1)[0]
    return re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE)


def test_nothing_installs_megarl_from_a_package_index() -> None:
    """PyPI's package `megarl` is another project: a reader who installs it, or an extra of it, runs code of strangers."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8", errors="replace") for name in names if (ROOT / name).is_file()
    }
    name_of_megarl = r"megarl(?:\[[\w,-]+\])?(?:[=<>~!]=[^\s]*)?"
    command = re.compile(rf"pip3? install[^\n#]*?[ \"'`]({name_of_megarl})[\"'`.,;:)]*(?:\s|$)", re.M)
    assert command.search("(`pip install 'megarl[convert]'`; the files)") and command.search("pip install megarl\n")
    assert not command.search('pip install "dist/megarl-0.1.0-py3-none-any.whl[cpu]"')
    here = Path(__file__).relative_to(ROOT).as_posix()
    assert not [(name, match[1]) for name, text in texts.items() if name != here for match in command.finditer(text)]


class TestCommands:
    def test_readme_shows_every_command(self) -> None:
        commands = {name for name, command in typer.main.get_command(app).commands.items() if not command.hidden}
        assert {words[0] for words in megarl_commands("README.md")} == commands

    @pytest.mark.parametrize("page", PAGES)
    def test_arguments_are_accepted(self, page: str) -> None:
        """Parsed as the command line would, without running anything."""
        for words in megarl_commands(page):
            command = typer.main.get_command(app)
            while hasattr(command, "commands"):
                command, words = command.commands[words[0]], words[1:]
            command.make_context("megarl", list(words))

    def test_recipes_load_with_the_settings_shown(self) -> None:
        shown = [words for words in commands("README.md") if any(word.startswith("recipes/") for word in words)]
        assert len(shown) >= 6
        for words in shown:
            at = next(i for i, word in enumerate(words) if word.startswith("recipes/"))
            load_recipe(ROOT / words[at], [word for word in words[at + 1 :] if not word.startswith("--")])

    def test_quickstart_settings(self) -> None:
        settings = re.findall(r"`bash launch/quickstart\.sh ([^`]+)`", (ROOT / "README.md").read_text())
        assert settings
        for words in settings:
            load_recipe(ROOT / "recipes/quickstart.yaml", words.split())

    def test_python_example_compiles_and_its_recipe_loads(self) -> None:
        code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        assert len(code) == 1
        calls = [node for node in ast.walk(ast.parse(code[0])) if isinstance(node, ast.Call)]
        load = next(call for call in calls if getattr(call.func, "id", "") == "load_recipe")
        recipe, settings = (ast.literal_eval(argument) for argument in load.args)
        load_recipe(ROOT / recipe, settings)


class TestFiles:
    @pytest.mark.parametrize("page", [*PAGES, *INSIDE, "docs/metrics.md"])
    def test_links_lead_somewhere(self, page: str) -> None:
        assert not broken_links(ROOT / page)

    def test_broken_links_and_unknown_settings_are_detected(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text(
            "# A title\n```\n# code\n```\n[a](#a-title) [b](#code) [c](page.md#b) [d](gone.md) [e](https://a.b/#c)"
        )
        assert broken_links(page) == ["#code", "page.md#b", "gone.md"]
        text = "`train.steps`, `train.step: 1`, `rollout.engine_args.any=1`, `actor.optimizer`, `actor.optimizers`, `judge.py`"
        assert unknown_settings(text) == ["train.step", "actor.optimizers"]

    @pytest.mark.parametrize("page", [*PAGES, *INSIDE])
    def test_paths_named_in_text_exist(self, page: str) -> None:
        text = (ROOT / page).read_text()
        named = set(re.findall(r"(?<![\w/])(?:launch|recipes|megarl|tests|docs|\.ci)/[\w./]*\w/?", text))
        assert named
        assert not [path for path in sorted(named) if not (ROOT / path).exists()]

    @pytest.mark.parametrize("page", INSIDE)
    def test_modules_named_in_text_exist(self, page: str) -> None:
        """Within megarl/; a name without its folder, in a folder that its paragraph, or row, has named before."""
        modules = modules_named((ROOT / page).read_text())
        assert len(modules) > 3 and not [name for name, files in modules if not files]

    def test_a_missing_module_is_detected(self) -> None:
        present = (
            "| `commands/plan/show/` | plans (`page.py`; `drawing.py`) |\n| `weight_sync/` | weights (`heartbeat.py`) |"
        )
        assert all(files for _, files in modules_named(present))
        gone = present.replace("(`heartbeat.py`)", "(`page.py`, `gone/`, `heart*.py`, `x*.py`)")
        assert [name for name, files in modules_named(gone) if not files] == ["page.py", "gone/", "x*.py"]

    def test_picture(self) -> None:
        assert "](docs/report.png)" in (ROOT / "README.md").read_text()
        picture = (ROOT / "docs/report.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) < 300_000

    def test_a_run_directory_has_the_documented_files(self, tmp_path: Path) -> None:
        run_dir = RunDirectory(tmp_path)
        entries = {path.name for name, path in vars(run_dir).items() if isinstance(path, Path) and name != "path"}
        entries |= {"hf", "hf_adapter", "logs"}  # made by run.py and cluster/
        assert {name.rstrip("/") for name in table("## Files")} == entries


class TestMetrics:
    def test_every_documented_metric_is_in_the_code(self) -> None:
        missing = set(table("## metrics.jsonl")) - metrics_in_the_code()
        assert not missing

    def test_every_metric_in_the_code_is_documented(self) -> None:
        # timing_s/export is spent after the last line: the trace alone has it.
        missing = metrics_in_the_code() - set(table("## metrics.jsonl")) - {"timing_s/export"}
        assert not missing

    def test_summary_keys(self, tmp_path: Path) -> None:
        recipe = Recipe()
        recipe.observe.console, recipe.observe.report, recipe.observe.tensorboard = "plain", False, False
        with RunLog(recipe, tmp_path, first_step=1, total_steps=1) as log:
            log.step(1)
        assert table("## summary.json") == list(json.loads((tmp_path / "summary.json").read_text()))


AREAS = {  # values of the variables at the start of a metric's name
    "<self.role>": ("actor", "critic"),
    "<role>": ("actor", "critic"),
    "<area>": ("rollout", "source/<data_source>"),
}


def machine_figures() -> list[str]:
    """Figures that a machine reports; a fresh reader needs a moment until the cores have counted time."""
    host, sampler = HostLoad(), DeviceSampler(lambda: (0.5, 0.5))
    sampler.sample()
    time.sleep(0.05)
    return [*host.take(), *sampler.take()]


def metrics_in_the_code() -> set[str]:
    """Metrics under the names in the reporting modules, with variable parts in angle brackets."""
    areas = r"(?:actor|critic|data/rows|data/epochs|source|agent|rollout|fleet|recovery|eval|weight_sync|checkpoint|perf|host|response_length|prompt_length)"
    names, stems = {"timing_s/step", "run/ettr"}, set()  # metrics that RunLog computes
    for path in (ROOT / "megarl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = text_of(node)
            # These read metrics that other modules report.
            shows = {"observe", "compare", "plan", "view"} & set(path.relative_to(ROOT).parts)
            first, _, rest = (name or "").partition("/")
            full = [f"{area}/{rest}" for area in AREAS.get(first, (first,))]
            if not shows:
                names.update(name for name in full if re.fullmatch(rf"{areas}/[\w@<>/]*[\w>]", name))
            if isinstance(node, ast.Call) and node.args and (name := text_of(node.args[0])):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if called == "mean_max_min" or (called == "metrics" and "/" in name):
                    stems.add(name)
                elif called == "phase":
                    names.add(f"timing_s/{name}")
    for figure in machine_figures():
        names.add(f"host/{figure}/<machine>")
    names.discard("host/<figure>/<machine>")
    return (names - stems - set(AREAS["<area>"])) | {
        f"{stem}/{part}" for stem in stems for part in ("mean", "max", "min")
    }


def text_of(node: ast.AST) -> str | None:
    """Text of a string or an f-string, with <variable> for each replacement field."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"<{ast.unparse(part.value)}>" if isinstance(part, ast.FormattedValue) else text_of(part) or ""
            for part in node.values
        )
    return None
