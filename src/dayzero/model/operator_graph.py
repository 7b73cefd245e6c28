"""A model in, what each kind of layer computes out: operators with FLOPs and bytes as formulas in batch and length.

The model (on meta, or a small one on the CPU) runs a prefill and a decode step at a few lengths below and above its windows
and chunks, one layer of each kind opened; the recordings become one graph (`ops.graph`). Decoding starts from the cache
that the prefill left. What cannot be followed is an empty graph with its reason in the notes: nothing is raised.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from dayzero.core.collector import collector_paused
from dayzero.core.errors import DayZeroError, one_line
from dayzero.core.model import PHASES, LayerKind, OperatorGraph, OperatorNode, Phase
from dayzero.model.classes import find_layers
from dayzero.ops.graph.cost import NodeCost, node_costs, operator_nodes
from dayzero.ops.graph.fit import Fitter
from dayzero.ops.graph.nodes import NotGeneral, RegionGraph
from dayzero.ops.graph.record import Recording, kernel_limits, recording
from dayzero.ops.graph.unify import generalised, held_weights
from dayzero.ops.observe import cache_of, implementations_restored, meta_nonzero

VARIABLE: dict[Phase, str] = {"prefill": "T", "decode": "C"}
# Below and above the windows of a shrunken model (8, 16) and the chunks of linear attention (64), with every remainder by 4
# and most by 8, so that one chunk is told from another.
LENGTHS = (5, 12, 22, 35, 71, 97, 130)
FEW_LENGTHS = (12, 22, 35, 71, 97)  # where nothing changes at a length: every call on meta costs Python
BATCH, OTHER_BATCH = 2, 3
OTHER_LENGTH = 3  # the place in the lengths where another batch size is seen too
# Keys whose value is a number of tokens that a layer looks at: lengths are taken on both sides, formulas may break there.
LIMIT_KEY = re.compile(r"window|chunk|top_?k|budget|block_size|stride|compress|kernel|conv")
MAX_LIMIT = 65_536
OUTER = "outer"


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseGraph:
    """One region in one phase: the graph of each of its calls in a pass (most layers have one), which can be run again, and
    what their nodes cost. `times`: passes through a layer of the kind for each one through the layer that was followed.
    """

    calls: tuple[RegionGraph, ...]
    costs: tuple[NodeCost, ...]
    times: Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphResult:
    """`details`: by kind (or "outer") and phase, what `by_kind` and `outer` were made from."""

    by_kind: dict[str, OperatorGraph]
    outer: OperatorGraph
    notes: tuple[str, ...]
    details: dict[str, dict[Phase, PhaseGraph]]


@dataclass(slots=True)
class _Runs:
    """Recordings by phase, alike in everything but their size."""

    prefill: list[Recording] = field(default_factory=list)
    decode: list[Recording] = field(default_factory=list)
    no_decode: str = ""


def operator_graphs(model: nn.Module, layer_kinds: Sequence[LayerKind], text_config: Any) -> GraphResult:
    """Operator graphs of every layer kind, and of what runs outside the layers."""
    limits = token_limits(model, layer_kinds, text_config)
    try:
        name, layers = find_layers(model)
        with eager(model), collector_paused():
            runs = _recorded(model, list(layers), layer_kinds, graph_lengths(limits, text_config, _on_meta(model)))
    except Exception as error:  # whatever a model's own code raises is the reason that is shown
        why = f"the model could not be followed: {_reason(error)}"
        return GraphResult(
            by_kind={kind.name: OperatorGraph(notes=(why,)) for kind in layer_kinds},
            outer=OperatorGraph(notes=(why,)),
            notes=(why,),
            details={},
        )
    with collector_paused():
        return _Generaliser(model, f"{name}.", layer_kinds, limits, runs).result()


def token_limits(model: nn.Module, layer_kinds: Sequence[LayerKind], text_config: Any) -> list[int]:
    """Numbers of tokens at which a layer may change what it does, the likeliest first."""
    found: dict[int, None] = {}
    for kind in layer_kinds:
        for spec in kind.cache:
            for limit in (spec.window_tokens, spec.tokens_per_entry):
                found.setdefault(limit or 0)
    for value in sorted(kernel_limits(model)):
        found.setdefault(value)
    for key, value in vars(text_config).items():
        if LIMIT_KEY.search(key):
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(item, int) and not isinstance(item, bool):
                    found.setdefault(item)
    return [limit for limit in found if 1 < limit <= MAX_LIMIT]


def graph_lengths(limits: Sequence[int], text_config: Any, on_meta: bool) -> tuple[int, ...]:
    """Lengths on both sides of the limits. Long ones cost nothing on meta, where nothing is computed."""
    longest = getattr(text_config, "max_position_embeddings", None)
    longest = longest if isinstance(longest, int) and longest > LENGTHS[-1] else None
    lengths: tuple[int, ...] = LENGTHS
    if on_meta and max(limits, default=0) <= LENGTHS[1]:
        lengths = FEW_LENGTHS
    elif on_meta and max(limits) > LENGTHS[2]:
        top = max(limits)
        lengths = (12, *(n for n in (71, 130) if n < top), top + 7, top + 90, 2 * top + 37, 5 * top + 11)
    return tuple(n for n in lengths if longest is None or n < longest)


def _recorded(model: nn.Module, layers: list[nn.Module], kinds: Sequence[LayerKind], lengths: tuple[int, ...]) -> _Runs:
    """All recordings; where layers need each other's results, every layer runs."""
    reasons: list[str] = []
    stubs = len(kinds) < len(layers)
    for answer in (True, False) if _on_meta(model) else (True,):
        for extra in ((), ("attention_mask",)):
            for reuse in (True, False) if stubs else (False,):
                try:
                    return _record_all(model, layers, kinds, lengths, answer, extra, reuse)
                except Exception as error:  # another way of calling may do; else every reason is shown
                    reasons.append(_reason(error))
    raise RuntimeError("; ".join(dict.fromkeys(reasons)))


