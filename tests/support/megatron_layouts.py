"""Table of tiny models and layouts, and its test cases.

`ci` runs in every test run, `slow` with `launch/test.sh --all`, `-` not at all: experts of a dense model, sizes that do
not divide, or combinations in other rows. CI has each kind of layer on one process, each kind of parallelism, and a layout of
some special layers: tied embeddings over TP (a padded vocabulary) and VPP (the embedding is on two stages), MLA, linear attention,
dense layers before experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layout:
    processes: int
    megatron: dict[str, Any] = field(default_factory=dict)  # keys of the recipe's section; TP brings sequence parallel
    per_micro: int = 3  # sequences in a micro batch; interleaving needs a multiple of the stages of micro batches


def _layout(processes: int, per_micro: int = 3, **megatron: Any) -> Layout:
    return Layout(processes, megatron, per_micro)


LAYOUTS = {
    "TP1": _layout(1, per_micro=2),
    "DP2": _layout(2),
    "TP2": _layout(2, tensor_parallel=2),
    "PP2": _layout(2, pipeline_parallel=2),
    "PP2xVPP2": _layout(2, per_micro=2, pipeline_parallel=2, virtual_pipeline=2),
    "CP2": _layout(2, context_parallel=2),
    "EP2": _layout(2, expert_parallel=2),
    "ETP2": _layout(2, expert_tensor_parallel=2),
    "TP2xEP2": _layout(2, tensor_parallel=2, expert_parallel=2),
    "TP2xETP2": _layout(2, tensor_parallel=2, expert_tensor_parallel=2),
    "TP2xPP2": _layout(4, per_micro=2, tensor_parallel=2, pipeline_parallel=2),
    "TP2xCP2": _layout(4, tensor_parallel=2, context_parallel=2),
    "EP4": _layout(4, expert_parallel=4),
    "EP2xETP2": _layout(4, expert_parallel=2, expert_tensor_parallel=2),
    "TP4xETP2": _layout(4, tensor_parallel=4, expert_tensor_parallel=2),
    "TP2xEP2xETP2": _layout(4, tensor_parallel=2, expert_parallel=2, expert_tensor_parallel=2),
    "PP2xEP2": _layout(4, pipeline_parallel=2, expert_parallel=2),
    "TP2xPP2xEP2": _layout(4, tensor_parallel=2, pipeline_parallel=2, expert_parallel=2),
    "TP2xPP2xVPP2xEP2": _layout(
        4, per_micro=1, tensor_parallel=2, pipeline_parallel=2, virtual_pipeline=2, expert_parallel=2
    ),
    "TP2xCP2xEP2": _layout(4, tensor_parallel=2, context_parallel=2, expert_parallel=2),
    "TP2xCP2xEP4": _layout(4, tensor_parallel=2, context_parallel=2, expert_parallel=4),
}

MATRIX = """
layout            llama  qwen2  qwen2_tied  qwen3  qwen3_moe  qwen3_moe_raw  deepseek_v3  moonlight  glm4_moe
TP1               ci     ci     ci          ci     ci         ci             ci           ci         ci
DP2               -      slow   slow        slow   slow       -              slow         slow       slow
TP2               slow   slow   ci          slow   ci         -              slow         slow       slow
PP2               slow   slow   slow        slow   slow       -              slow         slow       slow
PP2xVPP2          -      slow   ci          slow   ci         -              slow         slow       slow
CP2               -      slow   slow        slow   ci         -              slow         slow       slow
EP2               -      -      -           -      ci         -              slow         slow       slow
ETP2              -      -      -           -      slow       -              slow         slow       slow
TP2xEP2           -      -      -           -      slow       -              slow         slow       slow
TP2xETP2          -      -      -           -      ci         -              slow         slow       slow
TP2xPP2           -      slow   slow        slow   -          -              -            -          -
TP2xCP2           -      slow   slow        slow   -          -              -            -          -
EP4               -      -      -           -      slow       -              slow         slow       -
EP2xETP2          -      -      -           -      slow       -              slow         slow       -
TP4xETP2          -      -      -           -      -          -              slow         slow       -
TP2xEP2xETP2      -      -      -           -      slow       -              slow         slow       -
PP2xEP2           -      -      -           -      slow       -              slow         slow       -
TP2xPP2xEP2       -      -      -           -      slow       -              slow         slow       slow
TP2xPP2xVPP2xEP2  -      -      -           -      ci         -              slow         slow       -
TP2xCP2xEP2       -      -      -           -      slow       -              ci           slow       slow
TP2xCP2xEP4       -      -      -           -      slow       -              slow         slow       -
"""

TABLES = """
model               TP1  DP2   TP2   PP2   PP2xVPP2  CP2   EP2   ETP2  TP2xETP2  TP2xPP2  TP2xCP2  TP2xPP2xEP2  TP2xCP2xEP2
llama3              slow slow  slow  slow  -         slow  -     -     -         -        -        -            -
mistral             ci   slow  slow  slow  -         -     -     -     -         -        -        -            -
qwen3_linear        slow -     -     -     -         -     -     -     -         -        -        -            -
qwen3_yarn          ci   slow  slow  slow  -         slow  -     -     -         -        -        -            -
qwen2_moe           ci   slow  slow  slow  slow      slow  slow  slow  slow      -        -        slow         slow
mixtral             ci   slow  slow  slow  slow      slow  slow  slow  slow      -        -        slow         slow
minimax_m2          ci   slow  slow  slow  slow      slow  slow  slow  slow      -        -        slow         slow
olmoe               slow slow  slow  slow  slow      slow  slow  slow  slow      -        -        slow         slow
glm4_moe_lite       ci   slow  slow  slow  slow      slow  slow  slow  slow      -        -        slow         slow
kimi_k2             slow slow  slow  slow  slow      slow  slow  slow  slow      -        -        slow         slow
qwen3_next          ci   slow  ci    slow  slow      slow  slow  slow  slow      -        -        slow         slow
glm4_moe_plain      slow -     -     -     -         -     -     -     -         -        -        -            -
qwen3_5_text        ci   -     slow  slow  -         slow  -     -     -         -        -        -            -
qwen3_5             ci   slow  slow  slow  slow      slow  -     -     -         -        -        -            -
qwen3_5_moe         ci   slow  slow  slow  slow      slow  ci    -     -         -        -        slow         slow
qwen3_5_moe_text    slow -     -     -     -         -     slow  -     -         -        -        -            -
gpt_oss             ci   slow  slow  slow  slow      slow  slow  -     -         -        -        slow         slow
gemma3_text         ci   slow  slow  ci    slow      slow  -     -     -         slow     slow     -            -
gemma3              slow -     slow  slow  -         slow  -     -     -         -        -        -            -
deepseek_v32        ci   slow  slow  slow  slow      slow  slow  slow  slow      -        -        slow         slow
glm_moe_dsa         slow slow  slow  slow  slow      slow  slow  slow  slow      -        -        slow         slow
ernie4_5_moe        ci   slow  slow  slow  slow      slow  slow  slow  slow      -        -        slow         slow
ernie4_5_moe_plain  slow -     -     -     -         -     -     -     -         -        -        -            -
"""
"""Models that differ from the models of `MATRIX` by their tables, and in few computations: one row each."""


def case(model: str, layout: str, *, slow: bool = False, **more: Any) -> dict[str, Any]:
    """Case of a model in a layout for the trainer processes; `more` are keys of the recipe's megatron section.

    `reference` names the case with the same training results: the model on one process.
    """
    where = LAYOUTS[layout]
    per_micro = more.pop("per_micro", where.per_micro)
    return {
        "name": "-".join([model, layout, *(f"{key}={value}" for key, value in more.items())]),
        "model": model,
        "processes": where.processes,
        "per_micro": per_micro,
        "megatron": {**where.megatron, **more},
        "reference": f"{model}-TP1",
        "slow": slow,
    }


def _matrix(table: str, *, models_are_rows: bool = False) -> list[dict[str, Any]]:
    head, *rows = (line.split() for line in table.strip().splitlines())
    return [
        case(*(name, column) if models_are_rows else (column, name), slow=word == "slow")
        for name, *words in rows
        for column, word in zip(head[1:], words, strict=True)
        if word != "-"
    ]


PARITY = [*_matrix(MATRIX), *_matrix(TABLES, models_are_rows=True)]
OPTIONS = [
    case("qwen3_moe", "TP2", distributed_optimizer=False, recompute="full"),
    case("qwen3_moe", "TP2xEP2", recompute="selective"),
    case("qwen3", "TP2", sequence_parallel=False),
    case("qwen2_tied", "PP2", first_stage_layers=1),
    {
        **case("deepseek_v3", "TP1", recompute="selective"),
        "megatron": {"recompute": "selective", "extra": {"recompute_modules": ["moe_act", "layernorm"]}},
    },
]
_VL = [
    case("vl", "TP1", per_micro=3),
    case("vl_tied", "TP1"),
    case("vl", "TP2"),
    case("vl", "PP2", per_micro=2, first_stage_layers=1),
    case("vl", "CP2"),
    case("vl", "DP2", per_micro=1),
    case("vl_tied", "PP2"),
    case("vl", "TP2", sequence_parallel=False),
    case("vl", "TP2", recompute="full"),
    case("vl", "PP2", per_micro=8, recompute="selective"),
    case("vl", "TP2xPP2"),
    case("vl", "TP2xCP2"),
    case("qwen3_vl", "TP1", per_micro=3),
    case("qwen3_vl", "TP2"),
    case("qwen3_vl", "PP2", per_micro=2),
    case("qwen3_vl_moe", "TP1"),
    case("qwen3_vl_moe", "EP2"),
    case("qwen3_vl_tied", "TP1"),
    case("qwen3_vl", "CP2"),
    case("qwen3_vl", "DP2", per_micro=1),
    case("qwen3_vl_tied", "PP2", first_stage_layers=3),
    case("qwen3_vl", "TP2", sequence_parallel=False),
    case("qwen3_vl", "TP2", recompute="full"),
    case("qwen3_vl", "PP2", per_micro=8, recompute="selective"),
    case("qwen3_vl", "TP2xPP2"),
    case("qwen3_vl", "TP2xCP2"),
    case("qwen3_vl_moe", "TP2"),
    case("qwen3_vl_moe", "PP2"),
    case("qwen3_vl_moe", "CP2"),
    case("qwen3_vl_moe", "EP2", recompute="full"),
    case("qwen3_vl_moe", "TP2xPP2xEP2"),
]
VL = [{**each, "slow": True} for each in _VL]
"""Models that read images: their references take minutes."""
FROZEN_TOWER = [
    {
        **case(model, layout, **settings),
        "name": f"{model}-frozen-{layout}",
        "reference": f"{model}-frozen-TP1",
        "frozen_tower": True,
    }
    for model, layout, settings in (
        ("vl", "TP1", {"per_micro": 3}),
        ("vl", "TP2", {"recompute": "full"}),
        ("vl", "PP2", {"per_micro": 2, "first_stage_layers": 1}),
        ("qwen3_vl", "TP1", {}),
    )
]
RESUME: list[dict[str, Any]] = [
    {"name": "resume", "kind": "resume", "model": "qwen3_moe", "megatron": {"expert_parallel": 2}},
    {"name": "resume-bf16", "kind": "resume", "model": "qwen2_tied", "dtype": "bfloat16"},
]
SWAP = {
    "name": "swap",
    "kind": "swap",
    "swap": "stand-in",
    "model": "qwen3_moe",
    "dtype": "bfloat16",
    "megatron": {"expert_parallel": 2},
}
"""Optimizer states on the host between steps; see `tests.support.megatron_swap`."""


def reshard(name: str, source: str, **megatron: Any) -> dict[str, Any]:
    """Case that loads the checkpoint of the case `source` in another layout and saves it again; see
    `tests.support.megatron_checkpoints`. `resume` wrote the first one."""
    bf16 = source.endswith("bf16")
    model = {"model": "qwen2_tied", "dtype": "bfloat16"} if bf16 else {"model": "qwen3_moe"}
    case = {**model, "name": name + "-bf16" * bf16, "kind": "reshard", "from": source, "root": "resume"}
    return {**case, "per_micro": 2, "megatron": megatron}


# A chain: each reads what the one before has written, so every layout is both written and read.
RESHARD_TWO = [
    reshard("tp-ep", "resume", tensor_parallel=2, expert_parallel=2, distributed_optimizer=False),
    reshard("pp-vpp", "tp-ep", pipeline_parallel=2, virtual_pipeline=2),
    reshard("tp-etp", "pp-vpp", tensor_parallel=2, expert_tensor_parallel=2),
    reshard("tp", "resume-bf16", tensor_parallel=2, distributed_optimizer=False),
    {"name": "other", "kind": "other_model", "from": "resume", "model": "qwen3"},
]
RESHARD_ONE = [reshard("one", "tp-etp"), reshard("one", "tp-bf16")]
RESHARD_FOUR = [
    {
        **reshard("four", "one", tensor_parallel=2, expert_parallel=2, pipeline_parallel=2, virtual_pipeline=2),
        "per_micro": 1,
    },
]
RESHARD_MORE_TWO = [
    RESUME[0],
    RESUME[1],
    reshard("cp", "resume", context_parallel=2),
    reshard("dp", "cp"),
    reshard("tp", "dp", tensor_parallel=2),
    reshard("pp-plain", "tp", pipeline_parallel=2, distributed_optimizer=False),
    reshard("pp", "resume-bf16", pipeline_parallel=2, first_stage_layers=1),
]
RESHARD_MORE_ONE = [
    reshard("one-plain", "pp-plain", distributed_optimizer=False),
    {**reshard("one", "one-plain"), "same_ranks": True},
    reshard("one", "pp-bf16"),
]
RESHARD_MORE_FOUR = [
    reshard("tp-cp-ep", "one", tensor_parallel=2, context_parallel=2, expert_parallel=4),
    reshard("tp-dp-ep", "tp-cp-ep", tensor_parallel=2, expert_parallel=2),
    reshard("tp-ep-etp", "tp-dp-ep", tensor_parallel=2, expert_parallel=2, expert_tensor_parallel=2),
    reshard("pp-ep-plain", "tp-ep-etp", pipeline_parallel=2, expert_parallel=2, distributed_optimizer=False),
    reshard("tp-pp", "one-bf16", tensor_parallel=2, pipeline_parallel=2),
    reshard("dp-plain", "tp-pp-bf16", distributed_optimizer=False),
]


RESHARD_OTHER_TWO = [
    {"name": "resume", "kind": "resume", "megatron": {}},
    reshard("tp", "resume", tensor_parallel=2),
    reshard("pp", "tp", pipeline_parallel=2, distributed_optimizer=False),
]
RESHARD_OTHER_ONE = [reshard("one", "pp")]
"""Of models with layers that the others do not have."""
