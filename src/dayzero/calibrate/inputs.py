"""What every weight matrix of a layer is given, watched while the layer runs: sums of x x^T, tokens, largest magnitudes.

Matrix products are seen below the module level, where every way of writing one ends: an operand whose memory lies inside a
parameter is one of its matrices, the other operand is what it is given. So a linear module, a stack of experts in either
orientation and a fused projection are all found, and whether a parameter is kept as [input, output] is seen, not assumed.
A matrix reached through a copy of it (gathered experts) is not seen; whoever asks finds no inputs for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# Operators that multiply matrices, and the position of the two operands.
PRODUCTS: dict[Any, tuple[int, int]] = {
    aten.mm.default: (0, 1), aten.addmm.default: (1, 2), aten.bmm.default: (0, 1), aten.baddbmm.default: (1, 2),
    aten.mv.default: (0, 1), aten.addmv.default: (1, 2),
}  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class MatrixName:
    """One matrix of a parameter: its index among those that the leading dimensions count."""

    parameter: str
    index: int = 0


@dataclass(slots=True)
class Seen:
    """`transposed`: the parameter keeps [input, output]. `products` [input, input] sums x x^T where it was asked for;
    `tokens` counts the rows x, `largest` [input] is the largest magnitude of each column,
    `power` [input] its sum of squares."""

    transposed: bool
    largest: torch.Tensor
    power: torch.Tensor
    tokens: float = 0.0
    products: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class InputWatch(TorchDispatchMode):
    """Watches while active. `wanted`: the matrices whose products are summed; None: no sums, all are counted."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], wanted: Callable[[MatrixName], bool] | None = None) -> None:
        super().__init__()
        self.seen: dict[MatrixName, Seen] = {}
        self.doubts: dict[str, str] = {}  # parameter -> a use of it that is no plain product with a whole matrix
        self._wanted = wanted
        self._places = [
            _Place(name, tuple(one.shape), one.data_ptr(), one.data_ptr() + one.numel() * one.element_size())
            for name, one in parameters.items()
            if one.dim() >= 2 and one.numel() and one.is_contiguous()
        ]
        self._last: tuple[torch.Tensor, int, torch.Tensor] | None = None  # an input, its version, its x x^T

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._last = None
        super().__exit__(kind, value, trace)

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if operator in PRODUCTS:
            first, second = PRODUCTS[operator]
            self._product(args[first], args[second])
        return operator(*args, **(kwargs or {}))

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        if (place := self._place(right)) is not None and right.dim() >= 2:
            self._note(place, right.transpose(-1, -2), left)  # rows of x times [input, output]
        elif (place := self._place(left)) is not None:
            vectors = right.unsqueeze(-1) if right.dim() == 1 else right
            self._note(place, left, vectors.transpose(-1, -2))

    def _place(self, tensor: torch.Tensor) -> _Place | None:
        pointer = tensor.data_ptr()
        return next((place for place in self._places if place.start <= pointer < place.stop), None)

    def _note(self, place: _Place, weight: torch.Tensor, inputs: torch.Tensor) -> None:
        """`weight` [..., output, input] as it is multiplied, `inputs` [..., tokens, input]."""
        rows, columns = place.shape[-2:]
        offset = (weight.data_ptr() - place.start) // weight.element_size()
        width = weight.shape[-1]
        if weight.stride(-1) == 1 and weight.stride(-2) == columns and width == columns and offset % columns == 0:
            transposed, share = False, weight.shape[-2] / rows
        elif weight.stride(-2) == 1 and weight.stride(-1) == columns and width == rows:
            transposed, share = True, weight.shape[-2] / columns
        elif width == 1 or weight.shape[-2] == 1:
            return
        else:
            self.doubts[place.name] = "multiplied by a part of its input dimension, or in another layout than its own"
            return
        first = offset // (rows * columns)
        if weight.dim() == 2:
            self._add(MatrixName(place.name, first), transposed, inputs, share)
            return
        if weight.stride(0) != rows * columns:
            if weight.stride(0) == 0:  # one matrix for the whole batch
                self._add(MatrixName(place.name, first), transposed, inputs.reshape(-1, width), share)
            else:
                self.doubts[place.name] = "multiplied in batches that are not its matrices"
            return
        for index in range(weight.shape[0]):
            self._add(MatrixName(place.name, first + index), transposed, inputs[index], share)

    def _add(self, name: MatrixName, transposed: bool, inputs: torch.Tensor, share: float) -> None:
        if inputs.shape[-2] == 0:
            return
        seen = self.seen.get(name)
        if seen is None:
            zeros = torch.zeros(inputs.shape[-1])
            seen = self.seen[name] = Seen(transposed=transposed, largest=zeros, power=zeros.clone())
        if seen.transposed != transposed:
            self.doubts[name.parameter] = "multiplied from both sides"
            return
        sizes = inputs.abs()
        # Some classes give every expert every token and zeros where it was not chosen: those tokens did not reach it.
        seen.tokens += int((sizes.amax(-1) > 0).sum()) * share
        torch.maximum(seen.largest, sizes.amax(-2).float(), out=seen.largest)
        seen.power.add_(sizes.float().square().sum(-2), alpha=share)
        if self._wanted is not None and self._wanted(name):
            products = self._squared(inputs)
            # Rows of a matrix that are multiplied apart are given the same: the sum then counts it by the rows' share.
            seen.products = products * share if seen.products is None else seen.products.add_(products, alpha=share)

    def _squared(self, inputs: torch.Tensor) -> torch.Tensor:
        """x x^T, made once where several matrices are given the same tensor one after the other."""
        last = self._last
        if last is not None and _same(last[0], inputs) and last[1] == inputs._version:
            return last[2]
        rows = inputs.float()
        made = rows.T @ rows
        self._last = (inputs, inputs._version, made)
        return made


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def matrices_of(name: str, shape: tuple[int, ...]) -> list[MatrixName]:
    return [MatrixName(name, index) for index in range(prod(shape[:-2]))]


@dataclass(slots=True)
class LayerInputs:
    """What several watches of one layer saw, added up."""

    seen: dict[MatrixName, Seen] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)

    def add(self, watch: InputWatch) -> None:
        for name, one in watch.seen.items():
            mine = self.seen.get(name)
            if mine is None:
                self.seen[name] = one
                continue
            mine.tokens += one.tokens
            torch.maximum(mine.largest, one.largest, out=mine.largest)
            mine.power.add_(one.power)
            if one.products is not None:
                mine.products = one.products if mine.products is None else mine.products.add_(one.products)
        self.doubts |= watch.doubts
