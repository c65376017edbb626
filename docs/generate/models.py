"""Write the tables of docs/models.md: ``python -m docs.generate.models`` (--check: only test if they are up to date)."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.numerics.engine_gap import MODELS as SAMPLED
from megarl.hf.families import FAMILIES
from tests.support.megatron_layouts import PARITY, VL

PAGE = Path(__file__).parents[1] / "models.md"
BEGIN, END = "<!-- generated: python -m docs.generate.models -->", "<!-- end -->"

KNOWN = {
    "deepseek_v3": ("DeepSeek-V3, DeepSeek-R1, Moonlight", ("deepseek_v3", "moonlight"), "deepseek_v3"),
    "glm4_moe": ("GLM-4.5, GLM-4.6, GLM-4.7", ("glm4_moe", "glm4_moe_plain"), "glm4_moe"),
    "glm4_moe_lite": ("GLM-4.7-Flash", ("glm4_moe_lite",), "glm4_moe_lite"),
    "kimi_k2": ("Kimi-K2", ("kimi_k2",), "kimi_k2"),
    "llama": ("Llama 2, Llama 3", ("llama", "llama3"), "llama"),
    "minimax_m2": ("MiniMax-M2", ("minimax_m2",), "minimax_m2"),
    "mistral": ("Mistral", ("mistral",), "mistral"),
    "mixtral": ("Mixtral", ("mixtral",), "mixtral"),
    "qwen2": ("Qwen2, Qwen2.5", ("qwen2", "qwen2_tied"), "qwen2"),
    "qwen2_5_vl": ("Qwen2.5-VL", ("vl", "vl_tied"), ""),
    "qwen2_moe": ("Qwen1.5-MoE, Qwen2-57B-A14B", ("qwen2_moe",), "qwen2_moe"),
    "qwen3": ("Qwen3", ("qwen3", "qwen3_linear", "qwen3_yarn"), "qwen3"),
    "qwen3_moe": ("Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder", ("qwen3_moe", "qwen3_moe_raw"), "qwen3_moe"),
    "qwen3_next": ("Qwen3-Next-80B-A3B", ("qwen3_next",), "qwen3_next"),
}
"""By `model_type`: published models; tiny models of the layout tests; tiny model that is compared with vLLM."""


def document(page: str) -> str:
    """Return the page with new tables."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def table() -> str:
    """Return one row for each family."""
    rows = ["| `model_type` | models | layouts compared with transformers | sampled by vLLM | LoRA | rotary scaling |"]
    rows.append("|---|---|---|---|---|---|")
    for kind, family in sorted(FAMILIES.items()):
        models, tiny, sampled = KNOWN[kind]
        layouts = [case["name"].partition("-")[2] for case in [*PARITY, *VL] if case["model"] in tiny]
        layouts = list(dict.fromkeys(name for name in layouts if "=" not in name))
        engine = "yes" if sampled in SAMPLED else "with images" if family.tower else "no"
        scaling = ", ".join(word for word in family.rotary if word not in ("default", "mrope")) or "-"
        cells = [
            f"`{kind}`",
            models,
            f"{len(layouts)}: {', '.join(layouts)}",
            engine,
            "yes" if family.adapters else "no",
            scaling,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    text = document(PAGE.read_text())
    if "--check" in sys.argv:
        assert text == PAGE.read_text(), "docs/models.md is not up to date: python -m docs.generate.models writes it"
        return
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
