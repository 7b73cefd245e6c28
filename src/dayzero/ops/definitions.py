"""The operators of a decoder: what each computes, in plain float64 torch, and what one call costs.

Goes in: nothing. Comes out: `OPERATORS`, a dict of name to `Operator`. A definition is the reference that recognition and
conformance compare with, so it is written for reading and runs on the CPU; it never calls the library operator that it
judges. Cases to test with are in `cases.py`. Routers, rotary application, linear-attention and state-space scans have no
entry: they differ between models and are mapped as the library operators they are composed of.

Legend: B sequences, T rows, C context, H query heads, G key/value heads, D width of a head or a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dayzero.ops.paged import Visibility, visible
from dayzero.ops.quantized import quantized_linear

Sizes = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Floating-point operations, and bytes read and written."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(flops=self.flops + other.flops, bytes=self.bytes + other.bytes)

    def times(self, number: float) -> Cost:
        return Cost(flops=self.flops * number, bytes=self.bytes * number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """`define(*tensors, **settings)` in float64. `cost(sizes)`: arithmetic only, so symbols may be put in for numbers."""

    name: str
    kind: str
    define: Callable[..., Tensor]
    cost: Callable[[Sizes], Cost]


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: x.clamp(min=0),
    "relu_squared": lambda x: x.clamp(min=0) ** 2,
    "sigmoid": _sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "softplus": lambda x: x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())),
    "identity": lambda x: x,
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I], weight [O, I] -> [..., O]."""
    out = (x.reshape(-1, x.shape[-1]) @ weight.t()).reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


def embedding(ids: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    return torch.stack([weight[int(index)] for index in ids.flatten()]).reshape(*ids.shape, -1) * scale if ids.numel() else (
        weight.new_empty(*ids.shape, weight.shape[1])
    )  # fmt: skip


def rms_norm(
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
    """x / root mean square of each of `groups` parts of the last dimension * (offset + weight), gated before or after."""
    if gate is not None and gate_first:
        x = x * ACTIVATIONS[gate_activation](gate)
    parts = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    out = (parts / torch.sqrt((parts * parts).mean(-1, keepdim=True) + eps)).reshape(x.shape)
    if weight is not None:
        out = out * (weight_offset + weight)
    if gate is not None and not gate_first:
        out = out * ACTIVATIONS[gate_activation](gate)
    return out


def l2_norm(x: Tensor, weight: Tensor | None, *, eps: float) -> Tensor:
    out = x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)
    return out if weight is None else out * weight


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    out = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def activation(x: Tensor, *, activation: str) -> Tensor:
    return ACTIVATIONS[activation](x)


def gated_activation(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """The element-wise part of a gated feed-forward: act(gate) * up."""
    return ACTIVATIONS[activation](gate) * up


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *, padding: int, groups: int) -> Tensor:
    """x [B, I, T], weight [O, I/groups, K] -> [B, O, T + 2 padding - K + 1], stride 1."""
    padded = torch.cat([x.new_zeros(*x.shape[:2], padding), x, x.new_zeros(*x.shape[:2], padding)], -1)
    windows = padded.unfold(-1, weight.shape[-1], 1)  # [B, I, T', K]
    parts = windows.reshape(x.shape[0], groups, -1, *windows.shape[2:])
    kernels = weight.reshape(groups, -1, *weight.shape[1:])
    out = torch.einsum("bgitk,goik->bgot", parts, kernels).reshape(x.shape[0], weight.shape[0], -1)
    return out if bias is None else out + bias[:, None]


def attention(
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
    """q [B, H, T, D], k [B, G, C, D], v [B, G, C, Dv] -> [B, H, T, Dv]; the queries are the last T of C positions.

    `keep` [B, T, C] restricts keys further (sparse attention). `cache` says what the layer keeps; no value depends on it.
    """
    repeats, num_keys = q.shape[1] // k.shape[1], k.shape[2]
    scores = q @ k.repeat_interleave(repeats, 1).transpose(-1, -2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    seen = visible(q.shape[2], num_keys, Visibility(window=window, chunk=chunk), q.device)
    if keep is not None:
        seen = seen & keep[:, None]
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)], -1)
    return softmax(scores, dim=-1)[..., :num_keys] @ v.repeat_interleave(repeats, 1)


def softmax(x: Tensor, *, dim: int) -> Tensor:
    if not x.numel():
        return x
    weights = torch.exp(x - x.amax(dim, keepdim=True))
    return weights / weights.sum(dim, keepdim=True)


def _pointwise(flops: float) -> Callable[[Sizes], Cost]:
    """Cost of an operator that reads `inputs` tensors of `elements` and writes one."""
    return lambda s: Cost(flops=flops * s["elements"], bytes=s["item_bytes"] * s["elements"] * (s["inputs"] + 1))


def _norm_cost(s: Sizes) -> Cost:
    return Cost(flops=5 * s["elements"], bytes=s["item_bytes"] * s["elements"] * (s["inputs"] + 1) + s["weight_bytes"])


def _linear_cost(s: Sizes) -> Cost:
    moved = s["rows"] * (s["in_features"] + s["out_features"]) * s["item_bytes"]
    return Cost(flops=2 * s["rows"] * s["in_features"] * s["out_features"], bytes=s["weight_bytes"] + moved)


def _attention_cost(s: Sizes) -> Cost:
    """Two products over the visible keys and a softmax; keys and values are read once from the cache."""
    flops = s["rows"] * s["heads"] * s["visible_tokens"] * (2 * (s["qk_dim"] + s["v_dim"]) + 5)
    return Cost(flops=flops, bytes=s["cache_bytes"] + s["rows"] * s["heads"] * (s["qk_dim"] + s["v_dim"]) * s["item_bytes"])


def _experts_cost(s: Sizes) -> Cost:
    """Each row passes `active` experts; weights of at most rows * active distinct experts are read."""
    read = min(s["rows"] * s["active"], s["experts"])
    return Cost(
        flops=2 * s["rows"] * s["active"] * s["expert_elements"],
        bytes=read * s["expert_elements"] * s["item_bytes"] + 2 * s["rows"] * s["width"] * s["item_bytes"],
    )


def _opaque(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("experts are compared with the module's own float64 copy")


OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator(name="linear", kind="matmul", define=linear, cost=_linear_cost),
        Operator(name="quantized_linear", kind="matmul", define=quantized_linear, cost=_linear_cost),
        Operator(name="embedding", kind="lookup", define=embedding,
                 cost=lambda s: Cost(bytes=2 * s["rows"] * s["width"] * s["item_bytes"])),
        Operator(name="rms_norm", kind="norm", define=rms_norm, cost=_norm_cost),
        Operator(name="l2_norm", kind="norm", define=l2_norm, cost=_norm_cost),
        Operator(name="layer_norm", kind="norm", define=layer_norm, cost=_norm_cost),
        Operator(name="activation", kind="pointwise", define=activation, cost=_pointwise(4)),
        Operator(name="gated_activation", kind="pointwise", define=gated_activation, cost=_pointwise(5)),
        Operator(name="convolution", kind="convolution", define=convolution,
                 cost=lambda s: Cost(flops=2 * s["elements"] * s["taps"],
                                     bytes=s["weight_bytes"] + 2 * s["elements"] * s["item_bytes"])),
        Operator(name="attention", kind="attention", define=attention, cost=_attention_cost),
        Operator(name="softmax", kind="pointwise", define=softmax, cost=_pointwise(5)),
        Operator(name="experts", kind="experts", define=_opaque, cost=_experts_cost),
    )
}  # fmt: skip