def _record_all(
    model: nn.Module,
    layers: list[nn.Module],
    kinds: Sequence[LayerKind],
    lengths: tuple[int, ...],
    answer: bool,
    extra: Sequence[str],
    reuse: bool,
) -> _Runs:
    runs = _Runs()
    signatures = {index: kind.name for kind in kinds for index in kind.layers}
    first_of = {kind.name: kind.layers[0] for kind in kinds}
    sizes = [(BATCH, length) for length in lengths]
    sizes.append((OTHER_BATCH, lengths[min(OTHER_LENGTH, len(lengths) - 1)]))
    listed = [signatures[index] for index in range(len(layers))]
    with recording(model, layers, list(first_of.values()), answer=answer) as recorder, torch.no_grad(), meta_nonzero():
        with _stubs(layers, listed, first_of, reuse), recorder:
            model(**_arguments(model, 1, 2, 2, extra))  # a first forward may prepare what later ones find
        for batch, length in sizes:
            past: dict[str, Any] = {}
            for phase, tokens, total in (("prefill", length, length), ("decode", 1, length + 1)):
                if runs.no_decode and phase == "decode":
                    continue
                arguments = _arguments(model, batch, tokens, total, extra)
                try:
                    with _stubs(layers, listed, first_of, reuse), recorder:
                        output = model(**arguments, **past)
                except Exception as error:
                    recorder.forget()
                    if phase == "prefill" or reuse:
                        raise
                    runs.no_decode = f"it cannot be decoded step by step: {_reason(error)}"
                    continue
                made = recorder.recording
                assert made is not None and not recorder.stack
                made.batch, made.length = batch, total
                (runs.prefill if phase == "prefill" else runs.decode).append(made)
                past = cache_of(model, output)
                if not past and not runs.no_decode:
                    runs.no_decode = "it cannot be decoded step by step: the forward returns no cache"
    if runs.no_decode:
        runs.decode = []
    return runs


@contextlib.contextmanager
def _stubs(layers: list[nn.Module], listed: Sequence[str], first_of: Mapping[str, int], reuse: bool) -> Iterator[None]:
    """While active, layers other than the first of their kind return copies of what that one returned."""
    outputs: dict[str, Any] = {}

    def wrap(index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            kind = listed[index]
            if first_of[kind] != index and kind in outputs:
                # Tensors of their own: a recording knows a tensor by its identity.
                return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, outputs[kind])
            outputs[kind] = original(*args, **kwargs)
            return outputs[kind]

        return forward

    stubbed = {layer: index for index, layer in reversed(list(enumerate(layers)))} if reuse else {}
    for layer, index in stubbed.items():
        layer.forward = wrap(index, layer.forward)
    try:
        yield
    finally:
        for layer in stubbed:
            layer.__dict__.pop("forward", None)


