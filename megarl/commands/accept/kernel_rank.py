"""A rank that calls single layers of the tiny models, as the platform builds them, and compares them with references.

The layers belong to models built by `megarl.megatron.model.build.build`, so they use the same kernels as a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megarl.commands.accept import goldens, references
from megarl.commands.accept.parity_rank import Case, ParityRank, gradients_as_weights
from megarl.commands.accept.rank import forget_model
from megarl.commands.accept.tiny_families import FAMILIES, LENGTHS, exact_values, weights

COUNTS = (0, 13, 1, 0, 40, 7, 35, 0)  # rows of each expert: first, last and one between have none


@dataclass(frozen=True)
class Deviation:
    """The largest error of a tensor, `relative` to the reference's largest value, and its index `place`."""

    kernel: str
    shape: tuple[int, ...]
    relative: float
    place: tuple[int, ...]
    value: float
    right: float
    problem: str = ""  # what the call raised
    check: str = ""  # the name of the check; "": the kernel's

    @property
    def cause(self) -> str:
        if self.problem:
            return f"{self.kernel}: {self.problem}"
        return f"{self.kernel}, shape {list(self.shape)}: {self.value:.6g} at {list(self.place)}, expected {self.right:.6g}"


@dataclass(frozen=True)
class Condition:
    """A condition that is true or false. `cause` describes the failure."""

    name: str
    good: bool
    cause: str


def deviation_of(kernel: str, value: Any, right: Any) -> Deviation:
    """Return the largest error of `value`, and its index."""
    value = value.detach().float().cpu().double().reshape(right.shape)
    difference = torch.where(value.isfinite(), (value - right.detach()).abs(), torch.full_like(value, math.inf))
    flat = int(difference.argmax())
    place = tuple(int(number) for number in np.unravel_index(flat, tuple(right.shape)))
    relative = float(difference.flatten()[flat]) / max(float(right.detach().abs().max()), 1e-30)
    return Deviation(kernel, tuple(right.shape), relative, place, float(value[place]), float(right[place]))


