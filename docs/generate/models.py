"""Write the table of docs/models.md and the list in README.md: ``python -m docs.generate.models``.

--check: only test if they are up to date.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.numerics.engine_gap import MODELS as SAMPLED
from megarl.hf.families import FAMILIES
from tests.support.megatron_layouts import PARITY, VL

PAGE = Path(__file__).parents[1] / "models.md"
README = PAGE.parents[1] / "README.md"
BEGIN, END = "<!-- generated: python -m docs.generate.models -->", "<!-- end -->"

KNOWN = {
    "deepseek_v3": ("DeepSeek-V3, DeepSeek-R1, Moonlight", ("deepseek_v3", "moonlight")),
    "deepseek_v32": ("DeepSeek-V3.2", ("deepseek_v32",)),
    "ernie4_5_moe": ("ERNIE-4.5-21B-A3B, ERNIE-4.5-300B-A47B", ("ernie4_5_moe", "ernie4_5_moe_plain")),
    "gemma3": ("Gemma 3 4B, 12B and 27B (on text)", ("gemma3",)),
    "gemma3_text": ("Gemma 3 270M and 1B", ("gemma3_text",)),
    "glm4_moe": ("GLM-4.5, GLM-4.6, GLM-4.7", ("glm4_moe", "glm4_moe_plain")),
    "glm4_moe_lite": ("GLM-4.7-Flash", ("glm4_moe_lite",)),
    "glm_moe_dsa": ("GLM-5, GLM-5.1", ("glm_moe_dsa",)),
    "gpt_oss": ("gpt-oss-20b, gpt-oss-120b", ("gpt_oss",)),
    "kimi_k2": ("Kimi-K2", ("kimi_k2",)),
    "llama": ("Llama 2, Llama 3", ("llama", "llama3")),
    "minimax_m2": ("MiniMax-M2", ("minimax_m2",)),
    "mistral": ("Mistral", ("mistral",)),
    "mixtral": ("Mixtral", ("mixtral",)),
    "olmoe": ("OLMoE-1B-7B", ("olmoe",)),
    "qwen2": ("Qwen2, Qwen2.5", ("qwen2", "qwen2_tied")),
    "qwen2_5_vl": ("Qwen2.5-VL", ("vl", "vl_tied")),
    "qwen2_moe": ("Qwen1.5-MoE, Qwen2-57B-A14B", ("qwen2_moe",)),
    "qwen3": ("Qwen3", ("qwen3", "qwen3_linear", "qwen3_yarn")),
    "qwen3_moe": ("Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder", ("qwen3_moe", "qwen3_moe_raw")),
    "qwen3_5": ("Qwen3.5 and Qwen3.6 (on text)", ("qwen3_5",)),
    "qwen3_5_moe": ("Qwen3.5-35B-A3B and other mixtures of Qwen3.5 and 3.6 (on text)", ("qwen3_5_moe",)),
    "qwen3_5_moe_text": ("text models of Qwen3.5 with experts", ("qwen3_5_moe_text",)),
    "qwen3_5_text": ("text models of Qwen3.5", ("qwen3_5_text",)),
    "qwen3_next": ("Qwen3-Next-80B-A3B", ("qwen3_next",)),
    "qwen3_vl": ("Qwen3-VL", ("qwen3_vl", "qwen3_vl_tied")),
    "qwen3_vl_moe": ("Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B", ("qwen3_vl_moe",)),
}
"""By `model_type`: published models; tiny models of the layout tests."""


def pages() -> dict[Path, str]:
    """Return the text of each page with its new part."""
    names = ", ".join(models for models, *_ in sorted(KNOWN.values()))
    lines = textwrap.fill(names, width=120, break_on_hyphens=False)
    return {PAGE: _replaced(PAGE.read_text(), f"\n{table()}\n"), README: _replaced(README.read_text(), f"{lines}.")}


def _replaced(page: str, part: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{part}\n{END}{after}"


def table() -> str:
    """Return one row for each family."""
    rows = ["| `model_type` | models | layouts in CI; with --all | sampled by vLLM | LoRA | rotary scaling |"]
    rows.append("|---|---|---|---|---|---|")
    for kind, family in sorted(FAMILIES.items()):
        models, tiny = KNOWN[kind]
        cases = [case for case in [*PARITY, *VL] if case["model"] in tiny]
        quick = _layouts(case for case in cases if not case["slow"])
        slow = [name for name in _layouts(cases) if name not in quick]
        engine = (
            "with images and videos" if family.tower else _PRECISION.get(kind, "float32") if kind in SAMPLED else "no"
        )
        scaling = ", ".join(word for word in family.rotary if word not in ("default", "mrope")) or "-"
        cells = [
            f"`{kind}`",
            models,
            "; ".join([", ".join(quick) or "none", *([", ".join(slow)] if slow else [])]),
            engine,
            "yes" if family.adapters else "no",
            scaling,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _layouts(cases: Iterable[dict[str, Any]]) -> list[str]:
    names = (case["name"].partition("-")[2] for case in cases)
    return list(dict.fromkeys(name for name in names if "=" not in name))


_PRECISION = {"qwen3_next": "bfloat16"}  # vLLM's delta nets on a CPU have no other


def main() -> None:
    for page, text in pages().items():
        if "--check" in sys.argv:
            assert text == page.read_text(), f"{page.name} is not up to date: python -m docs.generate.models writes it"
        page.write_text(text)


if __name__ == "__main__":
    main()
