"""NU-17: the comparison tool itself must not be fooled. A table of inputs and the verdict each must get."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dayzero.validate.compare import CHUNK, compare

NAN, INF = float("nan"), float("inf")
WANT = np.array([[1.0, -2.0, 3.0, 0.5], [0.25, 4.0, -1.0, 2.0]], dtype=np.float32)
ZERO = np.zeros((2, 4), dtype=np.float32)


def make_changed(index: tuple[int, ...], value: float, base: np.ndarray = WANT) -> np.ndarray:
    changed = base.copy()
    changed[index] = value
    return changed


# name: (got, want, verdict within a relative 1e-3, verdict of exact, word of the reason when close, worst index)
NU17 = {
    "equal": (WANT, WANT, "pass", "pass", "equal", None),
    "candidate all NaN": (np.full_like(WANT, NAN), WANT, "fail", "fail", "8 values are NaN", (0, 0)),
    "one NaN": (make_changed((1, 2), NAN), WANT, "fail", "fail", "1 values are NaN", (1, 2)),
    "one infinity": (make_changed((0, 3), INF), WANT, "fail", "fail", "infinite", (0, 3)),
    "+Inf against -Inf": (make_changed((0, 1), INF), make_changed((0, 1), -INF), "fail", "fail", "infinite", (0, 1)),
    "-Inf at one place in both": (make_changed((0, 1), -INF), make_changed((0, 1), -INF), "pass", "pass", "equal", None),
    "NaN at one place in both": (make_changed((0, 1), NAN), make_changed((0, 1), NAN), "invalid", "invalid", "holds", (0, 1)),
    "NaN in the reference": (WANT, make_changed((1, 0), NAN), "invalid", "invalid", "reference", (1, 0)),
    "(1, 8) against (8,)": (WANT.reshape(1, 8), WANT.reshape(8), "fail", "fail", "shapes differ", None),
    "broadcastable": (WANT[:1], WANT, "fail", "fail", "shapes differ", None),
    "scaled by two": (2 * WANT, WANT, "fail", "fail", "relative", (1, 1)),
    "tiny and scaled by two": (2e-6 * WANT, 1e-6 * WANT, "fail", "fail", "relative", (1, 1)),
    "sign flipped": (-WANT, WANT, "fail", "fail", "relative", (1, 1)),
    "one place wrong": (make_changed((0, 2), 3.5), WANT, "fail", "fail", "relative", (0, 2)),
    "two places swapped": (WANT[::-1], WANT, "fail", "fail", "relative", (0, 1)),
    "reference all zero": (make_changed((0, 2), 1e-9, ZERO), ZERO, "fail", "fail", "relative", (0, 2)),
    "both all zero": (ZERO, ZERO, "pass", "pass", "constant", None),
    "candidate all zero": (ZERO, WANT, "fail", "fail", "relative", (1, 1)),
    "both constant": (ZERO + 3, ZERO + 3, "pass", "pass", "constant", None),
    "constants apart": (ZERO + 3, ZERO + 2, "fail", "fail", "relative", (0, 0)),
    "both empty": (WANT[:0], WANT[:0], "fail", "fail", "empty", None),
    "int against float": (WANT.astype(np.int64), WANT, "fail", "fail", "dtypes", None),
    "bool against int": (np.array([True]), np.array([1]), "fail", "fail", "dtypes", None),
    "text": (np.array(["a"]), np.array(["a"]), "fail", "fail", "dtypes", None),
    "float64 against float32": (WANT.astype(np.float64), WANT, "pass", "fail", "equal", None),
    "within the limit": (WANT * np.float32(1 + 1e-5), WANT, "pass", "fail", "within", (1, 1)),
    "integers apart by one": (np.array([1, 2**62 + 1]), np.array([1, 2**62]), "fail", "fail", "1 values are not equal", (1,)),
    "zeros of two signs": (-ZERO, ZERO, "pass", "fail", "equal", None),
    "one number": (np.float32(2.0), np.float32(2.0), "pass", "pass", "equal", None),
}  # fmt: skip


@pytest.mark.parametrize("name", NU17)
def test_nu_17_table_of_inputs_and_verdicts(name: str) -> None:
    got, want, close, exact, reason, worst = NU17[name]
    found = compare(got, want, relative=1e-3)
    assert (found.verdict, compare(got, want, exact=True).verdict) == (close, exact), found.describe()
    assert reason in found.reason
    if worst is not None:
        assert found.worst_index == worst
        at = (np.asarray(got)[worst].item(), np.asarray(want)[worst].item())
        np.testing.assert_equal((found.got, found.want), at)


def test_nu_17_a_failure_prints_worst_index_got_want_max_and_mean_error() -> None:
    text = compare(make_changed((0, 2), 3.5), WANT, relative=1e-3).describe()
    for fact in ("worst at (0, 2)", "got 3.5", "want 3.0", "max error 0.5", "mean error 0.0625", "relative", "cosine"):
        assert fact in text, text


def test_nu_17_cosine_decides_nothing_and_an_absolute_limit_alone_is_refused() -> None:
    scaled = compare(2 * WANT, WANT, relative=1e-3)
    assert scaled.cosine == pytest.approx(1.0) and scaled.verdict == "fail"
    assert compare(ZERO, WANT, relative=1e-3).cosine is None
    with pytest.raises(AssertionError, match="relative"):
        compare(WANT, WANT, max_abs=1e-3)


def test_absolute_limit_holds_everywhere() -> None:
    big = np.full(10_000, 100.0, dtype=np.float32)
    one_off = make_changed((17,), 100.5, big)
    assert compare(one_off, big, relative=1e-3).passed
    assert not compare(one_off, big, relative=1e-3, max_abs=1e-3).passed


def test_worst_place_behind_the_first_chunk() -> None:
    want = np.ones((3, CHUNK // 2), dtype=np.float32)
    found = compare(make_changed((2, 5), NAN, want), want, relative=1e-3)
    assert found.worst_index == (2, 5) and found.verdict == "fail"
    assert compare(make_changed((2, 6), 2.0, want), want, exact=True).worst_index == (2, 6)


def test_huge_values_do_not_overflow_the_norms() -> None:
    huge = np.array([1e300, -1e308])
    assert compare(huge, huge * (1 + 1e-6), relative=1e-3).passed
    assert compare(huge, huge / 2, relative=1e-3).relative == pytest.approx(1.0)


@settings(max_examples=60, deadline=None)
@given(arrays.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 5)),
                     elements=st.floats(allow_nan=False, allow_infinity=True, width=32)), st.data())  # fmt: skip
def test_any_single_change_is_seen_bitwise_and_nan_is_never_close(want: np.ndarray, data: st.DataObject) -> None:
    assert compare(want.copy(), want, exact=True).passed
    place = tuple(data.draw(st.integers(0, size - 1)) for size in want.shape)
    changed = want.copy()
    changed.view(np.uint32)[place] ^= np.uint32(1) << np.uint32(data.draw(st.integers(0, 31)))
    found = compare(changed, want, exact=True)
    assert not found.passed and found.num_different == 1 and found.worst_index == place
    changed[place] = np.nan
    assert compare(changed, want, relative=1e30).verdict == "fail"
