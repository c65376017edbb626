"""The rows of verl's table of models and algorithms on Ascend, and megarl's recipe for each, or the reason if there is none.

The table: docs/ascend_tutorial/model_support/model_and_algorithm_support.md of github.com/verl-project/verl, commit 1dda039
(2026-08-22). Its numbers 17, 24 and 28 do not exist.
"""

from __future__ import annotations

from typing import NamedTuple

_ZERO_CENTERED = "MindSpeed's RMSNorm does not add 1 to its weight: refused on NPU"
_NO_SCRIPT = "the row's script is in a repository that could not be read"


class VerlRow(NamedTuple):
    """A row. `recipe`: a file of recipes/, "" if there is none. `remark`: what differs, or why there is none."""

    number: str
    model: str
    algorithm: str
    backend: str
    engine: str
    recipe: str
    remark: str = ""


VERL_ROWS = (
    VerlRow("1", "Qwen2.5-7B-Instruct", "DAPO", "FSDP", "vllm", "dapo_qwen2.5_7b.yaml"),
    VerlRow("2", "Qwen2.5-VL-3B-Instruct", "DAPO", "FSDP2", "vllm", "dapo_qwen2.5_vl_3b.yaml"),
    VerlRow("3", "Qwen2.5-VL-7B-Instruct", "GRPO", "FSDP", "vllm", "grpo_qwen2.5_vl_7b.yaml"),
    VerlRow("4", "Qwen2.5-VL-7B-Instruct", "GRPO", "FSDP", "sglang", "", "megarl passes no images to SGLang"),
    VerlRow("5", "Qwen2.5-VL-7B-Instruct", "DAPO", "FSDP2", "vllm", "dapo_qwen2.5_vl_7b.yaml"),
    VerlRow("6", "Qwen2.5-32B", "GRPO", "FSDP", "vllm", "grpo_qwen2.5_32b.yaml"),
    VerlRow("7", "Qwen2.5-32B", "DAPO", "FSDP", "vllm", "dapo_qwen2.5_32b.yaml"),
    VerlRow(
        "8",
        "Qwen2.5-32B",
        "DAPO",
        "FSDP2",
        "vllm",
        "",
        "a test of speed: its samples ignore the end of sequence and all have 4,096 tokens, which megarl's engines do not do",
    ),
    VerlRow(
        "9", "Qwen2.5-32B", "DAPO", "FSDP2", "vllm", "dapo_qwen2.5_32b.yaml", "with the batch and the nodes of row 7"
    ),
    VerlRow("10", "Qwen2.5-VL-32B-Instruct", "DAPO", "FSDP2", "vllm", "dapo_qwen2.5_vl_32b.yaml"),
    VerlRow("11", "Qwen3-4B", "GRPO", "FSDP", "vllm", "grpo_qwen3_4b.yaml"),
    VerlRow("12", "Qwen3-8B", "GRPO", "FSDP", "vllm", "grpo_qwen3_8b.yaml"),
    VerlRow("13", "Qwen3-8B", "GRPO", "FSDP", "sglang", "grpo_qwen3_8b_sglang.yaml"),
    VerlRow("14", "Qwen3-8B", "PPO", "FSDP", "vllm", "ppo_qwen3_8b.yaml"),
    VerlRow("15", "Qwen3-8B", "SAPO", "FSDP", "vllm", "sapo_qwen3_8b.yaml"),
    VerlRow("16", "Qwen3-8B", "GSPO", "FSDP2", "vllm", "gspo_qwen3_8b.yaml"),
    VerlRow("18", "Qwen3-8B", "GRPO (One_Step_Off_Policy)", "FSDP2", "vllm", "one_step_off_qwen3_8b.yaml"),
    VerlRow("19", "Qwen3-8B-Base", "DAPO", "FSDP", "vllm", "dapo_qwen3_8b.yaml"),
    VerlRow("20", "Qwen3-14B-Base", "DAPO", "FSDP", "vllm", "dapo_qwen3_14b.yaml"),
    VerlRow("21", "Qwen3-30B", "DAPO", "FSDP", "vllm", "dapo_qwen3_30b_6k.yaml"),
    VerlRow("22", "Qwen3-30B-A3B-Base", "DAPO", "FSDP", "vllm", "dapo_qwen3_30b_8_nodes.yaml"),
    VerlRow("23", "Qwen3-30B-A3B", "GRPO", "Megatron", "sglang", "grpo_qwen3_30b_sglang.yaml"),
    VerlRow("25", "Qwen3-30B-A3B", "DAPO", "Megatron", "vllm", "dapo_qwen3_30b.yaml"),
    VerlRow("26", "Qwen3-30B-A3B", "GRPO (fully_async)", "FSDP", "vllm", "fully_async_qwen3_30b.yaml"),
    VerlRow("27", "Qwen3-32B", "GRPO", "FSDP", "vllm", "grpo_qwen3_32b.yaml"),
    VerlRow("29", "Qwen3-235B-A22B", "GRPO", "Megatron", "vllm", "grpo_qwen3_235b.yaml"),
    VerlRow(
        "30",
        "Qwen3-235B-A22B-Instruct",
        "GRPO",
        "Megatron",
        "vllm",
        "",
        "samples of 256k tokens; the config.json of the Instruct version, which has another context length, is not in megarl",
    ),
    VerlRow("31", "Qwen3-VL-8B-Instruct", "GRPO", "FSDP2", "vllm", "grpo_qwen3_vl_8b.yaml"),
    VerlRow("32", "Qwen3-VL-8B-Instruct", "GRPO (fully_async)", "FSDP2", "vllm", "fully_async_qwen3_vl_8b.yaml"),
    VerlRow("33", "Qwen3-VL-30B-A3B-Instruct", "GRPO", "FSDP2", "vllm", "grpo_qwen3_vl_30b.yaml"),
    VerlRow("34", "Qwen3-VL-30B-A3B-Instruct", "DAPO", "FSDP2", "vllm", "dapo_qwen3_vl_30b.yaml"),
    VerlRow(
        "35",
        "Qwen3.5-27B",
        "GRPO",
        "FSDP2",
        "vllm",
        "",
        f"{_ZERO_CENTERED}; for GPUs: cuda/grpo_qwen3.5_27b.yaml, on text",
    ),
    VerlRow(
        "36",
        "Qwen3.5-35B-A3B",
        "GRPO",
        "FSDP2",
        "vllm",
        "",
        f"{_ZERO_CENTERED}; for GPUs: cuda/gspo_qwen3.5_35b.yaml, on text",
    ),
    VerlRow(
        "37",
        "Qwen3.5-122B-A10B",
        "GRPO",
        "Megatron",
        "vllm",
        "",
        f"{_ZERO_CENTERED}; for GPUs: cuda/gspo_qwen3.5_122b.yaml, on text",
    ),
    VerlRow(
        "38",
        "Qwen3-Next-80B-A3B-Instruct",
        "GRPO",
        "FSDP2",
        "vllm",
        "",
        f"{_ZERO_CENTERED}; for GPUs: cuda/gspo_qwen3_next_80b.yaml",
    ),
    VerlRow("39", "DeepSeek-V3", "DAPO", "Megatron", "vllm", "", f"{_NO_SCRIPT}; by GRPO: grpo_deepseek_v3.yaml"),
    VerlRow("40", "Qwen3-1.7B", "GRPO", "VeOmni", "vllm", "", _NO_SCRIPT),
    VerlRow("41", "Qwen3-30B-A3B", "GRPO", "VeOmni", "vllm", "grpo_qwen3_30b.yaml"),
    VerlRow("42", "Qwen3-VL-30B-A3B-Instruct", "GRPO", "VeOmni", "vllm", "grpo_qwen3_vl_30b_veomni.yaml"),
    VerlRow("SFT 1", "Qwen3-8B", "SFT-PEFT", "FSDP", "-", "sft_peft_qwen3_8b.yaml"),
    VerlRow(
        "SFT 2", "Qwen2.5-7B-Instruct", "ReTool-SFT", "FSDP", "-", "retool_sft_qwen2_7b.yaml", "with Qwen2-7B-Instruct"
    ),
)


def table() -> str:
    """Return the rows as a Markdown table."""
    lines = ["| row | model | algorithm | backend, engine | recipe, or why there is none |", "|---|---|---|---|---|"]
    for row in VERL_ROWS:
        link = f"[{row.recipe}](../recipes/{row.recipe})" if row.recipe else "none"
        outcome = ": ".join(part for part in (link, row.remark) if part)
        lines.append(f"| {row.number} | {row.model} | {row.algorithm} | {row.backend}, {row.engine} | {outcome} |")
    return "\n".join(lines)
