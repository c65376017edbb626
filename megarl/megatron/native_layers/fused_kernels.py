"""Optional fused kernels for the native layers: grouped GEMM and attention over packed sequences.

Each kernel is tried on a tiny input before it is selected, so an unsupported torch version, device or data type shows
up before the first step. `description` names the selected kernels for the log.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

_SEQUENCES, _LENGTH, _HEADS, _WIDTH = 2, 8, 2, 64  # sizes of the trial attention
_EXPERTS, _ROWS, _SIZE = 2, 24, 16  # sizes of the trial grouped GEMM


@dataclass(frozen=True)
class Kernel:
    """A kernel, or the reason why none is available."""

    function: Callable[..., Any] | None
    name: str  # of the function; "" if None
    reason: str = ""  # why no kernel is available


@lru_cache(maxsize=16)
def grouped_gemm(device: torch.device, dtype: torch.dtype) -> Kernel:
    """Return `torch.nn.functional.grouped_mm` (a, b, offs=...) for `device` and `dtype`: torch 2.10 and later."""
    if device.type == "meta":
        return Kernel(_shape_of_product, "shapes only")
    name, function = "torch.nn.functional.grouped_mm", getattr(F, "grouped_mm", None)
    if function is None:
        return Kernel(None, "", f"torch {torch.__version__} has no grouped_mm")
    try:
        _try_grouped(function, device, dtype)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return Kernel(None, "", f"{name}: {_first_line(error)}")
    return Kernel(function, name)


def _shape_of_product(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """Compute the output shape of a grouped product on the meta device; torch's operator only accepts bfloat16."""
    return a.new_empty(*([len(offs)] if b.dim() == 2 else []), a.shape[0], b.shape[-1])


def _try_grouped(function: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> None:
    """Run the three products of a linear: output, input gradient and weight gradient."""
    rows = torch.ones(_ROWS, _SIZE, device=device, dtype=dtype)
    weights = torch.ones(_EXPERTS, _SIZE, _SIZE, device=device, dtype=dtype)
    offsets = torch.tensor([_ROWS // 3, _ROWS], device=device, dtype=torch.int32)
    function(rows, weights.transpose(1, 2), offs=offsets)
    function(rows, weights, offs=offsets)
    function(rows.t(), rows, offs=offsets)


def aligned(*tensors: torch.Tensor) -> bool:
    """Return whether rows of all `tensors` start at multiples of 16 bytes, as grouped GEMM requires."""
    return all(tensor.shape[-1] * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0 for tensor in tensors)


def packed_attention(device: torch.device, dtype: torch.dtype) -> Kernel:
    """Return causal or full attention over packed sequences, from torch or from the flash-attn package.

    Arguments of the kernel: query [t, heads, d], key and value [u, key heads, d], sequence offsets of both (int32, on
    the device), longest sequence of both (int), `causal` (bottom-right aligned if lengths differ) and `scale`.
    Both kernels take 16-bit types on CUDA devices of compute capability 8.0 or later, without dropout.
    """
    if device.type in ("cpu", "meta"):
        return Kernel(None, "", f"no kernel for {device.type}")
    return _packed_attention(device.type, dtype)


@lru_cache(maxsize=16)
def _packed_attention(device: str, dtype: torch.dtype) -> Kernel:
    reasons = []
    for name, load in (("torch.nn.attention.varlen", _torch_varlen), ("flash_attn", _flash_attn)):
        try:
            function = load()
            _try_attention(function, device, dtype)
        except (ImportError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            reasons.append(f"{name}: {_first_line(error)}")
            continue
        return Kernel(function, name)
    return Kernel(None, "", "; ".join(reasons))


def _torch_varlen() -> Callable[..., torch.Tensor]:
    from torch.nn.attention import varlen

    missing = {"scale", "window_size", "enable_gqa"} - set(inspect.signature(varlen.varlen_attn).parameters)
    if missing:
        raise ImportError(f"torch {torch.__version__} has varlen_attn without {', '.join(sorted(missing))}")

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        query_offsets: torch.Tensor, key_offsets: torch.Tensor, longest_query: int, longest_key: int,
        *, causal: bool, scale: float | None,
    ) -> torch.Tensor:  # fmt: skip
        result = varlen.varlen_attn(
            query, key, value, query_offsets, key_offsets, longest_query, longest_key,
            scale=scale, window_size=(-1, 0) if causal else (-1, -1), enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        assert isinstance(result, torch.Tensor)
        return result

    return attend


def _flash_attn() -> Callable[..., torch.Tensor]:
    if importlib.util.find_spec("flash_attn") is None:
        raise ImportError("not installed")
    from flash_attn import flash_attn_varlen_func

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        query_offsets: torch.Tensor, key_offsets: torch.Tensor, longest_query: int, longest_key: int,
        *, causal: bool, scale: float | None,
    ) -> torch.Tensor:  # fmt: skip
        return flash_attn_varlen_func(
            query, key, value, query_offsets, key_offsets, longest_query, longest_key,
            softmax_scale=scale, causal=causal, deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip

    return attend


def _try_attention(function: Callable[..., torch.Tensor], device: str, dtype: torch.dtype) -> None:
    """Run forward and backward with fewer key heads than query heads and fewer queries than keys."""
    tokens = _SEQUENCES * _LENGTH
    key = torch.ones(tokens, _HEADS // 2, _WIDTH, device=device, dtype=dtype, requires_grad=True)
    query = torch.ones(tokens // 2, _HEADS, _WIDTH, device=device, dtype=dtype, requires_grad=True)
    offsets = torch.arange(_SEQUENCES + 1, device=device, dtype=torch.int32)
    args = (offsets * (_LENGTH // 2), offsets * _LENGTH, _LENGTH // 2, _LENGTH)
    with torch.enable_grad():
        function(query, key, key, *args, causal=True, scale=None).sum().backward()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def description(device: torch.device, dtype: torch.dtype, *, experts: bool) -> str:
    """Return one log line: the kernels for attention and experts, and the reason for each missing fused kernel."""
    attention = packed_attention(device, dtype)
    how = attention.name or f"scaled_dot_product_attention of padded rectangles ({attention.reason})"
    text = f"native layers: attention by {how}"
    if experts:
        gemm = grouped_gemm(device, dtype)
        text += f"; experts by {gemm.name}" if gemm.name else f"; experts one by one ({gemm.reason})"
    return text
