"""Formulas: what they evaluate to, what is refused, and that building and fitting them gives back what was put in."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.core.formulas import Formula, evaluate, product, total

VALUES = {"B": 3, "T": 130, "C": 4100}


@pytest.mark.parametrize(
    ("formula", "want"),
    [
        ("0", 0),
        ("2*B*T*4096", 2 * 3 * 130 * 4096),
        ("-T + 131", 1),
        ("min(C, 4096)", 4096),
        ("max(C - 4096, 0, B)", 4),
        ("ceil(T/64)*64", 192),
        ("T//64", 2),
        ("3*T/2 - (C//4)", 195 - 1025),
    ],
)
def test_value(formula: str, want: float) -> None:
    assert evaluate(formula, **VALUES) == want


@pytest.mark.parametrize(
    "formula",
    [
        "", "T +", "S", "T**2", "T % 2", "abs(T)", "min(T)", "ceil(T, 2)", "min(T, key=C)", "T.real", "(lambda: 1)()", "'a'", "True",
        "[T][0]", "T if B else C", "__import__('os')", "1/0", "1/(T - 130)", "1j", "T and C", "(" * 500 + "T" + ")" * 500,
        "+T", "-" * 5000 + "T", "1+" * 60_000 + "1",
    ],
)  # fmt: skip
def test_refused(formula: str) -> None:
    with pytest.raises(DayZeroError):
        evaluate(formula, **VALUES)


def test_simplified() -> None:
    b, t = Formula.atom("B"), Formula.atom("T")
    chunks = Formula.atom("ceil(T/64)")
    assert str(b * t * 2 + t * b * 3) == "5*B*T"
    assert str(b * 2 + b * -2) == "0"
    assert str((t + Formula.number(-1)) * (t + Formula.number(1))) == "T*T - 1"
    assert str(product([chunks, b, Formula.number(Fraction(1, 2))])) == "B*ceil(T/64)/2"
    assert total([b, t, b]).value(B=2, T=5, C=0) == 9
    assert Formula.number(7).constant == 7 and (b + t).constant is None


TERMS = st.dictionaries(
    st.lists(st.sampled_from(["B", "T", "C", "min(C, 8)", "ceil(T/64)", "(C//4)"]), max_size=3).map(lambda x: tuple(sorted(x))),
    st.integers(-1000, 1000).map(Fraction),
    max_size=4,
)


@given(TERMS, TERMS, st.integers(1, 9), st.integers(1, 300), st.integers(1, 9000))
def test_sums_and_products_keep_their_value(one: dict, two: dict, b: int, t: int, c: int) -> None:
    first, second = Formula.of(one), Formula.of(two)
    sizes = {"B": b, "T": t, "C": c}
    known = {"B": b, "T": t, "C": c, "min(C, 8)": min(c, 8), "ceil(T/64)": -(-t // 64), "(C//4)": c // 4}

    def direct(terms: dict) -> int:
        return int(sum(number * math.prod(known[factor] for factor in factors) for factors, number in terms.items()))

    assert first.value(**sizes) == float(direct(one))
    assert (first + second).value(**sizes) == float(direct(one) + direct(two))
    assert (first * second).value(**sizes) == pytest.approx(direct(one) * direct(two), rel=1e-12)
