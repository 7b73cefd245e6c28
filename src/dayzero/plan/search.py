"""Every legal layout of a number of devices, and the best of them by the objective.

Goes in: an `Evaluator` and the degrees a user fixed. Comes out: candidates with their figures or the one constraint that
killed them. Exhaustive: every layout is enumerated (`space`); one is left unpriced only when a bound from below on its time or
its memory proves that it cannot be the answer. Deliberately not done: words (`advice`), counting cards (`counts`).
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from dayzero.core.errors import DayZeroError
from dayzero.core.plan import DEFAULT_PLACEMENT, Layout, TimeEstimate
from dayzero.core.target import Workload
from dayzero.plan.ledger import Evaluation, Evaluator
from dayzero.plan.roles import Split, Splitter
from dayzero.plan.roofline import middle, slower
from dayzero.plan.space import Space
from dayzero.plan.stages import Caps, Stages, cut_stages, first_cut
from dayzero.plan.work import Batch

NANOSECONDS = 1_000_000_000
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
        return self.misses, float(f"{self.serve_s:.3g}")


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
        self._weights: dict[tuple[int, int, int], int] = {}
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
        prompts, outside = self.roofline.layer_times(layout, self.roofline.prefill_batch(self._input_tokens)[0])
        tokens, head = self.roofline.layer_times(layout, self._decode_batch(layout))
        steps = self.roofline.prefill_batch(self._input_tokens)[1]
        times = [int((a * steps + b * work.output_tokens) * NANOSECONDS) for a, b in zip(prompts, tokens, strict=True)]
        ends = int((outside * steps + head * work.output_tokens) * NANOSECONDS)
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

    def _sequences(self, layout: Layout) -> int:
        return 1 if self.workload.objective == "latency" else self.request.sequences(layout.dp)

    def _decode_batch(self, layout: Layout) -> Batch:
        rows = -(-self._sequences(layout) // layout.pp)
        return Batch("decode", rows, rows, self.request.average_tokens)

    def timing(self, layout: Layout, *, at_best: bool = False) -> Timing:
        """What the objective compares: seconds to serve the workload's concurrent requests once, or one alone.

        Prompts follow each other through the stages; decoding splits the batch over them, and the slowest stage sets the
        pace. A layout without stages is bounded from below for every cut; `at_best` bounds every placement too.
        """
        work, sequences = self.workload, self._sequences(layout)
        prefill = self.roofline.prefill(layout, self._input_tokens, at_best=at_best)
        rows = -(-sequences // layout.pp)
        decode = self.roofline.decode(layout, rows, self.request.average_tokens, at_best=at_best)
        if layout.pp > 1:
            prompt = self.roofline.prefill_batch(self._input_tokens)[0]
            prefill = slower(prefill, self._imbalance(layout, prompt))
            decode = slower(decode, self._imbalance(layout, self._decode_batch(layout)))
        prompts = (sequences + layout.pp - 1) / layout.pp
        misses = 0
        if self.roofline.rates.published:
            misses = (work.max_ttft_s is not None and prefill.low_s > work.max_ttft_s) + (
                work.max_tpot_s is not None and decode.low_s > work.max_tpot_s)  # fmt: skip
        serve = (prompts * middle(prefill) if self.phase != "decode" else 0.0) + (
            work.output_tokens * middle(decode) if self.phase != "prefill" else 0.0)  # fmt: skip
        return Timing(int(misses), serve, prefill, decode)

    def _imbalance(self, layout: Layout, batch: Batch) -> float:
        """The slowest stage over the mean one. Not cut yet: some stage has as many layers as their mean, rounded up."""
        times, outside = self.roofline.layer_times(layout, batch)
        if not layout.stages:
            whole = sum(times) + outside
            return max(1.0, -(-len(times) // layout.pp) * min(times) * layout.pp / whole) if whole else 1.0
        stages = [sum(times[first:stop]) for first, stop in layout.stages]
        stages[-1] += outside
        return max(stages) * len(stages) / sum(stages)

    def timed(self, candidate: Candidate) -> Candidate:
        """The candidate in its best placement, with its times."""
        if candidate.timing is not None or candidate.evaluation is None:
            return candidate
        best = min(((self.timing(layout), layout) for layout in self.variants(candidate.layout)),
                   key=lambda pair: (pair[0].rank, _simplicity(pair[1])))  # fmt: skip
        timing, layout = best
        if candidate.split is not None:
            timing = timing._replace(serve_s=timing.serve_s + candidate.split.serve_s(self.workload))
        evaluation = replace(candidate.evaluation, layout=layout)
        return replace(candidate, layout=layout, evaluation=evaluation, timing=timing)

    # --- the best of them

    def best(self, devices: int) -> Candidate | None:
        """The fitting layout with the best time, else the one that lacks least; None when all are illegal."""
        return self.best_fitting(devices) or self.least_short(devices)

    def best_fitting(self, devices: int) -> Candidate | None:
        """Branch and bound over every layout: a time that no placement and no cut can beat orders the queue, and what is
        taken from it first with its real time and fits is the answer."""
        queue: list[tuple[tuple[tuple[int, float], tuple[object, ...]], int, int, Layout, Candidate | None]] = []
        for index, layout in enumerate(self.layouts(devices)):
            if self.illegal(layout) is None and self.lacks_at_least(layout) <= 0:
                queue.append(((self._coarse(layout), _simplicity(layout)), index, 0, layout, None))
        heapq.heapify(queue)
        while queue:
            _, index, level, layout, candidate = heapq.heappop(queue)
            if candidate is not None:
                return candidate
            if level == 0:
                heapq.heappush(queue, ((self._bound(layout), _simplicity(layout)), index, 1, layout, None))
            elif level == 1 and self.splitter is None:
                placed = min(self.timing(variant).rank for variant in self.variants(layout))
                heapq.heappush(queue, ((placed, _simplicity(layout)), index, 2, layout, None))
            elif (found := self.candidate(layout)).fits:
                found = self.timed(found)
                assert found.timing is not None
                heapq.heappush(queue, ((found.timing.rank, _simplicity(found.layout)), index, 3, layout, found))
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

    def _bound(self, layout: Layout) -> tuple[int, float]:
        """What no variant of the layout can beat, whatever its placement and its pipeline's cut."""
        if self.splitter is not None:  # a role that is split otherwise may save time
            return 0, 0.0
        return min(self.timing(replace(layout, sp=sp), at_best=True).rank for sp in self._sp(layout))

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
        key = (layout.tp, layout.ep, layout.expert_tp)
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
