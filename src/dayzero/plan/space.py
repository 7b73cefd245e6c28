"""Every layout that a number of cards could have: degrees, placements, what is legal and why not.

Goes in: an `Evaluator` and the degrees a user fixed. Comes out: layouts. Nothing is left out but what no workload could use.
Deliberately not done: pricing and choosing (`search`).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import permutations
from math import isqrt, prod
from typing import NamedTuple

from dayzero.core.errors import DayZeroError
from dayzero.core.plan import DEFAULT_PLACEMENT, Layout
from dayzero.core.target import Target
from dayzero.plan.engines import OWN
from dayzero.plan.ledger import Evaluator
from dayzero.plan.roofline import Roofline
from dayzero.plan.traffic import Reach

SPANNING = ("tp", "pp", "dp", "cp")  # their product is the number of devices


def divisors(number: int) -> tuple[int, ...]:
    small = [value for value in range(1, isqrt(number) + 1) if number % value == 0]
    return tuple(sorted({*small, *(number // value for value in small)}))


class Degrees(NamedTuple):
    """The degrees of a layout, without what they imply: cheap enough to be made by the ten thousand. `cp`: devices."""

    tp: int
    pp: int
    dp: int
    cp: int
    dcp: int
    ep: int


class Space:
    """The layouts of one evaluator's model on its target."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator, self.model, self.request = evaluator, evaluator.model, evaluator.request
        self.fixed = dict(evaluator.request.fixed)
        self._illegal: dict[tuple[int, ...], str | None] = {}
        self._refusals: dict[Layout, str | None] = {}
        self._known_places: dict[tuple[int, ...], tuple[tuple[tuple[str, ...], Reach], ...]] = {}

    @cached_property
    def roofline(self) -> Roofline:
        return Roofline(self.evaluator)

    @cached_property
    def estimated(self) -> bool:
        """Whether the attention's own parameters are unknown, so that only the counts say what TP may divide."""
        return all(p.name.startswith("estimated.") for p in self.model.parameters)

    def layouts(self, devices: int) -> Iterator[Layout]:
        """Every layout of `devices` that respects the fixed degrees, but for those that no workload could use: replicas
        without a request, stages without a layer, experts without a rank. One placement each; `variants` has the others."""
        return map(self.layout, self.degrees(devices))

    def layout(self, degrees: Degrees) -> Layout:
        """Raises DayZeroError for fixed degrees that clash."""
        tp, pp, dp, cp, dcp, ep = degrees
        return Layout(tp=tp, pp=pp, dp=dp, cp=cp * dcp, ep=ep, cp_in_tp=dcp, sp=bool(self.request.sp),
                      redundant_experts=self.request.redundant_experts if ep > 1 else 0)  # fmt: skip

    def families(self, devices: int) -> list[list[Degrees]]:
        """The same in groups that differ in nothing but the context that a TP group shares, least of it first."""
        found: dict[tuple[int, ...], list[Degrees]] = {}
        for degrees in self.degrees(devices):
            found.setdefault((*degrees[:4], degrees.ep), []).append(degrees)
        return list(found.values())

    def degrees(self, devices: int) -> Iterator[Degrees]:
        """What `layouts` are made of."""
        grows = self.evaluator.cache.grows()
        num_layers, num_experts = self.model.dimensions.num_layers, self.model.dimensions.num_experts
        copies = self.request.redundant_experts if num_experts else 0
        shared = {tp: self._shared_context(tp) for tp in self._values("tp", devices)}
        for tp in shared:
            for pp in self._values("pp", devices // tp):
                if pp > num_layers and "pp" not in self.fixed:
                    continue
                for dp in self._values("dp", devices // tp // pp):
                    if dp > self.request.concurrency and "dp" not in self.fixed:
                        continue
                    cp = devices // (tp * pp * dp)
                    if cp != self.fixed.get("cp", cp) or ("cp" not in self.fixed and cp > 1 and not grows):
                        continue
                    groups = divisors(tp * dp * cp) if num_experts else (1,)
                    for dcp in shared[tp]:
                        for ep in (self.fixed["ep"],) if "ep" in self.fixed else groups:
                            if (tp * dp * cp) % ep and "tp" not in self.fixed:  # who fixed both is told that they clash
                                continue
                            if (ep <= max(1, num_experts + copies) and (ep > 1 or not copies)) or "ep" in self.fixed:
                                yield Degrees(tp, pp, dp, cp, dcp, ep)

    def _values(self, axis: str, devices: int) -> tuple[int, ...]:
        if axis in self.fixed:
            return (self.fixed[axis],) if devices % self.fixed[axis] == 0 else ()
        return divisors(devices)

    def _shared_context(self, tp: int) -> list[int]:
        """Context ranks that a TP group may have: those that would otherwise hold the same cache. Who fixes TP without a
        word about them means the plain kind."""
        if "dcp" in self.fixed or "tp" in self.fixed:
            return [self.fixed.get("dcp", 1)]
        return [degree for degree in divisors(tp) if degree == 1 or self.context_illegal(tp, degree) is None]

    def context_illegal(self, tp: int, dcp: int) -> str | None:
        growing = [spec for kind in self.model.layer_kinds for spec in kind.cache if spec.elements_per_token]
        if not growing:
            return f"dcp={dcp}, but no cache grows with the context"
        if tp % dcp:
            return f"dcp={dcp} does not divide tp={tp}"
        for heads in sorted({spec.heads for spec in growing if spec.heads}):
            copies = max(1, tp // heads)
            if copies % dcp:
                return f"dcp={dcp}: tp={tp} holds {copies} copies of {heads} key/value heads, and only copies share a context"
        return None

    def variants(self, layout: Layout) -> Iterator[Layout]:
        """The layout in every placement that lies on other links, each with and without sequence parallelism."""
        for sp in self._sp(layout):
            for placement, _ in self.places(layout):
                yield replace(layout, sp=sp, placement=placement)

    def places(self, layout: Layout) -> tuple[tuple[tuple[str, ...], Reach], ...]:
        """Placements that lie on other links, with what each collective reaches in them."""
        key = (layout.tp, layout.pp, layout.dp, layout.cp_devices, layout.ep)
        if key not in self._known_places:
            found: dict[Reach, tuple[str, ...]] = {}
            for placement in self._placements(layout):
                found.setdefault(self.roofline.traffic.reach(layout, placement), placement)
            self._known_places[key] = tuple((placement, reach) for reach, placement in found.items())
        return self._known_places[key]

    def _placements(self, layout: Layout) -> Iterator[tuple[str, ...]]:
        active = [axis for axis in DEFAULT_PLACEMENT if layout.degree(axis) > 1]
        if layout.num_devices <= self.roofline.links.domain or len(active) < 2:
            yield DEFAULT_PLACEMENT
            return
        idle = tuple(axis for axis in DEFAULT_PLACEMENT if axis not in active)
        for order in permutations(active):
            yield DEFAULT_PLACEMENT if order == tuple(active) else (*order, *idle)

    def illegal(self, layout: Layout) -> str | None:
        if layout.ep > 1 and not self.model.dimensions.num_experts:
            return f"ep={layout.ep}, but the model has no experts"
        if layout.redundant_experts and self.evaluator.engine.name == OWN:
            return f"{layout.redundant_experts} copies of experts, but this engine keeps each expert once"
        if layout.cp > 1 and not self.evaluator.cache.grows():
            return f"cp={layout.cp}, but no cache grows with the context"
        if layout.cp_in_tp > 1 and (reason := self.context_illegal(layout.tp, layout.cp_in_tp)) is not None:
            return reason
        return self.uncut(layout) or self._refused(layout)

    def uncut(self, layout: Layout) -> str | None:
        """Why some parameter or cache cannot be cut this way, the same for all layouts of a family."""
        heads = self.model.dimensions.num_attention_heads
        if self.estimated and heads and heads % layout.tp:
            return f"{heads} attention heads are not divisible by tp={layout.tp}"
        key = (layout.tp, layout.ep, layout.expert_tp, layout.redundant_experts)
        if key not in self._illegal:
            self._illegal[key] = self.evaluator.weights.illegal(layout) or self._cannot_be_cut(layout)
        return self._illegal[key]

    def _refused(self, layout: Layout) -> str | None:
        """Why another engine, whose memory model the ledger follows, has no spelling for the degrees."""
        engine = self.evaluator.engine.name
        if engine == OWN:
            return None
        from dayzero.plan.export import ENGINES, refusal

        key = replace(layout, stages=(), placement=DEFAULT_PLACEMENT)
        if key not in self._refusals:
            known = engine in ENGINES
            self._refusals[key] = refusal(key, self.model, self.evaluator.target, engine) if known else None
        return self._refusals[key]

    def _cannot_be_cut(self, layout: Layout) -> str | None:
        flat = replace(layout, pp=1, stages=())
        try:
            self.evaluator.weights.layer_bytes(flat, flat.coordinates(0))
            self.evaluator.cache.sequence_per_layer(flat, self.request.block_tokens)
        except DayZeroError as error:
            return f"{error.what} ({error.got})"
        return None

    def _sp(self, layout: Layout) -> tuple[bool, ...]:
        return (False, True) if self.request.sp is None and layout.tp > 1 else (bool(self.request.sp),)


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
