"""mkdocs hooks: Markdown files of the repository outside docs/ become pages, and linked source files, too.

The pages keep the relative links that work on GitHub and in an editor. On the site `../recipes/quickstart.yaml` leads to a page
with the file's text, so that the site is complete without a network and shows the same commit everywhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = "docs"
PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
}
"""Files of the repository -> their pages on the site."""
LOW_IN_SEARCH = {
    "architecture.md": 0.2,
    "benchmarks.md": 0.2,
    "changelog.md": 0.2,
    "from_verl_reference.md": 0.2,
    "numerics.md": 0.2,
    "upstream.md": 0.2,
}
"""Pages with words of every subject -> their weight in the search, which lists the pages about a subject first."""
LANGUAGES = {".yaml": "yaml", ".py": "python", ".sh": "bash", ".env": "bash", ".json": "json", ".md": "markdown"}
FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LONG_NAME = re.compile(r"(?<=<td><code>)[\w.*]{40,}(?=</code>)")
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and a page for each source file that a page links."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(REPOSITORY / path).read_text(encoding="utf-8")))
    linked = {
        source
        for file in files.documentation_pages()
        for target in links(file.content_string)
        if (source := source_of(file, target))
    }
    for source in sorted(linked):
        files.append(File.generated(config, source_page(source), content=source_text(source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ to the pages of their files, and rank the page in the search."""
    if page.file.src_uri in LOW_IN_SEARCH:
        page.meta["search"] = {"boost": LOW_IN_SEARCH[page.file.src_uri]}
    return outside_fences(
        markdown, lambda text: LINK.sub(lambda match: match[1] + address(page.file, match[2]) + match[3], text)
    )


def on_post_page(output: str, *, page: Any, config: MkDocsConfig) -> str:
    """Name the language of Chinese pages, and allow a line break after each dot of a long name in a table.

    Browsers choose the shapes of Chinese characters by the language; without one they may be Japanese. The breaks keep the
    other columns in view. This is the last hook, after the search has read the page: a name in it stays one word.
    """
    if page.file.src_uri.endswith(".zh.md"):
        output = output.replace('<html lang="en"', '<html lang="zh-CN"', 1)
    return LONG_NAME.sub(lambda match: match[0].replace(".", ".<wbr>"), output)


def links(markdown: str) -> list[str]:
    """Return the targets of the links outside code blocks."""
    return [match[2] for match in LINK.finditer(FENCE.sub("", markdown))]


def outside_fences(markdown: str, change: Any) -> str:
    """Apply `change` to the text between code blocks."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def repository_path(file: File, target: str) -> str:
    """Return the path within the repository to which a relative link of a page leads."""
    origin = {page: path for path, page in PAGES.items()}.get(file.src_uri, f"{DOCS}/{file.src_uri}")
    return os.path.normpath(PurePosixPath(origin).parent / target)


def source_of(file: File, target: str) -> str:
    """Return the path of the source file to which a link leads, or "" for pages, anchors and web addresses.

    Raises:
        PluginError: the file does not exist, or is a folder.
    """
    target = target.partition("#")[0]
    if not target or "://" in target or target.startswith(("mailto:", "/")):
        return ""
    path = repository_path(file, target)
    if path in PAGES or path.startswith(f"{DOCS}/") or file.src_uri.startswith("source/"):
        return ""
    if not (REPOSITORY / path).is_file():
        raise PluginError(
            f"{file.src_uri} links {target}: {path} is not a file of the repository. Link a file that exists."
        )
    return path


def source_page(path: str) -> str:
    """Return the page of a source file, within docs_dir."""
    return f"source/{path}.md"


def source_text(path: str) -> str:
    """Return the page of a source file: its path and its text. The search leaves it out."""
    language = LANGUAGES.get(PurePosixPath(path).suffix, "dockerfile" if path.startswith("Dockerfile") else "text")
    text = (REPOSITORY / path).read_text(encoding="utf-8").rstrip()
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{language}\n{text}\n````\n"


def address(file: File, target: str) -> str:
    """Return the address of a link for mkdocs: the path of a page, relative to this page; others stay as they are."""
    name, mark, anchor = target.partition("#")
    if not name or "://" in name or name.startswith(("mailto:", "/")) or file.src_uri.startswith("source/"):
        return target
    path = repository_path(file, name)
    source = source_of(file, target)
    page = source_page(source) if source else PAGES.get(path, path.removeprefix(f"{DOCS}/"))
    return os.path.relpath(page, PurePosixPath(file.src_uri).parent) + mark + anchor
