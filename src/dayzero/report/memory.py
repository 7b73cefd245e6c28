"""Memory of the serving processes over time, and whether it grows: samples go in, a slope with its interval comes out.

The slope is the least-squares line. Memory samples follow each other, so the usual interval is far too narrow: the
number of samples is replaced by the effective number n_eff = n (1 - r) / (1 + r), r the lag-1 autocorrelation of the
residuals, and the interval is Student's with n_eff - 2 degrees of freedom (Santer et al. 2000, "Statistical significance
of trends and trend differences in layer-average atmospheric temperature time series", J. Geophys. Res. 105(D6), section 4).
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType

import psutil

MemorySource = Sequence[int] | Callable[[], int]

# The first quarter of a run is left out of its slope: pools, compiled kernels and caches fill up there.
SETTLE_SHARE = 0.25

HOW_MEMORY = ("Memory: resident bytes of the serving processes and their children, summed (pages that processes share count in "
              "each), or what the device reports where the caller gave a gauge; sampled every {every_s:g} s.")  # fmt: skip


class MemoryWatch:
    """Samples memory in a thread while the block runs. `source`: process ids (children are included), or a gauge.

    A process that is gone simply adds nothing; `gone` keeps the ids that were given and ended.
    """

    def __init__(self, source: MemorySource, *, every_s: float = 0.1) -> None:
        self.source, self.every_s = source, every_s
        self.samples: list[tuple[float, int]] = []  # (seconds since start, bytes)
        self.gone: set[int] = set()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._started = time.monotonic()
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error
        if error is None:
            self.sample()

    @property
    def peak_bytes(self) -> int:
        return max((num_bytes for _, num_bytes in self.samples), default=0)

    def sample(self) -> None:
        now = time.monotonic() - self._started
        num_bytes = self.source() if callable(self.source) else self._resident(self.source)
        self.samples.append((now, num_bytes))

    def _loop(self) -> None:
        try:
            while not self._stop.wait(self.every_s):
                self.sample()
        except BaseException as error:
            self._error = error

    def _resident(self, pids: Sequence[int]) -> int:
        processes: dict[int, psutil.Process] = {}
        for pid in pids:
            try:
                root = psutil.Process(pid)
                if root.status() == psutil.STATUS_ZOMBIE:
                    raise psutil.NoSuchProcess(pid)
                processes |= {process.pid: process for process in (root, *root.children(recursive=True))}
            except psutil.NoSuchProcess:
                self.gone.add(pid)
        total = 0
        for process in processes.values():
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue  # ended between the two looks: it holds nothing now
        return total


def slope_with_interval(times_s: Sequence[float], values: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Least-squares slope per second and its 95% interval; None where the samples carry too little to give one.

    Needs n_eff > 3, else the interval says nothing. Values that do not move at all give (0, (0, 0)).
    """
    n = len(times_s)
    assert n == len(values), (n, len(values))
    if n < 3:
        return 0.0, None
    mean_t, mean_y = math.fsum(times_s) / n, math.fsum(values) / n
    spread = math.fsum((t - mean_t) ** 2 for t in times_s)
    if spread == 0:
        return 0.0, None
    slope = math.fsum((t - mean_t) * (y - mean_y) for t, y in zip(times_s, values, strict=True)) / spread
    residuals = [y - mean_y - slope * (t - mean_t) for t, y in zip(times_s, values, strict=True)]
    squares = math.fsum(e * e for e in residuals)
    if squares <= n * (1e-12 * max(1.0, abs(mean_y))) ** 2:  # a straight line to within rounding
        return slope, (slope, slope)
    r = math.fsum(a * b for a, b in pairwise(residuals)) / squares
    n_eff = n * (1 - max(0.0, r)) / (1 + max(0.0, r))  # negative autocorrelation would only narrow the interval
    if n_eff <= 3:
        return slope, None
    error = math.sqrt(squares / (n_eff - 2) / spread)
    half = student_t_975(n_eff - 2) * error
    return slope, (slope - half, slope + half)


def student_t_975(degrees: float) -> float:
    """97.5% quantile of Student's t. With t = sqrt(v) tan(a), P(|T| < t) is the share of the integral of cos(a)^(v-1)
    over [0, pi/2] that lies below a; solved by bisection on a Simpson sum."""
    assert degrees >= 1, degrees

    def integral(stop: float, steps: int = 200) -> float:
        width = stop / steps
        weights = (1 if i in (0, steps) else 4 if i % 2 else 2 for i in range(steps + 1))
        return width / 3 * math.fsum(w * max(0.0, math.cos(i * width)) ** (degrees - 1) for i, w in enumerate(weights))

    whole, low, high = integral(math.pi / 2), 0.0, math.pi / 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if integral(middle) < 0.95 * whole else (low, middle)
    return math.sqrt(degrees) * math.tan(low)
