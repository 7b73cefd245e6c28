"""The memory ledger: every rank's bytes line by line, what is left for caches, and whether the request fits.

A request fits when, on every rank, one sequence at the full context and all other concurrent sequences at the workload's
average length fit beside everything else. Deliberately not done: choosing a layout (`search`).
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from dayzero.core.model import ModelDescription
from dayzero.core.plan import Coordinates, Layout, LedgerLine, MemoryLedger
from dayzero.core.target import Target
from dayzero.plan.cache import Cache
from dayzero.plan.engines import OWN, Engine, load_engine, weight_rules
from dayzero.plan.options import Request, memory_bytes
from dayzero.plan.overheads import activation_lines, communication_lines, expert_width, fixed_lines, outside_fraction
from dayzero.plan.pages import Pages
from dayzero.plan.stages import check_stages, cut_stages, first_cut
from dayzero.plan.unlisted import with_drafts
from dayzero.plan.weights import RoleCost, Weights


class StageLoad(NamedTuple):
    """The fullest rank of one stage: what it holds without caches, the demanded caches, and what the rest admits."""

    stage: int
    weights_bytes: int
    fixed_bytes: int  # activations, communication, runtime, loader, reserve
    cache_bytes: int
    full_sequence_bytes: int
    admissible_tokens: int | None  # None: the stage keeps no cache


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One legal layout, priced. `short_bytes` > 0 is what the worst rank lacks."""

    layout: Layout
    budget_bytes: int
    stages: tuple[StageLoad, ...]
    short_bytes: int
    admissible_tokens: int

    @property
    def fits(self) -> bool:
        return self.short_bytes <= 0

    @property
    def worst(self) -> StageLoad:
        return max(self.stages, key=lambda load: load.weights_bytes + load.fixed_bytes + load.cache_bytes)

    @property
    def limiting(self) -> StageLoad:
        """The stage whose pool is smallest."""
        return min(self.stages, key=lambda load: (load.admissible_tokens is None, load.admissible_tokens or 0))


