"""What a collective costs over the links it really crosses: alpha-beta, in the scale-up domain and between nodes.

Goes in: a target's topology, a layout's placement, the axes that a collective runs over. Comes out: seconds of start-up and
seconds of transfer. Collectives that cross nodes are two-level: every card carries its part, as libraries do it with one
network port a card. Deliberately not done: contention between collectives of different axes.

Sources: ring all-gather moves (n-1)/n of the result over each card's link, an all-reduce twice that; start-up grows with
log2 of the ranks (trees).
"""

from dataclasses import dataclass
from math import log2

from dayzero.core.plan import Layout
from dayzero.core.target import Target

# Start-up of one collective step, inside a scale-up domain and across: what NCCL-like libraries take for empty messages.
ALPHA_NODE_S, ALPHA_NETWORK_S = 6e-6, 20e-6
# A PCIe 4 x16 or 200 Gbit/s class link, only where a target publishes none; the plan says that it is assumed.
NOMINAL_LINK_BYTES_PER_S = 2.5e10
NOMINAL_NODE_CARDS = 8


@dataclass(frozen=True, slots=True)
class Seconds:
    """Start-up and transfer of collectives at the published rates."""

    alpha: float = 0.0
    beta: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.alpha + other.alpha, self.beta + other.beta)

    def times(self, count: float) -> "Seconds":
        return Seconds(self.alpha * count, self.beta * count)


ZERO = Seconds()


class Links:
    """The two levels of a target's topology."""

    def __init__(self, target: Target) -> None:
        node = target.node
        # Ranks of one host speak through its memory.
        one_host = node.topology == "shared memory"
        shared = target.card.memory_bytes_per_s if one_host else None
        self.domain = 1 << 30 if one_host else node.scaleup_domain or node.num_cards or NOMINAL_NODE_CARDS
        self.link_bytes_per_s = node.link_bytes_per_s or shared or NOMINAL_LINK_BYTES_PER_S
        # A network is never taken to be faster than the link inside, so that sharing a domain never costs time.
        self.network_bytes_per_s = min(target.network_bytes_per_s or NOMINAL_LINK_BYTES_PER_S, self.link_bytes_per_s)
        self.assumed = tuple(
            name for name, value in (("node.link_bytes_per_s", node.link_bytes_per_s or shared),
                                     ("network_bytes_per_s", target.network_bytes_per_s)) if not value
        )  # fmt: skip

    def inside(self, placement: tuple[str, ...], degrees: dict[str, int], counts: dict[str, tuple[int, int]]) -> int:
        """Of a collective's ranks, how many share a scale-up domain. `counts`: axis -> (ranks along it, step between them)."""
        stride, inside = 1, 1
        for axis in placement:
            if axis in counts:
                count, step = counts[axis]
                inside *= max(1, min(count, self.domain // (stride * step)))
            stride *= degrees[axis]
        return inside

    def gather(self, num_bytes: float, ranks: int, inside: int) -> Seconds:
        """All-gather to (or reduce-scatter of) `num_bytes` on each of `ranks`, `inside` of which share a domain."""
        if ranks <= 1:
            return ZERO
        groups = ranks / inside
        alpha = log2(inside) * ALPHA_NODE_S + log2(groups) * ALPHA_NETWORK_S
        beta = num_bytes * ((1 - 1 / inside) / self.link_bytes_per_s + (1 / inside - 1 / ranks) / self.network_bytes_per_s)
        return Seconds(alpha, beta)

    def reduce(self, num_bytes: float, ranks: int, inside: int) -> Seconds:
        """All-reduce. Short messages take one round trip of a tree, so start-up is counted once."""
        half = self.gather(num_bytes, ranks, inside)
        return Seconds(half.alpha, 2 * half.beta)

    def exchange(self, num_bytes: float, ranks: int, inside: int) -> Seconds:
        """All-to-all: each rank sends `num_bytes` in all, evenly."""
        if ranks <= 1:
            return ZERO
        beta = num_bytes / ranks * ((inside - 1) / self.link_bytes_per_s + (ranks - inside) / self.network_bytes_per_s)
        return Seconds(log2(inside) * ALPHA_NODE_S + log2(ranks / inside) * ALPHA_NETWORK_S, beta)

    def hand_over(self, num_bytes: float, stages: int, inside: int) -> Seconds:
        """One message from each pipeline stage to the next, `inside` of which share a domain."""
        far = -(-stages // inside) - 1
        near = stages - 1 - far
        return Seconds(near * ALPHA_NODE_S + far * ALPHA_NETWORK_S,
                       num_bytes * (near / self.link_bytes_per_s + far / self.network_bytes_per_s))  # fmt: skip

    def told(self, layout: Layout) -> tuple[str, ...]:
        """In words, which axis lies on which link."""
        lines, stride = [], 1
        for axis in layout.placement:
            degree = layout.degree(axis)
            if degree > 1:
                inside = max(1, min(degree, self.domain // stride))
                near = f"{self.link_bytes_per_s / 1e9:.4g} GB/s links"
                far = f"the network ({self.network_bytes_per_s / 1e9:.4g} GB/s a card)"
                where = near if inside == degree else far if inside == 1 else f"{near} in groups of {inside}, then {far}"
                lines.append(f"{axis} {degree}: every {stride} cards, over {where}" if stride > 1 else
                             f"{axis} {degree}: neighbouring cards, over {where}")  # fmt: skip
            stride *= degree
        return tuple(lines)
