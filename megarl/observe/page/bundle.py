"""The page's files, and all of them in one HTML file."""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from megarl.observe.html import page, script_json

_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./(\w+\.js)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def static_files() -> list[str]:
    """Return the names of the page's files."""
    return sorted(file.name for file in files("megarl.observe.page").joinpath("static").iterdir())


def static_text(name: str) -> str:
    return files("megarl.observe.page").joinpath("static", name).read_text("utf-8")


def bundled(main: str, instead: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the script `main` of static/ and the modules that it imports as one script, which exports nothing.

    instead: files that take the place of modules, by the module's name. A module becomes a function that is called once,
    so that names of different modules do not collide.
    """
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        text = static_text(instead.get(name, name))
        for module in (match[2] for match in _IMPORT.finditer(text)):
            if module not in parts:
                add(module)
        text = _IMPORT.sub(r'const { \1 } = modules["\2"];', text)
        names = _EXPORT.findall(text)
        text = _EXPORT.sub("", text)
        left = re.search(r"^(?:import|export)\b.*", text, re.MULTILINE)
        assert left is None, f"{name}: {left and left[0]!r} is in no form that `bundled` converts"
        parts[name] = f'modules["{name}"] = (() => {{\n{text}\nreturn {{ {", ".join(names)} }};\n}})();\n'

    add(main)
    script = "const modules = {};\n" + "".join(parts.values())
    assert "</script" not in script and "<!--" not in script, "the script cannot be placed inside a script element"
    return script


def content_security_policy(nonce: str) -> str:
    """Return a policy that blocks requests, and scripts and styles without `nonce`, whatever text the page contains."""
    return (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'"
    )


def page_with_charts(template: str, payload: dict[str, Any], main: str, **values: Any) -> str:
    """Render a template of `html.page` with the styles of this page and the script `main`, which reads `payload`."""
    nonce = secrets.token_urlsafe(16)
    policy = content_security_policy(nonce)
    parts = {"style": static_text("style.css"), "script": bundled(main), "payload": script_json(payload)}
    return page(template, **values, **parts, nonce=nonce, policy=policy)


def one_file(title: str, data: dict[str, Any]) -> str:
    """Return the page with `data`, which static/frozen.js reads in place of requests to the server."""
    nonce = secrets.token_urlsafe(16)
    icon = base64.b64encode(static_text("icon.svg").encode()).decode()
    security = f'<meta http-equiv="Content-Security-Policy" content="{content_security_policy(nonce)}">'
    script = bundled("app.js", {"api.js": "frozen.js"})
    html = static_text("index.html")
    for old, new in {
        '<meta charset="utf-8">': f'<meta charset="utf-8">\n{security}',
        "<title>megarl view</title>": f"<title>{title}</title>",
        '<link rel="icon" href="/static/icon.svg">': f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">',
        '<link rel="stylesheet" href="/static/style.css">': (
            f'<style nonce="{nonce}">\n{static_text("style.css")}</style>'
        ),
        '<script type="module" src="/static/app.js"></script>': (
            f'<script type="application/json" id="data" nonce="{nonce}">{script_json(data)}</script>\n'
            f'<script type="module" nonce="{nonce}">\n{script}</script>'
        ),
    }.items():
        assert html.count(old) == 1, f"index.html has {html.count(old)} of {old}"
        html = html.replace(old, new)
    return html
