"""Which operators of a model are library calls, fused, composed, falling back or missing on a target, and what each carries.

Goes in: a `ModelDescription` with its operator graph and what is declared for the device, operator by operator (`declared`
evidence), or the `OperatorMap` of a device that was reached (`measured`). Comes out: a `TargetCoverage`. It knows no device
and reads no file: `devices.declared` does. An operator that nothing is declared for is `unknown` and told apart.

`library` is one call of torch's own operator or of the vendor's library, `fused` one kernel that does the work of several of
torch's operators, `composed` several calls, `fallback` the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from dayzero.core.formulas import evaluate
from dayzero.core.model import PHASES, ModelDescription, OperatorNode, Phase
from dayzero.core.operator_totals import graphs_of
from dayzero.core.operators import Binding, Coverage, OperatorMap
from dayzero.core.records import STRICT

CoverageBinding = Binding | Literal["unknown"]
# The order in which bindings are shown: what runs well first.
ORDER: tuple[CoverageBinding, ...] = ("library", "fused", "custom", "composed", "fallback", "missing", "unknown")
VIEW = "view"  # the signature of a site that only changes a shape
# The kind of a module whose inside the graph could not follow.
UNOPENED = "module"
NOT_NAMED = "no table of the device or of torch's operators names it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """What is known of one operator on a device without running it. `table`: whose declaration it is, a device or `any`.

    `conditions` are for a reader: nothing checks a model against them.
    """

    __pydantic_config__ = STRICT
    binding: Binding
    kernel: str
    source: str
    table: str
    reason: str = ""
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseCoverage:
    """One pass over all layers: its FLOPs and bytes (None, as the batch is, where only shares were recorded).

    `free_sites` do no work (views, changes of shape) and are in no binding.
    """

    __pydantic_config__ = STRICT
    batch: int | None
    new_tokens: int
    context_tokens: int | None
    flops: float | None
    bytes: float | None
    bindings: dict[str, Coverage] = field(default_factory=dict)
    free_sites: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCoverage:
    """One kind of operator on the device. `prefill` and `decode`: None where the phase does not call it."""

    __pydantic_config__ = STRICT
    kind: str
    binding: CoverageBinding
    kernel: str
    reason: str
    source: str = ""
    table: str = ""
    conditions: tuple[str, ...] = ()
    prefill: Coverage | None = None
    decode: Coverage | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetCoverage:
    """`operators`: those that carry the most bytes of a decode step first. `notes`: what is not counted, and why."""

    SCHEMA: ClassVar[str] = "dayzero.coverage/1"
    __pydantic_config__ = STRICT

    model: str
    device: str
    evidence: Literal["declared", "measured"]
    prefill: PhaseCoverage | None
    decode: PhaseCoverage | None
    operators: tuple[OperatorCoverage, ...]
    notes: tuple[str, ...] = ()

    @property
    def unknown(self) -> tuple[str, ...]:
        """Operators that no table knows."""
        return tuple(operator.kind for operator in self.operators if operator.binding == "unknown")


@dataclass(slots=True)
class _Sum:
    sites: int = 0
    flops: float = 0.0
    bytes: float = 0.0


def kinds_of(model: ModelDescription) -> tuple[str, ...]:
    """Every kind of operator in the model's graphs, each once, in the order they run."""
    nodes = (node for phase in PHASES for node, _ in _nodes(model, phase))
    return tuple(dict.fromkeys(node.kind for node in nodes))


