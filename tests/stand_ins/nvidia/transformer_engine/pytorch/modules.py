import json
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

SIGNATURES = json.loads((Path(__file__).parents[2] / "signatures.json").read_text())["classes"]
CALLS: list[dict[str, object]] = []
"""Arguments of every call of the attention, but for tensors of the stream."""


def bind(name, method, args, kwargs):
    """Arguments by name, as the real method would take them. Raises TypeError where it would."""
    signature = SIGNATURES[name][method]
    names = [*signature["required"], *signature["optional"]]
    bound = dict(zip(names, args, strict=False))
    unknown = [] if signature["kwargs"] else sorted(set(kwargs) - set(names))
    missing = [required for required in signature["required"] if required not in {**bound, **kwargs}]
    if unknown or missing or set(bound) & set(kwargs) or len(args) > len(names):
        raise TypeError(f"{name}.{method}: unknown {unknown}, missing {missing}")
    return {**bound, **kwargs}


class Linear(torch.nn.Module):
    KIND = "Linear"

    def __init__(self, *args, **kwargs):
        super().__init__()
        arguments = bind(self.KIND, "__init__", args, kwargs)
        self.biased, self.return_bias = arguments["bias"], arguments["return_bias"]
        self.parallel_mode = arguments["parallel_mode"]
        self.tp_group, self.tp_size = arguments["tp_group"], arguments["tp_size"]
        self.sequence_parallel = arguments["sequence_parallel"] and self.tp_size > 1
        shape = [arguments["out_features"], arguments["in_features"]]
        axis = {"column": 0, "row": 1}.get(self.parallel_mode)
        if axis is not None:
            shape[axis] //= self.tp_size
        self._weights(arguments, shape, axis)

    def _weights(self, arguments, shape, axis):
        self.weight = self._weight(arguments, shape, axis)
        if self.biased:
            self.bias = self._bias(arguments, shape, axis)

    def _bias(self, arguments, shape, axis):
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        bias = torch.nn.Parameter(torch.zeros(shape[0], dtype=arguments["params_dtype"]))
        if axis == 0:
            set_tensor_model_parallel_attributes(bias, True, 0, 1)
        elif self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel
        return bias

    def _weight(self, arguments, shape, axis):
        from megatron.core.tensor_parallel.layers import (
            set_tensor_model_parallel_attributes,  # which imports this module
        )

        weight = torch.nn.Parameter(torch.empty(shape, dtype=arguments["params_dtype"]))
        with torch.no_grad():
            arguments["init_method"](weight)
        set_tensor_model_parallel_attributes(weight, True, axis or 0, 1)  # as `reset_parameters` marks every weight
        return weight

    def forward(self, *args, **kwargs):
        from megatron.core.tensor_parallel import mappings

        x = self._input(bind(self.KIND, "forward", args, kwargs)["inp"])
        if self.parallel_mode == "column" and self.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, group=self.tp_group)
        elif self.parallel_mode == "column" and self.tp_size > 1:
            x = mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        out = F.linear(x, self.weight)
        if self.parallel_mode == "row" and self.sequence_parallel:
            out = mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        elif self.parallel_mode == "row" and self.tp_size > 1:
            out = mappings.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        if not self.biased:
            return out
        return (out, self.bias) if self.return_bias else out + self.bias

    def _input(self, x):
        return x


class LayerNormLinear(Linear):
    KIND = "LayerNormLinear"

    def _weights(self, arguments, shape, axis):
        assert arguments["normalization"] == "RMSNorm"
        self.eps, self.added = arguments["eps"], float(bool(arguments["zero_centered_gamma"]))
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(shape[1], dtype=arguments["params_dtype"]))
        self.layer_norm_weight.sequence_parallel = arguments["sequence_parallel"]
        super()._weights(arguments, shape, axis)

    def _input(self, x):
        return F.rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight + self.added, self.eps)


class GroupedLinear(Linear):
    KIND = "GroupedLinear"

    def _weights(self, arguments, shape, axis):
        self.num_gemms = arguments["num_gemms"]
        for number in range(self.num_gemms):
            self.register_parameter(f"weight{number}", self._weight(arguments, shape, axis))
            if self.biased:
                self.register_parameter(f"bias{number}", self._bias(arguments, shape, None))

    def forward(self, *args, **kwargs):
        arguments = bind(self.KIND, "forward", args, kwargs)
        assert isinstance(arguments["m_splits"], list), "the real one takes a list on the host"
        parts = arguments["inp"].split(arguments["m_splits"])
        biases = [getattr(self, f"bias{i}") if self.biased else None for i in range(self.num_gemms)]
        added = [None] * self.num_gemms if self.return_bias else biases
        out = torch.cat([F.linear(part, getattr(self, f"weight{i}"), added[i]) for i, part in enumerate(parts)])
        return (out, biases) if self.return_bias else out


class RMSNorm(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        arguments = bind("RMSNorm", "__init__", args, kwargs)
        size = arguments.get("normalized_shape") or arguments["hidden_size"]
        self.eps, self.added = arguments["eps"], float(bool(arguments["zero_centered_gamma"]))
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=arguments["params_dtype"]))
        self.weight.sequence_parallel = arguments["sequence_parallel"]

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight + self.added, self.eps)


class DotProductAttention(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        arguments = bind("DotProductAttention", "__init__", args, kwargs)
        self.softmax_scale = arguments.get("softmax_scale")
        self.window = arguments.get("window_size")
        self.softmax_offset = None
        if arguments.get("softmax_type") == "learnable":
            heads = arguments["num_attention_heads"] // arguments["tp_size"]
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads))

    def forward(self, *args, **kwargs):
        arguments = bind("DotProductAttention", "forward", args, kwargs)
        query, key, value = arguments["query_layer"], arguments["key_layer"], arguments["value_layer"]
        CALLS.append({name: value for name, value in arguments.items() if not name.endswith("_layer")})
        if self.softmax_offset is not None:
            return self._with_sinks(query, key, value, arguments)
        offsets = arguments["cu_seqlens_q"].tolist()
        out = []
        for start, end in pairwise(offsets):
            q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
            group = q.shape[1] != k.shape[1]
            places = torch.arange(end - start)
            distance = places[:, None] - places
            before = self.window[0] if self.window else end - start
            mask = (distance >= 0) & (distance <= before)
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.softmax_scale, enable_gqa=group
            )
            out.append(attended[0].transpose(0, 1).flatten(1))
        return torch.cat(out)

    def _with_sinks(self, query, key, value, arguments):
        """Attention of padded sequences [s, b, heads, d]; the real one has none of packed sequences."""
        assert arguments.get("qkv_format", "sbhd") == "sbhd" and arguments["attn_mask_type"] == "causal"
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        places = torch.arange(query.shape[2])
        distance = places[:, None] - places
        before = self.window[0] if self.window else len(places)
        scores = query @ key.transpose(-1, -2) * (self.softmax_scale or query.shape[-1] ** -0.5)
        scores = scores.masked_fill((distance < 0) | (distance > before), -torch.inf)
        sinks = self.softmax_offset.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return (weights @ value).permute(2, 0, 1, 3).flatten(2)
