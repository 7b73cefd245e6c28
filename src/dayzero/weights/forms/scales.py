"""Stored scales or zero points and the matrix they belong to in; float32 numbers for the blocks of a run of its rows out.

A tensor is seen as matrices [R, C] (its last two dimensions), each with a grid of numbers, one a block. Shapes are checked
when a grid is made, values (NaN, infinity) when they are read. Nothing is kept between reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

import torch

from dayzero.core.errors import DayZeroError
from dayzero.core.units import DTYPE_BITS
from dayzero.model.headers import TensorEntry
from dayzero.model.stored.scales import Packing
from dayzero.weights.decoding import ReadStored
from dayzero.weights.forms.values import exponent_scales, float8_values, number_scales, signed_codes, unpack_words

Meaning = Literal["number", "exponent", "fp8"]  # as `model.stored.scales.scale_meaning` tells it
Block = tuple[int, int]  # rows and columns, 0 spans the dimension


class Numbers(Protocol):
    """What `rows` asks of a grid: `block`, and float32 numbers [last - first, columns] of one matrix's lines of blocks."""

    @property
    def block(self) -> Block: ...
    @property
    def sources(self) -> tuple[str, ...]: ...
    def read(self, read: ReadStored, matrix: int, first: int, last: int) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """One number a block, stored as they are. `second`: a number for the whole tensor that these are multiplied with or
    divided by, in float32, before anything else."""

    name: str
    dtype: str
    shape: tuple[int, int]  # of one matrix: lines of blocks, blocks in a line
    block: Block
    meaning: Meaning = "number"
    second: tuple[str, str, Literal["multiply", "divide"]] | None = None  # (tensor, its dtype, what is done)

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.name, self.second[0]) if self.second else (self.name,)

    def read(self, read: ReadStored, matrix: int, first: int, last: int) -> torch.Tensor:
        lines, across = self.shape
        size = DTYPE_BITS[self.dtype] // 8
        raw = read(self.name, (matrix * lines + first) * across * size, (last - first) * across * size)
        stored = torch.frombuffer(raw, dtype=getattr(torch, self.dtype)).reshape(last - first, across)
        at = (matrix * lines + first, 0)
        if self.meaning == "exponent":
            numbers = exponent_scales(stored, name=self.name, first=at)
        else:
            typed = stored.view(torch.float8_e4m3fn) if self.meaning == "fp8" else stored
            numbers = number_scales(typed, name=self.name, first=at)
        if self.second is None:
            return numbers
        name, dtype, operation = self.second
        single = torch.frombuffer(read(name, 0, DTYPE_BITS[dtype] // 8), dtype=getattr(torch, dtype))
        whole = number_scales(single, name=name)
        if operation == "multiply":
            return numbers * whole
        if float(whole) == 0:
            raise DayZeroError(f"{name} is zero", got="a division by it", want="the number that scales were multiplied with",
                               fix="download the file again, or use another release of the model")  # fmt: skip
        return numbers / whole


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroPoints:
    """Zero points beside integer codes, as whole numbers of any dtype."""

    name: str
    dtype: str
    shape: tuple[int, int]
    block: Block

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, read: ReadStored, matrix: int, first: int, last: int) -> torch.Tensor:
        lines, across = self.shape
        size = DTYPE_BITS[self.dtype] // 8
        raw = read(self.name, (matrix * lines + first) * across * size, (last - first) * across * size)
        stored = torch.frombuffer(raw, dtype=getattr(torch, self.dtype)).reshape(last - first, across)
        return float8_values(stored) if self.dtype.startswith("float8") else stored.to(torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedZeroPoints:
    """Zero points of packed codes, packed themselves along the rows into int32 words [W, G], for one matrix."""

    name: str
    bits: int
    shape: tuple[int, int]
    block: Block
    packing: Packing

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, read: ReadStored, matrix: int, first: int, last: int) -> torch.Tensor:
        assert matrix == 0, matrix
        lines, across = self.shape
        per = 32 // self.bits
        low, high = first // per, -(-last // per)
        raw = read(self.name, low * across * 4, (high - low) * across * 4)
        words = torch.frombuffer(raw, dtype=torch.int32).reshape(high - low, across)
        inner = min(high * per, lines) - low * per
        codes = unpack_words(words.T, self.packing, self.bits, (across, inner)).T
        return signed_codes(codes[first - low * per : last - low * per], self.bits).to(torch.float32)


def matrices_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(how many matrices, rows, columns) of a tensor; a vector is one row."""
    return prod(shape[:-2]), shape[-2] if len(shape) > 1 else 1, shape[-1]


def fit_grid(
    name: str, stored: TensorEntry, weight: str, shape: tuple[int, ...], declared: Iterable[Block]
) -> tuple[tuple[int, int], Block]:
    """(grid of one matrix, block) by which `stored` belongs to a weight of logical `shape`: the first of the declared blocks
    that gives the stored number of scales. Raises DayZeroError naming both shapes where none does."""
    lead, (_, rows, columns) = shape[:-2], matrices_of(shape)
    wanted = []
    for block in declared:
        down, across = (-(-size // (step or max(size, 1))) for size, step in zip((rows, columns), block, strict=True))
        shapes = [(*lead, down, across)]
        if across == 1:
            shapes.append((*lead, down))
        if down == across == 1:
            shapes += [lead, (*lead, 1)]
            shapes += [(), (1,)] if prod(lead) == 1 else []
        if stored.shape in shapes:
            return (down, across), block
        wanted.append((block, shapes[0]))
    blocks = " or ".join(f"{list(grid)} (blocks of {_spelt(block)})" for block, grid in wanted)
    raise DayZeroError(f"{name} does not fit {weight}", got=f"scales {list(stored.shape)} for a matrix {list(shape)}",
                       want=blocks or "a declared block size",
                       fix="check the block size that the release declares, or download it again")  # fmt: skip


def _spelt(block: Block) -> str:
    return "x".join(str(step) if step else "all" for step in block)
