"""Start `dump.py` for models, and return its output."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megarl.hf.config import text_fields
from megarl.hf.families.settings import rotary_base, rotary_scaling, rotated_part

PACKAGE = "megatron-bridge"
INSTALL = f"pip install --no-deps --target FOLDER {PACKAGE}"
_SECONDS = 600.0  # for the imports


def installed_version() -> str | None:
    """Return the version of Megatron-Bridge in this environment, None without it. Imports nothing."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def whole_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the defaults of the installed transformers. Raises ValueError for an unknown `model_type`."""
    from transformers import CONFIG_MAPPING

    kind = hf_config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"the installed transformers does not know the model_type {kind!r}, so nothing could check a table of it"
        )
    config: dict[str, Any] = CONFIG_MAPPING[kind].from_dict(hf_config).to_dict()
    return config


def read_bridge(hf_config: dict[str, Any], folder: str | None) -> dict[str, Any]:
    """Return the dump of a model (see dump.py). `hf_config`: from `whole_config`.

    folder: a folder that holds megatron/bridge; None: this environment. Raises ValueError if Megatron-Bridge is not there, if its
    bridge rejects the model, or if it has none for the model's `architectures`.
    """
    (dump,) = read_bridges([hf_config], folder)
    if "error" in dump:
        raise ValueError(f"{dump['bridge']} of Megatron-Bridge {dump['version']} rejects this model: {dump['error']}")
    if "bridge" not in dump:
        names = ", ".join(hf_config.get("architectures") or ["no architectures"])
        raise ValueError(
            f"Megatron-Bridge {dump['version']} has no bridge for {names}; it has bridges for {', '.join(dump['bridges'])}"
        )
    return dump


def read_bridges(hf_configs: list[dict[str, Any]], folder: str | None) -> list[dict[str, Any]]:
    """Return the dump of each model, from one process. Raises ValueError if Megatron-Bridge is not there or not importable."""
    if folder is None and installed_version() is None:
        raise ValueError(f"Megatron-Bridge is not installed. {INSTALL}, and name the folder: --megatron-bridge FOLDER")
    if folder is not None and not (Path(folder) / "megatron" / "bridge" / "package_info.py").is_file():
        raise ValueError(f"--megatron-bridge {folder} holds no megatron/bridge. {INSTALL} writes it")
    request = {
        "folder": os.path.abspath(folder) if folder else "",
        "configs": [*map(before_transformers_5, hf_configs)],
    }
    command = [sys.executable, "-W", "ignore", "-m", "megarl.megatron.megatron_bridge.dump"]
    try:
        result = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"the imports of Megatron-Bridge took more than {_SECONDS:g} s: try again on an idle machine"
        ) from error
    if result.returncode:
        raise ValueError(f"Megatron-Bridge cannot be imported: {_last_line(result.stderr)}")
    dumps: list[dict[str, Any]] = json.loads(result.stdout)
    return dumps


def before_transformers_5(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the field names of transformers 4, which Megatron-Bridge reads.

    transformers 5 moved `rope_theta`, `rope_scaling` and `partial_rotary_factor` into `rope_parameters`, and calls the dtype
    `dtype`. Its configuration classes answer to further names of their fields, which are added.
    """
    from transformers import CONFIG_MAPPING

    fields = {name: value for name, value in hf_config.items() if not name.startswith("_")}
    kind = hf_config.get("model_type")
    aliases = CONFIG_MAPPING[kind].attribute_map if kind in CONFIG_MAPPING else {}
    fields |= {alias: fields[name] for alias, name in aliases.items() if name in fields}
    text = text_fields(hf_config)
    scaling = rotary_scaling(text)
    old = {
        "rope_theta": rotary_base(text),
        "rope_scaling": None if scaling["rope_type"] == "default" else {**scaling, "type": scaling["rope_type"]},
        "torch_dtype": "bfloat16",
    }
    if (part := rotated_part(text)) != 1.0:
        old["partial_rotary_factor"] = part
    fields |= old
    for name, section in fields.items():
        if name.endswith("_config") and isinstance(section, dict):
            fields[name] = {**section, **old}
    return fields


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "its process ended without a message"
