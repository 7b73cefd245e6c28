"""Every legal layout of a number of devices, and the best of them by the objective.

Goes in: an `Evaluator` and the degrees a user fixed. Comes out: candidates with their figures or the one constraint that
killed them. Exhaustive: every layout is enumerated (`space`); one is left unpriced only when a bound from below on its time or
its memory proves that it cannot be the answer. Deliberately not done: words (`advice`), counting cards (`counts`).
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from dayzero.core.errors import DayZeroError
from dayzero.core.plan import DEFAULT_PLACEMENT, Layout, TimeEstimate
from dayzero.core.target import Workload
from dayzero.plan.ledger import Evaluation, Evaluator
from dayzero.plan.links import Seconds
from dayzero.plan.roles import Split, Splitter
from dayzero.plan.roofline import Step, slower
from dayzero.plan.space import Degrees, Space
from dayzero.plan.stages import Caps, Stages, cut_stages, first_cut, lightest_cost
from dayzero.plan.traffic import Reach
from dayzero.plan.work import Batch

NANOSECONDS, PICOSECONDS = 10**9, 10**12
Phase = Literal["mixed", "prefill", "decode"]  # what the pool does


class Timing(NamedTuple):
    """What the objective compares: whether a stated goal is missed even at best, then seconds."""

    misses: int
    serve_s: float
    prefill: TimeEstimate
    decode: TimeEstimate

    @property
    def rank(self) -> tuple[int, float]:
        """Equal within the third digit is equal."""
        return self.misses, _rounded(self.serve_s)


class Pace(NamedTuple):
    """What a layout takes whatever its placement: prompts that follow each other through a replica's stages, the batch that is
    decoded, a step of each kind before collectives, and the slowest stage over the mean one in it."""

    prompts: float
    tokens: Batch
    prompt: Step
    token: Step
    uneven_prompt: float
    uneven_token: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout: priced, or illegal for `constraint`."""

    layout: Layout
    evaluation: Evaluation | None = None
    constraint: str = ""
    error: DayZeroError | None = None
    timing: Timing | None = None
    split: Split | None = None  # roles over other numbers of cards, where asked for

    @property
    def fits(self) -> bool:
        return self.evaluation is not None and self.evaluation.fits


