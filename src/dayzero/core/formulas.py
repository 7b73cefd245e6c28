"""Formulas in B (sequences), T (new tokens a sequence) and C (context tokens a sequence): evaluated, built and simplified.

Goes in: the formula strings of an `OperatorNode`. Comes out: numbers. `Formula` is how they are made: a polynomial with
exact coefficients over those names and over atoms such as `min(C, 128)` or `ceil(T/64)`, so that sums and products of
sizes come out in one simplified form. A formula is read with `ast` and nothing but arithmetic is allowed in it. It does
not fit formulas to measurements: `ops.graph.fit` does.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from types import CodeType

from dayzero.core.errors import DayZeroError

NAMES = ("B", "T", "C")
MAX_CHARACTERS = 100_000  # a formula of a real operator has under a thousand
FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max, "ceil": math.ceil}
_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv)


def evaluate(formula: str, *, B: float, T: float, C: float) -> float:
    """The value of a formula. Raises DayZeroError where it is no formula, or divides by zero."""
    try:
        return float(eval(_compiled(formula), {"__builtins__": {}}, {**FUNCTIONS, "B": B, "T": T, "C": C}))
    except (ZeroDivisionError, OverflowError) as error:
        raise _refused(formula, f"{error} at B={B:g}, T={T:g}, C={C:g}") from error


@lru_cache(maxsize=4096)
def _compiled(formula: str) -> CodeType:
    if len(formula) > MAX_CHARACTERS:
        raise _refused(formula[:60] + "...", f"{len(formula)} characters")
    try:
        tree = ast.parse(formula.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refused(formula, f"{type(error).__name__}: {error}") from error
    try:
        _check(tree.body, formula)
        return compile(tree, "<formula>", "eval")
    except RecursionError as error:
        raise _refused(formula, "nested too deeply") from error


def _check(node: ast.expr, formula: str) -> None:
    match node:
        case ast.Constant(value=value) if isinstance(value, (int, float)) and not isinstance(value, bool):
            return
        case ast.Name(id=name) if name in NAMES:
            return
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _BINARY):
            _check(left, formula)
            _check(right, formula)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand, formula)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            if (len(args) != 1) if name == "ceil" else (len(args) < 2):
                raise _refused(formula, f"{name} of {len(args)} values")
            for argument in args:
                _check(argument, formula)
        case _:
            raise _refused(formula, f"`{ast.unparse(node)}`")


def _refused(formula: str, why: str) -> DayZeroError:
    return DayZeroError(
        what=f"not a formula of B, T and C: {formula[:200]!r}",
        got=why,
        want="numbers, B, T, C, + - * / //, min, max, ceil",
        fix="correct the formula",
    )


Terms = dict[tuple[str, ...], Fraction]


@dataclass(frozen=True, slots=True)
class Formula:
    """A sum of products: `terms` maps the sorted factors of a product to its coefficient (the empty product is 1)."""

    terms: tuple[tuple[tuple[str, ...], Fraction], ...] = ()

    @classmethod
    def of(cls, terms: Terms) -> Formula:
        return cls(tuple(sorted((factors, number) for factors, number in terms.items() if number)))

    @classmethod
    def number(cls, value: int | float | Fraction) -> Formula:
        return cls.of({(): Fraction(value)})

    @classmethod
    def atom(cls, text: str) -> Formula:
        """One factor as it is written, such as `T` or `min(C, 8)`."""
        return cls.of({(text,): Fraction(1)})

    @property
    def constant(self) -> Fraction | None:
        """The number, where it depends on nothing."""
        if not self.terms:
            return Fraction(0)
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    def __add__(self, other: Formula) -> Formula:
        terms = dict(self.terms)
        for factors, number in other.terms:
            terms[factors] = terms.get(factors, Fraction(0)) + number
        return Formula.of(terms)

    def __mul__(self, other: Formula | int | Fraction) -> Formula:
        if not isinstance(other, Formula):
            other = Formula.number(other)
        terms: Terms = {}
        for mine, one in self.terms:
            for theirs, two in other.terms:
                key = tuple(sorted(mine + theirs))
                terms[key] = terms.get(key, Fraction(0)) + one * two
        return Formula.of(terms)

    def value(self, *, B: float, T: float, C: float) -> float:
        return evaluate(str(self), B=B, T=T, C=C)

    def __str__(self) -> str:
        """Longest products first, so that what grows fastest is read first."""
        parts = [_product(factors, number) for factors, number in sorted(self.terms, key=lambda t: (-len(t[0]), t[0]))]
        return " + ".join(parts).replace("+ -", "- ") or "0"


def _product(factors: tuple[str, ...], number: Fraction) -> str:
    over = "" if number.denominator == 1 else f"/{number.denominator}"
    if not factors:
        return f"{number.numerator}{over}"
    first = {1: "", -1: "-"}.get(number.numerator, f"{number.numerator}*")
    return first + "*".join(factors) + over


ZERO = Formula()
ONE = Formula.number(1)


def product(parts: Iterable[Formula]) -> Formula:
    result = ONE
    for part in parts:
        result = result * part
    return result


def total(parts: Iterable[Formula]) -> Formula:
    terms: Terms = {}
    for part in parts:
        for factors, number in part.terms:
            terms[factors] = terms.get(factors, Fraction(0)) + number
    return Formula.of(terms)


def parse(formula: str) -> Formula:
    """The sum of products that a formula says; calls and whole divisions are its atoms. Raises DayZeroError as `evaluate`."""
    _compiled(formula)
    return _parsed(ast.parse(formula.strip(), mode="eval").body)


def _parsed(node: ast.expr) -> Formula:
    match node:
        case ast.Constant(value=value):
            assert isinstance(value, (int, float)), value
            return Formula.number(value)
        case ast.UnaryOp(operand=operand):
            return _parsed(operand) * -1
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _parsed(left) + _parsed(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _parsed(left) + _parsed(right) * -1
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _parsed(left) * _parsed(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right) if divisor := _parsed(right).constant:
            return _parsed(left) * (1 / divisor)
    return Formula.atom(ast.unparse(node))
