"""How many cards: the number that was asked for, or the one that the objective wants.

Goes in: a case. Comes out: the chosen candidate, what the next smaller number lacks, and how many cards stay idle. Throughput
and fewest cards take the smallest number that fits and can meet the stated latency goals; cost takes the fewest card-seconds
a request, latency the fastest single request.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from dayzero.core.errors import DayZeroError
from dayzero.core.plan import Layout, Rejected
from dayzero.core.units import format_bytes
from dayzero.plan.case import Case
from dayzero.plan.search import Candidate, Search, undivided_bytes
from dayzero.plan.space import SPANNING, fixed_devices, reachable_devices

# Largest deployment proposed on our own; more is planned when asked for.
MOST_DEVICES = 1024


@dataclass(frozen=True, slots=True)
class Choice:
    candidate: Candidate
    asked: int | None
    idle: int = 0
    ruled_out: tuple[Rejected, ...] = ()


def choose(case: Case) -> Choice:
    """Raises DayZeroError for degrees that cannot be (naming the nearest that can)."""
    search = case.search
    asked = fixed_devices(search.fixed, case.options.devices)
    if asked is not None:
        return _as_asked(search, asked)
    objective = case.workload.objective
    if objective in ("cost", "latency"):
        return _by_time(case, weigh_cards=objective == "cost")
    least: Choice | None = None  # where nothing fits, the smallest number of cards is shown
    first: Choice | None = None  # fits, but misses a latency goal even at best
    before: int | None = None
    for devices in device_counts(search, every=objective == "fewest_cards"):
        if could_fit(search, devices) and (best := search.best_fitting(devices)) is not None:
            found = Choice(best, None, ruled_out=_ruled_out(search, before))
            if best.timing is None or not best.timing.misses:
                return found
            first = first or found
        elif first is None and least is None and (short := search.least_short(devices)) is not None:
            least = Choice(short, None)
        before = devices
    if first is None and least is None:
        raise illegal(search, MOST_DEVICES)
    return first or least  # type: ignore[return-value]


def _as_asked(search: Search, asked: int) -> Choice:
    """All cards asked for; where no layout of all fits, the most of them that some layout fits, the others idle."""
    best = search.best(asked)
    if best is not None and best.fits:
        return Choice(best, asked)
    step = prod(search.fixed.get(axis, 1) for axis in SPANNING)
    if any(axis not in search.fixed for axis in SPANNING):
        for devices in range(asked - step, 0, -step):
            if not could_fit(search, devices):
                break  # fewer cards hold even less
            if (fewer := search.best_fitting(devices)) is not None:
                return Choice(fewer, asked, idle=asked - devices)
    if best is None:
        raise illegal(search, asked)
    return Choice(best, asked)


def _by_time(case: Case, *, weigh_cards: bool) -> Choice:
    search, cheapest = case.search, (2, 0.0)
    best: Candidate | None = None
    for devices in device_counts(search):
        if not could_fit(search, devices) or (found := search.best_fitting(devices)) is None or found.timing is None:
            continue
        misses, seconds = found.timing.rank
        cost = (misses, seconds * devices if weigh_cards else seconds)
        if best is None or cost < cheapest:
            best, cheapest = found, cost
    if best is not None:
        return Choice(best, None)
    least = next((short for devices in device_counts(search) if (short := search.least_short(devices)) is not None), None)
    if least is None:
        raise illegal(search, MOST_DEVICES)
    return Choice(least, None)


def device_counts(search: Search, start: int = 1, *, every: bool = False) -> list[int]:
    """Numbers of devices worth proposing: powers of two and whole nodes (every number, to find the fewest), on a target
    that has so many."""
    target = search.evaluator.target
    most = min(MOST_DEVICES, reachable_devices(target) or MOST_DEVICES)
    if every:
        return list(range(start, most + 1))
    node = target.node.num_cards or 1
    powers = [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]
    nodes = [node * count for count in range(1, 9) if node * count <= most]
    return sorted({count for count in [*powers, *nodes] if count >= start})


def could_fit(search: Search, devices: int) -> bool:
    """A bound from below, to spare enumerating what cannot fit: the stored weights once over all cards, and on each card
    what no layout divides."""
    evaluator = search.evaluator
    budget = evaluator.budget_bytes(Layout(dp=devices))
    return (budget - undivided_bytes(evaluator, budget)) * devices >= evaluator.stored_bytes


def _ruled_out(search: Search, devices: int | None) -> tuple[Rejected, ...]:
    """What the next smaller number of cards lacks, at best."""
    best = search.least_short(devices) if devices is not None else None
    if best is None or best.evaluation is None or best.evaluation.fits:
        return ()
    short = best.evaluation.short_bytes
    return (Rejected(layout=best.evaluation.layout, short_by_bytes=short,
                     constraint=f"memory: {devices} cards are short by {format_bytes(short)} per card at best"),)  # fmt: skip


def nearest_tp(search: Search, layout: Layout) -> list[int]:
    """The tensor-parallel degrees nearest to the layout's at which every parameter can be cut."""
    plain = replace(layout, ep=1, redundant_experts=0, cp=1, cp_in_tp=1, stages=())
    legal = search.evaluator.weights.legal_tp(plain, max(64, 2 * layout.tp))
    return sorted(sorted(legal, key=lambda degree: (abs(degree - layout.tp), degree))[:4])


def illegal(search: Search, devices: int) -> DayZeroError:
    """Why no layout of the asked degrees is legal, with the nearest tensor-parallel degrees that are."""
    layouts: Iterator[Layout] = search.layouts(devices)
    candidates = [search.candidate(layout) for layout in layouts]
    if not candidates:
        said = ", ".join(f"{axis}={degree}" for axis, degree in search.fixed.items()) or f"{devices} devices"
        return DayZeroError("no layout has these degrees", got=said, want=f"{' * '.join(SPANNING)} = {devices}",
                            fix="correct a degree or --devices")  # fmt: skip
    first = next((c for c in candidates if c.error is not None), candidates[0])
    if "pipeline" in first.constraint and first.error is not None:
        return first.error
    near = nearest_tp(search, first.layout)
    wanted = f"tp of {', '.join(map(str, near))}" if near or first.error is None else first.error.want
    said = first.layout.spelled()
    return DayZeroError(f"{said} is not legal for {search.model.name}: {first.constraint}", got=said, want=wanted,
                        fix="choose one of these degrees, or let the plan choose")  # fmt: skip
