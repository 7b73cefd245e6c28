"""A dense feed-forward or a stack of experts of a small instance in, its activation and the layout of its matrices out.

Nothing is read off names. The gradient of the output with respect to the last matrix is what the activation gave; the
gradient of one of its units with respect to the other matrices shows which rows make that unit: one (plain), two in two
matrices (separate), or two in one (i and i + I: concatenated, 2i and 2i + 1: interleaved). The activation is then fitted,
clamps included, with the numbers that the module keeps. Another layout or another function is an answer: not known.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dayzero.core.model import LayerKind, Parameter
from dayzero.core.structure import FeedForward
from dayzero.model.classes import text_config
from dayzero.model.structure.places import Places
from dayzero.model.structure.watch import Watched
from dayzero.ops.definitions import ACTIVATIONS

ROLES = ("mlp", "expert", "shared_expert")
ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "ffn_act_fn", "activation")
TOLERANCE = 1e-5
# One input near zero, where activations differ most, and one that reaches every clamp in use (7 to 10).
INPUT_SIZES = (1.0, 12.0)

UNITS = 16  # of the activation's units, how many are looked at

Layout = Literal["separate", "concatenated", "interleaved", "plain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """What the activation gave [I], and its inputs: one or two vectors [I], and where their rows lie."""

    values: Tensor
    inputs: tuple[Tensor, ...]
    layout: Layout


def read_feed_forwards(
    places: Places | None,
    watched: Watched | None,
    kinds: Sequence[LayerKind],
    parameters: Sequence[Parameter],
    model: nn.Module,
) -> tuple[tuple[FeedForward, ...], list[str]]:
    """One record for each place inside a layer that feeds forward, alike ones once; and what could not be measured."""
    text = text_config(model.config)
    named = next((value for key in ACTIVATION_KEYS if isinstance(value := getattr(text, key, None), str)), None)
    found: dict[FeedForward, None] = {}
    notes: list[str] = []
    by_layer: dict[int | None, list[Parameter]] = {}
    for parameter in parameters:
        by_layer.setdefault(parameter.layer, []).append(parameter)
    for kind in kinds:
        own = by_layer.get(kind.layers[0], [])
        for role in ROLES:
            # A matrix with one row is a gate beside the feed-forward, not part of it.
            names = [item.name for item in own if item.role == role and item.shape[:1] != (1,)]
            if not names:
                continue
            for inner in _places(names, kind.layers[0]):
                result: FeedForward | str = "no small layer stands for it"
                prefix = places.prefix(kind) if places else None
                if places and watched and prefix:
                    result = _measured(places, watched, prefix + inner, inner)
                if isinstance(result, str):
                    notes.append(f"feed-forward .{inner} of {kind.name} is not measured: {result}")
                    result = FeedForward(module=f".{inner}", activation=named, evidence="keys" if named else "unknown")
                elif result.activation is None:
                    notes.append(
                        f"feed-forward .{inner} of {kind.name}: the activation is none of those known (its key: {named})"
                    )
                found.setdefault(result)
    return tuple(found), list(dict.fromkeys(notes))


def _places(names: Sequence[str], layer: int) -> list[str]:
    """The modules inside the layer that hold the parameters; of a list of experts, its first.

    Where one role has several modules, those with one matrix (a projection beside the feed-forward) are left out.
    """
    inner = [name.split(f".{layer}.", 1)[1].split(".")[:-1] for name in names]
    if len({parts[0] for parts in inner if parts}) == 1:
        return [_common(inner)]
    groups: dict[str, list[list[str]]] = {}
    for parts in inner:
        groups.setdefault(parts[0] if parts else "", []).append(parts)
    several = [_common(group) for group in groups.values() if len({tuple(parts) for parts in group}) > 1]
    return several or [""]


def _common(paths: Sequence[Sequence[str]]) -> str:
    common = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    numbers = {parts[len(common)] for parts in paths if len(parts) > len(common)}
    if numbers and all(number.isdigit() for number in numbers):
        common.append("0")
    return ".".join(common)


def _measured(places: Places, watched: Watched, name: str, inner: str) -> FeedForward | str:
    if not inner:
        return "its matrices lie in the layer itself, with no module around them"
    try:
        module = places.small.get_submodule(name)
    except AttributeError:
        return "the small layer has no such module"
    if isinstance(module, nn.Linear):
        return "one matrix alone is no feed-forward"
    call = watched.calls.get(name)
    sample = next((value for value in (call.args if call else ()) if isinstance(value, Tensor)), None)
    probe = copy.deepcopy(module).to(torch.float64)
    units = []
    for size in INPUT_SIZES:
        try:
            unit = measure_unit(probe, sample, call.args if call else (), size)
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        if isinstance(unit, str):
            return unit
        units.append(unit)
    if len({unit.layout for unit in units}) != 1:
        return "two inputs show two layouts"
    return FeedForward(
        module=f".{inner}", activation=fit_activation(units, _numbers(probe)), layout=units[0].layout, evidence="measured"
    )


def measure_unit(module: nn.Module, sample: Tensor | None, args: Sequence[Any], size: float) -> Unit | str:
    """One token through a float64 module, read with gradients; why not, where it is no feed-forward of this form."""
    stacked = any(item.dim() == 3 and min(item.shape) > 1 for item in module.parameters(recurse=False))
    if sample is None:
        return "it was not called"
    x = torch.randn(sample.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64) * size
    parameters = {name: item.requires_grad_(True) for name, item in module.named_parameters() if item.is_floating_point()}
    for part in module.modules():
        if hasattr(getattr(part, "config", None), "_experts_implementation_internal"):
            part.config = copy.copy(part.config)
            part.config._experts_implementation_internal = "eager"
    with torch.enable_grad():
        if stacked:
            given = x[None], torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.float64)
            # Some take a row for each expert instead of a choice: then the first expert gets the token, like all others.
            alone = len(inspect.signature(module.forward).parameters) == 1
            out = module(x.expand(_stack(module), -1)) if alone else module(*given)
        else:
            one = x.reshape(*[1] * (sample.dim() - 1), -1)
            out = module(*[one if value is sample else _emptied(value, sample, one) for value in args])
        out = out[0] if isinstance(out, tuple) else out
        if not isinstance(out, Tensor):
            return "it gives no tensor"
        gradients = dict(
            zip(
                parameters,
                torch.autograd.grad(out.sum(), list(parameters.values()), create_graph=True, allow_unused=True),
                strict=True,
            )
        )
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            values = _hidden_values(gradient)
            if values is not None:
                return _inputs(parameters, name, values, x)
    return "no matrix stands last"


def _stack(module: nn.Module) -> int:
    return next(item.shape[0] for item in module.parameters(recurse=False) if item.dim() == 3)


def _emptied(value: Any, sample: Tensor, one: Tensor) -> Any:
    """What else it was given: a tensor like the input (a residual) counts nothing, the rest stays."""
    return torch.zeros_like(one) if isinstance(value, Tensor) and value.shape == sample.shape else value


def _slice(tensor: Tensor) -> Tensor:
    """Of a stack of experts, the one that was used: the first."""
    return tensor[0] if tensor.dim() == 3 else tensor


def _hidden_values(gradient: Tensor) -> Tensor | None:
    """d sum(out) / d last matrix holds the activation's values, once for each output: rows or columns are all alike."""
    if _slice(gradient).dim() != 2 or min(_slice(gradient).shape) < 2:
        return None
    matrix = _slice(gradient)
    for values, other in ((matrix[0], matrix), (matrix[:, 0], matrix.t())):
        alike = float((other - values[None]).detach().abs().max()) <= 1e-9 * float(values.detach().abs().max())
        if alike and float(values.detach().std()) > 0:
            return values
    return None


