"""Published figures of other projects, and the recipes that reproduce them for comparison with estimates."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Size:
    """Parameters of a model in billions: total, and active per token (None: not published)."""

    model: str  # in megarl/model_configs
    total: float
    active: float | None
    source: str


SIZES = [
    Size("DeepSeek-V3", 671, 37, "DeepSeek-V3 Technical Report, arXiv 2412.19437"),
    Size("Qwen3-30B-A3B", 30.5, 3.3, "model card, huggingface.co/Qwen/Qwen3-30B-A3B"),
    Size("Qwen3-235B-A22B", 235, 22, "model card, huggingface.co/Qwen/Qwen3-235B-A22B"),
    Size("Qwen3-32B", 32.8, None, "model card, huggingface.co/Qwen/Qwen3-32B"),
    Size("Qwen3-14B", 14.8, None, "model card, huggingface.co/Qwen/Qwen3-14B"),
    Size("Qwen3-8B", 8.2, None, "model card, huggingface.co/Qwen/Qwen3-8B"),
    Size("Qwen3-4B", 4.0, None, "model card, huggingface.co/Qwen/Qwen3-4B"),
    Size("Qwen2.5-32B", 32.5, None, "model card, huggingface.co/Qwen/Qwen2.5-32B"),
    Size("Qwen2.5-7B-Instruct", 7.61, None, "model card, huggingface.co/Qwen/Qwen2.5-7B-Instruct"),
    Size("Qwen2.5-0.5B-Instruct", 0.49, None, "model card, huggingface.co/Qwen/Qwen2.5-0.5B-Instruct"),
]


@dataclass(frozen=True)
class Published:
    """A published step time. `prompt`, `response`: mean tokens per sample. `seconds`: by phase, or only the whole `step`."""

    name: str
    source: str
    model: str
    device: str
    prompt: float
    response: float
    seconds: dict[str, float]
    why: str  # reasons for the difference from the estimate: facts and suppositions
    settings: dict[str, Any] = field(default_factory=dict)  # settings of a recipe, by dotted key
    file: str | None = None  # recipe of the repository that `settings` override
    compared: tuple[str, ...] = ()  # phases that can be compared; (): all published ones

    def recipe(self) -> Recipe:
        recipe = load_recipe(ROOT / "recipes" / self.file, []) if self.file else Recipe()
        for name, value in self.settings.items():
            *sections, key = name.split(".")
            owner: Any = recipe
            for section in sections:
                owner = getattr(owner, section)
            assert hasattr(owner, key), name
            setattr(owner, key, value)
        return recipe


_NEMO = (
    "NVIDIA NeMo RL v0.4, docs/about/performance-summary.md, DGX H100, on policy; its recipes in "
    "examples/configs/recipes/llm/performance"
)


def _nemo(
    model: str,
    *,
    devices: int,
    prompts: int,
    samples: int,
    longest: int,
    response: float,
    step: float,
    engine: int,
    layout: dict[str, Any],
    why: str,
) -> Published:
    """Describe a run with old and reference log-probs, mini batches of 512 samples, and sequences packed up to the longest.

    Engines of `engine` devices with 0.6 of the memory share the trainers' devices in turn. Prompts have 100 tokens: the
    published tokens per second less the published mean length.
    """
    settings: dict[str, Any] = {
        "data.prompts_per_step": prompts,
        "data.max_prompt_length": 200,
        "rollout.samples_per_prompt": samples,
        "rollout.max_response_length": longest - 200,
        "rollout.engines": devices // engine,
        "rollout.tensor_parallel": engine,
        "rollout.engine_args": {"gpu_memory_utilization": 0.6},
        "algorithm.kl_coef": 0.01,
        "actor.mini_batches": prompts * samples // 512,
        "actor.max_tokens_per_micro_batch": longest // layout.get("context_parallel", 1),
        "cluster.trainers": devices,
        "megatron.offload": True,
        **{f"megatron.{name}": value for name, value in layout.items()},
    }
    name = f"{model}, {devices} H100"
    return Published(name, _NEMO, model, "H100", 100, response, {"step": step}, why, settings)


_ASCEND = (
    "verl-project/verl-ascend-recipe, {}/README.md: tokens a step from end-to-end throughput x mean step, sampling from the "
    "generation throughput, both means of 100 steps; prompts assumed to have 110 tokens, since it has no length"
)


def _qwen3_30b_on_four(
    name: str, folder: str, *, prompts: int, tokens: float, written: float, step: float
) -> Published:
    """Describe Qwen3-30B-A3B on 4 devices of an Atlas 800T A2 with vllm-ascend: an engine of TP 4, trainers of PP 4.

    `tokens`: of a step in all; `written`: response tokens per second.
    """
    samples, prompt = 4 * prompts, 110.0
    response = tokens / samples - prompt
    return Published(
        name,
        _ASCEND.format(folder),
        "Qwen3-30B-A3B",
        "910B",
        prompt,
        round(response, 1),
        {"gen": round(samples * response / written, 1), "step": step},
        why="Only sampling can be compared: 40 % of the optimizer ran on the host, and weights went through a file. In the "
        "estimate the memory bandwidth limits sampling; graphs were captured.",
        settings={
            "data.prompts_per_step": prompts,
            "data.max_prompt_length": 512,
            "rollout.samples_per_prompt": 4,
            "rollout.max_response_length": 1024,
            "rollout.engines": 1,
            "rollout.tensor_parallel": 4,
            "rollout.engine_args": {"gpu_memory_utilization": 0.6, "max_num_seqs": 32, "max_num_batched_tokens": 8192},
            "algorithm.kl_coef": 0.001,
            "actor.max_tokens_per_micro_batch": 3072,
            "cluster.trainers": 4,
            "megatron.pipeline_parallel": 4,
            "megatron.offload": True,
        },
        compared=("gen",),
    )


STEPS = [
    _qwen3_30b_on_four(
        "Qwen3-30B-A3B, 4 x 910B, DPPO", "dppo", prompts=64, tokens=404.37 * 379.12, written=988.49, step=379.1
    ),
    _qwen3_30b_on_four(
        "Qwen3-30B-A3B, 4 x 910B, router replay",
        "router_replay",
        prompts=32,
        tokens=254.29 * 342.81,
        written=882.78,
        step=342.8,
    ),
    Published(
        "DeepSeek-V3, 256 dies of 910C",
        "verl's recipe r1_ascend, README.md, step 2 (now in the history of github.com/verl-project/verl-recipe)",
        "DeepSeek-V3",
        "910C",
        175.1,
        1385.0,
        {"gen": 482.2, "reward": 20.4, "old_log_prob": 105.5, "reference": 92.7, "update_actor": 342.9, "step": 1044.8},
        why="Trainers took 1.5 to 1.7 times the estimate. Suppositions: the estimate's share of the peak comes from a run tuned "
        "for pre-training (Pangu Ultra MoE), and this run had one sequence in a micro batch of the update and four in the "
        "passes, where the estimate packs. Sampling took five times the estimate: 482 s over at most 2,048 steps are 235 ms a "
        "step or more, where the estimate has 46. Known omissions: hosts that cannot start kernels as fast as the device "
        "finishes them, busy experts, and 128 engines that wait for the slowest in each layer. The source has no row for weight "
        "sync, so sampling may include it.",
        file="grpo_deepseek_v3.yaml",
    ),
    _nemo(
        "DeepSeek-V3",
        devices=256,
        prompts=32,
        samples=16,
        longest=1536,
        response=745,
        step=154,
        engine=32,
        layout={
            "pipeline_parallel": 16,
            "expert_parallel": 16,
            "first_stage_layers": 3,
            "last_stage_layers": 2,
            "recompute": "full",
        },
        why="With 512 short samples on 256 devices the time is probably spent on omissions of the estimate: hosts, waiting, "
        "and kernels on few tokens.",
    ),
    _nemo(
        "Qwen3-235B-A22B",
        devices=128,
        prompts=16,
        samples=32,
        longest=8192,
        response=5671,
        step=506,
        engine=16,
        layout={
            "tensor_parallel": 2,
            "context_parallel": 2,
            "pipeline_parallel": 8,
            "expert_parallel": 16,
            "first_stage_layers": 11,
            "last_stage_layers": 11,
            "recompute": "full",
        },
        why="Sampling is most of the estimate. Supposition: in engines over two nodes, 16 ranks exchange small messages in each "
        "layer of each step. The estimate counts their bytes and 80 microseconds a layer, and assumes that experts cut in 16 are "
        "read as fast as whole ones.",
    ),
    _nemo(
        "Qwen3-30B-A3B",
        devices=32,
        prompts=64,
        samples=32,
        longest=4096,
        response=3154,
        step=225,
        engine=4,
        layout={"tensor_parallel": 2, "expert_parallel": 8},
        why="Suppositions: many small experts reach less of the peak and of the bandwidth than the large models behind the "
        "shares, and the host is the bottleneck: a layer's products of 768 columns take microseconds.",
    ),
    _nemo(
        "Qwen3-32B",
        devices=32,
        prompts=64,
        samples=32,
        longest=4096,
        response=3206,
        step=393,
        engine=4,
        layout={"tensor_parallel": 4, "pipeline_parallel": 4},
        why="A dense model, like the models behind the shares. Phases are not published, so errors may cancel.",
    ),
]
