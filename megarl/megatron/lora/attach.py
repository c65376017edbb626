"""Attach LoRA adapters to a model's chunks, and read merged weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import copy_tensor_model_parallel_attributes

from megarl.hf.linears import matches, without_expert
from megarl.megatron.lora.layers import Adapter, Adapters, Cut, LinearPart, Site
from megarl.megatron.native_layers.norm_rotary import rms_norm
from megarl.recipe.trainers import LoraConfig

CHILD = "lora"
"""Name of the module that holds a chunk's adapters: the prefix of their parameter names."""

_CUTS: dict[str, Cut] = {
    "linear_qkv": "rows",
    "linear_proj": "columns",
    "linear_fc1": "rows",
    "linear_fc2": "columns",
    "linear_q_proj": "rows",
    "linear_q_down_proj": "whole",
    "linear_q_up_proj": "rows",
    "linear_kv_down_proj": "whole",
    "linear_kv_up_proj": "rows",
}


class Lora:
    """The adapters of this rank, with views of the model with and without them."""

    def __init__(self, settings: LoraConfig, bridge: Any, seed: int) -> None:
        self.settings, self.bridge, self.seed = settings, bridge, seed
        self.adapters: list[Adapter] = []
        self._of_weight: list[tuple[Any, dict[str, tuple[Adapter, int | None]]]] = []  # per chunk
        self._on = True

    def attach(self, chunk: Any, *, config: Any, pre_process: bool, **_: Any) -> None:
        """Freeze a GPTModel and add adapters to its linears. mbridge calls this before it wraps the chunk in DDP."""
        chunk.requires_grad_(False)
        names = self.bridge.global_names(chunk)
        adapters, of_weight = Adapters(), {}
        for path, module in chunk.named_modules():
            if path.rsplit(".", 1)[-1] not in _CUTS:
                continue
            grouped = f"{path}.weight0" in names
            weights = [f"{path}.weight{i}" for i in range(module.num_gemms)] if grouped else [f"{path}.weight"]
            site = self._site(module, [names[weight] for weight in weights], config, grouped=grouped)
            if not any(part.adapted for part in site.parts):
                continue
            adapter = Adapter(site, rank=self.settings.rank, alpha=self.settings.alpha, seed=self.seed, config=config)
            key = names[weights[0]].rsplit(".weight", 1)[0].replace(".", "/")
            adapters.add_module(key, adapter)
            of_weight.update({weight: (adapter, i if grouped else None) for i, weight in enumerate(weights)})
            self._hook(module, adapter, config)
        assert of_weight, "check_lora refuses targets that a chunk does not have"
        chunk.add_module(CHILD, adapters)
        self.adapters.extend(adapters.children())
        self._of_weight.append((chunk, of_weight))
        if pre_process:
            chunk.embedding.register_forward_hook(_require_gradient)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapters: the model computes as before any training."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def base(self) -> list[Any]:
        """Return views of the chunks for export, without adapters."""
        return [_View(chunk, {}) for chunk, _ in self._of_weight]

    def merged(self) -> list[Any]:
        """Return views of the chunks for export; each weight is merged with its adapter when it is read."""
        return [_View(chunk, of_weight) for chunk, of_weight in self._of_weight]

    def _site(self, module: Any, weights: list[str], config: Any, *, grouped: bool) -> Site:
        kind = weights[0].split(".weight")[0].rsplit(".", 1)[-1]
        weight = module.weight0 if grouped else module.weight
        rows, inputs = weight.shape
        modules = [
            [name.removesuffix(".weight") for name in self.bridge.row_of(weight_name).tensors]
            for weight_name in weights
        ]
        interleaved, sizes = 1, [rows // len(modules[0])] * len(modules[0])
        if kind == "linear_qkv":
            per_group = config.num_attention_heads // config.num_query_groups
            interleaved = config.num_query_groups // config.tensor_model_parallel_size
            head = rows // interleaved // (per_group + 2)
            sizes = [interleaved * head * heads for heads in (per_group, 1, 1)]
        return Site(
            parts=[
                LinearPart(
                    names[0].rsplit(".", 1)[-1],
                    list(names),
                    size,
                    matches(names[0], self.settings.targets),
                )
                for names, size in zip(zip(*modules, strict=True), sizes, strict=True)
            ],
            interleaved=interleaved,
            inputs=inputs,
            cut=_CUTS[kind],
            experts=len(weights) if grouped else 0,
            # With moe_shared_expert_overlap the dispatcher gathers and reduces for the shared experts.
            communicates=not (".shared_experts." in weights[0] and config.moe_shared_expert_overlap),
            sequence_parallel=config.sequence_parallel,
            expert_gradients=not getattr(weight, "allreduce", True),
        )

    def _hook(self, module: Any, adapter: Adapter, config: Any) -> None:
        norm = getattr(module, "layer_norm_weight", None)
        if norm is not None:
            assert config.normalization == "RMSNorm" and not config.layernorm_zero_centered_gamma

        def add(_: Any, args: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any] | None:
            if not self._on:
                return None
            x, *tokens_per_expert = args
            if norm is not None:  # the fused linear does not return its normed input
                x = rms_norm(x, norm, config.layernorm_epsilon)
            return output[0] + adapter(x, *tokens_per_expert), output[1]

        module.register_forward_hook(add)


def is_adapter(name: str) -> bool:
    """Return whether the parameter `name` of a GPTModel belongs to an adapter."""
    return name.startswith(f"{CHILD}.")


def trained_modules(lora: Lora) -> list[str]:
    """Return Hugging Face modules with adapters in any pipeline stage, without layer and expert: "self_attn.q_proj".

    Collective.
    """
    local = {
        without_expert(module).split(".", 3)[-1]
        for adapter in lora.adapters
        for part in adapter.site.parts
        for module in part.modules
        if part.adapted
    }
    all_ranks: list[set[str]] = [set()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(all_ranks, local)
    return sorted(set().union(*all_ranks))


def matrices(lora: Lora) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's part of all adapters: (PEFT name, full matrix).

    Example of a name: "model.layers.0.self_attn.q_proj.lora_A.weight". Exactly one rank yields each matrix. Collective
    within tensor-parallel groups.
    """
    ps = parallel_state
    for adapter in lora.adapters:
        copies = (
            ps.get_expert_data_parallel_rank()
            if adapter.site.experts
            else ps.get_data_parallel_rank(with_context_parallel=True)
        )
        for part in adapter.site.parts:
            for kind in ("A", "B") if part.adapted else ():
                whole = adapter.whole(kind, part.name)
                if adapter.group.rank() == 0 and copies == 0:
                    of_experts = whole if adapter.site.experts else whole[None]
                    for module, matrix in zip(part.modules, of_experts, strict=True):
                        yield f"{module}.lora_{kind}.weight", matrix


def _require_gradient(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
    """Make the embedding's output require gradients: recomputed layers only join the backward pass if their input does."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


class _View:
    """A chunk without adapters, for export; weights in `of_weight` are merged when read."""

    def __init__(self, chunk: Any, of_weight: dict[str, tuple[Adapter, int | None]]) -> None:
        self._chunk, self._of_weight = chunk, of_weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)

    def without_merging(self) -> _View:
        """Return a view in which reading a weight does not merge it."""
        return _View(self._chunk, {})

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self._chunk.state_dict().items() if not is_adapter(name)}

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._chunk.named_parameters():
            if name in self._of_weight:
                adapter, expert = self._of_weight[name]
                merged = (weight.detach().float() + adapter.delta(expert)).to(weight.dtype)
                copy_tensor_model_parallel_attributes(merged, weight)
                yield name, merged
            elif not is_adapter(name):
                yield name, weight