def coverage_of(
    model: ModelDescription,
    declared: Mapping[str, Declared],
    *,
    device: str,
    batch: int = 1,
    prompt_tokens: int = 2048,
    context_tokens: int = 2048,
    notes: Iterable[str] = (),
) -> TargetCoverage:
    """From declarations: a prefill of `batch` prompts of `prompt_tokens`, a decode step at `context_tokens` a sequence."""
    sizes = {"prefill": (prompt_tokens, prompt_tokens), "decode": (1, context_tokens)}
    by_kind: dict[Phase, dict[str, _Sum]] = {}
    phases: dict[Phase, PhaseCoverage | None] = {}
    for phase in PHASES:
        new, context = sizes[phase]
        by_kind[phase], free = _sums(model, phase, batch, new, context)
        phases[phase] = _phase(by_kind[phase], free, declared, (batch, new, context))
    kinds = list(dict.fromkeys(kind for phase in PHASES for kind in by_kind[phase]))
    operators = [_operator(kind, declared.get(kind), by_kind) for kind in kinds]
    return TargetCoverage(
        model=model.name,
        device=device,
        evidence="declared",
        prefill=phases["prefill"],
        decode=phases["decode"],
        operators=_sorted(operators),
        notes=(*notes, *_uncounted(model)),
    )


def coverage_from_map(operator_map: OperatorMap) -> TargetCoverage:
    """From the sites of a map, whose shares are those of a decode step at the context it was made for."""
    free = sum(len(site.names) for site in operator_map.sites if site.signature == VIEW)
    groups: dict[tuple[str, str, str], OperatorCoverage] = {}
    bindings: dict[str, Coverage] = {}
    for site in operator_map.sites:
        if site.signature == VIEW:
            continue
        own = Coverage(sites=len(site.names), flops_share=site.flops_share, bytes_share=site.bytes_share)
        bindings[site.binding] = _plus(bindings.get(site.binding), own)
        key = (site.operator, site.binding, site.kernel)
        known = groups.get(key)
        reason = site.reason if known is None or site.reason in known.reason else f"{known.reason}; {site.reason}"
        groups[key] = OperatorCoverage(
            kind=site.operator, binding=site.binding, kernel=site.kernel, reason=reason,
            decode=_plus(known.decode if known else None, own),
        )  # fmt: skip
    decode = PhaseCoverage(
        batch=None, new_tokens=1, context_tokens=None, flops=None, bytes=None, bindings=_ordered(bindings), free_sites=free
    )
    return TargetCoverage(
        model=operator_map.model,
        device=operator_map.device,
        evidence="measured",
        prefill=None,
        decode=decode if operator_map.sites else None,
        operators=_sorted(groups.values()),
        notes=operator_map.fallbacks,
    )


def coverage_summary(coverage: TargetCoverage) -> dict[str, Any]:
    """The field `coverage` that scripts read: by phase and binding the count and the shares, then the operators."""
    operators: list[dict[str, Any]] = []
    for operator in coverage.operators:
        told: dict[str, Any] = {
            "kind": operator.kind, "binding": operator.binding, "kernel": operator.kernel, "reason": operator.reason,
            "source": operator.source, "conditions": list(operator.conditions),
        }  # fmt: skip
        operators.append(told | {phase: _shares(one) for phase in PHASES if (one := getattr(operator, phase))})
    found: dict[str, Any] = {"device": coverage.device, "evidence": coverage.evidence}
    for phase in PHASES:
        whole: PhaseCoverage | None = getattr(coverage, phase)
        found[phase] = {binding: _shares(part) for binding, part in whole.bindings.items()} if whole else None
    return found | {"operators": operators, "unknown": list(coverage.unknown), "notes": list(coverage.notes)}


def _shares(part: Coverage) -> dict[str, float]:
    return {"count": part.sites, "flops_share": part.flops_share, "bytes_share": part.bytes_share}


def _nodes(model: ModelDescription, phase: Phase) -> Iterator[tuple[OperatorNode, int]]:
    """Each node of a phase and how many layers have it; 1 outside the layers."""
    for graph, layers, _ in graphs_of(model):
        for node in graph.of(phase):
            yield node, layers


