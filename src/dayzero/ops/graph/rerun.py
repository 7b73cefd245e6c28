"""Runs a generalised graph on real tensors, at any length: the proof that it is the region it was recorded from.

Goes in: the graph, the model whose weights it names, the arguments of the region (caches included; they are written to, so
give copies) and the sizes. Comes out: what the region returns. Nodes that are a whole module or function call it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.core.formulas import Formula
from dayzero.ops.graph.nodes import Block, External, Items, Keyed, Literal, Made, Node, Number, RegionGraph, Value, Weight, flat
from dayzero.ops.graph.record import Path


@dataclass(slots=True)
class _Run:
    model: nn.Module
    roots: dict[str, Any]
    sizes: Mapping[str, int]
    values: dict[int, Any] = field(default_factory=dict)
    held: dict[Path, Any] = field(default_factory=dict)

    def node(self, node: Node) -> None:
        if isinstance(node, Block):
            for child in node.children:
                self.node(child)
            return
        called = node.func if hasattr(node, "func") else node.target
        out = called(*self.tree(node.args), **self.tree(node.kwargs))
        leaves = flat(out)
        assert len(leaves) == len(node.outs), (called, len(leaves), len(node.outs))
        for index, leaf in zip(node.outs, leaves, strict=True):
            if index >= 0:
                self.values[index] = leaf

    def tree(self, value: Any) -> Any:
        match value:
            case Value(index=index):
                return self.values[index]
            case External(path=path):
                return self.held[path]
            case Weight(name=name):
                return _named(self.model, name)
            case Literal(value=literal):
                return literal
            case Number(formula=formula):
                return self._number(formula)
            case Made(dtype=dtype, shape=shape, numbers=numbers):
                return torch.tensor([self.tree(number) for number in numbers], dtype=dtype).reshape(shape)
            case Items(kind=kind, items=items):
                parts = [self.tree(item) for item in items]
                return slice(*parts) if kind is slice else parts if kind is list else tuple(parts)
            case Keyed(items=items):
                return {key: self.tree(item) for key, item in items}
        raise AssertionError(f"not a part of a graph: {value!r}")

    def _number(self, formula: Formula) -> int:
        number = formula.value(**self.sizes)
        assert number == int(number), (str(formula), self.sizes, number)
        return int(number)

    def hold(self, node: Any) -> None:
        """What lies in the arguments is looked up before anything runs: running replaces a cache's tensors."""
        match node:
            case Block(children=children):
                for child in children:
                    self.hold(child)
            case External(path=path):
                self.held[path] = _at(self.roots, path)
            case Items(items=items):
                for item in items:
                    self.hold(item)
            case Keyed(items=pairs):
                for _, item in pairs:
                    self.hold(item)
            case _ if hasattr(node, "args"):
                self.hold(node.args)
                self.hold(node.kwargs)


def _at(roots: Mapping[str, Any], path: Path) -> Any:
    found: Any = roots
    for how, what in path:
        if how == "made":
            found = found["made"][what]
        else:
            found = getattr(found, what) if how == "a" else found[what]
    return found


def _named(model: nn.Module, name: str) -> Tensor:
    module, _, last = name.rpartition(".")
    return getattr(model.get_submodule(module), last)


@torch.no_grad()
def run(
    graph: RegionGraph,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    sizes: Mapping[str, int],
    made: Sequence[Any] = (),
) -> Any:
    """`sizes`: B, T and C. `made`: caches that the model itself would have made, still empty."""
    state = _Run(model, {"args": tuple(args), "kwargs": dict(kwargs), "made": list(made)}, sizes)
    state.hold(graph.body)
    state.hold(graph.out)
    state.node(graph.body)
    return state.tree(graph.out)
