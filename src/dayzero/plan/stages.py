"""Where to cut a stack of layers into pipeline stages: the worst stage as light as possible, the rest balanced.

Goes in: the cost of each layer and what the first and the last stage carry beside (embedding, head). Comes out: half-open
layer ranges, every layer exactly once and in order. The cut is optimal, not heuristic. Deliberately not done: time.
"""

from bisect import bisect_right
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Caps:
    """A second cost that no stage may exceed (bytes beside seconds): per layer, of the ends, and the room of a stage."""

    costs: list[int]
    first_extra: int
    last_extra: int
    room: int


class _Stack:
    """Prefix sums of one cut's costs, and of its second ones."""

    def __init__(self, costs: list[int], num_stages: int, first_extra: int, last_extra: int, caps: Caps | None) -> None:
        check_stages(len(costs), num_stages)
        self.num_layers, self.num_stages, self.caps = len(costs), num_stages, caps
        self.extras = (first_extra, last_extra)
        self.prefix, self.largest = [0, *accumulate(costs)], max(costs)
        self.second = [0, *accumulate(caps.costs)] if caps is not None else []

    def extra(self, stage: int, ends: tuple[int, int]) -> int:
        return (ends[0] if stage == 0 else 0) + (ends[1] if stage == self.num_stages - 1 else 0)

    def cost(self, stage: int, start: int, stop: int) -> int:
        return self.prefix[stop] - self.prefix[start] + self.extra(stage, self.extras)

    def holds(self, stage: int, start: int, stop: int, limit: int) -> bool:
        """Whether the stage keeps both limits."""
        if self.cost(stage, start, stop) > limit:
            return False
        caps = self.caps
        if caps is None:
            return True
        held = self.second[stop] - self.second[start] + self.extra(stage, (caps.first_extra, caps.last_extra))
        return held <= caps.room

    def filled(self, limit: int) -> tuple[Stages | None, int]:
        """Each stage but the last takes as many layers as it can and leaves one for each after; None when none is left.

        Beside it the smallest higher limit at which some stage takes more, or the last one holds: below that nothing changes.
        """
        prefix, second, caps, last = self.prefix, self.second, self.caps, self.num_stages - 1
        found, start, higher = [], 0, prefix[-1] + sum(self.extras) + 1
        extra, held = self.extras[0], caps.first_extra if caps is not None else 0
        for stage in range(last):
            most = self.num_layers - (last - stage)
            if caps is not None:
                most = min(most, bisect_right(second, second[start] + caps.room - held, start) - 1)
            base = prefix[start] - extra
            stop = bisect_right(prefix, base + limit, start) - 1
            extra = held = 0  # only the first stage carries any
            if stop < most:
                higher = min(higher, prefix[stop + 1] - base)
            else:
                stop = most
            if stop <= start:
                return None, higher
            found.append((start, stop))
            start = stop
        found.append((start, self.num_layers))
        if self.holds(last, start, self.num_layers, limit):
            return tuple(found), higher
        return None, min(higher, max(limit + 1, self.cost(last, start, self.num_layers)))

    def lightest(self) -> tuple[int, Stages] | None:
        """The smallest possible cost of the heaviest stage and a cut that has it; None when the caps cannot be kept.

        Bisection over the answer, between costs that some cut has: a cut that was found bounds it from above by its heaviest
        stage, a limit without one from below by the next limit that changes anything.
        """
        whole = self.prefix[-1] + sum(self.extras)
        low = -(-whole // self.num_stages)
        best, higher = self.filled(low + self.largest)  # enough, but for large ends and caps
        if best is None:
            low, (best, _) = higher, self.filled(whole)
        if best is None:
            return None
        high = self.heaviest(best)
        while low < high:
            middle = (low + high) // 2
            found, higher = self.filled(middle)
            if found is None:
                low = higher
            else:
                best, high = found, self.heaviest(found)
        return high, best

    def heaviest(self, stages: Stages) -> int:
        costs = [self.prefix[stop] - self.prefix[start] for start, stop in stages]
        costs[0] += self.extras[0]
        costs[-1] += self.extras[1]
        return max(costs)


def _lightest(stack: _Stack) -> tuple[int, Stages]:
    found = stack.lightest()
    if found is None:
        raise DayZeroError("no cut keeps every stage within its memory", got=f"pp={stack.num_stages}", want="stages that fit",
                           fix="use more stages or more cards")  # fmt: skip
    return found


def lightest_cost(costs: list[int], num_stages: int, *, last_extra: int = 0) -> int:
    """What the heaviest stage costs in the best cut there is, memory apart."""
    return _lightest(_Stack(costs, num_stages, 0, last_extra, None))[0]


def first_cut(
    costs: list[int], num_stages: int, *, first_extra: int = 0, last_extra: int = 0, caps: Caps | None = None
) -> Stages:
    """A cut whose heaviest stage is lightest, found by filling stages from the front: quick, but not even."""
    return _lightest(_Stack(costs, num_stages, first_extra, last_extra, caps))[1]


def cut_stages(
    costs: list[int], num_stages: int, *, first_extra: int = 0, last_extra: int = 0, caps: Caps | None = None
) -> Stages:
    """The cut whose heaviest stage is lightest, and of those the one with the smallest sum of squares (most even).

    Dynamic programming over (stage, first layer), within the limit found before. Raises DayZeroError when there are more
    stages than layers, or when no cut keeps the caps.
    """
    stack = _Stack(costs, num_stages, first_extra, last_extra, caps)
    limit, _ = _lightest(stack)
    num_layers = len(costs)
    # best[i]: (sum of squares, stop) of the stages from the current one to the last, when the current starts at layer i.
    table: list[dict[int, tuple[int, int]]] = []
    after: dict[int, tuple[int, int]] = {num_layers: (0, num_layers)}
    for stage in reversed(range(num_stages)):
        left = num_stages - 1 - stage
        found: dict[int, tuple[int, int]] = {}
        for start in (0,) if stage == 0 else range(stage, num_layers - left):
            for stop in (num_layers,) if left == 0 else range(start + 1, num_layers - left + 1):
                if not stack.holds(stage, start, stop, limit):
                    break
                if stop in after:
                    total = stack.cost(stage, start, stop) ** 2 + after[stop][0]
                    if start not in found or total < found[start][0]:
                        found[start] = (total, stop)
        table.append(found)
        after = found
    assert 0 in after, f"no cut of {num_layers} layers into {num_stages} within {limit}"
    cut, start = [], 0
    for found in reversed(table):
        stop = found[start][1]
        cut.append((start, stop))
        start = stop
    return tuple(cut)
