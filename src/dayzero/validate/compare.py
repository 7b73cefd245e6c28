"""Two arrays in, one verdict out, with the worst place and its values. numpy only.

A comparison tool must not be fooled: NaN and infinities are never "within tolerance", shapes are never broadcast, integers
(token ids, say) are compared exactly and never with floats, nothing is never equal to nothing, and cosine similarity is
shown but decides nothing (a result scaled by two has cosine 1). Closeness therefore needs a *relative* limit; an absolute one
may be added. Claims of equality are bitwise. What the arrays mean, and how large a limit should be, is the caller's business.
bfloat16 has no numpy type: widen it to float32 first, which is exact.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

# "invalid": the reference itself cannot be compared with (NaN in it), which is an error of the test, not of the candidate.
ComparisonVerdict = Literal["pass", "fail", "invalid"]

CHUNK = 1 << 20  # elements widened to float64 at a time: 8 MiB per temporary


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """`max_abs`, `mean_abs` and `relative` (Frobenius norm of the error over that of `want`) are infinite where the candidate
    is not finite; None where nothing could be compared element by element. `cosine` is None for a zero norm."""

    verdict: ComparisonVerdict
    reason: str
    shape: tuple[int, ...]
    max_abs: float | None = None
    mean_abs: float | None = None
    relative: float | None = None
    cosine: float | None = None
    worst_index: tuple[int, ...] | None = None
    got: float | int | None = None
    want: float | int | None = None
    num_different: int | None = None

    @property
    def passed(self) -> bool:
        return self.verdict == "pass"

    def describe(self) -> str:
        """One line for a person: verdict, reason, worst index, got, want, max and mean error."""
        text = f"{self.verdict}: {self.reason}"
        if self.worst_index is not None:
            text += f"; worst at {self.worst_index}: got {self.got!r}, want {self.want!r}"
        if self.max_abs is not None:
            cosine = "undefined" if self.cosine is None else f"{self.cosine:.9f}"
            text += (f"; max error {self.max_abs:.6g}, mean error {self.mean_abs:.6g}, relative {self.relative:.6g}, "
                     f"cosine {cosine}, {self.num_different} different")  # fmt: skip
        return text


def compare(
    got: Any, want: Any, *, relative: float | None = None, max_abs: float | None = None, exact: bool = False
) -> Comparison:
    """Compare a candidate with a reference: either `exact` (same dtype, same bits), or within `relative` and, if given, also
    within `max_abs` everywhere. Infinities of one sign at one place are equal; NaN never is."""
    assert exact != (relative is not None), "choose: exact, or a relative limit (an absolute one alone passes scaled results)"
    got, want = np.asarray(got), np.asarray(want)
    if refusal := _refusal(got, want, exact):
        return refusal
    flat_got, flat_want = np.ascontiguousarray(got).ravel(), np.ascontiguousarray(want).ravel()
    if want.dtype.kind == "f" and (bad := int(np.argmax(np.isnan(flat_want)))) >= 0 and np.isnan(flat_want[bad]):
        return Comparison(verdict="invalid", reason="the reference holds NaN", shape=want.shape, got=flat_got[bad].item(),
                          want=flat_want[bad].item(), worst_index=_index(bad, want.shape))  # fmt: skip
    scan = _scan(flat_got, flat_want, exact)
    verdict, reason = _judge(scan, relative, max_abs, exact or want.dtype.kind != "f")
    if verdict == "pass" and want.size > 1 and bool((flat_want == flat_want[0]).all()):
        reason += " (the reference is constant: a wrong order could not show)"
    return Comparison(verdict=verdict, reason=reason, shape=want.shape, max_abs=scan.max_abs, mean_abs=scan.mean_abs,
                      relative=scan.relative, cosine=scan.cosine, worst_index=_index(scan.worst, want.shape),
                      got=flat_got[scan.worst].item(), want=flat_want[scan.worst].item(),
                      num_different=scan.num_different)  # fmt: skip


def _refusal(got: np.ndarray, want: np.ndarray, exact: bool) -> Comparison | None:
    """What forbids looking at elements at all."""
    if got.shape != want.shape:
        return Comparison(verdict="fail", reason=f"shapes differ: got {got.shape}, want {want.shape}", shape=want.shape)
    if want.size == 0:
        return Comparison(verdict="fail", reason="nothing to compare: both are empty", shape=want.shape)
    kinds = (got.dtype.kind, want.dtype.kind)
    if kinds[0] != kinds[1] or kinds[0] not in "biuf" or (exact and got.dtype != want.dtype):
        return Comparison(verdict="fail", reason=f"dtypes differ: got {got.dtype}, want {want.dtype}", shape=want.shape)
    return None


@dataclass(slots=True)
class _Scan:
    num_different: int = 0
    num_not_finite: int = 0
    worst: int = 0
    max_abs: float = 0.0
    mean_abs: float = 0.0
    relative: float = 0.0
    cosine: float | None = None


def _scan(got: np.ndarray, want: np.ndarray, exact: bool) -> _Scan:
    """One pass for the scale (so that squares cannot overflow), one for the sums, in chunks."""
    scan, sum_abs, squares = _Scan(), 0.0, np.zeros(4)  # error, want, got, product
    scale = max(_largest(got), _largest(want)) or 1.0
    first_not_finite = first_different = -1
    for start in range(0, want.size, CHUNK):
        raw_g, raw_w = got[start : start + CHUNK], want[start : start + CHUNK]
        same = _same_bits(raw_g, raw_w) if exact else raw_g == raw_w
        scan.num_different += int((~same).sum())
        if first_different < 0 and not same.all():
            first_different = start + int(np.argmin(same))
        with np.errstate(invalid="ignore", over="ignore"):
            g, w = raw_g.astype(np.float64), raw_w.astype(np.float64)
            finite = np.isfinite(g) & np.isfinite(w)
            error = np.where(finite, np.abs(g - w), 0.0)
        odd = ~finite & ~(raw_g == raw_w)
        if odd.any():
            scan.num_not_finite += int(odd.sum())
            first_not_finite = first_not_finite if first_not_finite >= 0 else start + int(np.argmax(odd))
        place = int(np.argmax(error))
        if error[place] > scan.max_abs:
            scan.max_abs, scan.worst = float(error[place]), start + place
        sum_abs += float((error / want.size).sum())
        g, w, error = (np.where(finite, x, 0.0) / scale for x in (g, w, error))
        squares += [error @ error, w @ w, g @ g, g @ w]
    scan.mean_abs = sum_abs
    error_norm, want_norm, got_norm = np.sqrt(squares[:3])
    scan.relative = float(error_norm / want_norm) if want_norm else (float("inf") if error_norm else 0.0)
    scan.cosine = float(squares[3] / (want_norm * got_norm)) if want_norm and got_norm else None
    if scan.max_abs == 0.0 and first_different >= 0:
        scan.worst = first_different  # bits differ where values do not: zeros of two signs
    if scan.num_not_finite:
        scan.worst, scan.cosine = first_not_finite, None
        scan.max_abs = scan.mean_abs = scan.relative = float("inf")
    return scan


def _judge(scan: _Scan, relative: float | None, max_abs: float | None, exact: bool) -> tuple[ComparisonVerdict, str]:
    if scan.num_not_finite:
        return "fail", f"{scan.num_not_finite} values are NaN or infinite where the reference is not the same"
    if scan.num_different == 0:
        return "pass", "equal"
    if exact:
        return "fail", f"{scan.num_different} values are not equal"
    assert relative is not None
    # Written as "not within", so that a NaN could only ever fail.
    if not scan.relative <= relative:
        return "fail", f"relative error {scan.relative:.3g} is over {relative:.3g}"
    if max_abs is not None and not scan.max_abs <= max_abs:
        return "fail", f"error {scan.max_abs:.3g} is over {max_abs:.3g}"
    limits = f"relative {relative:.3g}" + (f" and absolute {max_abs:.3g}" if max_abs is not None else "")
    return "pass", f"within {limits}"


def _same_bits(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    width = want.dtype.itemsize
    different = got.view(np.uint8).reshape(-1, width) != want.view(np.uint8).reshape(-1, width)
    return ~different.any(axis=1)


def _largest(values: np.ndarray) -> float:
    """Largest finite magnitude."""
    worst = 0.0
    for start in range(0, values.size, CHUNK):
        with np.errstate(invalid="ignore"):
            wide = np.abs(values[start : start + CHUNK].astype(np.float64))
        worst = max(worst, float(np.where(np.isfinite(wide), wide, 0.0).max()))
    return worst


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(part) for part in np.unravel_index(flat, shape)) if shape else ()
