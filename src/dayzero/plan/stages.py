"""Where to cut a stack of layers into pipeline stages: the worst stage as light as possible, the rest balanced.

Goes in: the cost of each layer and what the first and the last stage carry beside (embedding, head). Comes out: half-open
layer ranges, every layer exactly once and in order. The cut is optimal, not heuristic. Deliberately not done: time.
"""

from bisect import bisect_right
from itertools import accumulate

from dayzero.core.errors import DayZeroError

Stages = tuple[tuple[int, int], ...]


def check_stages(num_layers: int, num_stages: int) -> None:
    """Raises DayZeroError when there are more stages than layers."""
    if num_stages > num_layers:
        raise DayZeroError("more pipeline stages than layers", got=f"pp={num_stages}", want=f"at most {num_layers} stages",
                           fix=f"choose --pp of at most {num_layers}")  # fmt: skip


def stages_from_sizes(num_layers: int, sizes: tuple[int, ...]) -> Stages:
    """Stages of the given numbers of layers. Raises DayZeroError unless they cover all layers and none is empty."""
    if not sizes or min(sizes) < 1 or sum(sizes) != num_layers:
        raise DayZeroError("the pipeline partition does not cover the layers", got=f"{list(sizes)} (sum {sum(sizes)})",
                           want=f"positive numbers that sum to {num_layers}", fix="correct the partition")  # fmt: skip
    ends = list(accumulate(sizes))
    return tuple((end - size, end) for end, size in zip(ends, sizes, strict=True))


def worst_stage_limit(costs: list[int], num_stages: int, first_extra: int, last_extra: int) -> int:
    """The smallest possible cost of the heaviest of `num_stages` contiguous non-empty stages (bisection over the answer)."""
    check_stages(len(costs), num_stages)
    prefix = [0, *accumulate(costs)]
    low = max(max(costs), first_extra + costs[0], last_extra + costs[-1])
    high = prefix[-1] + first_extra + last_extra
    if num_stages == 1:
        return high
    while low < high:
        middle = (low + high) // 2
        if _fits(prefix, num_stages, first_extra, last_extra, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(prefix: list[int], num_stages: int, first_extra: int, last_extra: int, limit: int) -> bool:
    """Whether stages within `limit` exist: each but the last takes as many layers as it can and leaves one for each after."""
    num_layers, start = len(prefix) - 1, 0
    for stage in range(num_stages - 1):
        room = limit - (first_extra if stage == 0 else 0)
        stop = min(bisect_right(prefix, prefix[start] + room) - 1, num_layers - (num_stages - 1 - stage))
        if stop <= start:
            return False
        start = stop
    return prefix[-1] - prefix[start] + last_extra <= limit


def first_cut(costs: list[int], num_stages: int, *, first_extra: int = 0, last_extra: int = 0) -> Stages:
    """A cut whose heaviest stage is lightest, found by filling stages from the front: quick, but not even."""
    limit = worst_stage_limit(costs, num_stages, first_extra, last_extra)
    prefix = [0, *accumulate(costs)]
    starts = [0]
    for stage in range(num_stages - 1):
        room = limit - (first_extra if stage == 0 else 0)
        starts.append(min(bisect_right(prefix, prefix[starts[-1]] + room) - 1, len(costs) - (num_stages - 1 - stage)))
    return tuple(zip(starts, [*starts[1:], len(costs)], strict=True))


def cut_stages(costs: list[int], num_stages: int, *, first_extra: int = 0, last_extra: int = 0) -> Stages:
    """The cut whose heaviest stage is lightest, and of those the one with the smallest sum of squares (most even).

    Dynamic programming over (stage, first layer), within the limit found before. Raises DayZeroError when there are more
    stages than layers.
    """
    num_layers = len(costs)
    limit = worst_stage_limit(costs, num_stages, first_extra, last_extra)
    prefix = [0, *accumulate(costs)]
    # best[i]: (sum of squares, cut) of the stages from the current one to the last, when the current starts at layer i.
    best: dict[int, tuple[int, Stages]] = {}
    for stage in reversed(range(num_stages)):
        extra = (first_extra if stage == 0 else 0) + (last_extra if stage == num_stages - 1 else 0)
        after = num_stages - 1 - stage
        found: dict[int, tuple[int, Stages]] = {}
        for start in (0,) if stage == 0 else range(stage, num_layers - after):
            stops = (num_layers,) if after == 0 else range(start + 1, num_layers - after + 1)
            for stop in stops:
                cost = prefix[stop] - prefix[start] + extra
                if cost > limit:
                    break
                tail = best.get(stop) if after else (0, ())
                if tail is None:
                    continue
                total = cost * cost + tail[0]
                if start not in found or total < found[start][0]:
                    found[start] = (total, ((start, stop), *tail[1]))
        best = found
    assert 0 in best, f"no cut of {num_layers} layers into {num_stages} within {limit}"
    return best[0][1]