def _inputs(parameters: dict[str, nn.Parameter], last: str, values: Tensor, x: Tensor) -> Unit | str:
    others = {name: item for name, item in parameters.items() if name != last}
    by_unit: dict[int, list[tuple[str, int, bool]]] = {}
    vectors: dict[str, str] = {}
    for unit in [unit for unit in range(len(values)) if float(values[unit].detach().abs()) > 1e-9][:UNITS]:
        gradients = torch.autograd.grad(values[unit], list(others.values()), retain_graph=True, allow_unused=True)
        touched: list[tuple[str, int, bool]] = []
        for (name, item), gradient in zip(others.items(), gradients, strict=True):
            if gradient is None or not gradient.any():
                continue
            if item.dim() == 1 or (item.dim() == 2 and item.shape[0] != len(x) and item.shape[1] != len(x)):
                vectors[name] = name
                continue
            matrix = _slice(gradient)
            across = (matrix.abs().amax(1) > 0).nonzero().flatten().tolist()
            along = (matrix.abs().amax(0) > 0).nonzero().flatten().tolist()
            by_rows = len(across) <= len(along)
            touched += [(name, place, by_rows) for place in (across if by_rows else along)]
        by_unit[unit] = touched
    # A clamp hides a row of the units it cuts off, so those that show most are taken.
    most = max((len(row) for row in by_unit.values()), default=0)
    chosen = [unit for unit, row in by_unit.items() if len(row) == most][:2]
    if len(chosen) < 2:
        return "fewer than two units are active"
    rows = [by_unit[unit] for unit in chosen]
    layout = _layout(rows, chosen, len(values))
    if layout is None:
        return f"a unit of the activation is made from {[len(row) for row in rows]} rows in no known order"
    inputs = []
    for name, _, by_rows in dict.fromkeys((name, 0, by_rows) for name, _, by_rows in rows[0]):
        matrix = _slice(parameters[name]).detach()
        out = (matrix if by_rows else matrix.t()) @ x
        bias = _bias(parameters, vectors, name, out)
        inputs.append(out if bias is None else out + bias)
    if layout == "concatenated":
        inputs = list(inputs[0].chunk(2))
    elif layout == "interleaved":
        inputs = [inputs[0][0::2], inputs[0][1::2]]
    return Unit(values=values.detach(), inputs=tuple(inputs), layout=layout)


