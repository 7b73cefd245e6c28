"""Roles that are split over another number of cards than the pool's attention: embedding, head, dense feed-forward.

Goes in: a priced layout and, per role, the cards of a stage that share one copy. Comes out: the layout priced again with
those roles' weights as really held, and what that costs or saves in time. Searched exhaustively where asked: the roles are
independent of each other in time and add up in memory. Deliberately not done: other degrees for attention or experts.
"""

from dataclasses import dataclass, replace
from itertools import product

from dayzero.core.errors import DayZeroError
from dayzero.core.plan import Layout, MemoryLedger
from dayzero.core.target import Workload
from dayzero.plan.ledger import Evaluation, Evaluator, StageLoad
from dayzero.plan.options import SPLIT_ROLES
from dayzero.plan.roofline import Roofline
from dayzero.plan.weights import Weights


@dataclass(frozen=True, slots=True)
class Split:
    """The roles' own layouts, and the seconds they add to a prompt and to a decoded token."""

    layouts: dict[str, Layout]
    prefill_s: float
    decode_s: float

    def serve_s(self, workload: Workload) -> float:
        return self.prefill_s + workload.output_tokens * self.decode_s


@dataclass(frozen=True, slots=True)
class _Option:
    role: str
    layout: Layout
    changes: tuple[int, ...]  # bytes on the fullest rank of each stage


def role_layout(layout: Layout, degree: int) -> Layout:
    """The layout that a role has when `degree` cards of a stage share one copy. Raises DayZeroError when it cannot."""
    if layout.stage_devices % degree:
        raise DayZeroError("a role's degree must divide the cards of a stage", got=f"{degree} of {layout.stage_devices}",
                           want="a divisor", fix="correct the role's degree")  # fmt: skip
    return Layout(tp=degree, pp=layout.pp, dp=layout.stage_devices // degree, ep=layout.ep, stages=layout.stages)


class Splitter:
    """Splits of one evaluator's model, searched where the request does not name them."""

    def __init__(self, evaluator: Evaluator, roofline: Roofline) -> None:
        self.evaluator, self.roofline, request = evaluator, roofline, evaluator.request
        self.asked = dict(request.role_tp)
        self._alone: dict[str, Weights] = {}
        for role in SPLIT_ROLES:
            own = tuple(p for p in evaluator.model.parameters if p.role == role and p.tied_to is None)
            if own and (role in self.asked or request.split_roles):
                model = replace(evaluator.model, parameters=own)
                self._alone[role] = Weights(model, request.weights_dtype, rules=evaluator.weights.rules)
        if missing := [role for role in self.asked if role not in self._alone]:
            raise DayZeroError(f"the model has no {missing[0]} of its own to split", got=missing[0],
                               want=", ".join(self._alone) or "no such role", fix="leave the role out")  # fmt: skip

    def apply(self, evaluation: Evaluation) -> tuple[Evaluation, Split]:
        """The fastest split that fits (of those asked for), else the one that lacks least."""
        best: tuple[tuple[int, float], Evaluation, Split] | None = None
        for chosen in product(*(self._options(evaluation.layout, role) for role in self._alone)):
            stages = range(evaluation.layout.pp)
            changed = _changed(evaluation, [sum(row.changes[stage] for row in chosen) for stage in stages])
            # A step reads its share once. What more cards gather is not priced: a row of logits, or of the stream.
            seconds = sum(sum(row.changes) for row in chosen) / self.roofline.rates.bytes_per_s
            split = Split({row.role: row.layout for row in chosen if row.layout.tp != evaluation.layout.tp}, seconds, seconds)
            key = (max(0, changed.short_bytes), seconds)
            if best is None or key < best[0]:
                best = (key, changed, split)
        if best is None:
            raise DayZeroError("a role cannot be split as asked", got=str(self.asked), want="a degree that divides it",
                               fix="correct the role's degree")  # fmt: skip
        return best[1], best[2]

    def corrected(self, ledger: MemoryLedger, split: Split) -> MemoryLedger:
        """A rank's ledger with those roles as really held; what it admits shrinks or grows with its room."""
        lines, change = [], 0
        for line in ledger.lines:
            own = split.layouts.get(line.name) if line.category == "weights" else None
            if own is not None:
                held = self._held(line.name, own)[ledger.stage]
                change += held - line.num_bytes
                line = replace(line, num_bytes=held, formula=f"split over {own.tp} of {own.stage_devices} cards of the stage")
            lines.append(line)
        room = ledger.budget_bytes - sum(line.num_bytes for line in ledger.lines if line.category != "cache")
        admitted = int(ledger.admissible_tokens * max(0, room - change) / room) if room > 0 else 0
        return replace(ledger, lines=tuple(lines), admissible_tokens=admitted)

    def _options(self, layout: Layout, role: str) -> list[_Option]:
        degrees = [d for d in range(1, layout.stage_devices + 1) if layout.stage_devices % d == 0]
        found = []
        for degree in [self.asked[role]] if role in self.asked else degrees:
            own = role_layout(layout, degree)
            if self._alone[role].illegal(own) is None:
                before, after = self._held(role, layout), self._held(role, own)
                found.append(_Option(role, own, tuple(new - old for new, old in zip(after, before, strict=True))))
        return found

    def _held(self, role: str, layout: Layout) -> list[int]:
        held = (self._alone[role].by_role(layout, layout.coordinates(0), stage).get(role) for stage in range(layout.pp))
        return [cost.num_bytes if cost else 0 for cost in held]


def _changed(evaluation: Evaluation, changes: list[int]) -> Evaluation:
    """The evaluation with other weights on each stage. What the pool then admits follows in proportion to its room."""
    loads = []
    for load, change in zip(evaluation.stages, changes, strict=True):
        room = evaluation.budget_bytes - load.weights_bytes - load.fixed_bytes
        admitted = load.admissible_tokens
        if admitted is not None:
            admitted = int(admitted * max(0, room - change) / room) if room > 0 else 0
        loads.append(StageLoad(load.stage, load.weights_bytes + change, load.fixed_bytes, load.cache_bytes,
                               load.full_sequence_bytes, admitted))  # fmt: skip
    short = max(load.weights_bytes + load.fixed_bytes + load.cache_bytes for load in loads) - evaluation.budget_bytes
    pools = [load.admissible_tokens for load in loads if load.admissible_tokens is not None]
    return replace(evaluation, stages=tuple(loads), short_bytes=short,
                   admissible_tokens=min(pools, default=evaluation.admissible_tokens))  # fmt: skip
