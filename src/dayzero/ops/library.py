"""What torch itself offers for each operator, on any device it reaches: the kernels that stand last in every table.

Goes in: nothing. Comes out: `library_table()`. `library` is one call of the operator in torch, `composed` several. Whether
a device runs them, and right, is not known here: conformance finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dayzero.ops.paged import Visibility, visible
from dayzero.ops.quantized import composed_quantized_linear
from dayzero.ops.registry import Kernel, Table, Unsupported

TORCH_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: torch.square(F.relu(x)),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "softplus": F.softplus,
    "identity": lambda x: x,
}


def _embedding(ids: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    rows = F.embedding(ids, weight)
    return rows if scale == 1.0 else rows * scale


def _rms_norm_library(
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    groups: int = 1,
    gate_activation: str = "",
    gate_first: bool = False,
) -> Tensor:
    if gate is not None or groups != 1 or weight_offset:
        raise Unsupported("torch's rms_norm has no gate, groups or weight offset")
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _rms_norm_composed(
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    groups: int = 1,
    gate_activation: str = "",
    gate_first: bool = False,
) -> Tensor:
    """In float32 throughout, as the statistics need it."""
    wide = x.float()
    act = TORCH_ACTIVATIONS[gate_activation or "identity"]
    if gate is not None and gate_first:
        wide = wide * act(gate.float())
    parts = wide.unflatten(-1, (groups, x.shape[-1] // groups))
    wide = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if weight is not None:
        wide = wide * (weight.float() + weight_offset)
    if gate is not None and not gate_first:
        wide = wide * act(gate.float())
    return wide.to(x.dtype)


def _l2_norm(x: Tensor, weight: Tensor | None, *, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight.float()).to(x.dtype)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _attention_library(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    keep: Tensor | None,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    chunk: int = 0,
    cache: str = "full",
) -> Tensor:
    if sinks is not None or softcap:
        raise Unsupported("scaled_dot_product_attention has neither sinks nor a soft cap")
    seen = _seen(q, k, keep, window, chunk)
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _attention_composed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    keep: Tensor | None,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    chunk: int = 0,
    cache: str = "full",
) -> Tensor:
    repeats, num_keys = q.shape[1] // k.shape[1], k.shape[2]
    scores = q.float() @ k.float().repeat_interleave(repeats, 1).transpose(-1, -2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_seen(q, k, keep, window, chunk), float("-inf"))
    if sinks is not None:
        column = sinks.float().reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)[..., :num_keys]
    return (weights @ v.float().repeat_interleave(repeats, 1)).to(q.dtype)


def _seen(q: Tensor, k: Tensor, keep: Tensor | None, window: int, chunk: int) -> Tensor:
    seen = visible(q.shape[2], k.shape[2], Visibility(window=window, chunk=chunk), q.device)
    return seen if keep is None else seen & keep[:, None]


def run_experts(implementation: str, module: nn.Module, *tensors: Tensor) -> Tensor:
    """transformers' own ways to run an experts module; the module belongs to the caller, its setting is put back."""
    config: Any = module.config
    before = config._experts_implementation_internal
    config._experts_implementation_internal = implementation
    try:
        return module(*tensors)
    finally:
        config._experts_implementation_internal = before


def library_table() -> Table:
    """Operator -> torch's ways to compute it, one call before several."""
    return {
        "linear": (Kernel(name="aten::linear", call=F.linear),),
        "quantized_linear": (
            Kernel(name="dequantized, then aten::linear", call=composed_quantized_linear, binding="composed"),
        ),
        "embedding": (Kernel(name="aten::embedding", call=_embedding),),
        "rms_norm": (
            Kernel(name="aten::rms_norm", call=_rms_norm_library),
            Kernel(name="rms_norm of torch operators", call=_rms_norm_composed, binding="composed"),
        ),
        "l2_norm": (Kernel(name="l2_norm of torch operators", call=_l2_norm, binding="composed"),),
        "layer_norm": (Kernel(name="aten::layer_norm", call=_layer_norm),),
        "activation": (Kernel(name="torch's activation", call=lambda x, *, activation: TORCH_ACTIVATIONS[activation](x)),),
        "gated_activation": (
            Kernel(
                name="torch's activation and mul",
                call=lambda gate, up, *, activation: TORCH_ACTIVATIONS[activation](gate) * up,
                binding="composed",
            ),
        ),
        "convolution": (
            Kernel(
                name="aten::conv1d",
                call=lambda x, weight, bias, *, padding, groups: F.conv1d(x, weight, bias, padding=padding, groups=groups),
            ),
        ),
        "attention": (
            Kernel(name="aten::scaled_dot_product_attention", call=_attention_library),
            Kernel(name="attention of torch operators", call=_attention_composed, binding="composed"),
        ),
        "experts": (
            Kernel(name="grouped matrix products", call=partial(run_experts, "grouped_mm")),
            Kernel(name="batched matrix products", call=partial(run_experts, "batched_mm"), binding="composed"),
            Kernel(name="a loop over experts", call=partial(run_experts, "eager"), binding="composed"),
        ),
        "softmax": (Kernel(name="aten::softmax", call=lambda x, *, dim: torch.softmax(x, dim)),),
    }
