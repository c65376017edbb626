"""The site of docs/site/: it builds without warnings, has every page once, and reads nothing from a network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.docs_pages import broken_links

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs" / "site" / "mkdocs.yml"
OUTSIDE = {"readme.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "benchmarks.md": "benchmarks/README.md", "examples.md": "examples/README.md"}  # fmt: skip


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without the Python objects in it."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def pages_of(entry: object) -> list[str]:
    if isinstance(entry, dict):
        return [page for value in entry.values() for page in pages_of(value)]
    return [page for item in entry for page in pages_of(item)] if isinstance(entry, list) else [str(entry)]


NAVIGATION = pages_of(yaml.load(CONFIG.read_text(encoding="utf-8"), _Loader)["nav"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(CONFIG, folder)
    return folder


def build(config: Path, folder: Path) -> None:
    done = mkdocs(config, folder)
    assert done.returncode == 0, done.stderr


def mkdocs(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    # Not --quiet: it also hides warnings from --strict.
    arguments = ["build", "--strict", "--config-file", str(config), "--site-dir", str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", *arguments], capture_output=True, text=True, env={"NO_MKDOCS_2_WARNING": "1"}
    )


def test_every_page_is_built_and_in_the_navigation_once(site: Path) -> None:
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} | set(OUTSIDE)
    assert sorted(NAVIGATION) == sorted(pages)
    assert not [page for page in NAVIGATION if not (site / page).with_suffix(".html").is_file()]


def test_the_index_has_the_pages_in_the_order_of_the_navigation() -> None:
    linked = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", (ROOT / "docs" / "index.md").read_text())]
    outside = {f"../{path}": page for page, path in OUTSIDE.items()}
    linked = [outside.get(link, link) for link in linked]
    assert linked == [page for page in NAVIGATION if page not in ("index.md", "tutorials/index.md")]
    assert not broken_links(ROOT / "docs" / "index.md")


def test_source_files_have_pages(site: Path) -> None:
    page = (site / "hub.html").read_text(encoding="utf-8") + (site / "tutorials" / "your_data.html").read_text(
        encoding="utf-8"
    )
    assert 'href="../source/recipes/tiny/sft.yaml.html"' in page
    assert "lr:" in re.sub(r"<[^>]+>", "", (site / "source/recipes/tiny/sft.yaml.html").read_text(encoding="utf-8"))
    assert (
        "recipes/tiny/sft.yaml"
        not in (site / "search" / "search_index.json").read_text(encoding="utf-8").split('"text"')[0]
    )


def test_the_search_finds_names_in_dotted_keys_and_lists_pages_about_a_subject_first(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert re.split(index["config"]["separator"], "`rollout.max_staleness`: 2.13.0")[1:] == [
        "rollout",
        "max_staleness",
        "2.13.0",
    ]
    boosts = {entry["location"].partition("#")[0]: entry.get("boost") for entry in index["docs"]}
    assert boosts["recipes.html"] is None and boosts["changelog.html"] < 1 and boosts["numerics.html"] < 1


def test_long_names_in_tables_may_break_and_are_one_word_in_the_search(site: Path) -> None:
    name = "actor_rollout_ref.model.custom_chat_template"
    assert f"<td><code>{name.replace('.', '.<wbr>')}</code>" in (site / "from_verl.html").read_text(encoding="utf-8")
    assert name in (site / "search" / "search_index.json").read_text(encoding="utf-8")


def test_chinese_pages_name_their_language(site: Path) -> None:
    """Browsers take the shapes of Chinese characters from it."""
    languages = {
        page: re.findall(r"<html lang=\"([^\"]+)", (site / page).with_suffix(".html").read_text(encoding="utf-8"))
        for page in NAVIGATION
    }
    assert {page for page, found in languages.items() if found == ["zh-CN"]} == {
        page for page in NAVIGATION if page.endswith(".zh.md")
    }
    assert {found for [found] in languages.values()} == {"en", "zh-CN"}


def test_no_line_of_chinese_text_breaks_between_characters() -> None:
    """Browsers show such a break as a space within the sentence."""
    character = r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"
    pages = {
        page: (CONFIG.parents[1] / page).read_text(encoding="utf-8") for page in NAVIGATION if page.endswith(".zh.md")
    }
    assert pages
    assert {
        page: broken for page, text in pages.items() if (broken := re.findall(rf"{character}\n{character}", text))
    } == {}


def test_pages_read_nothing_from_a_network(site: Path) -> None:
    """Links to other sites are for readers; scripts, styles, fonts and pictures are the site's."""
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        read = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\s\">]+)", text)
        read += re.findall(r"<link[^>]* href=\"?([^\s\">]+)[^>]*rel=\"?(?:stylesheet|icon)", text)
        read += re.findall(r"<link[^>]*rel=\"?(?:stylesheet|icon|preconnect)\"?[^>]* href=\"?([^\s\">]+)", text)
        assert read and not [address for address in read if "//" in address], path


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("[a](../recipes/gone.yaml)", "recipes/gone.yaml is not a file of the repository"),
        ("[a](gone.md)", "gone.md"),
        ("[a](other.md#gone)", "gone"),
    ],
)
def test_broken_links_fail_the_build(text: str, warning: str, tmp_path: Path) -> None:
    (tmp_path / "docs" / "site").mkdir(parents=True)
    for path in OUTSIDE.values():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("# A page\n")
    config = yaml.load(CONFIG.read_text(encoding="utf-8"), _Loader)
    config["nav"] = ["index.md", "other.md", *OUTSIDE]
    del config["extra_css"], config["markdown_extensions"]
    (tmp_path / "docs" / "site" / "mkdocs.yml").write_text(yaml.safe_dump(config))
    hook = (CONFIG.parent / "repository_links.py").read_text(encoding="utf-8")
    (tmp_path / "docs" / "site" / "repository_links.py").write_text(hook)
    (tmp_path / "docs" / "other.md").write_text("# Other\n")
    (tmp_path / "docs" / "index.md").write_text("# Index\n[b](other.md#other)\n")
    build(tmp_path / "docs" / "site" / "mkdocs.yml", tmp_path / "built")
    (tmp_path / "docs" / "index.md").write_text(f"# Index\n{text}\n")
    done = mkdocs(tmp_path / "docs" / "site" / "mkdocs.yml", tmp_path / "built")
    assert done.returncode != 0 and warning in done.stderr
