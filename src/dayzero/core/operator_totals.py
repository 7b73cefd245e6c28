"""A description in, its distinct operators out: how many there are in the whole model and what they cost, as formulas.

The same operator of several layer kinds is one row; formulas are sums over all layers, in B, T and C (`core.formulas`).
"""

from dataclasses import dataclass

from dayzero.core.formulas import ZERO, Formula, evaluate, parse
from dayzero.core.model import PHASES, ModelDescription, OperatorGraph
from dayzero.core.records import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """`count`: sites in one step of the whole model. `flops` and `bytes` are formulas."""

    __pydantic_config__ = STRICT
    count: int = 0
    flops: str = "0"
    bytes: str = "0"

    def at(self, *, sequences: int, new_tokens: int, context_tokens: int) -> tuple[float, float]:
        """(FLOPs, bytes) of one step."""
        sizes = {"B": sequences, "T": new_tokens, "C": context_tokens}
        return evaluate(self.flops, **sizes), evaluate(self.bytes, **sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTotals:
    """One distinct operator. `name` is the first place in the model where it is found."""

    __pydantic_config__ = STRICT
    kind: str
    name: str
    prefill: Totals
    decode: Totals


def graphs_of(model: ModelDescription) -> list[tuple[OperatorGraph, int, str]]:
    """Every operator graph of a model: (graph, number of layers that have it, layer kind or "outside")."""
    layered = [(kind.operators, len(kind.layers), kind.name) for kind in model.layer_kinds]
    return [*layered, (model.outer_operators, 1, "outside")]


def operator_totals(model: ModelDescription) -> tuple[OperatorTotals, ...]:
    """Distinct operators, the most FLOPs of a long decode step first."""
    names: dict[str, str] = {}
    counts: dict[tuple[str, str], int] = {}
    sums: dict[tuple[str, str], tuple[Formula, Formula]] = {}
    for graph, layers, where in graphs_of(model):
        for phase in PHASES:
            for node in graph.of(phase):
                key = (node.kind, phase)
                names.setdefault(node.kind, f"{where}: {node.name}" if node.name else where)
                counts[key] = counts.get(key, 0) + node.count * layers
                flops, moved = sums.get(key, (ZERO, ZERO))
                sums[key] = (flops + parse(node.flops) * layers, moved + parse(node.bytes) * layers)
    found = [
        OperatorTotals(
            kind=kind,
            name=name,
            **{
                phase: Totals(count=counts[kind, phase], flops=str(sums[kind, phase][0]), bytes=str(sums[kind, phase][1]))
                if (kind, phase) in sums
                else Totals()
                for phase in PHASES
            },
        )
        for kind, name in names.items()
    ]
    return tuple(sorted(found, key=lambda one: one.decode.at(sequences=1, new_tokens=1, context_tokens=8192), reverse=True))
