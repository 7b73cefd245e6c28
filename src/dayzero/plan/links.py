"""What a collective costs over the links it really crosses: alpha-beta, in the scale-up domain and between nodes.

Goes in: a target's topology, a layout's placement, the axes that a collective runs over. Comes out: seconds of start-up and
seconds of transfer. Collectives that cross nodes are two-level: every card carries its part, as libraries do it with one
network port a card. Deliberately not done: contention between collectives of different axes.

Where the target has measured links, their latency and rate take the place of the published ones inside a domain, per
collective, from the group size nearest to the collective's ranks.

Sources: ring all-gather moves (n-1)/n of the result over each card's link, an all-reduce twice that; start-up grows with
log2 of the ranks (trees).
"""

from math import log2
from typing import NamedTuple

from dayzero.core.plan import Layout
from dayzero.core.target import Collective, MeasuredLink, Target
from dayzero.plan.trust import links_measured

# Start-up of one collective step, inside a scale-up domain and across: what NCCL-like libraries take for empty messages.
ALPHA_NODE_S, ALPHA_NETWORK_S = 6e-6, 20e-6
# A PCIe 4 x16 or 200 Gbit/s class link, only where a target publishes none; the plan says that it is assumed.
NOMINAL_LINK_BYTES_PER_S = 2.5e10
NOMINAL_NODE_CARDS = 8
# What is told of an axis' links: the collective it runs most.
MAIN_COLLECTIVE: dict[str, Collective] = {"tp": "all_reduce", "pp": "send_recv"}


class Seconds(NamedTuple):
    """Start-up and transfer of collectives at the published rates. A named tuple: a search makes hundreds of thousands."""

    alpha: float = 0.0
    beta: float = 0.0

    def plus(self, other: "Seconds") -> "Seconds":
        return Seconds(self.alpha + other.alpha, self.beta + other.beta)

    def times(self, count: float) -> "Seconds":
        return Seconds(self.alpha * count, self.beta * count)


ZERO = Seconds()