class Search(Space):
    """Layouts of one evaluator's model on its target, priced."""

    def __init__(self, evaluator: Evaluator, workload: Workload, *, phase: Phase = "mixed") -> None:
        super().__init__(evaluator)
        self.workload, self.phase = workload, phase
        self._weights: dict[tuple[int, ...], int] = {}
        self._priced: dict[Layout, Candidate] = {}

    def share(self, other: "Search") -> None:
        """Take over what another search of the same weights found out."""
        self._illegal, self._weights = other._illegal, other._weights

    @cached_property
    def splitter(self) -> Splitter | None:
        asked = self.request.role_tp or self.request.split_roles
        return Splitter(self.evaluator, self.roofline) if asked else None

    # --- what one costs

    def candidate(self, layout: Layout) -> Candidate:
        """Price one layout, or say why it is illegal. A pipeline is cut so that its stages take equally long, where that
        fits, else so that the fullest stage is as light as it can be."""
        if layout not in self._priced:
            self._priced[layout] = self._price(layout)
        return self._priced[layout]

    def _price(self, layout: Layout) -> Candidate:
        if (reason := self.illegal(layout)) is not None:
            return Candidate(layout, constraint=reason)
        try:
            evaluation = self.evaluator.evaluate(layout, even=False)
            if not evaluation.fits and not layout.sp and True in self._sp(layout):  # tokens dealt out take less
                dealt = self.evaluator.evaluate(replace(layout, sp=True), even=False)
                if dealt.short_bytes < evaluation.short_bytes:
                    layout, evaluation = replace(layout, sp=True), dealt
            if layout.pp > 1 and not layout.stages and evaluation.fits:
                evaluation = self._cut_by_time(layout, evaluation, first_cut)
            split = None
            if self.splitter is not None:
                evaluation, split = self.splitter.apply(evaluation)
        except DayZeroError as error:
            return Candidate(layout, constraint=f"{error.what} ({error.got})", error=error)
        return Candidate(evaluation.layout, evaluation, split=split)

    def evened(self, candidate: Candidate) -> Candidate:
        """The candidate with its stages balanced beyond the slowest one, where that fits too."""
        evaluation, layout = candidate.evaluation, candidate.layout
        if evaluation is None or layout.pp == 1 or self.splitter is not None:
            return candidate
        if not evaluation.fits:
            even = self.evaluator.evaluate(replace(layout, stages=()))
            return replace(candidate, layout=even.layout, evaluation=even)
        even = self._cut_by_time(replace(layout, stages=()), evaluation, cut_stages)
        return self.timed(replace(candidate, layout=even.layout, evaluation=even, timing=None))

    def _cut_by_time(self, layout: Layout, lightest: Evaluation, cut: Callable[..., Stages]) -> Evaluation:
        """The evaluation with the cut whose slowest stage is fastest among those that fit."""
        evaluator, work = self.evaluator, self.workload
        layers, first, last = evaluator.weights.cut_costs(layout, layout.coordinates(0))
        held = [a + b for a, b in zip(layers, evaluator.demand_per_layer(layout), strict=True)]
        # No stage of another cut holds more beside its layers than the worst of this one, a tensor's staging apart.
        room = lightest.budget_bytes - max(load.fixed_bytes for load in lightest.stages)
        chunk, steps = self._chunks
        prompt, token = self.roofline.step(layout, chunk), self.roofline.step(layout, self._decode_batch(layout))
        times = [int((a * steps + b * work.output_tokens) * NANOSECONDS)
                 for a, b in zip(prompt.layers_s, token.layers_s, strict=True)]  # fmt: skip
        ends = int((prompt.outside_s * steps + token.outside_s * work.output_tokens) * NANOSECONDS)
        try:
            stages = cut(times, layout.pp, last_extra=ends, caps=Caps(held, first, last, room))
        except DayZeroError:  # only the lightest cut fits: keep it
            return lightest
        found = evaluator.evaluate(replace(layout, stages=stages))
        return found if found.fits else lightest

    # --- how long one takes

    @property
    def _input_tokens(self) -> int:
        return min(self.workload.input_tokens, self.request.context_tokens)

    @cached_property
    def _chunks(self) -> tuple[Batch, int]:
        """One chunk of a prompt, and how many there are."""
        return self.roofline.prefill_batch(self._input_tokens)

    def _sequences(self, layout: Layout) -> int:
        return 1 if self.workload.objective == "latency" else self.request.sequences(layout.dp)

    def _decode_batch(self, layout: Layout) -> Batch:
        rows = -(-self._sequences(layout) // layout.pp)
        return Batch("decode", rows, rows, self.request.average_tokens)

    def timing(self, layout: Layout) -> Timing:
        """What the objective compares: seconds to serve the workload's concurrent requests once, or one alone.

        Prompts follow each other through the stages; decoding splits the batch over them, and the slowest stage sets the
        pace. A layout without stages is bounded from below for every cut.
        """
        pace = self._pace(layout)
        prefill = self.roofline.prefill(layout, self._input_tokens)
        decode = self.roofline.decode(layout, pace.tokens.sequences, self.request.average_tokens)
        if layout.pp > 1:
            prefill, decode = slower(prefill, pace.uneven_prompt), slower(decode, pace.uneven_token)
        return Timing(*self._weighed(pace, (prefill.low_s, prefill.high_s), (decode.low_s, decode.high_s)), prefill, decode)

    def rank(self, layout: Layout, pace: Pace, reach: Reach) -> tuple[int, float]:
        """`timing(layout).rank` alone, in a placement that reaches so far: nothing is built that only the answer needs."""
        traffic, (chunk, steps) = self.roofline.traffic, self._chunks

        def span(step: Step, collectives: Seconds, count: int, uneven: float) -> tuple[float, float]:
            low, high = self.roofline.ends(step, collectives)
            return count * low * uneven, count * high * uneven

        misses, serve = self._weighed(
            pace, span(pace.prompt, traffic.over(layout, chunk, reach), steps, pace.uneven_prompt),
            span(pace.token, traffic.over(layout, pace.tokens, reach), 1, pace.uneven_token),
        )  # fmt: skip
        return misses, _rounded(serve)

    def _weighed(self, pace: Pace, prefill: tuple[float, float], decode: tuple[float, float]) -> tuple[int, float]:
        """The objective of two ranges of seconds: goals missed even at best, and seconds to serve the workload."""
        work, misses = self.workload, 0
        if self.roofline.rates.published:
            misses = (work.max_ttft_s is not None and prefill[0] > work.max_ttft_s) + (
                work.max_tpot_s is not None and decode[0] > work.max_tpot_s)  # fmt: skip
        serve = (pace.prompts * ((prefill[0] + prefill[1]) / 2) if self.phase != "decode" else 0.0) + (
            work.output_tokens * ((decode[0] + decode[1]) / 2) if self.phase != "prefill" else 0.0)  # fmt: skip
        return int(misses), serve

    def _pace(self, layout: Layout, uneven: Callable[[Layout, Step], float] | None = None) -> Pace:
        """`uneven`: how far the slowest stage is above the mean one; of a layout without stages, a bound from below."""
        tokens, uneven = self._decode_batch(layout), uneven or _imbalance
        prompt, token = self.roofline.step(layout, self._chunks[0]), self.roofline.step(layout, tokens)
        prompts = (self._sequences(layout) + layout.pp - 1) / layout.pp
        if layout.pp == 1:
            return Pace(prompts, tokens, prompt, token, 1.0, 1.0)
        return Pace(prompts, tokens, prompt, token, uneven(layout, prompt), uneven(layout, token))

    def _best_variant(self, layout: Layout) -> tuple[tuple[int, float], Layout]:
        """The rank of the best placement, and the layout in it (the simplest of equals). Without stages: in the best cut."""
        found, uneven = [], _imbalance if layout.stages else _least_imbalance
        for sp in (True,) if layout.sp else self._sp(layout):  # priced with SP: it would not fit without
            pace = self._pace(one := replace(layout, sp=sp), uneven)
            for placement, reach in self.places(one):
                found.append((self.rank(one, pace, reach), sp, placement != DEFAULT_PLACEMENT, placement))
        rank, sp, _, placement = min(found)
        return rank, replace(layout, sp=sp, placement=placement)

    def timed(self, candidate: Candidate) -> Candidate:
        """The candidate in its best placement, with its times."""
        if candidate.timing is not None or candidate.evaluation is None:
            return candidate
        _, layout = self._best_variant(candidate.layout)
        timing = self.timing(layout)
        if candidate.split is not None:
            timing = timing._replace(serve_s=timing.serve_s + candidate.split.serve_s(self.workload))
        evaluation = replace(candidate.evaluation, layout=layout)
        if layout.sp != candidate.layout.sp and self.splitter is None:
            evaluation = self.evaluator.evaluate(layout)
        return replace(candidate, layout=layout, evaluation=evaluation, timing=timing)

    # --- the best of them

    def best(self, devices: int) -> Candidate | None:
        """The fitting layout with the best time, else the one that lacks least; None when all are illegal."""
        return self.best_fitting(devices) or self.least_short(devices)

    def best_fitting(self, devices: int) -> Candidate | None:
        """Branch and bound over every layout: a time that no placement and no cut can beat orders the queue, and what is
        taken from it first with its real time and fits is the answer. Each layout is bounded more closely as it is taken:
        with its family, by sums, in the best placement there could be, in the best cut, in the best placement there is."""
        queue: list[tuple[tuple[int, float], tuple[object, ...], int, int, list[Degrees], Layout, Candidate | None]] = []
        count = itertools.count()  # no two entries compare beyond it

        def push(rank: tuple[int, float], level: int, layout: Layout, *, family: list[Degrees] | None = None,
                 found: Candidate | None = None) -> None:  # fmt: skip
            heapq.heappush(queue, (rank, _simplicity(layout), next(count), level, family or [], layout, found))

        for family in self.families(devices):
            # Sharing more of the context divides what is read and nothing else: the last one bounds them all.
            fastest = self.layout(family[-1])
            if self.uncut(fastest) is None and self.lacks_at_least(fastest) <= 0:
                push(self._coarse(fastest), 0, self.layout(family[0]), family=family)
        while queue:
            _, _, _, level, family, layout, candidate = heapq.heappop(queue)
            if candidate is not None:
                return candidate
            if level == 0:
                for member in map(self.layout, family):
                    if self.illegal(member) is None:
                        push(self._coarse(member), 1, member)
            elif level == 1:
                push(self._bound(layout), 2, layout)
            elif level == 2 and self.splitter is None:
                push(self._bound(layout, _least_imbalance), 3, layout)
            elif level == 3 and self.splitter is None:
                push(self._best_variant(layout)[0], 4, layout)
            elif (found := self.candidate(layout)).fits:
                found = self.timed(found)
                assert found.timing is not None
                push(found.timing.rank, 5, found.layout, found=found)
        return None

    def _coarse(self, layout: Layout) -> tuple[int, float]:
        """What no variant of the layout can beat, from sums alone."""
        if self.splitter is not None:  # a role that is split otherwise may save time
            return 0, 0.0
        sequences, serve = self._sequences(layout), 0.0
        if self.phase != "decode":
            batch, steps = self.roofline.prefill_batch(self._input_tokens)
            serve += (sequences + layout.pp - 1) / layout.pp * steps * self.roofline.at_least_s(layout, batch)
        if self.phase != "prefill":
            serve += self.workload.output_tokens * self.roofline.at_least_s(layout, self._decode_batch(layout))
        return 0, float(f"{serve:.3g}")

    def _bound(self, layout: Layout, uneven: Callable[[Layout, Step], float] | None = None) -> tuple[int, float]:
        """What no variant of the layout can beat, whatever its placement and its pipeline's cut."""
        if self.splitter is not None:  # a role that is split otherwise may save time
            return 0, 0.0
        reach, variants = self.roofline.traffic.best_reach(layout), [replace(layout, sp=sp) for sp in self._sp(layout)]
        return min(self.rank(variant, self._pace(variant, uneven), reach) for variant in variants)

    def fits(self, devices: int) -> bool:
        """Whether any layout of that many devices fits. The lightest first; what provably lacks memory is not priced."""
        order = sorted((lack, index, layout) for index, layout in enumerate(self.layouts(devices))
                       if self.illegal(layout) is None and (lack := self.lacks_at_least(layout)) <= 0)  # fmt: skip
        return any(self.candidate(layout).fits for _, _, layout in order)

    def least_short(self, devices: int) -> Candidate | None:
        """The legal layout that lacks least. A bound from below on what each lacks orders the work."""
        order = [(self.lacks_at_least(layout), index, layout) for index, layout in enumerate(self.layouts(devices))
                 if self.illegal(layout) is None]  # fmt: skip
        best: Candidate | None = None
        for lack, _, layout in sorted(order, key=lambda row: row[:2]):
            if best is not None and lack > _evaluated(best).short_bytes:
                break
            found = self.candidate(layout)
            if found.evaluation is not None and (best is None or _lacks(found) < _lacks(best)):
                best = found
        return best

    def lacks_at_least(self, layout: Layout) -> int:
        """A bound from below on what the fullest rank lacks: its runtime and reserve, and the mean over the stages of
        weights alone."""
        key = (layout.tp, layout.ep, layout.expert_tp, layout.redundant_experts)
        if key not in self._weights:
            flat = replace(layout, pp=1, stages=())
            try:
                self._weights[key] = sum(self.evaluator.weights.layer_bytes(flat, flat.coordinates(0)))
            except DayZeroError:  # `candidate` says why
                self._weights[key] = 0
        lightest = self._weights[key] // layout.pp if self.splitter is None else 0
        budget = self.evaluator.budget_bytes(layout)
        return lightest + undivided_bytes(self.evaluator, budget) - budget


def undivided_bytes(evaluator: Evaluator, budget_bytes: int) -> int:
    """What no layout divides: the runtime and the reserve of each card, where the engine charges them to its budget."""
    outside, reserves = evaluator.engine.memory.outside, evaluator.reserves
    runtime = 0 if "runtime" in outside else reserves.runtime_bytes
    return runtime + (0 if "reserve" in outside else int(budget_bytes * reserves.reserve_share))


def _lacks(candidate: Candidate) -> tuple[int, tuple[object, ...]]:
    return _evaluated(candidate).short_bytes, _simplicity(candidate.layout)


def _evaluated(candidate: Candidate) -> Evaluation:
    assert candidate.evaluation is not None, candidate
    return candidate.evaluation


def _simplicity(layout: Layout) -> tuple[object, ...]:
    """Between equals: fewer stages, less context parallelism, less expert parallelism, less tensor parallelism."""
    moved = layout.placement != DEFAULT_PLACEMENT
    return (layout.pp, layout.cp_devices, layout.cp_in_tp, layout.ep, layout.tp, layout.dp, layout.sp, moved, layout.placement)


def _imbalance(layout: Layout, step: Step) -> float:
    """The slowest stage over the mean one. Not cut yet: of the layers that take some time or longer, some stage has as many as
    their mean, rounded up."""
    times, outside = step.layers_s, step.outside_s
    if not layout.stages:
        whole, slowest, count = sum(times) + outside, 0.0, 0
        for seconds, alike in sorted(Counter(times).items(), reverse=True):
            count += alike
            slowest = max(slowest, -(-count // layout.pp) * seconds)
        return max(1.0, slowest * layout.pp / whole) if whole else 1.0
    stages = [sum(times[first:stop]) for first, stop in layout.stages]
    stages[-1] += outside
    return max(stages) * len(stages) / sum(stages)


def _least_imbalance(layout: Layout, step: Step) -> float:
    """The slowest stage over the mean one in the evenest cut that there is, whether it fits or not."""
    if layout.pp > len(step.layers_s):  # `candidate` says that there is none
        return 1.0
    whole = sum(step.layers_s) + step.outside_s
    slowest = lightest_cost([int(seconds * PICOSECONDS) for seconds in step.layers_s], layout.pp,
                            last_extra=int(step.outside_s * PICOSECONDS))  # fmt: skip
    # One less than what was rounded down already: no other way of summing seconds comes out below it.
    return max(1.0, (slowest - 1) / PICOSECONDS * layout.pp / whole) if whole else 1.0


def _rounded(seconds: float) -> float:
    """Equal within the third digit is equal."""
    return float(f"{seconds:.3g}")
