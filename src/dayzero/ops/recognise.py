"""What a module computes, found by running it against the definitions in float64. Class names are never read.

Goes in: a module of a CPU model and one call it received. Comes out: a `Recognised` (operator, settings) or None:
then the module is composed of what it calls. Plain linears, embeddings and convolutions are taken structurally, because
their forward is torch's own; everything else is probed with random weights and inputs of the shape that was observed.
Attention and experts are not recognised here: they announce themselves through transformers' interfaces (`observe`).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.ops.definitions import ACTIVATIONS, embedding, l2_norm, layer_norm, linear, rms_norm

# Norms widen to float32 inside whatever they are given, so agreement is to float32's precision.
TOLERANCE = 2e-5
# Inputs this small make eps visible beside the mean square (1e-8 against 1e-6).
SMALL = 1e-4
EPS = (1e-6, 1e-5, 1e-8, 1e-12, 1e-20, 0.0, 1e-3)  # tried after those found in the module's own numbers
GROUPS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recognised:
    """`slots`: which of the operator's optional tensors the module has. `inside`: child names that stay sites themselves."""

    operator: str
    settings: dict[str, Any] = field(default_factory=dict)
    slots: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()


def recognise(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recognised | None:
    """The operator a module is, from one observed call. The module is not changed: probes run on a copy."""
    if (known := _structural(module)) is not None:
        return known
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not tensors:
        return None
    probe = _Probe(module, args, kwargs)
    if any(True for _ in module.children()):
        return _gated_feed_forward(module, probe)
    weights = list(module.parameters(recurse=False))
    if any(weight.dim() == 2 for weight in weights):
        return _projection(probe)
    if any(weight.dim() != 1 for weight in weights) or len(tensors) > 2:
        return None
    return _norm(probe) or (None if weights or len(tensors) > 1 else _activation(probe))


def _structural(module: nn.Module) -> Recognised | None:
    forward = type(module).forward
    if forward is nn.Linear.forward:
        assert isinstance(module, nn.Linear)
        return Recognised(operator="linear", slots=("bias",) if module.bias is not None else ())
    if forward is nn.Embedding.forward and getattr(module, "max_norm", None) is None:
        return Recognised(operator="embedding", settings={"scale": 1.0})
    if forward is nn.Conv1d.forward:
        assert isinstance(module, nn.Conv1d)
        plain = module.stride == (1,) and module.dilation == (1,) and isinstance(module.padding, tuple)
        if plain and module.padding_mode == "zeros":
            settings = {"padding": int(module.padding[0]), "groups": module.groups}
            return Recognised(operator="convolution", settings=settings, slots=("bias",) if module.bias is not None else ())
    return None


class _Probe:
    """A float64 copy of a module with random vectors, called the way it was called, on random input of the same shape."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.args, self.kwargs = copy.deepcopy(module).to(torch.float64), args, kwargs
        self.generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.dim() == 1:
                    parameter.copy_(1 + 0.3 * self.draw(parameter.shape))

    def draw(self, shape: Any) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.module.named_parameters(recurse=False)}

    def call(self, *tensors: Tensor) -> Tensor | None:
        """The output for new tensors in the places of the observed ones; None where the module refuses or gives another kind
        of result: it is then no single operator, which is an answer and not a failure."""
        queue = list(tensors)

        def put(value: Any) -> Any:
            return queue.pop(0) if isinstance(value, Tensor) else value

        try:
            with torch.no_grad():
                out = self.module(*map(put, self.args), **{name: put(value) for name, value in self.kwargs.items()})
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError):
            return None
        return out.to(torch.float64) if isinstance(out, Tensor) and out.is_floating_point() else None

    @property
    def observed(self) -> list[Tensor]:
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]


def _close(got: Tensor | None, want: Tensor) -> bool:
    if got is None or got.shape != want.shape or not torch.isfinite(got).all():
        return False
    return float((got - want).abs().max()) <= TOLERANCE * max(float(want.abs().max()), 1e-30)


def _projection(probe: _Probe) -> Recognised | None:
    """A linear with the weight either way round, or a lookup with a constant factor."""
    weights = probe.weights
    weight = next(value for value in weights.values() if value.dim() == 2)
    vectors = [value for value in weights.values() if value.dim() == 1]
    if len(probe.observed) != 1 or len(weights) > 2:
        return None
    seen = probe.observed[0]
    if not seen.is_floating_point():
        ids = torch.randint(0, min(weight.shape[0], 64), seen.shape, generator=probe.generator)
        got, want = probe.call(ids), embedding(ids, weight)
        if got is None or got.shape != want.shape or not want.abs().max():
            return None
        scale = float((got * want).sum() / (want * want).sum())
        return Recognised(operator="embedding", settings={"scale": scale}) if _close(got, want * scale) else None
    x = probe.draw(seen.shape)
    got, bias = probe.call(x), vectors[0] if vectors else None
    for matrix in (weight, weight.t()):
        fits = matrix.shape[1] == x.shape[-1] and (bias is None or bias.shape[0] == matrix.shape[0])
        if fits and _close(got, linear(x, matrix, bias)):
            return Recognised(operator="linear", slots=("bias",) if vectors else ())
    return None


def _norm(probe: _Probe) -> Recognised | None:
    """Root mean square, l2 or layer norm, with its eps, form of weight, groups and gate."""
    seen, weights = probe.observed, probe.weights
    if len({tensor.shape for tensor in seen}) != 1 or not seen[0].is_floating_point() or seen[0].shape[-1] < 2:
        return None
    vectors = list(weights.values())
    if len(vectors) > 2 or any(vector.shape[0] != seen[0].shape[-1] for vector in vectors):
        return None
    shape = (2, *seen[0].shape[1:])
    inputs = [[probe.draw(shape) * size, *(probe.draw(shape) for _ in seen[1:])] for size in (1.7, SMALL)]
    outputs = [probe.call(*tensors) for tensors in inputs]
    if any(out is None or out.shape != torch.Size(shape) for out in outputs):
        return None
    for candidate in _norm_candidates(vectors, gated=len(seen) == 2, numbers=_numbers(probe.module)):
        recognised, weight, bias = candidate
        if all(
            _close(out, _norm_value(recognised, tensors, weight, bias)) for tensors, out in zip(inputs, outputs, strict=True)
        ):
            return recognised
    return None


def _numbers(module: nn.Module) -> list[float]:
    """Small numbers the module keeps: one of them is usually its eps. The probe still decides."""
    return [value for value in vars(module).values() if isinstance(value, float) and 0 <= value < 0.01]


def _norm_candidates(
    vectors: list[Tensor], *, gated: bool, numbers: list[float]
) -> Iterator[tuple[Recognised, Tensor | None, Tensor | None]]:
    pairs: list[tuple[Tensor | None, Tensor | None]] = [(vectors[0], None)] if len(vectors) == 1 else [(None, None)]
    if len(vectors) == 2:
        pairs = [(vectors[0], vectors[1]), (vectors[1], vectors[0])]
    for eps, (weight, bias) in itertools.product(dict.fromkeys((*numbers, *EPS)), pairs):
        slots = tuple(name for name, value in (("weight", weight), ("bias", bias)) if value is not None)
        if bias is None:
            for offset, groups in itertools.product((0.0, 1.0) if weight is not None else (0.0,), GROUPS):
                plain = {"eps": eps, "weight_offset": offset, "groups": groups}
                if not gated:
                    yield Recognised(operator="rms_norm", settings=plain, slots=slots), weight, None
                    continue
                for name, first in itertools.product(("silu", "sigmoid"), (False, True)):
                    settings = plain | {"gate_activation": name, "gate_first": first}
                    yield Recognised(operator="rms_norm", settings=settings, slots=slots), weight, None
        if not gated:
            yield Recognised(operator="layer_norm", settings={"eps": eps}, slots=slots), weight, bias
            if bias is None:
                yield Recognised(operator="l2_norm", settings={"eps": eps}, slots=slots), weight, None


def _norm_value(recognised: Recognised, tensors: list[Tensor], weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x, settings = tensors[0], recognised.settings
    if recognised.operator == "layer_norm":
        return layer_norm(x, weight, bias, **settings)
    if recognised.operator == "l2_norm":
        return l2_norm(x, weight, **settings)
    if x.shape[-1] % settings["groups"]:
        return torch.full_like(x, float("nan"))
    return rms_norm(x, weight, tensors[1] if len(tensors) == 2 else None, **settings)


def _activation(probe: _Probe) -> Recognised | None:
    if not probe.observed[0].is_floating_point():
        return None
    x = probe.draw(probe.observed[0].shape) * 2
    got = probe.call(x)
    for name, function in ACTIVATIONS.items():
        if name != "identity" and _close(got, function(x)):  # what changes nothing is no operator
            return Recognised(operator="activation", settings={"activation": name})
    return None


def _gated_feed_forward(module: nn.Module, probe: _Probe) -> Recognised | None:
    """down(act(gate(x)) * up(x)), gate and up as two linears or one. The linears remain sites of their own."""
    children = dict(probe.module.named_children())
    linears = {name: child for name, child in children.items() if type(child).forward is nn.Linear.forward}
    others = [child for name, child in children.items() if name not in linears]
    if not 2 <= len(linears) <= 3 or any(True for child in others for _ in child.parameters()) or probe.weights:
        return None
    if len(probe.observed) != 1 or not probe.observed[0].is_floating_point():
        return None
    x = probe.draw(probe.observed[0].shape)
    got = probe.call(x)
    if got is None:
        return None
    for names in itertools.permutations(linears):
        first, *middle, last = (linears[name] for name in names)
        if first.in_features != x.shape[-1] or any(child.in_features != x.shape[-1] for child in middle):
            continue
        with torch.no_grad():
            halves = (first(x), middle[0](x)) if middle else tuple(first(x).chunk(2, -1))
            for gate, up in [halves] if middle else [halves, halves[::-1]]:
                if gate.shape != up.shape or gate.shape[-1] != last.in_features:
                    continue
                for name, function in ACTIVATIONS.items():
                    if name != "identity" and _close(got, last(function(gate) * up)):
                        return Recognised(operator="gated_activation", settings={"activation": name}, inside=tuple(linears))
    return None
