"""Statistics, checksums and header entries of a checkpoint's tensors in, everything that no sound checkpoint shows out.

A tensor is held against its kind: tensors of the same name up to the numbers of layers and experts, and of the same dtype.
`error`: a sound checkpoint cannot hold this, such as NaN, a page of zeros inside a matrix whose kind has none, or the bits of
another type. `warning`: odd, and yet seen in sound ones, such as layers that are copies of each other, as in models grown by
repeating layers. Constant norms, zero biases, zero rows of an embedding and what a whole kind has in common are not told.

Not found here, as no statistics show it: flips of a sign, of the mantissa or of low bits of the exponent, of any bit in an FP8
or integer code, values that moved, tensors exchanged, a stale shard. Scales are judged in `census_scales`, copies in
`census_copies`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Literal

from dayzero.core.model import Problem
from dayzero.model.headers import TensorEntry
from dayzero.weights.checks.census import PAGE_BYTES, TensorStatistics
from dayzero.weights.checks.census_samples import FLOATS

# Tables in which whole rows of zeros are usual: padding of the vocabulary, tokens never seen.
TABLE = re.compile(r"(^|[._])(\w*embed\w*|wte|wpe|lm_head|head|shared|codebook\w*)(\.|$)")
MASK = re.compile(r"mask", re.IGNORECASE)
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# A number this large overflows in the first product. The largest finite number of a type stands for minus infinity in masks.
ABSURD_LOG2 = 64
LARGEST_FINITE = {3.4028234663852886e38, 3.3895313892515355e38, 65504.0, 1.7976931348623157e308}
# One number against the largest elsewhere in its tensor, in octaves. Weights with outliers, trained, stay under 8; flipping the
# top bit of a float16's exponent gives 16 less what the number was below the largest, of a bfloat16 or float32 over 100.
ISOLATED_LOG2 = {"float16": 8.0, "float8_e5m2": 99.0, "float8_e4m3fn": 99.0}
ISOLATED_ELSE_LOG2, ISOLATED_VECTOR_LOG2 = 12.0, 20.0
# A tensor's mean magnitude against its kind's, in octaves: layers of sound models stay within 4 above, further below.
LOUD_LOG2, QUIET_LOG2 = 7.0, 24.0
FEW_ELEMENTS = 256
# More runs of zeros than this in one tensor are a structure (blocks, triangles, pruning) and no damage.
MANY_RUNS = 64
MOST_OTHERS = 48
MOST_PROBLEMS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One tensor of a kind."""

    name: str
    entry: TensorEntry
    statistics: TensorStatistics

    @property
    def is_matrix(self) -> bool:
        return len(self.entry.shape) >= 2 and min(self.entry.shape[-2:]) > 1

    @property
    def element_bytes(self) -> int:
        return max(1, self.entry.num_bytes // max(1, self.entry.num_elements))

    def problem(self, kind: str, severity: Literal["error", "warning"], detail: str) -> Problem:
        return Problem(kind=kind, severity=severity, file=self.entry.file, tensor=self.name, detail=f"{self.name}: {detail}")


class Kind:
    """Tensors of one kind."""

    def __init__(self) -> None:
        self.members: list[Member] = []

    def others(self, member: Member) -> list[Member]:
        """The others or, of a large kind, some evenly spread: what the rules compare with."""
        step = max(1, len(self.members) // MOST_OTHERS)
        return [other for other in self.members[::step] if other is not member]

    @cached_property
    def usual_mean_log2(self) -> float:
        return median(member.statistics.mean_log2 for member in self.members)


def kind_name(name: str) -> str:
    """The name with `*` for every number between dots or at the end."""
    return NUMBER.sub("*", name)


def judge(
    statistics: Mapping[str, TensorStatistics], checksums: Mapping[str, str], entries: Mapping[str, TensorEntry]
) -> list[Problem]:
    """Everything found, by tensor; where one rule finds more than MOST_PROBLEMS tensors, once for each form of name.

    Tensors without statistics are not judged, and those without checksum not compared for being copies.
    """
    from dayzero.weights.checks.census_copies import copies
    from dayzero.weights.checks.census_scales import belongs_to_codes, scale_problems

    kinds: dict[tuple[str, str], Kind] = {}
    for name, found in statistics.items():
        entry = entries[name]
        kind = kinds.setdefault((kind_name(name), entry.dtype), Kind())
        kind.members.append(Member(name=name, entry=entry, statistics=found))
    problems: list[Problem] = []
    for kind in kinds.values():
        if belongs_to_codes(kind.members[0].name, entries):
            problems += scale_problems(kind, statistics, entries)
            continue
        for member in kind.members:
            problems += _values(member, kind)
        problems += copies(kind, checksums, kinds)
    return _summed_up(problems)


def _values(member: Member, kind: Kind) -> list[Problem]:
    """The first rules that apply end the search: one damage is told once."""
    for rule in (_nonfinite, _zero, _type, _constant, _absurd, _isolated, _loud):
        if found := rule(member, kind):
            return [found, *(_runs(member, kind) if rule is _nonfinite else [])]
    return [*_runs(member, kind), *_vanishing(member, kind)]


def _nonfinite(member: Member, kind: Kind) -> Problem | None:
    one = member.statistics
    if not one.num_nan + one.num_infinite or (MASK.search(member.name) and not one.num_nan):
        return None
    parts = [f"{count} {what}" for count, what in ((one.num_nan, "NaN"), (one.num_infinite, "infinite")) if count]
    detail = f"{' and '.join(parts)} of {member.entry.num_elements} values, the first at index {one.nonfinite_at}"
    if one.reads_like:
        detail += f"; its bits read like {one.reads_like}"
    # Vectors of minus infinity switch entries off: a bias for experts or tokens that must not be chosen.
    off = not one.num_nan and one.num_infinite == one.num_negative_infinite and not member.is_matrix
    return member.problem("nonfinite_values", "warning" if off else "error", detail)


def _zero(member: Member, kind: Kind) -> Problem | None:
    if not member.statistics.all_zero or member.entry.num_elements < 2:
        return None
    others = kind.others(member)
    filled = [other for other in others if not other.statistics.all_zero]
    what = f"all {member.entry.num_elements} values are zero"
    if not filled:
        if not others and TABLE.search(member.name) and member.is_matrix and "pos" not in member.name:
            return member.problem("zero_tensor", "error", what)
        return None  # set to zero when it was made, as biases and added parts are, and not trained
    share = len(filled) / len(others)
    if not member.is_matrix and share <= 0.5:
        return None
    sure = member.is_matrix or (len(filled) >= 3 and share > 0.75)
    return member.problem("zero_tensor", "error" if sure else "warning", f"{what}; of its kind {len(filled)} of "
                          f"{len(others)} others are not")  # fmt: skip


def _type(member: Member, kind: Kind) -> Problem | None:
    one = member.statistics
    if not one.reads_like or not member.is_matrix:
        return None
    detail = (f"its values are no sound {member.entry.dtype} (magnitudes about 2^{one.mean_log2:.0f}, spread over "
              f"{one.deviation_log2:.1f} octaves); its bits read like {one.reads_like}")  # fmt: skip
    return member.problem("wrong_type", "error", detail)


def _constant(member: Member, kind: Kind) -> Problem | None:
    one = member.statistics
    if one.num_distinct != 1 or not member.is_matrix or member.entry.num_elements < FEW_ELEMENTS or one.all_zero:
        return None
    packed, others = member.entry.dtype not in FLOATS, kind.others(member)
    varied = [other for other in others if other.statistics.num_distinct > 1]
    if not varied and not packed:
        return None
    detail = "all its packed words are the same" if packed else "all its values are the same"
    more = f"; of its kind {len(varied)} of {len(others)} others vary" if others else ""
    sure = len(varied) * 2 > len(others) or not others
    return member.problem("constant_tensor", "error" if sure else "warning", detail + more)


def _absurd(member: Member, kind: Kind) -> Problem | None:
    one = member.statistics
    if one.largest < 2.0**ABSURD_LOG2 or one.largest in LARGEST_FINITE or MASK.search(member.name):
        return None
    return member.problem("exponent_out_of_line", "error", f"{one.largest:.3g} at index {one.largest_at} is no sound value"
                          + _usual(kind.others(member)))  # fmt: skip


def _isolated(member: Member, kind: Kind) -> Problem | None:
    """One number far above all others of its tensor, and above all of its kind."""
    one = member.statistics
    if member.entry.num_elements < FEW_ELEMENTS or not one.second or one.largest in LARGEST_FINITE:
        return None
    octaves = ISOLATED_LOG2.get(member.entry.dtype, ISOLATED_ELSE_LOG2) if member.is_matrix else ISOLATED_VECTOR_LOG2
    if one.largest < one.second * 2.0**octaves:
        return None
    others = kind.others(member)
    if one.largest < max((other.statistics.second for other in others), default=0.0) * 2.0**octaves:
        return None
    return member.problem("exponent_out_of_line", "error",
                          f"{one.largest:.3g} at index {one.largest_at} stands alone: elsewhere it reaches {one.second:.3g}"
                          + _usual(others))  # fmt: skip


def _usual(others: Sequence[Member]) -> str:
    largest = [other.statistics.largest for other in others]
    return f", its kind {median(largest):.3g} (median of {len(largest)})" if largest else ""


def _loud(member: Member, kind: Kind) -> Problem | None:
    """A whole matrix out of line: its mean magnitude against the median of its kind."""
    one = member.statistics
    if not member.is_matrix or member.entry.num_elements < FEW_ELEMENTS or member.entry.dtype not in FLOATS:
        return None
    if abs(one.mean_log2 - kind.usual_mean_log2) < LOUD_LOG2 / 2:
        return None
    means = [other.statistics.mean_log2 for other in kind.others(member) if other.statistics.num_distinct > 1]
    if len(means) < 3:
        return None
    middle = median(means)
    spread = median(abs(mean - middle) for mean in means)
    above = one.mean_log2 - middle
    if -QUIET_LOG2 < above < max(LOUD_LOG2, 6 * spread):
        return None
    if above < 0 and -above < 6 * spread:
        return None
    detail = (f"its values are about 2^{one.mean_log2:.0f}, those of its kind about 2^{middle:.0f} (median of {len(means)}, "
              f"usual deviation {spread:.1f} octaves)")  # fmt: skip
    return member.problem("exponent_out_of_line", "error" if above > 0 else "warning", detail)


def _vanishing(member: Member, kind: Kind) -> list[Problem]:
    """One or two numbers that vanish in a matrix where none does: a high bit of the exponent that was set and is no more."""
    one = member.statistics
    if not 1 <= one.num_vanishing <= 2 or not member.is_matrix or one.mean_log2 < -20:
        return []
    others = kind.others(member)
    if len(others) < 3 or any(other.statistics.num_vanishing for other in others):
        return []
    return [member.problem("exponent_out_of_line", "warning", f"the value at index {one.vanishing_at} is below 2^-48 and not "
                           f"zero, no other of its kind is: a bit of its exponent may have changed")]  # fmt: skip


def _runs(member: Member, kind: Kind) -> list[Problem]:
    """Zeros in a row where the kind has none. Rows of a table may be zero; parts of rows are not."""
    one, entry = member.statistics, member.entry
    if one.all_zero or MASK.search(member.name) or not one.num_ragged_runs + one.num_row_runs:
        return []
    others = kind.others(member)
    clean = [other for other in others if not other.statistics.num_ragged_runs + other.statistics.num_row_runs]
    if others and len(clean) * 4 < len(others) * 3:
        return []  # its kind has them
    certain = len(clean) >= 2 or (member.is_matrix and not others)
    has = f"; of its kind {len(clean)} of {len(others)} others have none" if others else ""
    found = []
    begin, count = one.ragged_run
    size = member.element_bytes
    # Tables of positions begin with the sine of zero, over half a row.
    sine = begin == 0 and count < (entry.shape[-1] if entry.shape else 0)
    if count and one.num_ragged_runs <= MANY_RUNS and not sine and (member.is_matrix or others):
        found.append(member.problem("zero_run", "error" if certain else "warning", _run_text(member, begin, count) + has))
    begin, count = one.row_run
    if not count or not member.is_matrix or one.num_row_runs > MANY_RUNS:
        return found
    rows, row = count // entry.shape[-1], entry.shape[-1]
    paged = (entry.begin + begin * size) % PAGE_BYTES == 0 and count * size % PAGE_BYTES == 0
    text = f"{_run_text(member, begin, count)}, {rows} whole rows of {entry.num_elements // row}"
    if TABLE.search(member.name) or not re.search(r"\.\d+\.", member.name):
        if paged and begin + count < entry.num_elements:
            found.append(member.problem("zero_run", "warning", f"{text}, from one page of the file to another{has}"))
        elif count * 2 > entry.num_elements:
            found.append(member.problem("zero_run", "warning", f"{text}{has}"))
    elif certain or paged:
        found.append(member.problem("zero_run", "error" if rows > 1 or paged else "warning", text + has))
    return found


def _run_text(member: Member, begin: int, count: int) -> str:
    size = member.element_bytes
    tail = " up to its end" if begin + count == member.entry.num_elements else ""
    place = f"byte {begin * size} (byte {member.entry.begin + begin * size} of the file)"
    return f"{count * size} bytes of zeros from {place}{tail}"


def _summed_up(problems: list[Problem]) -> list[Problem]:
    """As found or, where one kind of problem has many, the first for each form of name with how many it stands for."""
    by_kind: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        by_kind.setdefault((problem.kind, problem.severity), []).append(problem)
    shown: list[Problem] = []
    for alike in by_kind.values():
        if len(alike) <= MOST_PROBLEMS:
            shown += alike
            continue
        forms: dict[str, list[Problem]] = {}
        for problem in alike:
            forms.setdefault(kind_name(str(problem.tensor)), []).append(problem)
        shown += [
            one[0] if len(one) == 1 else replace(one[0], detail=f"{form}: {len(one)} tensors, the first: {one[0].detail}")
            for form, one in forms.items()
        ]
    return shown