def _layout(rows: Sequence[Sequence[tuple[str, int, bool]]], units: Sequence[int], width: int) -> Layout | None:
    names = [[name for name, _, _ in row] for row in rows]
    numbers = [sorted(place for _, place, _ in row) for row in rows]
    if names[0] != names[1]:
        return None
    if len(names[0]) == 1:
        return "plain" if numbers == [[unit] for unit in units] else None
    if len(names[0]) != 2:
        return None
    if len(set(names[0])) == 2:
        return "separate" if numbers == [[unit, unit] for unit in units] else None
    if numbers == [[unit, unit + width] for unit in units]:
        return "concatenated"
    return "interleaved" if numbers == [[2 * unit, 2 * unit + 1] for unit in units] else None


def _bias(parameters: dict[str, nn.Parameter], vectors: dict[str, str], matrix: str, out: Tensor) -> Tensor | None:
    """The bias of a matrix among the vectors that act on a unit: the one that shares its module or its name."""
    stem = matrix.removesuffix(".weight").removesuffix("_weight")
    for name in vectors:
        vector = parameters[name].detach()
        vector = vector[0] if vector.dim() == 2 else vector
        if name.startswith(stem) and vector.shape == out.shape:
            return vector
    return None


def _numbers(module: nn.Module) -> list[float]:
    """Plain numbers the module (or its config) keeps: limits and slopes are among them. The fit decides."""
    found = [vars(module)]
    config = getattr(module, "config", None)
    found += [vars(config)] if config is not None else []
    found += [vars(child) for child in module.children()]
    values = [
        float(value)
        for numbers in found
        for name, value in numbers.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and 0 < value <= 100
        if isinstance(value, float) or any(word in name for word in ("limit", "clamp", "alpha", "swiglu"))
    ]
    return list(dict.fromkeys(values))


def fit_activation(units: Sequence[Unit], numbers: Sequence[float]) -> str | None:
    """The name of the function that gives every unit's values; None where none of those known does."""
    if len(units[0].inputs) == 1:
        plain = ((name, lambda unit, f=function: f(unit.inputs[0])) for name, function in ACTIVATIONS.items())
        return _first_fit(units, plain)
    return _first_fit(units, _gated(numbers))


def _first_fit(units: Sequence[Unit], candidates: Iterator[tuple[str, Callable[[Unit], Tensor]]]) -> str | None:
    for name, function in candidates:
        if all(_close(function(unit), unit.values) for unit in units):
            return name
    return None


def _close(got: Tensor, want: Tensor) -> bool:
    return float((got - want).abs().max()) <= TOLERANCE * max(float(want.abs().max()), 1e-12)


def _gated(numbers: Sequence[float]) -> Iterator[tuple[str, Callable[[Unit], Tensor]]]:
    """Known gated forms, the plain ones first. The first half or matrix is the gate unless the name says otherwise."""
    for swapped in (False, True):
        told = ", up before gate" if swapped else ""
        for name, function in ACTIVATIONS.items():
            yield f"{name}{told}", _form(function, swapped)
        for limit, (name, function) in itertools.product(numbers, ACTIVATIONS.items()):
            clamps = f"up within {limit:g}{told}"
            yield f"{name}, gate at most {limit:g}, {clamps}", _form(function, swapped, gate_limit=limit, up_limit=limit)
            yield f"{name}, at most {limit:g} after it, {clamps}", _form(function, swapped, after_limit=limit, up_limit=limit)
        for limit, alpha in itertools.product((math.inf, *numbers), numbers):
            clamps = f", gate at most {limit:g}, up within {limit:g}" if math.isfinite(limit) else ""
            yield (
                f"gate * sigmoid({alpha:g} * gate) * (up + 1){clamps}{told}",
                _form(_scaled_silu(alpha), swapped, gate_limit=limit, up_limit=limit, added=1.0),
            )


def _scaled_silu(alpha: float) -> Callable[[Tensor], Tensor]:
    return lambda gate: gate * torch.sigmoid(alpha * gate)


def _form(
    function: Callable[[Tensor], Tensor],
    swapped: bool,
    *,
    gate_limit: float = math.inf,
    after_limit: float = math.inf,
    up_limit: float = math.inf,
    added: float = 0.0,
) -> Callable[[Unit], Tensor]:
    def values(unit: Unit) -> Tensor:
        gate, up = unit.inputs[::-1] if swapped else unit.inputs
        return function(gate.clamp(max=gate_limit)).clamp(max=after_limit) * (up.clamp(-up_limit, up_limit) + added)

    return values
