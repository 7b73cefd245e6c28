"""How long a prefill and a decode step take: a roofline per device plus alpha-beta per collective, as a range.

Sources: 2 FLOPs a parameter and token, 4 x heads x width x context for attention; a ring all-reduce moves
2 (n-1)/n of the bytes. Deliberately not done: overlap, kernels, scheduling. The range is what they may cost or save.
"""

from dataclasses import dataclass
from math import ceil, log2

from dayzero.core.model import ModelDescription
from dayzero.core.plan import Layout, TimeEstimate
from dayzero.core.target import Target
from dayzero.core.units import DTYPE_BITS
from dayzero.plan.ledger import Evaluation, Evaluator
from dayzero.plan.overheads import head_width

# Shares of the published rate that good and poor kernels reach; the range of an estimate is spanned by them.
COMPUTE_SHARES, MEMORY_SHARES, LINK_SHARES = (0.85, 0.35), (0.92, 0.5), (0.9, 0.4)
# Start-up of one collective. Within a node and across; from what NCCL-like libraries take for empty messages.
ALPHA_NODE_S, ALPHA_NETWORK_S = 10e-6, 30e-6
# Only to order layouts where a card publishes nothing; never shown as a time.
NOMINAL_FLOPS_PER_S, NOMINAL_BYTES_PER_S, NOMINAL_LINK_BYTES_PER_S = 3e14, 1.5e12, 2.5e10
# A 16-bit rate stands for another where a card states only one of them.
SAME_RATE = {"bfloat16": ("bfloat16", "float16"), "float16": ("float16", "bfloat16"), "float32": ("float32",)}


@dataclass(frozen=True, slots=True)
class Rates:
    flops_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    published: bool  # compute and memory rates both


def rates_of(target: Target, dtype: str) -> Rates:
    stated = target.card.flops_per_s
    flops = next((stated[name] for name in SAME_RATE.get(dtype, (dtype,)) if name in stated), None)
    bandwidth = target.card.memory_bytes_per_s
    # Ranks of one host speak through its memory.
    shared = bandwidth if target.node.topology == "shared memory" else None
    link = target.node.link_bytes_per_s or shared or NOMINAL_LINK_BYTES_PER_S
    return Rates(flops or NOMINAL_FLOPS_PER_S, bandwidth or NOMINAL_BYTES_PER_S, link,
                 target.network_bytes_per_s or min(link, NOMINAL_LINK_BYTES_PER_S),
                 flops is not None and bandwidth is not None)  # fmt: skip


