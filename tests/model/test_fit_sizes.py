"""Sizes seen at a few lengths and batches: the formula found gives them at lengths that were not seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dayzero.model.operator_graph import BATCH, LENGTHS, OTHER_BATCH
from dayzero.ops.graph.fit import Fitter

LAWS: dict[str, Callable[[int, int], int]] = {
    "constant": lambda b, n: 7,
    "batch": lambda b, n: 4 * b,
    "affine": lambda b, n: 3 * n - 1,
    "both": lambda b, n: 6 * b * n,
    "window": lambda b, n: min(n, 8),
    "window less one": lambda b, n: min(n - 1, 7) + 1,
    "beyond a window": lambda b, n: max(n - 8, 0),
    "chunks": lambda b, n: -(-n // 64) * 64,
    "padding": lambda b, n: -n % 64,
    "window and compressed": lambda b, n: min(n, 8) + n // 4,
}
COSTS: dict[str, Callable[[int, int], int]] = {
    "square": lambda b, n: b * (2 * n * n + 5 * n),
    "weights and rows": lambda b, n: 100 + 8 * b * n,
    "chunks squared": lambda b, n: b * 3 * (-(-n // 64) * 64) ** 2,
    "blocks": lambda b, n: b * ((n // 8) * 64 + (n % 8) ** 2),
    "each token sees whole blocks": lambda b, n: b * sum((t + 1) // 4 for t in range(n)),
}


def points(law: Callable[[int, int], int]) -> list[tuple[int, int, int]]:
    sizes = [(BATCH, n) for n in LENGTHS] + [(OTHER_BATCH, LENGTHS[3])]
    return [(b, n, law(b, n)) for b, n in sizes]


@pytest.mark.parametrize("name", [*LAWS, *COSTS])
def test_found_and_holds_elsewhere(name: str) -> None:
    law = (LAWS | COSTS)[name]
    found = Fitter("T", [8, 64, 4]).fit(points(law), products=name in COSTS)
    assert found is not None, name
    for batch in (1, 5):
        for length in (3, 8, 9, 64, 65, 127, 300, 1000):
            assert found.value(B=batch, T=length, C=length) == law(batch, length), (name, str(found), batch, length)


def test_noise_fits_nothing() -> None:
    noise = [202752, 516096, 958464, 1972224, 3262464, 3981312, 5787648, 2635776]
    given = [(b, n, value) for (b, n, _), value in zip(points(LAWS["constant"]), noise, strict=True)]
    assert Fitter("T", [8, 64, 4]).fit(given, products=True) is None


def test_a_bump_fits_nothing() -> None:
    bump = [(b, n, 55296 if n == 12 else 36864 * b // 2) for b, n, _ in points(LAWS["constant"])]
    assert Fitter("T", [8, 64, 4]).fit(bump, products=True) is None
