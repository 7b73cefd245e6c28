"""What a generalised graph is made of: values and numbers that hold for any length, and the nodes that use them.

Nothing here records, generalises or runs anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dayzero.core.formulas import Formula
from dayzero.ops.graph.fit import Fitter
from dayzero.ops.graph.record import OpCall, Path, Region, RegionKind


class NotGeneral(Exception):
    """Why recordings could not be made one graph."""


@dataclass(frozen=True, slots=True)
class Value:
    """The tensor that a node of the graph made."""

    index: int


@dataclass(frozen=True, slots=True)
class External:
    """Something in the arguments of the region, before it ran."""

    path: Path


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor that a module of the model holds, by its qualified name."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    value: Any


@dataclass(frozen=True, slots=True)
class Number:
    """A whole number that moves with the length or the batch."""

    formula: Formula


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that the code writes down, of whole numbers of which some move with the length."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    numbers: tuple[Literal | Number, ...]


@dataclass(frozen=True, slots=True)
class Items:
    kind: type
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Keyed:
    kind: type
    items: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class Sized:
    """A tensor's shape as formulas, its bytes an element, and the parameter that it is."""

    shape: tuple[Formula, ...]
    item_bytes: int
    is_float: bool
    weight: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class OpNode:
    """One library operator. `outs`: the values it makes, in order (-1: no tensor). `raw`: the calls it stands for."""

    func: Any
    args: Any
    kwargs: Any
    outs: tuple[int, ...]
    inputs: tuple[Sized, ...]
    results: tuple[Sized, ...]
    hidden: bool
    raw: tuple[OpCall, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CallNode:
    """One call that is not opened: a function, or a module (`why` then says why)."""

    kind: RegionKind
    name: str
    target: Any
    args: Any
    kwargs: Any
    outs: tuple[int, ...]
    inputs: tuple[Sized, ...]
    results: tuple[Sized, ...]
    raw: tuple[Region, ...]
    why: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A module that was opened, in its place."""

    name: str
    inputs: tuple[Sized, ...]
    results: tuple[Sized, ...]
    children: tuple[OpNode | CallNode | Block, ...]


Node = OpNode | CallNode | Block


@dataclass(frozen=True, slots=True, eq=False)
class RegionGraph:
    """A region at any length. `out` is its result, `opaque` the nodes that stand for a whole module, with the reason.

    `lengths`: (batch, length) of the calls it was made from. `shortest`: where shorter ones take another path, else 0.
    """

    body: Block
    out: Any
    fitter: Fitter
    lengths: tuple[tuple[int, int], ...]
    opaque: tuple[tuple[str, str], ...]
    shortest: int = 0


def flat(value: Any) -> list[Any]:
    """The leaves of lists, tuples and dictionaries, None left out; objects (caches) are leaves."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flat(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in flat(item)]
    return [] if value is None else [value]