def _arguments(model: nn.Module, batch: int, tokens: int, total: int, extra: Sequence[str]) -> dict[str, Any]:
    device = next(model.parameters()).device
    if device.type == "meta":
        ids = torch.zeros(batch, tokens, dtype=torch.long, device=device)
    else:
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(3, 120, (batch, tokens), generator=generator)
    masks = {name: torch.ones(batch, total, dtype=torch.long, device=device) for name in extra}
    return {"input_ids": ids, "use_cache": True, **masks}


@dataclass(slots=True)
class _Generaliser:
    model: nn.Module
    prefix: str
    kinds: Sequence[LayerKind]
    limits: Sequence[int]
    runs: _Runs
    notes: list[str] = field(default_factory=list)
    details: dict[str, dict[Phase, PhaseGraph]] = field(default_factory=dict)

    def result(self) -> GraphResult:
        weights = held_weights(self.model)
        fitters: dict[Phase, Fitter] = {phase: Fitter(VARIABLE[phase], self.limits) for phase in PHASES}
        by_kind = {kind.name: self._graph(kind, weights, fitters) for kind in self.kinds}
        outer = self._graph(None, weights, fitters)
        return GraphResult(by_kind=by_kind, outer=outer, notes=tuple(dict.fromkeys(self.notes)), details=self.details)

    def _graph(self, kind: LayerKind | None, weights: Mapping[int, str], fitters: Mapping[Phase, Fitter]) -> OperatorGraph:
        label = kind.name if kind else OUTER
        inside = f"{self.prefix}{kind.layers[0]}" if kind else ""
        nodes: dict[str, tuple[OperatorNode, ...]] = {}
        notes: list[str] = []
        for phase in PHASES:
            try:
                found = self._phase(kind, phase, weights, fitters[phase])
            except NotGeneral as error:
                notes.append(f"{phase}: {error}")
                continue
            self.details.setdefault(label, {})[phase] = found
            nodes[phase] = operator_nodes(found.costs, inside, found.times)
            notes += [f"{phase}: {name} is one node: {why}" for graph in found.calls for name, why in graph.opaque]
            if found.calls[0].shortest:
                least = f"{VARIABLE[phase]} = {found.calls[0].shortest}"
                notes.append(f"{phase}: holds from {least} on, shorter ones take another path")
        self.notes += [f"{label}: {note}" for note in notes]
        return OperatorGraph(prefill=nodes.get("prefill", ()), decode=nodes.get("decode", ()), notes=tuple(notes))

    def _phase(self, kind: LayerKind | None, phase: Phase, weights: Mapping[int, str], fitter: Fitter) -> PhaseGraph:
        made = self.runs.prefill if phase == "prefill" else self.runs.decode
        if not made:
            raise NotGeneral(self.runs.no_decode)
        if kind is None:
            calls = [[one.root] for one in made]
        else:
            calls = [one.layers.get(kind.layers[0], []) for one in made]
        if len({len(regions) for regions in calls}) > 1 or not calls[0]:
            raise NotGeneral("the layer does not run" if not calls[0] else "a layer does not run the same number of times")
        sizes = [(one.batch, one.length) for one in made]
        graphs = tuple(generalised(list(regions), sizes, weights, fitter) for regions in zip(*calls, strict=True))
        times = Fraction(1)
        if kind is not None:
            passes = sum(made[0].calls.get(index, 0) for index in kind.layers)
            times = Fraction(passes, len(kind.layers) * len(graphs))
        costs = tuple(cost for graph in graphs for cost in node_costs(graph))
        return PhaseGraph(calls=graphs, costs=costs, times=times)


@contextlib.contextmanager
def eager(model: Any) -> Iterator[None]:
    """Attention and experts as the modelling file itself has them, and what was set before back again whatever happens."""
    with implementations_restored(model) as settings:
        for config, name in settings:
            setattr(config, name, "eager")
        yield


def _on_meta(model: nn.Module) -> bool:
    return next(model.parameters()).is_meta


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error.what}"[:300] if isinstance(error, DayZeroError) else one_line(error)
