"""A description, a layout and all ranks' ledgers in; what they do not conserve out. Rests on nothing that the run computed.

Each rank's stored parts are cut back into the boxes of the parameter that the layout assigns to it (`core.sharding`). A box
that several ranks hold (a replica, or both ends of a tie) must have the same origin element by element; distinct boxes must
make up the parameter; read backwards, the origins must reach every element of every source tensor exactly once, or its
record says what was left out. Origins must carry the names that the description expects, experts in their order. What an
operation computed is followed to its tensors, not to their elements. Bytes are read elsewhere (`verify`, `expected`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from dayzero.core.artifact import LedgerEntry
from dayzero.core.model import ModelDescription, Parameter, Problem
from dayzero.core.sharding import Box
from dayzero.core.units import DTYPE_BITS
from dayzero.weights.algebra import Digit, Piece, View, restrict
from dayzero.weights.copying import linear_pieces
from dayzero.weights.ledger import SourceTensor, pieces_of_entry
from dayzero.weights.proof.one_origin import elements, first_flaw

COMPARED_ELEMENTS = 2**20


def problem(kind: str, detail: str, file: str | None = None, tensor: str | None = None) -> Problem:
    return Problem(kind=kind, severity="error", detail=detail, file=file, tensor=tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """One box of a parameter as one rank stores it."""

    rank: int
    entry: LedgerEntry
    box: Box
    start: int  # where it begins in the stored tensor, along `dim`
    dim: int
    part: View
    flat: tuple[Piece, ...]

    def place(self, element: int) -> str:
        """Where an element of the box lies, in words."""
        where = list(np.unravel_index(element, self.part.shape)) if self.part.shape else []
        local = [int(at) + (self.start if dim == self.dim else 0) for dim, at in enumerate(where)]
        return place_of(self.rank, self.entry, flat_index(local, self.entry.shape))


def flat_index(index: list[int], shape: tuple[int, ...]) -> int:
    return sum(at * prod(shape[dim + 1 :]) for dim, at in enumerate(index))


def place_of(rank: int, entry: LedgerEntry, element: int) -> str:
    return f"rank {rank}, {entry.file}, offset {entry.offset + element * DTYPE_BITS[entry.dtype] // 8}"


class Conservation:
    """Feed it every ledger line of every rank, then ask for the problems."""

    def __init__(self, model: ModelDescription, sources: Mapping[str, SourceTensor]) -> None:
        self.problems: list[Problem] = []
        self._sources = sources
        self._parameters = {parameter.name: parameter for parameter in model.parameters}
        self._names: dict[str, list[str]] = {}
        for parameter in model.parameters:
            self._names.setdefault(self._root(parameter.name), []).extend(parameter.sources)
        self._held: dict[str, dict[Box, _Held]] = {}
        self._experts: dict[tuple[str, str], set[tuple[int, int]]] = {}

    def _root(self, name: str) -> str:
        """The parameter whose elements this one shares, through any number of ties."""
        seen = {name}
        while (tied := self._parameters[name].tied_to) is not None and tied in self._parameters and tied not in seen:
            name = tied
            seen.add(name)
        return name

    def add(self, rank: int, entry: LedgerEntry, parameter: Parameter, boxes: tuple[Box, ...]) -> None:
        """A stored tensor, in the shape that `boxes` make."""
        pieces = pieces_of_entry(entry, self._sources)
        if isinstance(pieces, str):
            self._note("ledger", f"{place_of(rank, entry, 0)}: the line of {entry.parameter} {pieces}", entry)
            return
        whole = View(entry.shape, entry.dtype, tuple(pieces))
        if (flaw := first_flaw(linear_pieces(whole), prod(entry.shape))) is not None:
            detail = f"{place_of(rank, entry, flaw[0])}: {flaw[1]} origins for this element of {entry.parameter}"
            self._note("conservation", detail, entry)
            return
        dim, start = parameter.shard.tensor_dim or 0, 0
        for box in boxes:
            size = box[dim][1] - box[dim][0] if box else 0
            part = whole if len(boxes) == 1 else whole.slice(dim, start, start + size)
            held = _Held(rank=rank, entry=entry, box=box, start=start, dim=dim, part=part, flat=tuple(linear_pieces(part)))
            start += size
            self._add_box(held, parameter)

    def _add_box(self, held: _Held, parameter: Parameter) -> None:
        first = self._held.setdefault(parameter.name, {}).setdefault(held.box, held)
        if first is held:
            self._check_names(held, self._root(parameter.name))
        else:
            self._compare(first, held)

    def _compare(self, first: _Held, held: _Held) -> None:
        element = 0 if first.entry.dtype != held.entry.dtype else first_difference(first.flat, held.flat, held.part)
        if element is None:
            return
        detail = (f"{held.place(element)}: this element of {held.entry.parameter} comes from "
                  f"{self._origin(held.flat, element)}, its replica at {first.place(element)} from "
                  f"{self._origin(first.flat, element)}")  # fmt: skip
        self._note("conservation", detail, held.entry)

    def _check_names(self, held: _Held, root: str) -> None:
        """Origins are those the description names; of experts, each in its own place."""
        patterns = [(name, re.compile(re.escape(name).replace(r"\*", r"(\d+)") + r"\Z")) for name in self._names[root]]
        expert_dim = self._parameters[root].shard.expert_dim
        if not patterns:
            return  # a buffer, or a description made without the checkpoint's names
        for piece in held.part.pieces:
            if piece.source not in self._sources:
                continue  # an operation's result
            found = next(((name, match) for name, one in patterns if (match := one.match(piece.source))), None)
            if found is None:
                where = held.place(flat_index(list(piece.base), held.part.shape))
                detail = (f"{where}: {held.entry.parameter} is filled from {piece.source}, which is none of its sources "
                          f"({', '.join(sorted(self._names[root]))})")  # fmt: skip
                self._note("conservation", detail, held.entry)
            elif expert_dim is not None and found[1].groups() and not piece.extent(expert_dim):
                position = held.box[expert_dim][0] + piece.base[expert_dim]
                # The last number in a name is the expert's: those before it are what the description could not tell apart.
                self._experts.setdefault((held.entry.parameter, found[0]), set()).add((position, int(found[1].groups()[-1])))

    def finish(self) -> list[Problem]:
        for name, boxes in self._held.items():
            shape = self._parameters[name].shape
            pieces = tuple(_box_piece(box, shape) for box in boxes)
            if (flaw := first_flaw(linear_pieces(View(shape, "uint8", pieces)), prod(shape))) is not None:
                detail = f"{flaw[1]} of the parts that ranks hold have element {flaw[0]} of {name}"
                self.problems.append(problem("coverage", detail, next(iter(boxes.values())).entry.file, name))
            for box, held in boxes.items():  # both ends of a tie
                if (first := self._held[self._first_of_tie[name]].get(box)) is not None and first is not held:
                    self._compare(first, held)
        for (name, pattern), pairs in self._experts.items():
            for before, after in pairwise(sorted(pairs)):
                if after[0] == before[0] or after[1] <= before[1]:
                    held = next(one for one in self._held[name].values() if _has_expert(one, self._parameters[name], after[0]))
                    detail = (f"{place_of(held.rank, held.entry, 0)}: expert {after[0]} of {name} comes from number "
                              f"{after[1]} of {pattern}, after number {before[1]}")  # fmt: skip
                    self._note("conservation", detail, held.entry)
                    break
        for name, source in self._sources.items():
            if source.dropped is None:
                self._check_source(source, self._reaching.get(name, []), name in self._operands)
        return self.problems

    @cached_property
    def _first_of_tie(self) -> dict[str, str]:
        """For each stored parameter, the first stored one that shares its elements."""
        first: dict[str, str] = {}
        return {name: first.setdefault(self._root(name), name) for name in self._held}

    @cached_property
    def _reaching(self) -> dict[str, list[tuple[Piece, _Held]]]:
        """Each source's pieces; replicas and both ends of a tie once."""
        found: dict[str, list[tuple[Piece, _Held]]] = {}
        for name, boxes in self._held.items():
            if self._first_of_tie[name] == name:
                for held in boxes.values():
                    for piece in held.flat:
                        found.setdefault(piece.source, []).append((piece, held))
        return found

    @cached_property
    def _operands(self) -> set[str]:
        """Sources that operations read whole."""
        return {
            one.tensor
            for boxes in self._held.values() for held in boxes.values()
            if any(piece.source not in self._sources for piece in held.flat)
            for one in held.entry.sources
        }  # fmt: skip

    def _check_source(self, source: SourceTensor, reaching: list[tuple[Piece, _Held]], is_operand: bool) -> None:
        """Every element of a source tensor reaches one element of one parameter."""
        if is_operand or not reaching:
            return  # operations are not followed to elements; a source that reaches nothing is told by the caller
        total = prod(source.shape)
        backwards = sorted((_backwards(piece) for piece, _ in reaching), key=lambda piece: piece.base)
        flaw = first_flaw(backwards, total, holes=source.partly_used is not None)
        if flaw is None:
            return
        element, count = flaw
        offset = element * DTYPE_BITS[source.dtype] // 8
        if count == 0:
            detail = f"{source.file}: the element at byte {offset} of {source.tensor} reaches no rank, and nothing says why"
            file: str | None = source.file
        else:
            holders = [held for piece, held in reaching if element in elements(piece, of_source=True)]
            places = "; ".join(f"{held.entry.parameter} ({place_of(held.rank, held.entry, 0)})" for held in holders[:4])
            detail = f"the element at byte {offset} of {source.tensor} fills {count} elements: {places}"
            file = holders[0].entry.file if holders else source.file
        self.problems.append(problem("conservation", detail, file, source.tensor))

    def _origin(self, flat: tuple[Piece, ...], element: int) -> str:
        for piece in flat:
            for part in restrict(piece, 0, element, element + 1):
                return f"element {part.offset} of {part.source}" + "".join(f" as {cast}" for cast in part.casts)
        return "nowhere"

    def _note(self, kind: str, detail: str, entry: LedgerEntry) -> None:
        self.problems.append(problem(kind, detail, entry.file, entry.parameter))


