"""docs/numerics.md: the benchmark replaces its sections and nothing else."""

from __future__ import annotations

from pathlib import Path

from benchmarks.numerics.__main__ import SECTIONS, write

ROOT = Path(__file__).parents[2]


def test_text_outside_a_section_is_kept(tmp_path: Path) -> None:
    page = tmp_path / "numerics.md"
    page.write_text("# Numbers\n\n<!-- begin parity -->\nold\n<!-- end parity -->\n\n## By hand\n")
    write(page, {"parity": "new\n"})
    assert page.read_text() == "# Numbers\n\n<!-- begin parity -->\nnew\n<!-- end parity -->\n\n## By hand\n"
    write(page, {"invariance": "more\n"})
    assert page.read_text().endswith("## By hand\n\n<!-- begin invariance -->\nmore\n<!-- end invariance -->\n")


def test_the_page_has_every_section_without_other_headings() -> None:
    text = (ROOT / "docs" / "numerics.md").read_text()
    for name in SECTIONS:
        _, _, rest = text.partition(f"<!-- begin {name} -->\n")
        body, end, _ = rest.partition(f"<!-- end {name} -->\n")
        assert end and "\n## " not in body, f"{name} holds a second heading: it would be replaced with the section"
