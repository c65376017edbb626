"""Pages on Ascend: all names on them exist, and both languages of the quick start contain the same commands."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import typer

from docs.generate.doctor import RECIPE_AND_NODE_CHECKS
from megarl.cli import app
from megarl.commands.doctor.catalogue import CHECKS
from megarl.platform.environment import NEEDED
from megarl.platform.npu import NPUPlatform
from megarl.preflight.load import load_recipe
from tests.docs.test_dockerfile import FILES, NPU_SETS, PACKAGES, versions
from tests.support.docs_pages import broken_links, unknown_settings

ROOT = Path(__file__).parents[2]
NAMES = ["ascend.md", "ascend_quickstart.md", "ascend_quickstart.zh.md", "ascend_troubleshooting.md"]
PAGES = {name: (ROOT / "docs" / name).read_text() for name in NAMES}


def blocks(page: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", PAGES[page], re.M | re.S)


def commands(page: str) -> list[list[str]]:
    lines = [line for block in blocks(page) for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`((?:torchrun|bash|sbatch|python|RAY_ADDRESS)[^`\n]* recipes/[^`\n]*)`", PAGES[page])
    return [words for line in [*lines, *inline] if (words := shlex.split(line, comments=True))]


@cache
def loads(recipe: str, settings: tuple[str, ...]) -> None:
    """Load all recipes once for all pages: some take most of a second."""
    load_recipe(recipe, list(settings))


def section(page: str, heading: str) -> str:
    return PAGES[page].split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Cells of a table, below its heading."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@pytest.mark.parametrize("page", NAMES)
class TestPage:
    def test_blocks_are_bash(self, page: str) -> None:
        for block in blocks(page):
            done = subprocess.run([shutil.which("bash") or "", "-n", "-c", block], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr

    def test_commands_are_accepted(self, page: str) -> None:
        for words in commands(page):
            if "megarl" not in words or "-m" not in words[: words.index("megarl")]:
                continue
            command, words = typer.main.get_command(app), words[words.index("megarl") + 1 :]
            while hasattr(command, "commands"):
                command, words = command.commands[words[0]], words[1:]
            command.make_context("megarl", list(words))

    def test_recipes_load_with_the_settings_shown(self, page: str) -> None:
        shown = [words for words in commands(page) if any(word.startswith("recipes/") for word in words)]
        for words in shown:
            at = next(index for index, word in enumerate(words) if word.startswith("recipes/"))
            loads(words[at], tuple(word for word in words[at + 1 :] if "=" in word))

    def test_files_exist(self, page: str) -> None:
        for name in re.findall(r"(?:launch|recipes|tests|megarl)/[\w./-]+\.(?:yaml|sh|env|py)", PAGES[page]):
            assert (ROOT / name).is_file(), name
        for argument in re.findall(r"Dockerfile\.\w+|--build-arg (\w+)=", PAGES[page]):
            assert not argument or f"ARG {argument}" in (ROOT / "Dockerfile.npu").read_text()

    def test_links_lead_somewhere(self, page: str) -> None:
        assert not broken_links(ROOT / "docs" / page)

    def test_settings_exist(self, page: str) -> None:
        assert not unknown_settings(PAGES[page])

    def test_checks_exist(self, page: str) -> None:
        checks = {check.name for check in CHECKS} | set(RECIPE_AND_NODE_CHECKS)
        lines = re.findall(r"^Doctor: (.*?)\. Source:", PAGES[page], re.M | re.S)
        lines += re.findall(r"(`cann`[^.。|]*?)\s(?:are those|是与)", PAGES[page])
        names = re.findall(r"`([^`]+)`", " ".join(lines))
        assert names or page == "ascend.md"
        for name in names:
            assert name in checks, name


def test_engine_arguments_are_vllms() -> None:
    from megarl.engines.vllm.args import check_engine_args

    values = {
        "gpu_memory_utilization": 0.8,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 32,
        "compilation_config": {},
    }
    for page in PAGES.values():
        for name in set(re.findall(r"rollout\.engine_args\.(\w+)", page)):
            check_engine_args({name: values.get(name, True)})


def test_the_table_of_versions() -> None:
    table = {row[0]: row[1:] for row in rows(section("ascend.md", "Versions"))}
    files = [file.strip("`") for file in table["file in `launch/npu_versions/`"]]
    assert sorted(files) == [file.name for file in FILES]
    shown = {"Python": "PYTHON", "torch": "TORCH", "torch_npu": "TORCH_NPU", "transformers": "TRANSFORMERS"}
    shown |= {
        "vLLM": "VLLM",
        "vllm-ascend": "VLLM_ASCEND",
        "Megatron": "MEGATRON",
        "triton-ascend": "TRITON_ASCEND",
        "numpy": "NUMPY",
    }
    assert set(shown.values()) - {"PYTHON"} == set(PACKAGES)
    for column, file in enumerate(files):
        have = versions(ROOT / "launch" / "npu_versions" / file)
        assert {name: table[row][column] for row, name in shown.items()} == {
            name: have[name] for name in shown.values()
        }
        assert file.removeprefix("cann-").removesuffix(".env") in NPU_SETS


def test_the_table_of_the_environment() -> None:
    platform = NPUPlatform()
    roles = (
        platform.trainer_env(1800.0)
        | dict.fromkeys(["HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"], "`cluster.timeout`"),
        platform.rollout_env(),
    )
    table_text, after, _ = section("ascend.md", "Environment").partition("\nIf the command's environment")
    assert after
    table = {row[0].strip("`"): row[1:3] for row in rows(table_text)}
    assert table.pop(platform.kind.visible) == ["its device", "its devices"]
    for column, environ in enumerate(roles):
        shown = {name: cells[column].strip('"') for name, cells in table.items() if cells[column] != "-"}
        assert shown == environ


def test_overridden_variables_are_named_below_the_table() -> None:
    platform = NPUPlatform()
    below = section("ascend.md", "Environment").partition("overrides only")[2].partition("`HCCL_BUFFSIZE`")[0]
    for name, value in NEEDED:
        if platform.rollout_env().get(name) == value or platform.deterministic_env().get(name) == value:
            assert re.search(rf"`({name}\b|{value.replace('False', 'True')}`)", below), name


def test_both_languages_have_the_same_blocks_tables_and_links() -> None:
    english, chinese = "ascend_quickstart.md", "ascend_quickstart.zh.md"
    assert blocks(english) == blocks(chinese)
    ranks = [[len(marks) for marks in re.findall(r"^(#+) ", PAGES[page], re.M)] for page in (english, chinese)]
    assert ranks[0] == ranks[1]
    tables = [[row[-1] for row in rows(PAGES[page])] for page in (english, chinese)]
    assert tables[0] == tables[1]
    links = [{link for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]) if "quickstart" not in link} for page in (english, chinese)]  # fmt: skip
    assert links[0] == links[1]


def test_each_trouble_has_all_its_parts() -> None:
    text = PAGES["ascend_troubleshooting.md"]
    entries = re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", text, re.M | re.S)
    assert len(entries) > 20
    for title, body in entries:
        parts = re.findall(r"^(Printed|Means|Change|Doctor)\b", body, re.M)
        assert parts == ["Printed", "Means", "Change", "Doctor"], title
        assert re.search(r"^Doctor: .*?Source: ", body, re.M | re.S), title