class Line(NamedTuple):
    """Start-up for each doubling of the ranks, and bytes per second: inside a domain and across."""

    near_s: float
    far_s: float
    near: float
    far: float


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
        self.network_rate = target.network_bytes_per_s or NOMINAL_LINK_BYTES_PER_S
        self.network_bytes_per_s = min(self.network_rate, self.link_bytes_per_s)
        self._published = Line(ALPHA_NODE_S, ALPHA_NETWORK_S, self.link_bytes_per_s, self.network_bytes_per_s)
        self._measured = target.links
        self._lines: dict[tuple[str, int], Line] = {}
        self.assumed = tuple(
            name for name, value in (("node.link_bytes_per_s", node.link_bytes_per_s or shared or links_measured(target)),
                                     ("network_bytes_per_s", target.network_bytes_per_s)) if not value
        )  # fmt: skip

    def measured(self, collective: Collective, ranks: int) -> MeasuredLink | None:
        """The measured link that prices a collective over so many ranks: of the nearest group size, in doublings."""
        within = min(ranks, self.domain)
        sizes = (link for link in self._measured if link.collective == collective)
        return min(sizes, key=lambda link: (abs(log2(link.group_size / within)), link.group_size), default=None)

    def spread(self) -> tuple[float, float]:
        """The measured times of sizes where transfer counts most, against the two figures fitted to them: the share of the
        rate that the best and the worst of them reached. (1, 1) without points."""
        prices = {"all_reduce": self.reduce, "all_gather": self.gather, "all_to_all": self.exchange,
                  "send_recv": self.hand_over}  # fmt: skip
        shares = [1.0]
        for link in (link for link in self._measured if link.collective in prices):
            for point in link.points:
                cost = prices[link.collective](point.num_bytes, link.group_size, link.group_size)
                if cost.beta >= cost.alpha:
                    shares.append((cost.alpha + cost.beta) / point.best_s)
        return max(shares), min(shares)

    def _line(self, collective: Collective, ranks: int) -> Line:
        """By the ranks of the whole collective, not by how many share a domain: so that placements are priced alike, and
        sharing a domain never costs time (what the bounds of the search rest on)."""
        if not self._measured:
            return self._published
        if (found := self._lines.get((collective, ranks))) is None:
            found, link = self._published, self.measured(collective, ranks)
            if link is not None:
                near_s = link.latency_s / log2(link.group_size)
                network = min(self.network_rate, link.bytes_per_s)
                found = Line(near_s, max(ALPHA_NETWORK_S, near_s), link.bytes_per_s, network)
            self._lines[collective, ranks] = found
        return found

    def inside(self, placement: tuple[str, ...], degrees: dict[str, int], counts: dict[str, tuple[int, int]]) -> int:
        """Of a collective's ranks, how many share a scale-up domain. `counts`: axis -> (ranks along it, step between them)."""
        stride, inside = 1, 1
        for axis in placement:
            if axis in counts:
                count, step = counts[axis]
                inside *= max(1, min(count, self.domain // (stride * step)))
            stride *= degrees[axis]
        return inside

    def gather(self, num_bytes: float, ranks: int, inside: int, collective: Collective = "all_gather") -> Seconds:
        """All-gather to (or reduce-scatter of) `num_bytes` on each of `ranks`, `inside` of which share a domain."""
        if ranks <= 1:
            return ZERO
        near_s, far_s, near, far = self._line(collective, ranks)
        alpha = log2(inside) * near_s + log2(ranks / inside) * far_s
        beta = num_bytes * ((1 - 1 / inside) / near + (1 / inside - 1 / ranks) / far)
        return Seconds(alpha, beta)

    def reduce(self, num_bytes: float, ranks: int, inside: int) -> Seconds:
        """All-reduce. Short messages take one round trip of a tree, so start-up is counted once."""
        half = self.gather(num_bytes, ranks, inside, "all_reduce")
        return Seconds(half.alpha, 2 * half.beta)

    def exchange(self, num_bytes: float, ranks: int, inside: int) -> Seconds:
        """All-to-all: each rank sends `num_bytes` in all, evenly."""
        if ranks <= 1:
            return ZERO
        near_s, far_s, near, far = self._line("all_to_all", ranks)
        beta = num_bytes / ranks * ((inside - 1) / near + (ranks - inside) / far)
        return Seconds(log2(inside) * near_s + log2(ranks / inside) * far_s, beta)

    def hand_over(self, num_bytes: float, stages: int, inside: int) -> Seconds:
        """One message from each pipeline stage to the next, `inside` of which share a domain."""
        far = -(-stages // inside) - 1
        near = stages - 1 - far
        line = self._line("send_recv", 2)  # between two cards each
        return Seconds(near * line.near_s + far * line.far_s, num_bytes * (near / line.near + far / line.far))

    def told(self, layout: Layout) -> tuple[str, ...]:
        """In words, which axis lies on which link."""
        lines, stride = [], 1
        for axis in layout.placement:
            degree = layout.degree(axis)
            if degree > 1:
                inside = max(1, min(degree, self.domain // stride))
                collective = MAIN_COLLECTIVE.get(axis, "all_gather")
                ranks = 2 if collective == "send_recv" else degree
                line, link = self._line(collective, ranks), self.measured(collective, ranks)
                near = f"{line.near / 1e9:.4g} GB/s links"
                if link is not None:
                    stands = "" if link.group_size == ranks else f", the nearest to {ranks}"
                    first = f"{link.latency_s * 1e6:.4g} us first"
                    near += f" ({collective} measured over {link.group_size} ranks{stands}, {first})"
                far = f"the network ({line.far / 1e9:.4g} GB/s a card)"
                where = near if inside == degree else far if inside == 1 else f"{near} in groups of {inside}, then {far}"
                lines.append(f"{axis} {degree}: every {stride} cards, over {where}" if stride > 1 else
                             f"{axis} {degree}: neighbouring cards, over {where}")  # fmt: skip
            stride *= degree
        return tuple(lines)
