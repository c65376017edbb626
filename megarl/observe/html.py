"""HTML pages that need no network and no server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from megarl.atomic_files import write_atomically
from megarl.observe.json_lines import strict


def page(template: str, **values: Any) -> str:
    """Render a template of this package as HTML."""
    import jinja2

    loader = jinja2.PackageLoader("megarl.observe")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**values, written=time.strftime("%Y-%m-%d %H:%M"))


def write_html(path: Path, html: str) -> None:
    """Write a page atomically. Lone surrogates, which UTF-8 lacks, become escapes."""
    write_atomically(path, html.encode("utf-8", "backslashreplace"))


def script_json(value: Any) -> str:
    """Return `value` as JSON with <, > and & escaped, so that HTML parsers never read it as markup."""
    text = json.dumps(strict(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
