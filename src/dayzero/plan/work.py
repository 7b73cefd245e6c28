"""What the layers of each kind compute and read in a step, on one rank: FLOPs and bytes, operator by operator.

Goes in: a description (its operator graphs where it has them, its parameters where not), a layout, a batch. Comes out:
`Operator` rows. Weights are read as they are really sharded and stored (`weights`), caches as they are really kept
(`cache`); experts that no token chose are not read. Deliberately not done: time (`roofline`), communication (`traffic`).

Sources: 2 FLOPs a weight and token; attention 2 x heads x (key + value width) x keys seen, a latent cache without
expansion 2 x heads x (2 x latent + rope); a recurrent state 6 FLOPs an element and token.
"""

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from dayzero.core.formulas import evaluate
from dayzero.core.model import LayerKind, OperatorNode
from dayzero.core.plan import Layout
from dayzero.core.units import DTYPE_BITS
from dayzero.plan.ledger import Evaluator
from dayzero.plan.overheads import ROUTING_IMBALANCE, head_width

# Operators whose cost is counted from the shards themselves; all other nodes of a graph move activations.
PRODUCTS = frozenset({"linear", "experts", "embedding"})
MIXERS = frozenset({"attention", "matmul", "linear_attention", "state_space_scan", "convolution"})
# A layer without a graph: two norms, two residual additions, rotation, activation, each reading and writing the stream.
NOMINAL_OPERATORS, NOMINAL_STREAM_PASSES = 16, 10
# What sparse attention reads, where the description does not say: the usual choice of an indexer.
NOMINAL_SELECTED_TOKENS = 2048
STATE_FLOPS = 6


class Batch(NamedTuple):
    """One step of one replica: new tokens, sequences they belong to, and the mean number of keys each sees."""

    phase: str  # prefill, decode
    tokens: float
    sequences: int
    context: int

    @property
    def decodes(self) -> bool:
        return self.phase == "decode"


class Operator(NamedTuple):
    """One roofline: what it computes at which rate, and what it reads and writes. `formats`: of its weights."""

    name: str
    flops: float
    num_bytes: float
    formats: tuple[str, ...] = ()
    uneven: float = 1.0  # the fullest rank's share of the FLOPs over the mean, at worst


class KindWork(NamedTuple):
    """One layer of a kind (or what is outside the layers, `num_layers` 1). `parts`: its operators, together where layouts share
    them."""

    name: str
    num_layers: int
    parts: tuple[tuple[Operator, ...], ...]
    launches: float


