"""Every legal layout of a number of devices, priced; the best of them by the workload's objective.

Goes in: an `Evaluator` and the degrees a user fixed. Comes out: candidates with their figures or the one constraint that
killed them. Exhaustive: nothing is skipped but what cannot be legal. Deliberately not done: words (that is `advice`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from dayzero.core.errors import DayZeroError
from dayzero.core.plan import Layout
from dayzero.core.target import Target, Workload
from dayzero.plan.ledger import Evaluation, Evaluator
from dayzero.plan.roofline import Roofline

SPANNING = ("tp", "pp", "dp", "cp")  # their product is the number of devices
# Largest deployment proposed on our own; more is planned when asked for.
MOST_DEVICES = 1024


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout: priced, or illegal for `constraint`."""

    layout: Layout
    evaluation: Evaluation | None = None
    constraint: str = ""
    error: DayZeroError | None = None


def divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


class Search:
    """Layouts of one evaluator's model on its target."""

    def __init__(self, evaluator: Evaluator, workload: Workload) -> None:
        self.evaluator, self.workload = evaluator, workload
        self.model, self.request = evaluator.model, evaluator.request
        self.fixed = dict(evaluator.request.fixed)
        self._times: dict[Layout, float] = {}

    @cached_property
    def roofline(self) -> Roofline:
        return Roofline(self.evaluator)

    def layouts(self, devices: int) -> Iterator[Layout]:
        """Every layout of `devices` that respects the fixed degrees and could be legal."""
        grows = self.evaluator.cache.grows()
        num_layers, num_experts = self.model.dimensions.num_layers, self.model.dimensions.num_experts
        for tp in self._values("tp", devices):
            for pp in self._values("pp", devices // tp):
                if pp > num_layers and "pp" not in self.fixed:
                    continue
                for dp in self._values("dp", devices // tp // pp):
                    if dp > self.request.concurrency and "dp" not in self.fixed:
                        continue  # a replica without a request
                    cp = devices // (tp * pp * dp)
                    if cp != self.fixed.get("cp", cp) or ("cp" not in self.fixed and cp > 1 and not grows):
                        continue
                    group = tp * dp * cp
                    degrees = divisors(group) if num_experts else [1]
                    for ep in [self.fixed["ep"]] if "ep" in self.fixed else degrees:
                        if ep <= max(1, num_experts) or "ep" in self.fixed:
                            yield Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)

    def _values(self, axis: str, devices: int) -> list[int]:
        if axis in self.fixed:
            return [self.fixed[axis]] if devices % self.fixed[axis] == 0 else []
        return divisors(devices)

    def candidate(self, layout: Layout) -> Candidate:
        """Price one layout, or say why it is illegal."""
        if layout.ep > 1 and not self.model.dimensions.num_experts:
            return Candidate(layout, constraint=f"ep={layout.ep}, but the model has no experts")
        if layout.cp > 1 and not self.evaluator.cache.grows():
            return Candidate(layout, constraint=f"cp={layout.cp}, but no cache grows with the context")
        if (reason := self.evaluator.weights.illegal(layout)) is not None:
            return Candidate(layout, constraint=reason)
        try:
            return Candidate(layout, self.evaluator.evaluate(layout, even=False))
        except DayZeroError as error:
            return Candidate(layout, constraint=f"{error.what} ({error.got})", error=error)

    def candidates(self, devices: int) -> list[Candidate]:
        return [self.candidate(layout) for layout in self.layouts(devices)]

    def best(self, candidates: list[Candidate]) -> Candidate | None:
        """The fitting candidate with the best time, else the one that lacks least; None when all are illegal."""
        priced = [c for c in candidates if c.evaluation is not None]
        fitting = [c for c in priced if c.evaluation is not None and c.evaluation.fits]
        if fitting:
            return min(fitting, key=lambda c: (float(f"{self.time_s(c):.3g}"), _simplicity(c.layout)))
        return min(priced, key=lambda c: (_evaluated(c).short_bytes, _simplicity(c.layout)), default=None)

    def time_s(self, candidate: Candidate) -> float:
        """What the objective minimises: seconds to serve the workload's concurrent requests once, or one alone."""
        evaluation = _evaluated(candidate)
        layout = evaluation.layout
        if layout not in self._times:
            work, latency = self.workload, self.workload.objective == "latency"
            sequences = 1 if latency else self.request.sequences(layout.dp)
            # Prompts follow each other through the stages; decoding splits the batch over them.
            rows = -(-sequences // layout.pp)
            prefill = self.roofline.prefill(evaluation, min(work.input_tokens, self.request.context_tokens))
            decode = self.roofline.decode(evaluation, rows, self.request.average_tokens)
            prompts = (sequences + layout.pp - 1) / layout.pp
            self._times[layout] = prompts * _middle(prefill) + work.output_tokens * _middle(decode)
        return self._times[layout]

    def could_fit(self, devices: int) -> bool:
        """A bound from below, to spare enumerating what cannot fit: the stored weights once over all cards, and on each
        card what no layout divides."""
        evaluator = self.evaluator
        budget = evaluator.budget_bytes(Layout(dp=devices))
        undivided = evaluator.reserves.runtime_bytes + int(budget * evaluator.reserves.reserve_share)
        return (budget - undivided) * devices >= evaluator.stored_bytes

    def device_counts(self, start: int = 1, limit: int = MOST_DEVICES) -> list[int]:
        """Numbers of devices worth proposing: powers of two and whole nodes, on a target that has so many."""
        target = self.evaluator.target
        most = min(limit, reachable_devices(target) or limit)
        node = target.node.num_cards or 1
        powers = [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]
        nodes = [node * count for count in range(1, 9) if node * count <= most]
        return sorted({count for count in [*powers, *nodes] if count >= start})


def reachable_devices(target: Target) -> int | None:
    """How many devices a target can join; None when there is a network (or none is published)."""
    return target.node.num_cards if target.node.topology == "shared memory" else None


def fixed_devices(fixed: dict[str, int], devices: int | None) -> int | None:
    """The number of devices that options ask for; None: choose it. Raises DayZeroError when degrees contradict it."""
    spanning = {axis: fixed[axis] for axis in SPANNING if axis in fixed}
    product = prod(spanning.values())
    if devices is None:
        return product if spanning else None
    if devices % product or (len(spanning) == len(SPANNING) and devices != product):
        said = " * ".join(f"{axis} {degree}" for axis, degree in spanning.items())
        raise DayZeroError("the degrees do not make up the devices", got=f"{said} = {product}, devices {devices}",
                           want="devices = tp * pp * dp * cp", fix="drop --devices or correct a degree")  # fmt: skip
    return devices


def _middle(estimate: object) -> float:
    from dayzero.core.plan import TimeEstimate

    assert isinstance(estimate, TimeEstimate)
    return (estimate.low_s + estimate.high_s) / 2


def _evaluated(candidate: Candidate) -> Evaluation:
    assert candidate.evaluation is not None, candidate
    return candidate.evaluation


def _simplicity(layout: Layout) -> tuple[int, ...]:
    """Between equals: fewer stages, less context parallelism, less expert parallelism, less tensor parallelism."""
    return (layout.pp, layout.cp, layout.ep, layout.tp, layout.dp)
