"""The scales of one kind in, those that cannot be scales out.

A scale multiplies codes, so it is positive and finite, and about as large as its kind's in other layers: the largest code
times the scale is the largest weight. One that was stored inverted is far off on the other side of one. Factors of activations
and of caches are only asked to be finite, and not negative: they differ from layer to layer, and some tools write markers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from dayzero.core.model import Problem
from dayzero.core.storage import COMPANION
from dayzero.model.headers import TensorEntry
from dayzero.model.stored.scales import FLOAT8, KV_SCALE, NO_WEIGHT_SCALE, PACKED_DTYPES, WEIGHT_SCALE, weight_of
from dayzero.weights.checks.census import TensorStatistics
from dayzero.weights.checks.census_samples import FLOATS

if TYPE_CHECKING:
    from dayzero.weights.checks.census_rules import Kind, Member

# Octaves from the median of the kind. Scales follow the largest weight of a block, which differs by 3 between sound layers.
ABOVE_LOG2, BELOW_LOG2 = 7.0, 14.0
# Weights whose largest is over 2^12 are none; inverted scales of FP8 give 2^17 and more.
LARGEST_WEIGHT_LOG2 = 12.0
NUM_SURE_SAMPLES = 16  # so many zero codes must be expected among the samples before their absence says something


def belongs_to_codes(name: str, entries: Mapping[str, TensorEntry]) -> bool:
    """Whether this tensor goes with stored codes or caches: it is no parameter, and only what is said here holds for it."""
    if COMPANION.search(name) is None and KV_SCALE.search(name) is None:
        return False
    weight = weight_of(name, entries)
    return KV_SCALE.search(name) is not None or (weight is not None and entries[weight].dtype in FLOAT8 | PACKED_DTYPES)


def is_weight_scale(name: str, entries: Mapping[str, TensorEntry]) -> bool:
    """Whether this tensor scales a stored weight. Parameters of models may be called scale, too."""
    if not WEIGHT_SCALE.search(name) or NO_WEIGHT_SCALE.search(name) or KV_SCALE.search(name):
        return False
    weight = weight_of(name, entries)
    return weight is not None and entries[weight].dtype in FLOAT8 | PACKED_DTYPES


def scale_problems(kind: Kind, statistics: Mapping[str, TensorStatistics], entries: Mapping[str, TensorEntry]) -> list[Problem]:
    problems = []
    for member in kind.members:
        if member.entry.dtype not in FLOATS and member.entry.dtype != "uint8":
            continue
        one = member.statistics
        if one.num_nan + one.num_infinite:
            detail = (f"{one.num_nan} NaN and {one.num_infinite} infinite of {member.entry.num_elements} scales, the first at "
                      f"index {one.nonfinite_at}")  # fmt: skip
            problems.append(member.problem("scale_values", "error", detail))
        elif is_weight_scale(member.name, entries):
            weight = weight_of(member.name, entries)
            assert weight is not None
            problems += _of_weight(member, kind, entries[weight], statistics.get(weight))
        elif re.search(r"(input|activation|output)_(global_)?scale$", member.name):
            if one.num_negative:
                problems.append(member.problem("scale_values", "error", f"{one.num_negative} scales are negative"))
            elif one.num_zero:
                problems.append(member.problem("scale_values", "warning", f"{one.num_zero} scales are zero"))
    return problems


def _of_weight(member: Member, kind: Kind, weight: TensorEntry, codes: TensorStatistics | None) -> list[Problem]:
    """The first of the rules that applies."""
    one, count = member.statistics, member.entry.num_elements
    others = kind.others(member)
    float8 = weight.dtype in FLOAT8
    # Some tools use the sign to shift the range of integer codes; then some are negative, not all.
    if one.num_negative and (float8 or one.num_negative == count):
        return [member.problem("scale_values", "error", f"{one.num_negative} of {count} scales are negative")]
    if one.num_zero:
        return _zeros(member, others, weight, codes)
    return _out_of_line(member, others, weight, codes)


def _zeros(member: Member, others: Sequence[Member], weight: TensorEntry, codes: TensorStatistics | None) -> list[Problem]:
    one, count = member.statistics, member.entry.num_elements
    assert one.num_zero is not None
    share, text = one.num_zero / count, f"{one.num_zero} of {count} scales are zero"
    if codes is not None and codes.zero_share >= share / 2 and codes.num_samples:
        return []  # blocks without any number: zero times zero
    if one.num_zero == count and codes is not None and not codes.all_zero:
        return [member.problem("scale_values", "error", f"{text}, and the weight's codes are not")]
    if weight.dtype in FLOAT8 and codes is not None and share * codes.num_samples >= NUM_SURE_SAMPLES:
        return [member.problem("scale_values", "error", f"{text}, and the weight's codes are not")]
    alike = sum(1 for other in others if other.statistics.num_zero)
    if alike * 2 > len(others):
        return []  # small blocks whose scale was rounded to zero
    severe = share > 0.5 and len(others) >= 2
    return [member.problem("scale_values", "error" if severe else "warning", f"{text}; of its kind {alike} of {len(others)} "
                           "others have any")]  # fmt: skip


def _out_of_line(
    member: Member, others: Sequence[Member], weight: TensorEntry, codes: TensorStatistics | None
) -> list[Problem]:
    one = member.statistics
    means = [other.statistics.mean_log2 for other in others if not other.statistics.num_nan and not other.statistics.num_zero]
    if len(means) >= 2:
        middle = median(means)
        spread = median(abs(mean - middle) for mean in means)
        above = one.mean_log2 - middle
        if above >= max(ABOVE_LOG2, 6 * spread) or -above >= max(BELOW_LOG2, 6 * spread):
            text = f"scales about 2^{one.mean_log2:.1f}, those of its kind about 2^{middle:.1f} (median of {len(means)})"
            if abs(-one.mean_log2 - middle) < abs(above) / 4:
                return [member.problem("scale_values", "error", f"{text}: they look inverted")]
            return [member.problem("scale_values", "error" if above > 0 else "warning", text)]
    largest = math.log2(codes.largest) if codes is not None and codes.largest else None
    # A scale that is FP8 itself, or a byte of unknown meaning, says nothing without what scales it.
    if largest is not None and weight.dtype in FLOAT8 and member.entry.dtype not in FLOAT8 | {"uint8"}:
        implied, inverted = one.mean_log2 + largest, largest - one.mean_log2
        if implied > LARGEST_WEIGHT_LOG2 and inverted < 8:
            return [member.problem("scale_values", "error", f"scales about 2^{one.mean_log2:.1f} make weights up to "
                                   f"2^{implied:.0f}: they look inverted")]  # fmt: skip
    return []