class Work:
    """The work of one model's layers under one evaluator's weights and caches."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator, self.model = evaluator, evaluator.model
        dims = self.model.dimensions
        self.size = DTYPE_BITS[evaluator.request.compute_dtype] // 8
        self.chosen_share = dims.num_experts_per_token / dims.num_experts if dims.num_experts else 0.0
        self._roles: dict[object, dict[str, tuple[float, float, tuple[str, ...]]]] = {}
        self._products: dict[object, tuple[Operator, ...]] = {}
        self._mixers: dict[object, tuple[Operator, ...]] = {}
        self._launches: dict[object, float] = {}
        self._dense_sums: dict[object, tuple[float, float]] = {}
        self._expert_sums: dict[object, tuple[float, float]] = {}
        self._read: dict[object, float] = {}
        self._moved_bytes: dict[object, float] = {}
        self._flops: dict[object, float] = {}

    @cached_property
    def from_graphs(self) -> bool:
        """Whether every layer kind has its operator graph."""
        return bool(self.model.layer_kinds) and all(kind.operators.decode for kind in self.model.layer_kinds)

    def kinds(self, layout: Layout, batch: Batch) -> tuple[KindWork, ...]:
        """Every layer kind's work for a step, then what is outside the layers."""
        found = [self._kind(index, kind, layout, batch) for index, kind in enumerate(self.model.layer_kinds)]
        return (*found, self._outside(layout, batch))

    def sums(self, layout: Layout) -> tuple[float, float, float, float]:
        """Over all layers: bytes of weights and of experts on the fullest rank, FLOPs a token of each (the head apart)."""
        both = (layout.tp, layout.ep, layout.expert_tp, layout.redundant_experts)
        apart = self.evaluator.weights.experts_apart
        dense_key = layout.tp if apart and self.chosen_share else both
        expert_key = both[1:] if apart else both
        if dense_key not in self._dense_sums or expert_key not in self._expert_sums:
            weights = experts = flops = expert_flops = 0.0
            for index, kind in enumerate(self.model.layer_kinds):
                count = len(kind.layers)
                for role, (elements, num_bytes, _) in self._shares(index, layout).items():
                    if role == "expert" and self.chosen_share:
                        experts, expert_flops = experts + count * num_bytes, expert_flops + 2 * count * elements
                    else:
                        weights, flops = weights + count * num_bytes, flops + 2 * count * elements
            self._dense_sums[dense_key], self._expert_sums[expert_key] = (weights, flops), (experts, expert_flops)
        (weights, flops), (experts, expert_flops) = self._dense_sums[dense_key], self._expert_sums[expert_key]
        return weights, experts, flops, expert_flops

    def cached_bytes(self, layout: Layout, batch: Batch) -> float:
        """What one sequence's caches make a rank read in a step, over all layers."""
        key = (layout.tp, layout.cp, layout.cp_in_tp, batch.context)
        if key not in self._read:
            one = batch._replace(sequences=1)
            self._read[key] = sum(len(kind.layers) * self._mixer(index, kind, layout, one).num_bytes
                                  for index, kind in enumerate(self.model.layer_kinds))  # fmt: skip
        return self._read[key]

    @cached_property
    def least_launches(self) -> float:
        graphs = [(len(kind.layers), kind.operators) for kind in self.model.layer_kinds]
        return sum(count * min(_started(graph.of(phase)) for phase in ("prefill", "decode")) for count, graph in graphs)

    def _kind(self, index: int, kind: LayerKind, layout: Layout, batch: Batch) -> KindWork:
        # Prompts are dealt out over context ranks; a decoded token is worked on by all of them, for its attention only.
        tokens = batch.tokens if batch.decodes else batch.tokens / layout.cp_devices
        key = (index, layout.tp, layout.ep, layout.dp, layout.cp_devices, layout.redundant_experts, tokens)
        if key not in self._products:
            self._products[key] = tuple(self._product(role, *share, tokens, layout)
                                        for role, share in self._shares(index, layout).items())  # fmt: skip
        read = (index, layout.tp, layout.cp, layout.cp_in_tp, batch)
        if read not in self._mixers:
            self._mixers[read] = (self._mixer(index, kind, layout, batch),)
        moved, launches = self._stream(kind, tokens, batch, layout)
        parts = (self._products[key], self._mixers[read], (Operator("activations", 0.0, moved),))
        return KindWork(kind.name, len(kind.layers), parts, launches)

    def _product(
        self, role: str, elements: float, num_bytes: float, formats: tuple[str, ...], tokens: float, layout: Layout
    ) -> Operator:
        if role != "expert" or not self.chosen_share:
            return Operator(role, 2.0 * elements * tokens, num_bytes, formats)
        # Experts are shared by all replicas of a stage; the fullest rank holds what an uneven deal gives it.
        everyone = tokens * layout.dp * layout.cp_devices
        share = self.chosen_of(layout)
        touched = 1.0 - (1.0 - min(1.0, share)) ** everyone
        return Operator(role, 2.0 * elements * everyone * share, num_bytes * touched, formats,
                        ROUTING_IMBALANCE if layout.ep > 1 else 1.0)  # fmt: skip

    def chosen_of(self, layout: Layout) -> float:
        """The share of a layer's places for experts that a token is sent to: copies take their part of it."""
        if not layout.redundant_experts:
            return self.chosen_share
        dims = self.model.dimensions
        return dims.num_experts_per_token / (dims.num_experts + layout.redundant_experts) if dims.num_experts else 0.0

    def _shares(self, kind: int, layout: Layout) -> dict[str, tuple[float, float, tuple[str, ...]]]:
        """Per role, what one layer of the kind (-1: what is outside the layers) keeps on the fullest rank."""
        key = (kind, layout.tp, layout.ep, layout.expert_tp, layout.redundant_experts)
        if key not in self._roles:
            flat = replace(layout, pp=1, stages=((0, 0),))
            outside = self.evaluator.weights.by_role(flat, flat.coordinates(0), 0)
            if kind < 0:
                found = outside
            else:
                layer = self.model.layer_kinds[kind].layers[-1]
                one = replace(flat, stages=((layer, layer + 1),))
                found = self.evaluator.weights.by_role(one, one.coordinates(0), 0)
            shares = {}
            for role, cost in found.items():
                base = outside.get(role) if kind >= 0 else None
                elements = cost.elements - (base.elements if base else 0)
                num_bytes = cost.num_bytes - (base.num_bytes if base else 0)
                if elements > 0:
                    shares[str(role)] = (float(elements), float(num_bytes), cost.formats)
            self._roles[key] = shares
        return self._roles[key]

    def _mixer(self, index: int, kind: LayerKind, layout: Layout, batch: Batch) -> Operator:
        parts = self.evaluator.cache.parts(layout)[index]
        selected = self._selected(kind)
        read, sees_all = 0.0, True
        for part in parts:
            seen = min(batch.context, part.window_tokens) if part.window_tokens else batch.context
            if selected and part.kind != "indexer":
                seen, sees_all = min(seen, selected), sees_all and seen <= selected
            rows = batch.sequences if batch.decodes else 1
            # A state is read and written once a step; a prompt's own keys are read from cache once a chunk.
            read += rows * (float(part.bits_per_token) * seen + 2 * float(part.sequence_bits)) / 8
        return Operator("mixer", self._mixer_flops(kind, batch) / layout.tp / layout.cp_devices, read)

    def _selected(self, kind: LayerKind) -> int:
        visible = (self.model.structure.visible_tokens or {}).get(kind.name, 0)
        return visible or (NOMINAL_SELECTED_TOKENS if kind.mixer == "sparse_latent" else 0)

    def _mixer_flops(self, kind: LayerKind, batch: Batch) -> float:
        key = (kind.name, batch)
        if key not in self._flops:
            self._flops[key] = self._computed_flops(kind, batch)
        return self._flops[key]

    def _computed_flops(self, kind: LayerKind, batch: Batch) -> float:
        nodes = [node for node in getattr(kind.operators, batch.phase) if node.kind in MIXERS]
        if nodes and batch.decodes:
            return sum(evaluate(node.flops, B=batch.sequences, T=1, C=batch.context) for node in nodes)
        return self._nominal_mixer_flops(kind, batch)

    def _nominal_mixer_flops(self, kind: LayerKind, batch: Batch) -> float:
        dims, total = self.model.dimensions, 0.0
        heads, width = dims.num_attention_heads or 1, head_width(dims)
        keys = dims.head_dim or width
        both = keys + (dims.value_head_dim or keys)
        selected = self._selected(kind)
        growing = [spec for spec in kind.cache if spec.elements_per_token]
        for spec in kind.cache:
            if not spec.elements_per_token:
                total += STATE_FLOPS * spec.elements_per_sequence * (batch.tokens if spec.kind == "state" else 0.0)
            elif spec.kind == "indexer":
                total += 2.0 * batch.tokens * heads * spec.elements_per_token * batch.context / spec.tokens_per_entry
        latent = sum(spec.elements_per_token for spec in growing if spec.kind == "latent")
        if latent and batch.decodes:
            both = latent + max(spec.elements_per_token for spec in growing if spec.kind == "latent")
        seen = 0.0
        for spec in growing:
            if spec.kind in ("full", "latent"):
                seen = max(seen, min(batch.context, spec.window_tokens or batch.context))
            elif spec.kind in ("sliding", "chunked", "compressed"):
                window = min(batch.context, spec.window_tokens) if spec.window_tokens else batch.context
                seen = max(seen, window / spec.tokens_per_entry)
        return total + 2.0 * batch.tokens * heads * both * (min(seen, selected) if selected else seen)

    def _stream(self, kind: LayerKind, tokens: float, batch: Batch, layout: Layout) -> tuple[float, float]:
        """Bytes of activations that all but the products move, and how many operators are started."""
        # What is not cut by heads is done by every TP rank, unless the group splits the tokens (SP).
        split = layout.tp if layout.sp else 1
        graph = getattr(kind.operators, batch.phase)
        if not graph:
            return NOMINAL_STREAM_PASSES * tokens * self.model.dimensions.hidden_size * self.size / split, NOMINAL_OPERATORS
        key = (kind.name, tokens, batch)
        if key not in self._moved_bytes:  # formulas are evaluated once for all layouts with as many tokens
            nodes = (node for node in graph if node.kind not in PRODUCTS | MIXERS)
            self._moved_bytes[key] = sum(self._moved(node, tokens, batch) for node in nodes)
            self._launches[kind.name, batch.phase] = _started(graph)
        return self._moved_bytes[key] / split, self._launches[kind.name, batch.phase]

    @staticmethod
    def _moved(node: OperatorNode, tokens: float, batch: Batch) -> float:
        if batch.decodes:
            return evaluate(node.bytes, B=tokens, T=1, C=batch.context)
        return evaluate(node.bytes, B=1, T=tokens, C=tokens)

    def _outside(self, layout: Layout, batch: Batch) -> KindWork:
        """Embedding (looked up), the head (a row a sequence) and what else has no layer."""
        tokens = batch.tokens if batch.decodes else batch.tokens / layout.cp_devices
        operators, has_head = [], False
        shares = self._shares(-1, layout)
        for role, (elements, num_bytes, formats) in shares.items():
            if role == "head":
                operators.append(Operator(role, 2.0 * elements * batch.sequences, num_bytes, formats))
                has_head = True
            elif role not in ("embedding", "tower", "projector", "mtp"):
                operators.append(Operator(role, 2.0 * elements * tokens, num_bytes, formats))
        if not has_head and "embedding" in shares:  # a tied head
            elements, num_bytes, formats = shares["embedding"]
            operators.append(Operator("head", 2.0 * elements * batch.sequences, num_bytes, formats))
        return KindWork("outside", 1, (tuple(operators),), 6.0)


def _started(nodes: tuple[OperatorNode, ...]) -> float:
    """Operators that a layer starts. A graph from keys has one node for all products of a role: no layer has so few."""
    return float(max(NOMINAL_OPERATORS, sum(node.count for node in nodes)))