def _has_expert(held: _Held, parameter: Parameter, expert: int) -> bool:
    assert parameter.shard.expert_dim is not None
    start, stop = held.box[parameter.shard.expert_dim]
    return start <= expert < stop


def _box_piece(box: Box, shape: tuple[int, ...]) -> Piece:
    digits = tuple(Digit(stop - start, dim, 1, 0) for dim, (start, stop) in enumerate(box) if stop - start > 1)
    return Piece("", "uint8", 0, tuple(start for start, _ in box), digits)


def _backwards(piece: Piece) -> Piece:
    """Over the source's elements instead of the target's."""
    return Piece("", piece.dtype, 0, (piece.offset,), tuple(Digit(digit.size, 0, digit.stride, 0) for digit in piece.digits))


def first_difference(first: tuple[Piece, ...], second: tuple[Piece, ...], view: View) -> int | None:
    """The first element whose origins differ. Pieces are compared as they are; element by element only where they differ."""
    if first == second:
        return None
    names: dict[tuple[str, tuple[str, ...]], int] = {}
    for start in range(0, view.num_elements, COMPARED_ELEMENTS):
        stop = min(start + COMPARED_ELEMENTS, view.num_elements)
        (one, one_at), (other, other_at) = (_origins(pieces, start, stop, names) for pieces in (first, second))
        wrong = np.nonzero((one != other) | (one_at != other_at))[0]
        if len(wrong):
            return start + int(wrong[0])
    return None


def _origins(
    pieces: tuple[Piece, ...], start: int, stop: int, names: dict[tuple[str, tuple[str, ...]], int]
) -> tuple[np.ndarray, np.ndarray]:
    """For each element: a number for its source (and casts), and the element of the source."""
    source, at = np.full(stop - start, -1, dtype=np.int64), np.full(stop - start, -1, dtype=np.int64)
    for piece in pieces:
        number = names.setdefault((piece.source, piece.casts), len(names))
        for part in restrict(piece, 0, start, stop):
            where = elements(part) - start
            source[where], at[where] = number, elements(part, of_source=True)
    return source, at