class KernelRank(ParityRank):
    """A process that calls layers; `check` returns the errors of all layers of one family in one type."""

    def __init__(self, device: str) -> None:
        super().__init__(device, deterministic=True)

    def check(self, family: str, model: str, dtype: str) -> tuple[list[Deviation], list[Condition]]:
        """Errors of layers and their gradients; and conditions: two calls give the same bits, memory is freed."""
        self.dtype = getattr(torch, dtype)
        self.deviations: list[Deviation] = []
        self.conditions: list[Condition] = []
        self.trainer = self._build(Case(family, model, dtype))
        from megarl.megatron.heads.output_heads import language_model

        self.model = language_model(self.trainer.model.chunks[0])
        self.config = FAMILIES[family]
        self.weights = {name: torch.from_numpy(value).double() for name, value in weights(family).items()}
        try:
            parts: list[Callable[[], None]] = [self._attention]
            if family == "dense":
                parts += [self._norm, self._mlp, self._rotary, self._adam, self._memory]
            if family == "moe":
                parts = [self._experts, self._permute]
            for part in parts:
                self._guarded(part)
        finally:
            del self.trainer, self.model
            forget_model()
        return self.deviations, self.conditions

    def _guarded(self, part: Callable[[], None]) -> None:
        try:
            part()
        except (RuntimeError, ValueError, AssertionError, TypeError, NotImplementedError) as error:
            name = part.__name__.strip("_").replace("_", " ")
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.deviations.append(Deviation(name, (), math.inf, (), math.nan, math.nan, text))

    def _input(self, name: str, *shape: int) -> tuple[Any, Any]:
        """Return the same values on the device, and in float64 on the CPU, both with requires_grad."""
        values = torch.from_numpy(exact_values(f"kernels {name}", int(np.prod(shape))).reshape(shape))
        return (
            values.to(self.platform.device(), self.dtype).requires_grad_(),
            values.double().requires_grad_(),
        )

    def _compare(
        self, name: str, function: Callable[..., Any], reference: Callable[..., Any], inputs: Sequence[tuple[Any, Any]]
    ) -> None:
        """Compare output and gradients of `function` with `reference`, and bit for bit with a second call."""
        right = reference(*(exact for _, exact in inputs))
        upstream = torch.from_numpy(exact_values(f"kernels {name} upstream", right.numel()).reshape(right.shape))
        right_gradients = torch.autograd.grad(right, [exact for _, exact in inputs], upstream.double())
        calls = []
        for _ in range(2):
            output = function(*(tensor for tensor, _ in inputs))
            gradient = upstream.to(output.device, output.dtype).reshape(output.shape)
            calls.append((output, *torch.autograd.grad(output, [tensor for tensor, _ in inputs], gradient)))
        same = all(torch.equal(first, second) for first, second in zip(*calls, strict=True))
        cause = f"{name} is not repeatable under train.deterministic"
        self.conditions.append(Condition(f"{name}: same bits twice", same, cause))
        self.deviations.append(deviation_of(f"{name} forward", calls[0][0], right))
        for number, (value, expected) in enumerate(zip(calls[0][1:], right_gradients, strict=True), 1):
            self.deviations.append(deviation_of(f"{name} backward, input {number}", value, expected))

    def _packed(self) -> Any:
        """Megatron's description of the packed sequences, as the model gets it."""
        from megarl.megatron.batch import MicroBatch, pack
        from megarl.megatron.current_batch import stream_params

        batch = MicroBatch(torch.zeros(sum(LENGTHS), dtype=torch.int64), list(LENGTHS))
        device = self.platform.device()
        return stream_params(pack(batch, context_parallel=1, context_rank=0, sequence_parallel=1, device=device))

    def _attention(self) -> None:
        config, total = self.config, sum(LENGTHS)
        latent = "kv_lora_rank" in config
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"] if latent else config["head_dim"]
        out = config["v_head_dim"] if latent else width
        scale = width**-0.5
        if latent:
            yarn = config["rope_scaling"]
            scale *= (0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1.0) ** 2
        layer, packed = self.model.decoder.layers[1].self_attention, self._packed()
        inputs = [
            self._input("query", total, heads, width),
            self._input("key", total, groups, width),
            self._input("value", total, groups, out),
        ]

        def attend(query: Any, key: Any, value: Any) -> Any:
            return layer.core_attention(
                query, key, value, None, attn_mask_type=layer.attn_mask_type, packed_seq_params=packed
            )

        kind = (
            f"MLA attention {width}/{out}" if latent else f"attention, {heads} query and {groups} key heads of {width}"
        )
        self._compare(kind, attend, lambda q, k, v: references.attention(q, k, v, LENGTHS, scale), inputs)

    def _norm(self) -> None:
        module = self.model.decoder.layers[1].self_attention.q_layernorm
        weight = self.weights["model.layers.1.self_attn.q_norm.weight"]
        eps = self.config["rms_norm_eps"]
        shape = (sum(LENGTHS), self.config["num_attention_heads"], self.config["head_dim"])
        self._compare("rms_norm", module, lambda x: references.rms_norm(x, weight, eps), [self._input("norm", *shape)])

    def _layer(self, name: str) -> Any:
        return self.weights[f"model.layers.1.{name}.weight"]

    def _mlp(self) -> None:
        module, eps = self.model.decoder.layers[1].mlp, self.config["rms_norm_eps"]
        norm = self._layer("post_attention_layernorm")
        parts = [self._layer(f"mlp.{name}_proj") for name in ("gate", "up", "down")]
        inputs = [self._input("mlp", sum(LENGTHS), 1, self.config["hidden_size"])]
        self._compare(
            "rms_norm, linear and swiglu", lambda x: module(x)[0],
            lambda x: references.gated(references.rms_norm(x, norm, eps), *parts), inputs,
        )  # fmt: skip

    def _rotary(self) -> None:
        import megatron.core.transformer.attention as attention

        packed, total = self._packed(), sum(LENGTHS)
        angles = self.model.rotary_pos_emb(max(LENGTHS), packed_seq=True)
        layer = self.model.decoder.layers[1].self_attention

        def turn(x: Any) -> Any:
            return attention.apply_rotary_pos_emb(
                x, angles, config=layer.config, cu_seqlens=packed.cu_seqlens_q, cp_group=layer.pg_collection.cp
            )

        inputs = [self._input("rotary", total, self.config["num_attention_heads"], self.config["head_dim"])]
        self._compare(
            "rotary embedding", turn, lambda x: references.rotate(x, LENGTHS, self.config["rope_theta"]), inputs
        )

    def _experts(self) -> None:
        """Grouped matrix products forward, for the inputs and for the weights, where some experts have no rows."""
        module, rows = self.model.decoder.layers[1].mlp.experts, sum(COUNTS)
        probabilities = torch.from_numpy(np.abs(exact_values("kernels probabilities", rows)))
        on_device = probabilities.to(self.platform.device(), torch.float32)
        counts = torch.tensor(COUNTS)
        experts = [
            tuple(
                self._layer(f"mlp.experts.{expert}.{name}_proj").clone().requires_grad_()
                for name in ("gate", "up", "down")
            )
            for expert in range(len(COUNTS))
        ]

        def call(x: Any) -> Any:
            return module(x, counts, on_device)[0]

        def reference(x: Any) -> Any:
            return references.experts(x, COUNTS, probabilities.double(), experts)

        inputs = [self._input("experts", rows, self.config["hidden_size"])]
        self._compare("grouped matmul of experts", call, reference, inputs)
        x, right = inputs[0]
        upstream = torch.from_numpy(exact_values("kernels experts weights", right.numel()).reshape(right.shape))
        chunk = self.trainer.model.chunks[0]
        chunk.zero_grad_buffer()
        output = call(x)
        output.backward(upstream.to(output.device, output.dtype))
        reference(right).backward(upstream.double())
        gradients = self._gradients(".layers.1.mlp.experts.")
        busy: list[Deviation] = []
        empty: list[Deviation] = []
        for expert, tensors in enumerate(experts):
            for name, tensor in zip(("gate", "up", "down"), tensors, strict=True):
                value = gradients[f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"]
                expected = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                deviation = deviation_of(f"grouped matmul, weight gradient of expert {expert} {name}", value, expected)
                (busy if COUNTS[expert] else empty).append(deviation)
        worst = max(busy, key=lambda deviation: deviation.relative)
        self.deviations.append(replace(worst, check="grouped matmul, weight gradients"))
        worst = max(empty, key=lambda deviation: abs(deviation.value))
        self.deviations.append(
            replace(worst, check="grouped matmul, gradients of experts without rows", relative=abs(worst.value))
        )

    def _gradients(self, part: str) -> dict[str, Any]:
        """Return the gradients of tensors with `part` in their name, by their names in the checkpoint."""
        with gradients_as_weights(self.trainer):
            return {name: value.float().cpu().clone() for name, value in self.trainer.export_weights() if part in name}

    def _permute(self) -> None:
        """Tokens sorted by expert and back, where some experts get none."""
        from megatron.core.transformer.moe import moe_utils

        tokens, experts, chosen = sum(LENGTHS), len(COUNTS), 2
        busy = [number for number, count in enumerate(COUNTS) if count]
        routing = torch.zeros(tokens, experts, dtype=torch.bool)
        for token in range(tokens):
            for place in range(chosen):
                routing[token, busy[(token * 7 + place) % len(busy)]] = True
        shares = torch.from_numpy(np.abs(exact_values("kernels shares", tokens * experts)).reshape(tokens, experts))
        shares = shares.masked_fill(~routing, 0.0)
        device = self.platform.device()
        fused = bool(self.trainer.model.config.moe_permute_fusion)

        def there_and_back(x: Any) -> Any:
            sorted_rows, _, order = moe_utils.permute(
                x, routing.to(device), num_out_tokens=tokens * chosen, fused=fused
            )[:3]
            return moe_utils.unpermute(
                sorted_rows,
                order,
                x.shape,
                probs=shares.to(device, x.dtype),
                routing_map=routing.to(device),
                fused=fused,
            )

        total = shares.sum(1, keepdim=True).double()
        inputs = [self._input("permute", tokens, self.config["hidden_size"])]
        self._compare("permute and unpermute", there_and_back, lambda x: x * total, inputs)

    def _adam(self) -> None:
        """Two steps of the optimizer on given gradients, on every weight."""
        from megarl.megatron.optimizer import guarded_step

        names = [name for name in self.weights if self.weights[name].dim() > 1][:6]
        parameters = [parameter for chunk in self.trainer.model.chunks for parameter in chunk.parameters()]
        gradients: list[dict[str, Any]] = []
        for step in range(2):
            for chunk in self.trainer.model.chunks:
                chunk.zero_grad_buffer()
            with torch.no_grad():
                for number, parameter in enumerate(parameters):
                    values = exact_values(f"gradient {number} {step}", parameter.numel()).reshape(parameter.shape)
                    parameter.main_grad.copy_(torch.from_numpy(values) / 64)
            exported = self._gradients("")
            gradients.append({name: exported[name].double() for name in names})
            guarded_step(self.trainer.optimizer, lr=goldens.LEARNING_RATE, clip_grad=0.0)
        weights_after = {
            name: value.detach().double().cpu() for name, value in self.trainer.export_weights() if name in names
        }
        settings = goldens.LEARNING_RATE, goldens.BETAS, goldens.EPSILON
        deviations = [
            deviation_of(
                name,
                weights_after[name],
                references.adam(self.weights[name], [step[name] for step in gradients], *settings),
            )
            for name in names
        ]
        self.deviations.append(
            replace(max(deviations, key=lambda deviation: deviation.relative), check="Adam, 2 steps")
        )

    def _memory(self) -> None:
        """A storage that is freed and filled again keeps its tensors and views; copies from page-locked memory are exact."""
        from megarl.megatron.offload import copy_to_host

        values = torch.from_numpy(exact_values("kernels memory", 1 << 16))
        tensor = values.to(self.platform.device(), copy=True)
        view = tensor[100:200]
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        host = copy_to_host(whole)
        tensor.untyped_storage().resize_(0)
        freed = tensor.untyped_storage().size() == 0
        tensor.untyped_storage().resize_(host.numel())
        whole.copy_(host)
        self.deviations.append(deviation_of("storage freed and filled: tensor", tensor, values.double()))
        self.deviations.append(deviation_of("storage freed and filled: view", view, values[100:200].double()))
        cause = "the storage keeps its bytes, so offloading would free nothing"
        self.conditions.append(Condition("storage.resize_(0) frees the memory", freed, cause))
        if tensor.device.type != "cpu":
            cause = "the copy is in pageable memory, so copies to the device are slow and wait for it"
            self.conditions.append(Condition("copies on the host are page-locked", host.is_pinned(), cause))
