"""Is the machine quiet enough to measure? A fixed matmul and a fixed memory read, timed between runs.

A figure counts only if the gate before and after it is close to the best gate seen; otherwise it is measured again.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

TOLERANCE = 1.15  # slower than the best gate by more than this: somebody else is using the machine


@dataclass
class Gate:
    """Seconds of the fixed work, best so far. `quiet()` runs it once and says whether the machine was free."""

    matrix: torch.Tensor = field(default_factory=lambda: torch.randn(768, 768))
    memory: torch.Tensor = field(default_factory=lambda: torch.zeros(32 * 2**20, dtype=torch.uint8))
    best_s: list[float] = field(default_factory=lambda: [float("inf"), float("inf")])

    def quiet(self) -> bool:
        times = [_fastest(lambda: self.matrix @ self.matrix), _fastest(lambda: self.memory.sum(dtype=torch.int64))]
        self.best_s = [min(best, seen) for best, seen in zip(self.best_s, times, strict=True)]
        return all(seen <= TOLERANCE * best for seen, best in zip(times, self.best_s, strict=True))


def _fastest(work: Callable[[], object]) -> float:
    """Of five: a blip of milliseconds does not move a run of seconds, a neighbour that stays does."""
    seen = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        seen.append(time.perf_counter() - started)
    return min(seen)


def interleave(
    contenders: dict[str, Callable[[], float]], *, rounds: int, gate: Gate, most_repeats: int
) -> dict[str, list[float]] | None:
    """Run the contenders in turn, `rounds` good rounds. A round with a loud gate is repeated, at most `most_repeats` times in
    all; None when the machine never was quiet enough ("not shown")."""
    results: dict[str, list[float]] = {name: [] for name in contenders}
    repeats = 0
    while len(next(iter(results.values()))) < rounds:
        before = gate.quiet()
        taken = {name: run() for name, run in contenders.items()}
        if before and gate.quiet():
            for name, value in taken.items():
                results[name].append(value)
            continue
        repeats += 1
        if repeats > most_repeats:
            return None
    return results


def median_ratio(results: dict[str, list[float]], over: str, under: str) -> float:
    """Median over the rounds of value[over] / value[under]: pairs of one round saw the same machine."""
    return statistics.median(a / b for a, b in zip(results[over], results[under], strict=True))
