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
        self._least: dict[object, Seconds] = {}
        self._reach: dict[object, Reach] = {}

    def at_best(self, layout: Layout, batch: Batch) -> Seconds:
        """A bound from below for every placement: each collective has as many ranks in one domain as a domain holds."""
        return self._cached(layout, batch, self._best_reach(layout))

    def layers_at_best(self, layout: Layout, tokens: float) -> Seconds:
        """Part of every step: the all-reduces of all mixers and the collectives of all experts, at best, with no token
        rounded up and none gathered twice (so that it bounds both kinds of sequence parallelism)."""
        key = (layout.tp, layout.dp * layout.cp_devices, layout.ep, tokens)
        if key not in self._least:
            mixers = sum(len(kind.layers) for kind in self.model.layer_kinds if kind.mixer != "none")
            routed = sum(len(kind.layers) for kind in self.model.layer_kinds if kind.feed_forward == "moe")
            stream, reach = tokens * self.model.dimensions.hidden_size * self.size, self._best_reach(layout)
            total = self.links.reduce(stream, layout.tp, reach.tp).times(mixers)
            if routed:
                total += self._experts(layout, stream, reach, sp=True).times(routed)
            self._least[key] = total
        return self._least[key]

    def step(self, layout: Layout, batch: Batch) -> Seconds:
        """All collectives of one step through all stages."""
        return self._cached(layout, batch, self.reach(layout))

    def _cached(self, layout: Layout, batch: Batch, reach: Reach) -> Seconds:
        degree = (layout.tp, layout.pp, layout.dp, layout.cp, layout.cp_in_tp, layout.ep, layout.sp)
        key = (degree, reach, batch)
        if key not in self._known:
            self._known[key] = self._step(layout, batch, reach)
        return self._known[key]

    def reach(self, layout: Layout) -> Reach:
        """Of the ranks of each collective, how many share a domain in the layout's placement."""
        key = (layout.tp, layout.cp_devices, layout.dp, layout.pp, layout.ep, layout.placement)
        if key not in self._reach:
            self._reach[key] = self._found_reach(layout)
        return self._reach[key]

    def _found_reach(self, layout: Layout) -> Reach:
        degrees = {axis: layout.degree(axis) for axis in layout.placement}
        rest, sharing, away = layout.expert_tp, {}, {}
        for axis in ("tp", "cp", "dp"):  # as coordinates are dealt out: the ranks of one expert first
            take = min(rest, degrees[axis])
            sharing[axis], away[axis] = (take, 1), (-(-degrees[axis] // take), take)
            rest = -(-rest // take)

        def inside(counts: dict[str, tuple[int, int]], ranks: int) -> int:
            return min(ranks, self.links.inside(layout.placement, degrees, counts))

        whole = {axis: (degrees[axis], 1) for axis in ("tp", "cp", "dp")}
        return Reach(
            tp=inside({"tp": (degrees["tp"], 1)}, layout.tp), cp=inside({"cp": (degrees["cp"], 1)}, layout.cp_devices),
            pp=inside({"pp": (degrees["pp"], 1)}, layout.pp), stage=inside(whole, layout.stage_devices),
            replicas=inside({axis: whole[axis] for axis in ("cp", "dp")}, layout.dp * layout.cp_devices),
            sharing=inside(sharing, layout.expert_tp), away=inside(away, layout.ep),
        )  # fmt: skip

    def _best_reach(self, layout: Layout) -> Reach:
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
        total = reduce  # the embedding, cut by vocabulary
        experts = self._experts(layout, stream, reach, sp=layout.sp)
        context = self._context(layout, batch, tokens, reach)
        for kind in self.model.layer_kinds:
            layer = reduce if kind.mixer != "none" else ZERO
            layer += experts if kind.feed_forward == "moe" else reduce if kind.feed_forward == "dense" else ZERO
            if any(spec.elements_per_token for spec in kind.cache):
                layer += context
            total += layer.times(len(kind.layers))
        logits = batch.sequences * dims.vocab_size * self.size
        total += links.gather(logits, layout.tp, reach.tp)
        if layout.pp > 1:
            total += links.hand_over(stream / layout.tp, layout.pp, reach.pp)
        return total

    def _context(self, layout: Layout, batch: Batch, tokens: float, reach: Reach) -> Seconds:
        """Context parallelism of one layer. Prompts: keys and values of all are gathered. Decoding: queries are gathered
        and partial outputs reduced, over the ranks that share a sequence."""
        total, dims = ZERO, self.model.dimensions
        width = (dims.num_attention_heads or 1) / layout.tp * head_width(dims) * self.size
        if layout.cp_devices > 1:
            if batch.decodes:
                total += self.links.reduce(tokens * width, layout.cp_devices, reach.cp)
            else:
                growing = [spec for kind in self.model.layer_kinds for spec in kind.cache if spec.elements_per_token]
                row = max((spec.elements_per_token for spec in growing), default=0) * 2 * self.size
                total += self.links.gather(batch.tokens * row, layout.cp_devices, reach.cp)
        if layout.cp_in_tp > 1 and batch.decodes:
            inside = min(layout.cp_in_tp, reach.tp)
            both = tokens * width * layout.cp_in_tp
            total += self.links.gather(both, layout.cp_in_tp, inside) + self.links.gather(both, layout.cp_in_tp, inside)
        return total

    def _experts(self, layout: Layout, stream: float, reach: Reach, *, sp: bool) -> Seconds:
        links, group = self.links, layout.stage_devices
        replicas = layout.dp * layout.cp_devices
        everything = stream * replicas
        gathered = links.gather(everything, replicas, reach.replicas) + links.reduce(everything, group, reach.stage)
        if layout.ep == 1:
            return gathered
        # A token is sent once to each rank that has some of its experts.
        chosen = max(1, self.model.dimensions.num_experts_per_token)
        targets = layout.ep * (1.0 - (1.0 - 1.0 / layout.ep) ** chosen)
        rows = stream / layout.tp * targets
        routed = links.exchange(rows, layout.ep, reach.away).times(2)
        routed += links.gather(rows * layout.expert_tp, layout.expert_tp, reach.sharing).times(2)
        # With SP, the all-reduce of attention is a reduce-scatter before and a gather after the experts.
        if not sp:
            routed += links.gather(stream, layout.tp, reach.tp)
        return min(gathered, routed, key=lambda cost: cost.alpha + cost.beta)