class Roofline:
    """Times of layouts of one model on one target."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.model: ModelDescription = evaluator.model
        self.rates = rates_of(evaluator.target, evaluator.request.compute_dtype)
        dims = self.model.dimensions
        self.size = DTYPE_BITS[evaluator.request.compute_dtype] // 8
        embedding = dims.vocab_size * dims.hidden_size
        head_is_stored = any(p.role == "head" and p.tied_to is None for p in self.model.parameters)
        # The embedding is looked up, not multiplied; a head of its own is counted per row of logits.
        self.body_parameters = max(1, self.model.active_parameters - embedding * (1 + head_is_stored))
        self.head_parameters = embedding
        experts = sum(p.num_elements for p in self.model.parameters if p.role == "expert")
        # Share of all weights that every token reads.
        self.dense_share = min(1.0, max(0.0, 1.0 - experts / max(1, self.model.total_parameters)))
        node = evaluator.target.node
        self.fast_group = node.scaleup_domain or node.num_cards or 8

    def _attention_flops(self, tokens: int, context: int) -> float:
        dims, total = self.model.dimensions, 0.0
        for kind in self.model.layer_kinds:
            window = min((spec.window_tokens for spec in kind.cache if spec.window_tokens), default=None)
            seen = min(context, window) if window else context
            if kind.mixer not in ("linear", "ssm", "none"):
                total += len(kind.layers) * 4.0 * tokens * (dims.num_attention_heads or 1) * head_width(dims) * seen
        return total

    def _collective_s(self, num_bytes: float, ranks: int, span: int, factor: float) -> float:
        """One collective of `ranks` ranks spread over `span` consecutive devices."""
        if ranks == 1:
            return 0.0
        fast = span <= self.fast_group
        rate = self.rates.link_bytes_per_s if fast else self.rates.network_bytes_per_s
        alpha = (ALPHA_NODE_S if fast else ALPHA_NETWORK_S) * ceil(log2(ranks))  # a tree's depth
        return alpha + factor * (ranks - 1) / ranks * num_bytes / rate

    def _communication_s(self, layout: Layout, tokens: int) -> float:
        dims = self.model.dimensions
        hidden = tokens * dims.hidden_size * self.size
        moe = sum(len(kind.layers) for kind in self.model.layer_kinds if kind.feed_forward == "moe")
        reduce = self._collective_s(hidden, layout.tp, layout.tp, 2.0)
        total = (2 * dims.num_layers - moe) * reduce + moe * self._experts_s(layout, hidden)
        total += dims.num_layers * self._collective_s(hidden, layout.cp, layout.tp * layout.cp, 2.0)
        per_stage = layout.num_devices // layout.pp
        if layout.pp > 1:
            slow = 2 * per_stage > self.fast_group
            rate = self.rates.network_bytes_per_s if slow else self.rates.link_bytes_per_s
            total += (layout.pp - 1) * ((ALPHA_NETWORK_S if slow else ALPHA_NODE_S) + hidden / layout.tp / rate)
        return total

    def _experts_s(self, layout: Layout, hidden: int) -> float:
        """Collectives of one expert layer, the cheaper of two ways.

        Gathered: every rank of the expert group sees all tokens of all replicas, and partial sums are reduced over the
        group (with one replica: the all-reduce of TP). Routed: tokens travel to their experts and back, all to all.
        """
        group, replicas = layout.tp * layout.cp * layout.dp, layout.cp * layout.dp
        everything = hidden * layout.dp
        gathered = self._collective_s(everything, replicas, group, 1.0) + self._collective_s(everything, group, group, 2.0)
        if layout.ep == 1:
            return gathered
        rows = hidden * max(1, self.model.dimensions.num_experts_per_token) / layout.tp
        routed = 2 * self._collective_s(rows, layout.ep, group, 1.0)
        routed += self._collective_s(rows * layout.expert_tp, layout.expert_tp, layout.expert_tp, 2.0)
        routed += self._collective_s(hidden, layout.tp, layout.tp, 1.0)
        return min(gathered, routed)

    def prefill(self, evaluation: Evaluation, num_tokens: int) -> TimeEstimate:
        """One prompt of `num_tokens` on one replica, through all stages."""
        layout = evaluation.layout
        flops = 2.0 * self.body_parameters * num_tokens + self._attention_flops(num_tokens, num_tokens // 2 + 1)
        flops += 2.0 * self.head_parameters
        steps = -(-num_tokens // self.evaluator.request.chunk_tokens)
        reads = steps * sum(load.weights_bytes * self._touched(layout, num_tokens / steps) for load in evaluation.stages)
        return self._estimate(flops / (layout.tp * layout.cp), reads, self._communication_s(layout, num_tokens))

    def decode(self, evaluation: Evaluation, sequences: int, context: int) -> TimeEstimate:
        """One token for each of `sequences` sequences on one replica, each with `context` tokens in its cache."""
        layout = evaluation.layout
        flops = 2.0 * (self.body_parameters + self.head_parameters) * sequences + self._attention_flops(sequences, context)
        cache = self.evaluator.cache.sequence_per_layer(layout, context)
        weights = sum(load.weights_bytes for load in evaluation.stages) * self._touched(layout, sequences)
        reads = weights + sequences * sum(cache)
        return self._estimate(flops / (layout.tp * layout.cp), reads, self._communication_s(layout, sequences))

    def _touched(self, layout: Layout, tokens: float) -> float:
        """Share of a rank's weights that a step of `tokens` per replica reads: experts nobody chose stay untouched."""
        dims = self.model.dimensions
        if not dims.num_experts or not dims.num_experts_per_token:
            return 1.0
        group = tokens * (layout.dp if layout.ep > 1 or layout.expert_tp > layout.tp else 1)
        hit = 1.0 - (1.0 - min(1.0, dims.num_experts_per_token / dims.num_experts)) ** group
        return self.dense_share + (1.0 - self.dense_share) * hit

    def _estimate(self, flops: float, num_bytes: float, communication_s: float) -> TimeEstimate:
        compute, memory = flops / self.rates.flops_per_s, num_bytes / self.rates.bytes_per_s
        low, high = (max(compute / rate, memory / read) + communication_s / link
                     for rate, read, link in zip(COMPUTE_SHARES, MEMORY_SHARES, LINK_SHARES, strict=True))  # fmt: skip
        return TimeEstimate(compute_s=compute, memory_s=memory, communication_s=communication_s, low_s=low, high_s=high)
