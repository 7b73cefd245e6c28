"""Whole numbers seen at several batch sizes and lengths in, the formula that gives each of them exactly out.

A size of a decoder is constant, proportional to the batch, affine in the length, or follows a window (`min`), a chunk
(`ceil`, `//`) or a product of those. Candidates for windows and chunks are numbers found in the model. A formula is only
taken where there are at least one or two points more than free numbers. What fits nothing is None: the caller says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from dayzero.core.formulas import Formula, Terms

# (batch, length, value)
Point = tuple[int, int, int]
MAX_PAIR_LIMITS = 12  # limits that are also tried two at a time


@dataclass(frozen=True, slots=True)
class Atom:
    """A quantity that a size may be affine in, and its value at each length."""

    text: str
    values: tuple[int, ...]


@dataclass(slots=True)
class Fitter:
    """`variable`: the name of the length in formulas. `limits`: candidate windows and chunks, the likeliest first. `shapes`:
    formulas of whole shapes that were asked for before, for `unify`."""

    variable: str
    limits: Sequence[int]
    shapes: dict[Hashable, tuple[Formula, ...]] = field(default_factory=dict)
    _known: dict[tuple[tuple[Point, ...], bool], Formula | None] = field(default_factory=dict)
    _atoms: dict[tuple[int, ...], list[Atom]] = field(default_factory=dict)

    def fit(self, points: Sequence[Point], *, products: bool = False) -> Formula | None:
        """The formula of these values. `products`: also those of two quantities, as costs have."""
        first = points[0][2]
        if all(value == first for _, _, value in points):
            return Formula.number(first)
        key = (tuple(points), products)
        if key not in self._known:
            self._known[key] = self._fit(points, products)
        return self._known[key]

    def _fit(self, points: Sequence[Point], products: bool) -> Formula | None:
        power = _batch_law(points)
        if power is None:
            return self._mixed(points, products) if products else None
        if any(value % size**power for size, _, value in points):
            return None
        points = [(size, length, value // size**power) for size, length, value in points]
        seen = {length: value for _, length, value in points}
        if any(seen[length] != value for _, length, value in points):
            return None
        lengths = tuple(sorted(seen))
        found = self._in_length(lengths, [seen[length] for length in lengths], products)
        return None if found is None else found * Formula.of({("B",) * power: Fraction(1)})

    def _mixed(self, points: Sequence[Point], products: bool) -> Formula | None:
        """A part that the batch shares (weights: constant; position tables and masks: growing) and a part for each sequence."""
        pairs = [(one, two) for one in points for two in points if one[1] == two[1] and one[0] < two[0]]
        (size, at, low), (other, _, high) = pairs[0]
        shared = low - Fraction(high - low, other - size) * size
        for power in (0, 1, 2):
            factor = shared / at**power
            rest = [(b, n, (value - factor * n**power) / b) for b, n, value in points]
            if shared > 0 and all(value.denominator == 1 for _, _, value in rest):
                seen = {n: int(value) for _, n, value in rest}
                lengths = tuple(sorted(seen))
                if all(seen[n] == value for _, n, value in rest):
                    found = self._in_length(lengths, [seen[n] for n in lengths], products)
                    if found is not None:
                        return found * Formula.atom("B") + Formula.of({(self.variable,) * power: factor})
        return None

    def _in_length(self, lengths: tuple[int, ...], values: list[int], products: bool) -> Formula | None:
        if all(value == values[0] for value in values):
            return Formula.number(values[0])
        length = Atom(self.variable, lengths)
        for basis in self._bases(length, lengths, values, products):
            spare = 1 if len(basis) < 3 else 2  # a basis of many quantities and a choice of limits fits much by chance
            if len(values) > len(basis) + spare and (found := _solve(basis, values)) is not None:
                return found
        return None

    def _bases(
        self, length: Atom, lengths: tuple[int, ...], values: list[int], products: bool
    ) -> Iterator[tuple[tuple[Atom, ...], ...]]:
        """Bases, the simplest first: each is a tuple of products of atoms, a constant always added."""
        yield ((length,),)
        if products:
            yield ((length, length), (length,))
        atoms = self._atoms_at(lengths)
        for atom in atoms:
            yield ((atom,),)
        for atom in atoms:
            yield ((length,), (atom,))
        if broken := _breakpoint(lengths, values):
            yield ((length,), (Atom(f"min({self.variable}, {broken})", tuple(min(n, broken) for n in lengths)),))
        for one, two in self._pairs(lengths):
            yield ((one,), (two,))
        if products:
            for atom in atoms:
                yield ((atom, atom),)
            for atom in atoms:
                yield ((atom, atom), (atom,))
                yield ((length, atom), (length,), (atom,))
                yield ((length, length), (length,), (atom,))
            for k in self.limits:
                # Whole chunks, and the rest that is shorter: sums over chunks, and over tokens that see whole chunks.
                chunks = Atom(f"({self.variable}//{k})", tuple(n // k for n in lengths))
                rest = Atom(f"({self.variable} - {k}*({self.variable}//{k}))", tuple(n % k for n in lengths))
                yield ((length,), (rest, rest), (rest,))
                yield ((length, chunks), (chunks, chunks), (length,), (chunks,))
                yield ((length, length), (length, chunks), (length,), (chunks,))

    def _atoms_at(self, lengths: tuple[int, ...]) -> list[Atom]:
        if lengths not in self._atoms:
            distinct: dict[tuple[int, ...], Atom] = {}
            for atom in self._all_atoms(lengths):
                if len(set(atom.values)) > 1 and atom.values != lengths:
                    distinct.setdefault(atom.values, atom)
            self._atoms[lengths] = list(distinct.values())
        return self._atoms[lengths]

    def _pairs(self, lengths: tuple[int, ...]) -> Iterator[tuple[Atom, Atom]]:
        """A window and what is compressed beyond it."""
        x, few = self.variable, self.limits[:MAX_PAIR_LIMITS]
        for window in few:
            for k in few:
                for shift in (0, -1):
                    text = f"({x}//{k})" if not shift else f"(({x} - 1)//{k})"
                    window_values = tuple(min(n, window) for n in lengths)
                    yield Atom(f"min({x}, {window})", window_values), Atom(text, tuple((n + shift) // k for n in lengths))

    def _all_atoms(self, lengths: tuple[int, ...]) -> Iterator[Atom]:
        x = self.variable
        for k in self.limits:
            for limit in (k, k - 1, k + 1):
                yield Atom(f"min({x}, {limit})", tuple(min(n, limit) for n in lengths))
        for k in self.limits:
            yield Atom(f"ceil({x}/{k})", tuple(-(-n // k) for n in lengths))
            yield Atom(f"({x}//{k})", tuple(n // k for n in lengths))
            yield Atom(f"(({x} + 1)//{k})", tuple((n + 1) // k for n in lengths))
            yield Atom(f"(({x} - 1)//{k})", tuple((n - 1) // k for n in lengths))
        few = self.limits[:MAX_PAIR_LIMITS]
        for k in few:
            for limit in few:
                yield Atom(f"min({x}//{k}, {limit})", tuple(min(n // k, limit) for n in lengths))
                yield Atom(f"ceil(min({x}, {limit})/{k})", tuple(-(-min(n, limit) // k) for n in lengths))


def _batch_law(points: Sequence[Point]) -> int | None:
    """The power of the batch that the values are proportional to (0: they do not depend on it), None where there is none."""
    answers = set()
    for one in points:
        for two in points:
            if one[1] == two[1] and one[0] < two[0] and (one[2] or two[2]):
                answers.add(next((n for n in (0, 1, 2) if one[2] * two[0] ** n == two[2] * one[0] ** n), None))
    return answers.pop() if len(answers) == 1 else None if answers else 0


def _breakpoint(lengths: Sequence[int], values: Sequence[int]) -> int | None:
    """Where the line through the two shortest lengths meets the line through the two longest, if at a whole number between
    them: a bend that lies between the two shortest (or the two longest) cannot be told."""
    if len(lengths) < 5:
        return None
    first = Fraction(values[1] - values[0], lengths[1] - lengths[0])
    last = Fraction(values[-1] - values[-2], lengths[-1] - lengths[-2])
    if first == last:
        return None
    meeting = ((values[-1] - last * lengths[-1]) - (values[0] - first * lengths[0])) / (first - last)
    return int(meeting) if meeting.denominator == 1 and lengths[1] < meeting < lengths[-2] else None


def _solve(basis: tuple[tuple[Atom, ...], ...], values: Sequence[int]) -> Formula | None:
    """Exact coefficients of a basis and a constant for all values; None where there are none, or too few points to tell."""
    columns = len(basis) + 1
    rows = []
    for index in range(len(values)):
        row = [1]
        for factors in basis:
            number = 1
            for atom in factors:
                number *= atom.values[index]
            row.append(number)
        rows.append(row)
    if any(len(factors) > 1 for factors in basis) and len({tuple(row) for row in rows}) <= columns:
        return None  # a product of quantities that do not move any more says nothing
    if not _consistent(rows, values):
        return None
    matrix = [[Fraction(number) for number in (*row, value)] for row, value in zip(rows, values, strict=True)]
    chosen: list[list[Fraction]] = []
    pivots: list[int] = []
    for line in matrix:
        for pivot, done in zip(pivots, chosen, strict=True):
            if line[pivot]:
                factor = line[pivot]
                line = [a - factor * b for a, b in zip(line, done, strict=True)]
        pivot = next((i for i in range(columns) if line[i]), -1)
        if pivot < 0:
            if line[columns]:
                return None  # a contradiction: this value does not follow
            continue
        line = [a / line[pivot] for a in line]
        chosen = [[a - done[pivot] * b for a, b in zip(done, line, strict=True)] for done in chosen]
        chosen.append(line)
        pivots.append(pivot)
    if len(pivots) < columns:
        return None
    numbers = {pivot: line[columns] for pivot, line in zip(pivots, chosen, strict=True)}
    if len(basis) > 2 and any(number.denominator & (number.denominator - 1) for number in numbers.values()):
        return None  # sums over chunks have halves and quarters; sevenths are chance
    terms: Terms = {(): numbers[0]}
    for column, factors in enumerate(basis, 1):
        terms[tuple(sorted(atom.text for atom in factors))] = numbers[column]
    return Formula.of(terms)


PRIME = 2**61 - 1


def _consistent(rows: Sequence[Sequence[int]], values: Sequence[int]) -> bool:
    """Whether some coefficients give all values, modulo a prime: quick, and never wrong where it says no for small sizes."""
    done: list[tuple[int, list[int]]] = []
    for row, value in zip(rows, values, strict=True):
        line = [*row, value]
        for pivot, other in done:
            if factor := line[pivot]:
                line = [(a - factor * b) % PRIME for a, b in zip(line, other, strict=True)]
        pivot = next((i for i in range(len(line) - 1) if line[i] % PRIME), -1)
        if pivot < 0:
            if line[-1] % PRIME:
                return False
            continue
        inverse = pow(line[pivot], -1, PRIME)
        done.append((pivot, [a * inverse % PRIME for a in line]))
    return True
