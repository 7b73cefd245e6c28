"""What a type's operator graphs are held to: FLOPs against torch's counter, and the graph run again against the module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dayzero.core.model import LayerKind
from dayzero.model.classes import find_layers, layer_kind_signatures, text_config
from dayzero.model.operator_graph import OUTER, PHASES, GraphResult, Phase, cache_of, eager, operator_graphs
from dayzero.ops.graph.nodes import RegionGraph, flat
from dayzero.ops.graph.record import is_held
from dayzero.ops.graph.rerun import run
from tests.tiny.build import make_tiny_model

# Not among the recorded lengths; both cross the windows (8, 16) of a shrunken model, the second also a chunk of 64.
CHECKED_LENGTHS = (29, 84)
FLOPS_TOLERANCE = 0.01
OUTPUT_TOLERANCE = 1e-5  # of the largest output; the same operators in the same order give the same bits


@dataclass(slots=True)
class Verdict:
    """`worst`: largest relative difference of an output. `opaque`: modules that are one node."""

    flops: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    worst: float = 0.0
    worst_flops: float = 0.0
    opaque: list[str] = field(default_factory=list)
    no_decode: str = ""

    @property
    def failures(self) -> list[str]:
        return self.flops + self.outputs


@dataclass(slots=True)
class _Call:
    """One call as it was before it ran, and what it returned."""

    args: Any
    kwargs: Any
    out: Any = None


def make_kinds(model: nn.Module) -> list[LayerKind]:
    """Layers of one structure and one set of shapes."""
    _, layers = find_layers(model)
    alike: dict[Any, list[int]] = {}
    for index, signature in enumerate(layer_kind_signatures(model, model.config)):  # type: ignore[arg-type]
        shapes = tuple((name, tuple(item.shape)) for name, item in layers[index].named_parameters())
        alike.setdefault((signature, shapes), []).append(index)
    return [
        LayerKind(name=f"kind{number}", mixer="full", feed_forward="dense", layers=tuple(indices))
        for number, indices in enumerate(alike.values())
    ]


def examine(model_type: str) -> Verdict:
    """Everything that is wrong with the graphs of a tiny model of this type."""
    model = make_tiny_model(model_type).requires_grad_(False)
    kinds = make_kinds(model)
    result = operator_graphs(model, kinds, text_config(model.config))  # type: ignore[arg-type]
    verdict = Verdict(opaque=[note for note in result.notes if "is one node" in note])
    verdict.no_decode = next((note for note in result.notes if "cannot be decoded" in note), "")
    said = ("is one node", "cannot be decoded", "the layer does not run", "shorter ones take another path")
    verdict.flops += [f"no graph: {note}" for note in result.notes if not any(what in note for what in said)]
    if result.details:
        with eager(model), torch.no_grad():
            for length in CHECKED_LENGTHS:
                _check_length(model, kinds, result, length, verdict)
    return verdict


def _check_length(model: nn.Module, kinds: list[LayerKind], result: GraphResult, length: int, verdict: Verdict) -> None:
    generator = torch.Generator().manual_seed(length)
    past: dict[str, Any] = {}
    for phase in PHASES:
        tokens = length if phase == "prefill" else 1
        context = length if phase == "prefill" else length + 1
        ids = torch.randint(3, 120, (1, tokens), generator=generator)
        arguments = {"input_ids": ids, "use_cache": True, **past}
        if phase == "decode" and verdict.no_decode:
            _check_undecodable(model, arguments, verdict)
            break
        calls, made, counted, output = _capture(model, kinds, arguments)
        past = cache_of(model, output)
        sizes = {"B": 1, "T": tokens, "C": context}
        _check_flops(kinds, result, phase, sizes, counted, verdict)
        for label, listed in calls.items():
            graphs = result.details[label][phase].calls if phase in result.details.get(label, {}) else ()
            for graph, call in zip(graphs, listed, strict=bool(graphs)):
                _check_output(model, graph, label, phase, sizes, call, made, verdict)


def _check_undecodable(model: nn.Module, arguments: dict[str, Any], verdict: Verdict) -> None:
    """A note that there is no decode step is only true where transformers itself has none."""
    try:
        if set(arguments) - {"input_ids", "use_cache"}:
            model(**arguments)
            verdict.flops.append("no decode graph, but a decode step runs")
    except Exception as error:
        assert str(error), error


def _capture(
    model: nn.Module, kinds: list[LayerKind], arguments: dict[str, Any]
) -> tuple[dict[str, list[_Call]], list[Any], float, Any]:
    """One forward: the calls of one layer of each kind and of the model, caches it made, FLOPs counted, what it returned."""
    _, layers = find_layers(model)
    calls: dict[str, list[_Call]] = {OUTER: [_Call(*_copied((), arguments))]}
    made: list[Any] = []
    given = {id(value) for value in arguments.values()}
    handles = []

    def before(label: str | None) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            for value in (*args, *kwargs.values()):
                if is_held(value) and id(value) not in given:
                    given.add(id(value))
                    made.append(copy.deepcopy(value))
            if label is not None:
                calls.setdefault(label, []).append(_Call(*_copied(args, kwargs)))

        return hook

    def after(label: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            calls[label][-1].out = _copied(out, {})[0]

        return hook

    labels = {kind.layers[0]: kind.name for kind in kinds}
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(before(labels.get(index)), with_kwargs=True))
        if index in labels:
            handles.append(layer.register_forward_hook(after(labels[index]), with_kwargs=True))
    try:
        with FlopCounterMode(display=False) as counter:
            output = model(**arguments)
    finally:
        for handle in handles:
            handle.remove()
    calls[OUTER][0].out = _copied(output, {})[0]
    return calls, made, float(counter.get_total_flops()), output


def _copied(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Copies that share what the originals share; the config is not copied."""
    return copy.deepcopy((args, kwargs))


