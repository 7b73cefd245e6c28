"""A kind's tensors and their checksums in, those that are copies of others out.

Trained matrices of two layers or experts are never the same bytes. Yet sound checkpoints hold copies: models grown by repeating
whole layers, blocks that all layers share, experts that all start from one feed-forward. So few copies among many are an error,
a whole layer or everything alike a warning, and tables that are the same everywhere and not random nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dayzero.core.model import Problem
from dayzero.weights.checks.census_rules import NUMBER, Kind, Member
from dayzero.weights.checks.census_samples import FLOATS

LEAST_ELEMENTS, LEAST_DISTINCT = 1024, 48
FEW = 8  # copies are few when they are at most one in so many


def copies(kind: Kind, checksums: Mapping[str, str], kinds: Mapping[tuple[str, str], Kind]) -> list[Problem]:
    """Groups of the same bytes within one kind, each told once."""
    members = kind.members
    groups: dict[str, list[Member]] = {}
    for member in members:
        if _varied(member) and member.name in checksums:
            groups.setdefault(checksums[member.name], []).append(member)
    groups = {checksum: group for checksum, group in groups.items() if len(group) > 1}
    if not groups:
        return []
    surplus = sum(len(group) - 1 for group in groups.values())
    few = len(members) > 2 and surplus <= max(1, len(members) // FEW)
    problems = []
    for group in groups.values():
        first, names = group[-1], [member.name for member in group]
        numbers = [NUMBER.findall(name) for name in names]
        same_layer = len(numbers[0]) > 1 and len({tuple(one[:-1]) for one in numbers}) == 1
        shown = ", ".join(names[: min(3, len(names) - 1)]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        text = f"the same bytes as {shown}; {len(members) - len(group)} others of its kind differ"
        if same_layer:
            layer = [other for other in members if NUMBER.findall(other.name)[:-1] == numbers[0][:-1]]
            sure = len(group) < len(layer)  # all alike: as after splitting one feed-forward into experts
            problems.append(first.problem("identical_tensors", "error" if sure else "warning", text))
        elif _whole_layer(names, checksums, kinds):
            whole = f"{text}; their whole layers are alike"
            problems.append(first.problem("identical_tensors", "warning", whole))
        else:
            problems.append(first.problem("identical_tensors", "error" if few else "warning", text))
    return problems


def _varied(member: Member) -> bool:
    """Whether this is a matrix of many different numbers, so that equal bytes are no chance. Tables made by formula that every
    layer stores have one sign or few values."""
    one = member.statistics
    form = FLOATS.get(member.entry.dtype)
    signs = form is None or not form.signed or 0.2 < one.negative_share < 0.8
    return member.is_matrix and member.entry.num_elements >= LEAST_ELEMENTS and one.num_distinct >= LEAST_DISTINCT and signs


def _whole_layer(names: Sequence[str], checksums: Mapping[str, str], kinds: Mapping[tuple[str, str], Kind]) -> bool:
    """Whether the first two layers that these names belong to have all their matrices alike."""
    first, second = (prefix.group() if (prefix := re.match(r".*?\.\d+\.", name)) else "" for name in names[:2])
    if not first or first == second:
        return False
    own = [member.name for kind in kinds.values() for member in kind.members
           if member.name.startswith(first) and _varied(member) and member.name in checksums]  # fmt: skip
    return len(own) > 1 and all(checksums[name] == checksums.get(second + name.removeprefix(first)) for name in own)
