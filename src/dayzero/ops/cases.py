"""Inputs that an operator is tested on: several lengths and batch sizes, one token, none, large values, awkward sizes.

Goes in: an operator's name, the settings and sizes of a site. Comes out: float64 tensors for the definition; the kit
rounds them to each dtype first, so that only the kernel's own error counts. Widths are the site's own up to a limit, and
beyond it keep the remainder that vectorised loops stumble over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# [batch, tokens]: nothing, a decode step, odd lengths, more rows than any decode path takes at once.
ROWS = ((1, 0), (1, 1), (3, 1), (2, 7), (1, 67))
WIDEST = 256
# Larger than exp can take in float32 (88.7) and float16 (11.1): what a missing max-subtraction cannot survive.
LARGE = 300.0
# Standard deviation of attention scores, so that the largest exceed 88.7 by far. Not larger: a score s is only known to
# s * 2**-24 in float32, and exp turns that absolute error into a relative one.
LARGE_SCORES = 64.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    label: str
    args: tuple[Any, ...]
    settings: dict[str, Any] = field(default_factory=dict)


def tested(size: float) -> int:
    """A width to test with in place of `size`: the same where it is small, else the same remainder modulo 64."""
    size = int(size)
    return size if size <= WIDEST else WIDEST + size % 64


def _draw(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def _linear(settings: dict[str, Any], sizes: Mapping[str, float]) -> Iterator[Case]:
    draw, inputs, outputs = _draw(1), tested(sizes["in_features"]), tested(sizes["out_features"])
    weight = draw(outputs, inputs) / inputs**0.5
    bias = draw(outputs) if sizes.get("bias") else None
    for batch, tokens in ROWS:
        yield Case(label=f"{batch}x{tokens}", args=(draw(batch, tokens, inputs), weight, bias), settings=settings)


def _quantized_linear(settings: dict[str, Any], sizes: Mapping[str, float]) -> Iterator[Case]:
    """Random codes are as good as any weight's: every pattern of bits but E4M3's NaN is a number."""
    draw, inputs, outputs = _draw(9), tested(sizes["in_features"]), tested(sizes["out_features"])
    code, width = settings["code"], settings["block_columns"]
    inputs = -(-inputs // width) * width if width else inputs
    blocks = (-(-outputs // settings["block_rows"]), inputs // width if width else 1)
    row_bytes = (-(-inputs // 2) if code in ("nibble", "fp4") else inputs) + 3 & ~3
    codes = (torch.arange(outputs * row_bytes) * 197 % 251).to(torch.uint8).reshape(outputs, row_bytes)
    codes = codes.clamp(max=126) if code == "fp8" else codes
    scales = (draw(*blocks).abs() + 0.5) / inputs**0.5 / {"fp8": 128, "fp4": 3, "nibble": 4}.get(code, 64)
    scales = (
        torch.randint(120, 126, blocks, generator=torch.Generator().manual_seed(9)).to(torch.uint8) if code == "fp4" else scales
    )
    zeros = (torch.arange(blocks[0] * blocks[1]) % 15 - 7).to(torch.int8).reshape(blocks) if sizes.get("zeros") else None
    bias = draw(outputs) if sizes.get("bias") else None
    for batch, tokens in ROWS:
        yield Case(label=f"{batch}x{tokens}", args=(draw(batch, tokens, inputs), codes, scales, zeros, bias, None),
                   settings=settings)  # fmt: skip


def _embedding(settings: dict[str, Any], sizes: Mapping[str, float]) -> Iterator[Case]:
    draw, width = _draw(2), tested(sizes["width"])
    weight = draw(97, width)
    for batch, tokens in ROWS:
        ids = (torch.arange(batch * tokens) * 31 % 97).reshape(batch, tokens)
        yield Case(label=f"{batch}x{tokens}", args=(ids, weight), settings=settings)


def _norm(last: str) -> Callable[[dict[str, Any], Mapping[str, float]], Iterator[Case]]:
    """(x, weight) and, as `last` says, a gate like x or a bias; weight, gate and bias are None where the site has none."""

    def cases(settings: dict[str, Any], sizes: Mapping[str, float]) -> Iterator[Case]:
        draw, width = _draw(3), int(sizes["width"])
        weight = 1 + 0.3 * draw(width) if sizes.get("weight") else None
        bias = draw(width) if sizes.get("bias") else None
        for batch, tokens in ROWS:
            for size in (1.0, 1e-3, 50.0):
                third = {
                    "gate": (draw(batch, tokens, width) if settings.get("gate_activation") else None,),
                    "bias": (bias,),
                    "": (),
                }[last]
                x = draw(batch, tokens, width) * size
                yield Case(label=f"{batch}x{tokens} of size {size:g}", args=(x, weight, *third), settings=settings)

    return cases


def _pointwise(num_inputs: int) -> Callable[[dict[str, Any], Mapping[str, float]], Iterator[Case]]:
    def cases(settings: dict[str, Any], sizes: Mapping[str, float]) -> Iterator[Case]:
        draw, width = _draw(4), tested(sizes["width"])
        for batch, tokens in ROWS:
            for size in (1.0, 20.0):
                args = tuple(draw(batch, tokens, width) * size for _ in range(num_inputs))
                yield Case(label=f"{batch}x{tokens} of size {size:g}", args=args, settings=settings)
        yield Case(label="signed zeros", args=tuple(torch.tensor([[0.0, -0.0, 1.0]]).double() for _ in range(num_inputs)),
                   settings=settings)  # fmt: skip

    return cases


def _convolution(settings: dict[str, Any], sizes: Mapping[str, float]) -> Iterator[Case]:
    draw, channels, taps = _draw(5), int(sizes["channels"]), int(sizes["taps"])
    depthwise = settings["groups"] > 1
    channels = min(channels, 48) if depthwise else tested(channels)
    settings = settings | {"groups": channels if depthwise else 1}
    weight = draw(channels, 1 if depthwise else channels, taps)
    bias = draw(channels) if sizes.get("bias") else None
    for batch, tokens in ((1, taps), (2, 9), (1, 67)):
        yield Case(label=f"{batch}x{tokens}", args=(draw(batch, channels, tokens), weight, bias), settings=settings)


def _attention(settings: dict[str, Any], sizes: Mapping[str, float]) -> Iterator[Case]:
    """Decode, chunked prefill and whole prompts; windows and chunks are shrunk until 41 positions cross them."""
    draw = _draw(6)
    groups = int(min(sizes["kv_heads"], 2))
    heads = groups * int(min(sizes["heads"] // sizes["kv_heads"], 4))
    sparse, sinks = bool(sizes.get("sparse")), draw(heads) if sizes.get("sinks") else None
    settings = settings | {name: min(settings.get(name, 0), limit) for name, limit in (("window", 9), ("chunk", 8))}
    for batch, rows, context in ((1, 0, 5), (1, 1, 1), (1, 1, 41), (3, 1, 17), (2, 7, 7), (1, 6, 41), (1, 41, 41)):
        q = draw(batch, heads, rows, int(sizes["qk_dim"]))
        k, v = draw(batch, groups, context, int(sizes["qk_dim"])), draw(batch, groups, context, int(sizes["v_dim"]))
        # The row's own position stays visible, as an indexer leaves at least one key.
        keep = None
        if sparse:
            own = torch.arange(context) == torch.arange(context - rows, context)[:, None]
            keep = (draw(batch, rows, context) > 0) | own
        yield Case(label=f"{batch}x{rows} of {context}", args=(q, k, v, sinks, keep), settings=settings)
        if (rows, context) == (6, 41):
            size = (LARGE_SCORES / (settings["scale"] * q.shape[3] ** 0.5)) ** 0.5
            yield Case(label="large scores", args=(q * size, k * size, v, sinks, keep), settings=settings)


def _softmax(settings: dict[str, Any], sizes: Mapping[str, float]) -> Iterator[Case]:
    draw = _draw(7)
    for batch, tokens in ROWS:
        for shift in (0.0, LARGE, -LARGE):
            x = draw(batch, tokens, tested(sizes["width"])) * 3 + shift
            yield Case(label=f"{batch}x{tokens} around {shift:g}", args=(x,), settings=settings)


CASES: dict[str, Callable[[dict[str, Any], Mapping[str, float]], Iterator[Case]]] = {
    "linear": _linear,
    "quantized_linear": _quantized_linear,
    "embedding": _embedding,
    "rms_norm": _norm("gate"),
    "l2_norm": _norm(""),
    "layer_norm": _norm("bias"),
    "activation": _pointwise(1),
    "gated_activation": _pointwise(2),
    "convolution": _convolution,
    "attention": _attention,
    "softmax": _softmax,
}


def aten_cases(name: str) -> Iterator[Case]:
    """The declared domain of library operators that replacements are known to get wrong; none for the others.

    Empty tensors, int32 and int64, negative zero, NaN, many and few elements, exact ties, strided input.
    """
    draw = _draw(8)
    if name == "aten::_softmax":
        for case in _softmax({}, {"width": 65}):
            yield Case(label=case.label, args=(*case.args, -1, False))
    elif name in ("aten::zeros", "aten::ones"):
        for shape in ([0], [1], [3, 5], [1000], [257, 129]):
            settings = {"dtype": torch.float64, "device": torch.device("cpu")}
            yield Case(label=f"{shape}", args=(shape,), settings=settings)
    elif name == "aten::floor_divide":
        numbers = torch.tensor([-7, -1, 0, 1, 7, 8, 2**20])
        for dtype in (torch.int32, torch.int64, torch.float64):
            yield Case(label=f"{dtype}", args=(numbers.to(dtype), torch.tensor(3, dtype=dtype)))
            yield Case(label=f"empty {dtype}", args=(numbers[:0].to(dtype), torch.tensor(3, dtype=dtype)))
    elif name == "aten::topk":
        for size, k in ((5, 0), (5, 5), (64, 8), (300, 65), (4097, 100)):
            yield Case(label=f"{k} of {size}", args=(draw(2, size), k, -1, True, True))
        yield Case(label="strided", args=(draw(3, 40).t(), 2, -1, True, True))
        yield Case(label="ties", args=(torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]]).double(), 2, -1, True, True))
        yield Case(label="NaN", args=(torch.tensor([[1.0, float("nan"), 3.0]]).double(), 2, -1, True, True))