def _check_flops(
    kinds: list[LayerKind], result: GraphResult, phase: Phase, sizes: dict[str, int], counted: float, verdict: Verdict
) -> None:
    layers = {kind.name: len(kind.layers) for kind in kinds} | {OUTER: 1}
    told = sum(
        cost.products.value(**sizes) * float(phases[phase].times) * layers[label]  # type: ignore[arg-type]
        for label, phases in result.details.items()
        for cost in (phases[phase].costs if phase in phases else ())
    )
    error = abs(told - counted) / counted if counted else float(told != 0)
    verdict.worst_flops = max(verdict.worst_flops, error)
    if error > FLOPS_TOLERANCE:
        verdict.flops.append(f"{phase} {sizes}: {told:.0f} FLOPs by formula, {counted:.0f} counted")


def _check_output(
    model: nn.Module,
    graph: RegionGraph,
    label: str,
    phase: Phase,
    sizes: dict[str, int],
    call: _Call,
    made: list[Any],
    verdict: Verdict,
) -> None:
    made = [copy.deepcopy(value) for value in made]
    try:
        out = run(graph, model, call.args, call.kwargs, sizes=sizes, made=made)
    except Exception as error:
        verdict.outputs.append(f"{label} {phase} {sizes}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return
    got = [leaf for leaf in flat(out) if isinstance(leaf, Tensor)]
    want = [leaf for leaf in flat(call.out) if isinstance(leaf, Tensor)]
    if [one.shape for one in got] != [one.shape for one in want]:
        verdict.outputs.append(
            f"{label} {phase} {sizes}: shapes {[one.shape for one in got]}, not {[one.shape for one in want]}"
        )
        return
    for one, two in zip(got, want, strict=True):
        if not one.numel() or not one.is_floating_point():
            continue
        error = float((one - two).abs().max() / two.abs().max().clamp(min=1e-30))
        verdict.worst = max(verdict.worst, error)
        if not error <= OUTPUT_TOLERANCE:
            verdict.outputs.append(f"{label} {phase} {sizes}: output differs by {error:.1e} of its scale")