class Evaluator:
    """Prices layouts of one model on one target for one request, in the memory model of one engine (our own by default)."""

    def __init__(self, model: ModelDescription, target: Target, request: Request, *, engine: Engine | str = OWN) -> None:
        self.model, self.target, self.request = model, target, request
        self.engine = load_engine(engine) if isinstance(engine, str) else engine
        rules = weight_rules(self.engine, model, target, request.weights_dtype)
        priced = with_drafts(model, own_ends=self.engine.weights.draft_ends) if request.mtp else model
        self.weights = Weights(priced, request.weights_dtype, mtp=request.mtp, rules=rules)
        self.cache = Cache(model, request.cache_dtype, request.block_tokens, rules=self.engine.cache,
                           chunk_tokens=request.chunk_tokens,
            draft_layers=max(1, model.dimensions.num_mtp_layers) if request.mtp and model.mtp_parameters else 0,
        )  # fmt: skip
        self.reserves = self.engine.reserves(target)
        self.memory_bytes = memory_bytes(target)
        self.expert_inner = expert_width(model)

    @cached_property
    def layer_likeness(self) -> list[int]:
        """A number per layer; layers with the same one hold the same weights and caches."""
        numbers: dict[tuple[int, int], int] = {}
        pairs = zip(self.weights.layer_class, self.cache.kind_of_layer, strict=True)
        return [numbers.setdefault(pair, len(numbers)) for pair in pairs]

    @cached_property
    def stored_bytes(self) -> int:
        """All weights once."""
        single = Layout()
        place = single.coordinates(0)
        return sum(self.weights.layer_bytes(single, place)) + self.weights.loose_bytes(single, place, 0)

    def budget_bytes(self, layout: Layout) -> int:
        """What a rank may use: the fraction of its card. Ranks of one host share its memory."""
        return int(self.memory_bytes * self.request.memory_fraction) // self._sharing(layout)

    def _sharing(self, layout: Layout) -> int:
        return layout.num_devices if self.target.node.topology == "shared memory" else 1

    def demand_per_layer(self, layout: Layout, tp_index: int = 0) -> list[int]:
        """Cache bytes each layer must hold: one full context, every other sequence at the average length."""
        full = self.cache.sequence_per_layer(layout, self.request.context_tokens, tp_index)
        average = self.cache.sequence_per_layer(layout, self.request.average_tokens, tp_index)
        others = self.request.sequences(layout.dp) - 1
        return [one + others * other for one, other in zip(full, average, strict=True)]

    def with_stages(self, layout: Layout, *, even: bool) -> Layout:
        """The layout with its pipeline cut: optimal either way, and balanced beyond the worst stage when `even`.

        Raises DayZeroError when a cut is illegal.
        """
        if layout.stages:
            return layout
        layers, first, last = self.weights.cut_costs(layout, layout.coordinates(0))
        if layout.pp == 1:
            return replace(layout, stages=((0, len(layers)),))
        check_stages(len(layers), layout.pp)
        costs = [weights + cache for weights, cache in zip(layers, self.demand_per_layer(layout), strict=True)]
        last += sum(line.num_bytes for line in self._activations(layout, layout.pp - 1) if line.name == "logits")
        cut = cut_stages if even else first_cut
        return replace(layout, stages=cut(costs, layout.pp, first_extra=first, last_extra=last))

    def evaluate(self, layout: Layout, *, even: bool = True) -> Evaluation:
        """Price a layout by the fullest rank of each stage (its first: earlier ranks get the remainders).

        Raises DayZeroError when a parameter or a cache cannot be cut this way.
        """
        layout = self.with_stages(layout, even=even)
        budget, place = self.budget_bytes(layout), layout.coordinates(0)
        layers = self.weights.layer_bytes(layout, place)
        request, others = self.request, self.request.sequences(layout.dp) - 1
        # Only the last stage differs in its activations, and stages of alike layers are alike.
        shared = [self._activations(layout, layout.pp), self._activations(layout, layout.pp - 1)]
        communication = self._communication(layout)
        loads: list[StageLoad] = []
        known: dict[object, StageLoad] = {}
        for stage, (first, stop) in enumerate(layout.stages):
            last = stage == layout.pp - 1
            which = stage if self.weights.shared_layers else None
            alike = (tuple(sorted(self.layer_likeness[first:stop])), stage == 0, last, which)
            if alike not in known:
                fixed = sum(line.num_bytes for line in self._charged(layout, stage, budget, shared[last], communication))
                weights = sum(layers[first:stop]) + self.weights.loose_bytes(layout, place, stage)
                full = self.cache.stage_sequence(layout, first, stop, request.context_tokens)
                average = self.cache.stage_sequence(layout, first, stop, request.average_tokens) if others else 0
                pool = self._admissible(layout, stage, place, budget - weights - fixed)
                known[alike] = StageLoad(stage, weights, fixed, full + others * average, full, pool)
            loads.append(known[alike]._replace(stage=stage))
        short = max(load.weights_bytes + load.fixed_bytes + load.cache_bytes for load in loads) - budget
        pools = [load.admissible_tokens for load in loads if load.admissible_tokens is not None]
        free = self.request.sequences(layout.dp) * self.request.context_tokens  # nothing grows: nothing limits
        return Evaluation(layout, budget, tuple(loads), short, min(pools, default=free if short <= 0 else 0))

    def _activations(self, layout: Layout, stage: int) -> list[LedgerLine]:
        return activation_lines(self.model, self.expert_inner, self.request, layout, stage, self.engine.activations)

    def _communication(self, layout: Layout) -> list[LedgerLine]:
        lines = communication_lines(self.model, self.request, layout, self.reserves, self.engine.activations)
        if layout.redundant_experts:
            moved = self.weights.layer_experts_bytes(layout, layout.coordinates(0))
            lines.append(LedgerLine(category="communication", name="expert exchange", num_bytes=moved,
                                    formula="one layer's experts of a rank, received while copies move"))  # fmt: skip
        return lines

    def _charged(
        self, layout: Layout, stage: int, budget: int, activations: list[LedgerLine], communication: list[LedgerLine]
    ) -> list[LedgerLine]:
        """Everything but weights and caches, as charged to the budget."""
        peak = sum(line.num_bytes for line in activations)
        lines = [*activations, *communication, *fixed_lines(self.weights, layout, stage, self.reserves, budget, peak)]
        return outside_fraction(lines, self.engine, budget, self.memory_bytes // self._sharing(layout))

    def _fixed(self, layout: Layout, stage: int, budget: int) -> list[LedgerLine]:
        return self._charged(layout, stage, budget, self._activations(layout, stage), self._communication(layout))

    def _admissible(self, layout: Layout, stage: int, place: Coordinates, free: int) -> int | None:
        """Tokens that `free` bytes hold, in whole blocks. Where sequences also cost a constant (windows, states), tokens
        held by sequences of the planned context: concurrency at that length times the length."""
        first, stop = layout.stages[stage]
        constant = self.cache.stage_constant(layout, first, stop, place.tp)
        slope = Fraction(0) if constant else self.cache.stage_slope(layout, first, stop, place.tp)
        block = self.request.block_tokens
        if not slope and not constant:
            return None
        if free <= 0:
            return 0
        if not constant:
            return int(free / (slope * block * layout.cp)) * block * layout.cp
        full = self.cache.stage_sequence(layout, first, stop, self.request.context_tokens, place.tp)
        if (pages := self.cache.pages(layout, first, stop, place.tp)) is not None:
            free = free // pages.block_bytes * pages.block_bytes
        return free * self.request.context_tokens // full // block * block

    def ledgers(self, evaluation: Evaluation) -> tuple[MemoryLedger, ...]:
        """Every rank's ledger. Ranks that hold the same share their lines."""
        layout, budget = evaluation.layout, evaluation.budget_bytes
        per_stage = layout.num_devices // layout.pp
        ledgers: list[MemoryLedger] = []
        known: dict[object, tuple[tuple[LedgerLine, ...], float, int, int]] = {}
        holdings: dict[object, int] = {}  # what ranks of a stage hold of each tensor and cache -> a number
        held_at: dict[tuple[int, int, int], int] = {}  # place in a stage -> that number
        fixed = [tuple(self._fixed(layout, stage, budget)) for stage in range(layout.pp)]
        for rank in range(layout.num_devices):
            stage, place = rank // per_stage, layout.coordinates(rank)
            within = (place.tp, place.ep, place.expert_tp)
            if within not in held_at:
                tensors = map(self.weights.costs(layout, place), range(len(self.weights.groups)))
                held_at[within] = holdings.setdefault((self._cache_key(layout, place), *tensors), len(holdings))
            key = (stage, held_at[within])
            if key not in known:
                roles = self.weights.by_role(layout, place, stage)
                lines = (*self._weight_lines(roles, layout), *self._cache_lines(layout, stage, place), *fixed[stage])
                first, stop = layout.stages[stage]
                held = sum(line.num_bytes for line in lines if line.category != "cache")
                pool = self._admissible(layout, stage, place, budget - held)
                known[key] = (
                    lines, float(self.cache.stage_slope(layout, first, stop, place.tp)),
                    self.cache.stage_constant(layout, first, stop, place.tp),
                    evaluation.admissible_tokens if pool is None else pool,
                )  # fmt: skip
            lines, slope, constant, pool = known[key]
            ledgers.append(MemoryLedger(rank=rank, stage=stage, budget_bytes=budget, lines=lines, cache_bytes_per_token=slope,
                                        cache_bytes_per_sequence=constant, admissible_tokens=pool))  # fmt: skip
        return tuple(ledgers)

    def _cache_key(self, layout: Layout, place: Coordinates) -> tuple[Fraction, ...]:
        return tuple(part.local_share for parts in self.cache.parts(layout, place.tp) for part in parts)

    def _weight_lines(self, roles: dict[str, RoleCost], layout: Layout) -> list[LedgerLine]:
        padded = " and padded as the engine's kernels need" if self.weights.rules.padding is not None else ""
        cut = f"tp {layout.tp}, ep {layout.ep} x {layout.expert_tp}" if layout.num_devices > 1 else "one rank"
        places = f", {self.model.dimensions.num_experts} + {layout.redundant_experts} places dealt out over ep {layout.ep}"
        return [
            LedgerLine(category="weights", name=role, num_bytes=cost.num_bytes,
                       formula=f"{cost.num_tensors} tensors, {cost.elements} of {cost.whole_elements} elements ({cut}) "
                               f"in {' and '.join(cost.formats)} = {8 * cost.num_bytes / max(1, cost.elements):.4g} bit each"
                               + (padded + places * bool(layout.redundant_experts)) * (role == "expert"))
            for role, cost in sorted(roles.items())
        ]  # fmt: skip

    def _cache_lines(self, layout: Layout, stage: int, place: Coordinates) -> list[LedgerLine]:
        first, stop = layout.stages[stage]
        request, lines = self.request, []
        others = request.sequences(layout.dp) - 1
        if (pages := self.cache.pages(layout, first, stop, place.tp)) is not None:
            return page_lines(pages, request, others)
        for index, (kind, parts) in enumerate(zip(self.cache.kinds, self.cache.parts(layout, place.tp), strict=True)):
            count = self.cache.kind_of_layer[first:stop].count(index)
            count += self.cache.drafts_in(stop) if index == self.cache.draft_kind else 0
            for part in parts if count else ():
                full = self.cache.part_bytes(part, request.context_tokens, layout.cp)
                average = self.cache.part_bytes(part, request.average_tokens, layout.cp)
                lines.append(LedgerLine(
                    category="cache", name=f"{kind.name} {part.spec_name}", num_bytes=count * (full + others * average),
                    formula=f"{count} layers x (1 x {full} B at {request.context_tokens} tokens + {others} x {average} B at "
                            f"{request.average_tokens} tokens), {part.dtype}, {part.note}",
                ))  # fmt: skip
        return lines


def page_lines(pages: Pages, request: Request, others: int) -> list[LedgerLine]:
    """Cache lines of a stage whose layers share one page size."""
    lines = []
    for kind in pages.types:
        full, average = (pages.blocks(kind, tokens) for tokens in (request.context_tokens, request.average_tokens))
        held = f"of {kind.block_tokens} tokens" if kind.block_tokens else "a state"
        lines.append(LedgerLine(
            category="cache", name=" + ".join(kind.kinds),
            num_bytes=pages.block_bytes * kind.groups * (full + others * average),
            formula=f"{kind.layers} layers in {kind.groups} groups x {pages.group_layers} pages of {pages.page_bytes} B "
                    f"({held}) x (1 x {full} blocks at {request.context_tokens} tokens + {others} x {average} at "
                    f"{request.average_tokens})",
        ))  # fmt: skip
    return lines
