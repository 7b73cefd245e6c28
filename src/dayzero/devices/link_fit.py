"""Latency and rate of a collective from timed sizes.

Goes in: seconds per size, of every rank. Comes out: a `MeasuredLink`. Deliberately not done: measuring (`measure_links`), or
leaving points out.

Formula, per collective over n ranks: seconds = latency + factor(n) * bytes / rate, where factor(n) * bytes is what crosses
the busiest card's link in the best known algorithm: 2(n-1)/n for an all-reduce, (n-1)/n for an all-gather (of its result),
a reduce-scatter (of its input) and an all-to-all (of what a rank sends), 1 for a message. That makes `rate` the "bus
bandwidth" of nccl-tests (doc/PERFORMANCE.md), comparable between collectives and with a link's own rate; the bounds are
those of Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH (2005).
"""

from collections.abc import Callable, Sequence
from math import log
from statistics import median
from typing import Any

from dayzero.core.target import Collective, LinkPoint, MeasuredLink

FACTORS: dict[Collective, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1.0,
}
# Of the weighted fit; it settles to three digits within ten on times that are off by a factor of three.
REPEATS = 20


def slowest(ranks: Sequence[list[list[Any]]]) -> tuple[LinkPoint, ...]:
    """A collective has ended when its slowest rank has."""
    points = []
    for sizes in zip(*ranks, strict=True):
        last = [max(times) for times in zip(*(times for _, times in sizes), strict=True)]
        points.append(LinkPoint(num_bytes=sizes[0][0], best_s=min(last), median_s=median(last)))
    return tuple(points)


def fit(collective: Collective, group_size: int, points: tuple[LinkPoint, ...]) -> MeasuredLink:
    """Latency and rate through the best times, by least squares of log(predicted / measured): twice too long weighs as much as
    half, and 1 KiB as much as 64 MiB. Found by repeating a weighted fit of the times.

    A negative latency is none. Where time does not grow with the bytes, the rate is what the largest size reached: too
    slow rather than too fast.
    """
    factor = FACTORS[collective](group_size)
    pairs = [(factor * point.num_bytes, point.best_s) for point in points]
    weights = [1 / time_s**2 for _, time_s in pairs]
    latency_s, slope = _weighted(pairs, weights)
    for _ in range(REPEATS):
        weights = [_weight(latency_s + slope * size, time_s) for size, time_s in pairs]
        latency_s, slope = _weighted(pairs, weights)
    return MeasuredLink(collective=collective, group_size=group_size, latency_s=latency_s, bytes_per_s=1 / slope, points=points)


def _weight(predicted_s: float, time_s: float) -> float:
    """What makes the squared difference the squared logarithm of the ratio."""
    difference = predicted_s - time_s
    return 1 / time_s**2 if abs(difference) < 1e-6 * time_s else (log(predicted_s / time_s) / difference) ** 2


def _weighted(pairs: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Latency (not negative) and seconds per byte (positive) of the line with the least weighted squares."""
    total = sum(weights)
    mean_size, mean_s = (sum(w * pair[part] for w, pair in zip(weights, pairs, strict=True)) / total for part in (0, 1))
    around = [(w, size - mean_size, time_s - mean_s) for w, (size, time_s) in zip(weights, pairs, strict=True)]
    spread_out = sum(w * size * size for w, size, _ in around)
    slope = sum(w * size * time_s for w, size, time_s in around) / spread_out if spread_out else mean_s / mean_size
    if slope <= 0:
        return min(time_s for _, time_s in pairs), min(time_s / size for size, time_s in pairs)
    if (latency_s := mean_s - slope * mean_size) > 0:
        return latency_s, slope
    return 0.0, (sum(w * size * time_s for w, (size, time_s) in zip(weights, pairs, strict=True))
                 / sum(w * size * size for w, (size, _) in zip(weights, pairs, strict=True)))  # fmt: skip


def spread(link: MeasuredLink) -> str:
    factor = FACTORS[link.collective](link.group_size)
    off = max(abs((link.latency_s + factor * p.num_bytes / link.bytes_per_s) / p.best_s - 1) for p in link.points)
    return (f"{link.collective} over {link.group_size}: median/best up to "
            f"{max(p.median_s / p.best_s for p in link.points):.2f}, fit within {off:.0%}")  # fmt: skip


def link_lines(links: Sequence[MeasuredLink]) -> list[str]:
    """One line each, for people."""
    return [f"{link.collective:14} over {link.group_size:3} ranks: {link.latency_s * 1e6:9.1f} us + "
            f"{link.bytes_per_s / 1e9:8.3f} GB/s" for link in links]  # fmt: skip
