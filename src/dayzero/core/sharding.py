"""Which part of a parameter a rank owns: one rule for the planner (bytes) and the converter (copies). Integers only.

A rank's part is a tuple of boxes (one half-open range per dimension) which are concatenated along `ShardRule.tensor_dim`
in order. Uneven cuts are allowed where units do not divide: earlier ranks get one unit more.
"""

from math import prod

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Parameter
from dayzero.core.plan import Coordinates, Layout

Box = tuple[tuple[int, int], ...]

# Parameters of the experts: EP cuts them across experts, and the ranks that share an expert split its tensors.
EXPERT_ROLES = frozenset({"expert"})


def even_split(total: int, parts: int, index: int) -> tuple[int, int]:
    """Part `index` of `total` items in `parts` near-equal contiguous runs; earlier parts get the remainder."""
    base, extra = divmod(total, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def unit_range(units: int, degree: int, index: int, *, replicable: bool, name: str) -> tuple[int, int]:
    """The units of one segment that tensor rank `index` of `degree` owns.

    With more ranks than units, ranks share a unit when the rule allows it and the degree is a multiple. Raises
    DayZeroError naming the parameter where the cut is illegal.
    """
    if degree <= units:
        if units % degree and not replicable:
            return even_split(units, degree, index)
        if units % degree == 0:
            return even_split(units, degree, index)
    elif replicable and degree % units == 0:
        unit = index * units // degree
        return unit, unit + 1
    raise DayZeroError(
        f"{name} cannot be cut {degree} ways",
        got=f"{units} units",
        want="a degree that divides the units" + (" or is a multiple of them" if replicable else ""),
        fix="choose another --tp (or --ep for experts)",
    )


def rank_boxes(parameter: Parameter, layout: Layout, place: Coordinates) -> tuple[Box, ...]:
    """The boxes of `parameter` that the rank at `place` stores; () when its stage or expert group has none of it.

    Pipeline stages are decided by `owns_layer` (the caller), not here.
    """
    rule, shape = parameter.shard, parameter.shape
    box = [(0, size) for size in shape]
    is_expert = parameter.role in EXPERT_ROLES and rule.expert_dim is not None
    degree, index = (layout.expert_tp, place.expert_tp) if is_expert else (layout.tp, place.tp)
    if is_expert:
        assert rule.expert_dim is not None
        first, last = even_split(shape[rule.expert_dim], layout.ep, place.ep)
        if first == last:
            return ()
        box[rule.expert_dim] = (first, last)
    if rule.tensor_dim is None or degree == 1:
        return (tuple(box),)
    segments = rule.segments or (shape[rule.tensor_dim],)
    units = rule.units or tuple(segments)
    assert sum(segments) == shape[rule.tensor_dim] and len(units) == len(segments), (parameter.name, rule)
    boxes, start = [], 0
    for size, count in zip(segments, units, strict=True):
        first, last = unit_range(count, degree, index, replicable=rule.replicable, name=parameter.name)
        width = size // count
        if last > first:
            box[rule.tensor_dim] = (start + first * width, start + last * width)
            boxes.append(tuple(box))
        start += size
    return tuple(boxes)


def box_elements(boxes: tuple[Box, ...]) -> int:
    return sum(prod(stop - start for start, stop in box) for box in boxes)


def local_shape(boxes: tuple[Box, ...], tensor_dim: int | None) -> tuple[int, ...]:
    """Shape of the stored part: boxes concatenated along `tensor_dim`."""
    shape = [stop - start for start, stop in boxes[0]]
    if tensor_dim is not None:
        shape[tensor_dim] = sum(box[tensor_dim][1] - box[tensor_dim][0] for box in boxes)
    return tuple(shape)


def owns_layer(parameter: Parameter, layout: Layout, stage: int) -> bool:
    """Whether a pipeline stage stores the parameter. Embeddings live on the first stage, the head, the final norm and
    everything else without a layer on the last; a tied embedding is stored on both."""
    last = layout.pp - 1
    if parameter.layer is None:
        if parameter.role in ("embedding", "tower", "projector"):
            return stage == 0 or (parameter.role == "embedding" and parameter.tied_to is not None and stage == last)
        return stage == last
    if not layout.stages:
        assert layout.pp == 1, "a pipelined layout needs its stages"
        return True
    first, stop = layout.stages[stage]
    return first <= parameter.layer < stop or (parameter.layer >= layout.stages[-1][1] and stage == last)