def _sums(model: ModelDescription, phase: Phase, batch: int, new: int, context: int) -> tuple[dict[str, _Sum], int]:
    """Count, FLOPs and bytes of each kind over all layers, and how many sites do no work."""
    found: dict[str, _Sum] = {}
    free = 0
    for node, layers in _nodes(model, phase):
        flops, moved = (evaluate(formula, B=batch, T=new, C=context) for formula in (node.flops, node.bytes))
        if not flops and not moved:
            free += node.count * layers
            continue
        one = found.setdefault(node.kind, _Sum())
        one.sites += node.count * layers
        one.flops += flops * layers
        one.bytes += moved * layers
    return found, free


def _phase(
    sums: Mapping[str, _Sum], free: int, declared: Mapping[str, Declared], sizes: tuple[int, int, int]
) -> PhaseCoverage | None:
    if not sums:
        return None
    bindings: dict[str, Coverage] = {}
    for kind, one in sums.items():
        binding = declared[kind].binding if kind in declared else "unknown"
        bindings[binding] = _plus(bindings.get(binding), _share(one, sums))
    return PhaseCoverage(
        batch=sizes[0],
        new_tokens=sizes[1],
        context_tokens=sizes[2],
        flops=sum(one.flops for one in sums.values()),
        bytes=sum(one.bytes for one in sums.values()),
        bindings=_ordered(bindings),
        free_sites=free,
    )


def _share(one: _Sum, sums: Mapping[str, _Sum]) -> Coverage:
    flops, moved = (sum(getattr(each, name) for each in sums.values()) or 1.0 for name in ("flops", "bytes"))
    return Coverage(sites=one.sites, flops_share=one.flops / flops, bytes_share=one.bytes / moved)


def _operator(kind: str, known: Declared | None, by_kind: Mapping[Phase, Mapping[str, _Sum]]) -> OperatorCoverage:
    parts = {phase: _share(sums[kind], sums) if kind in sums else None for phase, sums in by_kind.items()}
    if known is None:
        why = "what it calls could not be followed" if kind == UNOPENED else NOT_NAMED
        return OperatorCoverage(
            kind=kind, binding="unknown", kernel="", reason=why,
            prefill=parts["prefill"], decode=parts["decode"],
        )  # fmt: skip
    return OperatorCoverage(
        kind=kind, binding=known.binding, kernel=known.kernel, reason=known.reason or f"declared for {known.table}",
        source=known.source, table=known.table, conditions=known.conditions,
        prefill=parts["prefill"], decode=parts["decode"],
    )  # fmt: skip


def _plus(one: Coverage | None, other: Coverage) -> Coverage:
    if one is None:
        return other
    return replace(
        one,
        sites=one.sites + other.sites,
        flops_share=one.flops_share + other.flops_share,
        bytes_share=one.bytes_share + other.bytes_share,
    )


def _ordered(bindings: Mapping[str, Coverage]) -> dict[str, Coverage]:
    return {binding: bindings[binding] for binding in ORDER if binding in bindings}


def _sorted(operators: Iterable[OperatorCoverage]) -> tuple[OperatorCoverage, ...]:
    def carried(operator: OperatorCoverage) -> tuple[float, float]:
        parts = [part.bytes_share if part else 0.0 for part in (operator.decode, operator.prefill)]
        return -parts[0], -parts[1]

    return tuple(sorted(operators, key=carried))


def _uncounted(model: ModelDescription) -> list[str]:
    """What the graphs leave out, in plain words: shares are of the rest."""
    notes: list[str] = []
    for kind in model.layer_kinds:
        for phase in PHASES:
            if not kind.operators.of(phase):
                why = "; ".join(note for note in kind.operators.notes) or "no operator graph"
                notes.append(f"the {phase} of {len(kind.layers)} layers ({kind.name}) is not counted: {why}")
    if model.towers:
        notes.append(f"towers are not counted: {', '.join(model.towers)}")
    if model.mtp_parameters:
        notes.append("multi-token-prediction layers are not counted")
    return notes
