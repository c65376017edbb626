"""HTML pages as a browser parses them, and text that would be markup if it were not escaped."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- </pre>"


class Page(HTMLParser):
    """Elements, title, scripts and other texts of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = self.title = ""
        self._tag = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._tag = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag == "script":
            self.scripts[-1] += data
        elif self._tag == "title":
            self.title += data
        else:
            self.text += data


def assert_self_contained(page: Page) -> None:
    """Assert that no element of the page loads another file."""
    assert page.elements
    for tag, attributes in page.elements:
        is_icon = tag == "link" and (attributes.get("href") or "").startswith("data:")
        assert is_icon or tag not in ("link", "img", "iframe", "object", "embed", "base"), (tag, attributes)
        assert "src" not in attributes, (tag, attributes)
        assert not (attributes.get("href") or "#").startswith(("http", "//")), (tag, attributes)
