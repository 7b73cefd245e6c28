"""Is the machine as quiet as it usually is? A fixed matmul and a fixed memory read, timed between runs.

A figure counts only if the gate before and after it is in line with the median of all gates of this run; otherwise it is
measured again. The median, not the best: a virtual machine's luckiest moment is no yardstick for its steady state.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

TOLERANCE = 1.15  # slower than the median gate by more than this: somebody else is using the machine
FIRST_GATES = 7  # before the first judgement


@dataclass
class Gate:
    """Seconds of the fixed work, all seen so far. `quiet()` runs it once and says whether the machine was as usual."""

    matrix: torch.Tensor = field(default_factory=lambda: torch.randn(768, 768))
    memory: torch.Tensor = field(default_factory=lambda: torch.zeros(32 * 2**20, dtype=torch.uint8))
    seen_s: list[tuple[float, float]] = field(default_factory=list)

    def quiet(self) -> bool:
        while len(self.seen_s) < FIRST_GATES:
            self.seen_s.append(self._run())
        now = self._run()
        self.seen_s.append(now)
        usual = [statistics.median(one) for one in zip(*self.seen_s, strict=True)]
        return all(seen <= TOLERANCE * median for seen, median in zip(now, usual, strict=True))

    def _run(self) -> tuple[float, float]:
        return _fastest(lambda: self.matrix @ self.matrix), _fastest(lambda: self.memory.sum(dtype=torch.int64))


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
