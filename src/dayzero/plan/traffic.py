"""Which collectives a step runs, on how many bytes, over which axes: one layer of a kind, and the whole step.

Goes in: a layout with its placement, a batch. Comes out: `Seconds` over the links the axes lie on. Deliberately not done:
overlap with computation (`roofline` decides how much is hidden).

Ways of running experts, the cheaper is taken: gathered (every rank of the stage sees all tokens, partial sums are reduced) or
routed (tokens travel to their experts and back, all to all). With SP the TP group's tokens are dealt out already, so that a
routed layer needs no gathering of its own.
"""

from typing import NamedTuple

from dayzero.core.model import ModelDescription
from dayzero.core.plan import Layout
from dayzero.plan.links import ZERO, Links, Seconds
from dayzero.plan.overheads import head_width
from dayzero.plan.work import Batch


class Reach(NamedTuple):
    """Of the ranks of each collective, how many share a scale-up domain."""

    tp: int
    cp: int
    pp: int
    stage: int  # all ranks of a pipeline stage
    replicas: int  # one of each TP group of a stage
    sharing: int  # the ranks of one expert
    away: int  # one rank of each group of experts


class Traffic:
    """Collectives of layouts of one model over one target's links."""

    def __init__(self, model: ModelDescription, links: Links, size: int) -> None:
        self.model, self.links, self.size = model, links, size
        self._known: dict[object, Seconds] = {}
        self._least: dict[object, tuple[Seconds, ...]] = {}
        self._dealt: dict[object, Seconds] = {}
        self._reach: dict[object, Reach] = {}
        kinds = model.layer_kinds
        self.mixers = sum(len(kind.layers) for kind in kinds if kind.mixer != "none")
        self.routed = sum(len(kind.layers) for kind in kinds if kind.feed_forward == "moe")
        # Per layer kind: how many layers, whether they mix, their feed-forward, whether they cache what grows.
        self.kinds = tuple((len(kind.layers), kind.mixer != "none", kind.feed_forward,
                            any(spec.elements_per_token for spec in kind.cache)) for kind in kinds)  # fmt: skip
        growing = [spec.elements_per_token for kind in kinds for spec in kind.cache if spec.elements_per_token]
        self.row_bytes = max(growing, default=0) * 2 * size

    def at_best(self, layout: Layout, batch: Batch) -> Seconds:
        """A bound from below for every placement: each collective has as many ranks in one domain as a domain holds."""
        return self.over(layout, batch, self.best_reach(layout))

    def layers_at_best(self, layout: Layout, tokens: float) -> Seconds:
        """Part of every step: the all-reduces of all mixers and the collectives of all experts, at best, with no token
        rounded up and none gathered twice (so that it bounds both kinds of sequence parallelism)."""
        key = (layout.tp, layout.dp * layout.cp_devices, layout.ep)
        if (ways := self._least.get(key)) is None:
            reach = self.best_reach(layout)
            mixing = self.links.reduce(1.0, layout.tp, reach.tp).times(self.mixers)
            experts = self._expert_ways(layout, 1.0, reach, sp=True) if self.routed else ()
            ways = self._least[key] = (mixing, *(way.times(self.routed) for way in experts))
        # Start-up is the same for every number of bytes, and transfer grows with them.
        stream = tokens * self.model.dimensions.hidden_size * self.size
        mixing = ways[0]
        best = min(ways[1:], key=lambda way: way.alpha + way.beta * stream, default=ZERO)
        return Seconds(mixing.alpha + best.alpha, (mixing.beta + best.beta) * stream)

    def step(self, layout: Layout, batch: Batch) -> Seconds:
        """All collectives of one step through all stages."""
        return self.over(layout, batch, self.reach(layout, layout.placement))

    def over(self, layout: Layout, batch: Batch, reach: Reach) -> Seconds:
        """All collectives of one step over that reach, whatever the layout's own placement."""
        key = (layout.tp, layout.pp, layout.dp, layout.cp, layout.cp_in_tp, layout.ep, layout.sp, reach, batch)
        if (found := self._known.get(key)) is None:
            found = self._known[key] = self._step(layout, batch, reach)
        return found

    def reach(self, layout: Layout, placement: tuple[str, ...]) -> Reach:
        """Of the ranks of each collective, how many share a domain in a placement."""
        key = (layout.tp, layout.cp_devices, layout.dp, layout.pp, layout.ep, placement)
        if key not in self._reach:
            self._reach[key] = self._found_reach(layout, placement)
        return self._reach[key]

    def _found_reach(self, layout: Layout, placement: tuple[str, ...]) -> Reach:
        degrees = {axis: layout.degree(axis) for axis in placement}
        rest, sharing, away = layout.expert_tp, {}, {}
        for axis in ("tp", "cp", "dp"):  # as coordinates are dealt out: the ranks of one expert first
            take = min(rest, degrees[axis])
            sharing[axis], away[axis] = (take, 1), (-(-degrees[axis] // take), take)
            rest = -(-rest // take)

        def inside(counts: dict[str, tuple[int, int]], ranks: int) -> int:
            return min(ranks, self.links.inside(placement, degrees, counts))

        whole = {axis: (degrees[axis], 1) for axis in ("tp", "cp", "dp")}
        return Reach(
            tp=inside({"tp": (degrees["tp"], 1)}, layout.tp), cp=inside({"cp": (degrees["cp"], 1)}, layout.cp_devices),
            pp=inside({"pp": (degrees["pp"], 1)}, layout.pp), stage=inside(whole, layout.stage_devices),
            replicas=inside({axis: whole[axis] for axis in ("cp", "dp")}, layout.dp * layout.cp_devices),
            sharing=inside(sharing, layout.expert_tp), away=inside(away, layout.ep),
        )  # fmt: skip

    def best_reach(self, layout: Layout) -> Reach:
        """No placement reaches more ranks inside one domain."""
        ranks = (layout.tp, layout.cp_devices, layout.pp, layout.stage_devices, layout.dp * layout.cp_devices,
                 layout.expert_tp, layout.ep)  # fmt: skip
        return Reach(*(min(count, self.links.domain) for count in ranks))

    def _step(self, layout: Layout, batch: Batch, reach: Reach) -> Seconds:
        dims, links = self.model.dimensions, self.links
        tokens = batch.tokens if batch.decodes else batch.tokens / layout.cp_devices
        if layout.sp:  # whole rows are dealt out
            tokens = -(-tokens // layout.tp) * layout.tp
        stream = tokens * dims.hidden_size * self.size
        reduce = links.reduce(stream, layout.tp, reach.tp)
        experts = self._experts(layout, stream, reach) if self.routed else ZERO
        context = self._context(layout, batch, tokens, reach)
        fed = {"moe": experts, "dense": reduce}
        alpha, beta = reduce  # the embedding, cut by vocabulary
        for count, mixes, feed_forward, grows in self.kinds:
            parts = (reduce if mixes else ZERO, fed.get(feed_forward, ZERO), context if grows else ZERO)
            alpha += (parts[0].alpha + parts[1].alpha + parts[2].alpha) * count
            beta += (parts[0].beta + parts[1].beta + parts[2].beta) * count
        logits = batch.sequences * dims.vocab_size * self.size
        total = Seconds(alpha, beta).plus(links.gather(logits, layout.tp, reach.tp))
        if layout.pp > 1:
            total = total.plus(links.hand_over(stream / layout.tp, layout.pp, reach.pp))
        return total

    def _context(self, layout: Layout, batch: Batch, tokens: float, reach: Reach) -> Seconds:
        """Context parallelism of one layer. Prompts: keys and values of all are gathered. Decoding: queries are gathered
        and partial outputs reduced, over the ranks that share a sequence."""
        total, dims = ZERO, self.model.dimensions
        width = (dims.num_attention_heads or 1) / layout.tp * head_width(dims) * self.size
        if layout.cp_devices > 1:
            if batch.decodes:
                total = self.links.reduce(tokens * width, layout.cp_devices, reach.cp)
            else:
                total = self.links.gather(batch.tokens * self.row_bytes, layout.cp_devices, reach.cp)
        if layout.cp_in_tp > 1 and batch.decodes:
            inside = min(layout.cp_in_tp, reach.tp)
            total = total.plus(self.links.gather(tokens * width * layout.cp_in_tp, layout.cp_in_tp, inside).times(2))
        return total

    def _experts(self, layout: Layout, stream: float, reach: Reach) -> Seconds:
        """One layer's experts, in the cheaper way. Placements that differ only elsewhere share it."""
        key = (layout.tp, layout.dp * layout.cp_devices, layout.ep, layout.sp, stream, reach.tp, *reach[3:])
        if key not in self._dealt:
            self._dealt[key] = min(self._expert_ways(layout, stream, reach, sp=layout.sp), key=sum)
        return self._dealt[key]

    def _expert_ways(self, layout: Layout, stream: float, reach: Reach, *, sp: bool) -> tuple[Seconds, ...]:
        """Gathered, and routed where there is more than one expert rank."""
        links, group = self.links, layout.stage_devices
        replicas = layout.dp * layout.cp_devices
        everything = stream * replicas
        gathered = links.gather(everything, replicas, reach.replicas).plus(links.reduce(everything, group, reach.stage))
        if layout.ep == 1:
            return (gathered,)
        # A token is sent once to each rank that has some of its experts.
        chosen = max(1, self.model.dimensions.num_experts_per_token)
        targets = layout.ep * (1.0 - (1.0 - 1.0 / layout.ep) ** chosen)
        rows = stream / layout.tp * targets
        routed = links.exchange(rows, layout.ep, reach.away).times(2)
        routed = routed.plus(links.gather(rows * layout.expert_tp, layout.expert_tp, reach.sharing).times(2))
        # With SP, the all-reduce of attention is a reduce-scatter before and a gather after the experts.
        if not sp:
            routed = routed.plus(links.gather(stream, layout.tp, reach.tp))
        return gathered, routed
