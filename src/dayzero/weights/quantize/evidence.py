"""What quantization did to each tensor: errors summed up as rows go by, and the record of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence

import torch

from dayzero.core.artifact import TensorError

Run = tuple[float, ...]  # elements, then the five sums of `add_sums`


class ErrorSums:
    """One tensor's sums by run of rows, fed by several threads. A run that comes again (another rank stores it too) counts
    once, and the order in which runs came changes nothing."""

    def __init__(self, tensor: str, preset: str) -> None:
        self.tensor, self.preset = tensor, preset
        self._runs: dict[int, Run] = {}
        self._lock = threading.Lock()

    def add(self, first_row: int, values: torch.Tensor, made: torch.Tensor) -> None:
        """Rows from `first_row` on: float32 values, and the numbers that their codes stand for."""
        difference = made - values
        squares = [torch.sum(one.square(), dtype=torch.float64).item() for one in (difference, values, made)]
        product = torch.sum(values * made, dtype=torch.float64).item()
        self.add_sums(first_row, values.numel(), (*squares, product, difference.abs().max().item()))

    def add_sums(self, first_row: int, num_elements: int, sums: Sequence[float]) -> None:
        """The same from sums: squares of the error, of the weight and of what was made, their product, the largest error."""
        with self._lock:
            self._runs.setdefault(first_row, (num_elements, *sums))

    @property
    def runs(self) -> dict[int, Run]:
        """All runs so far, by first row: what a work folder keeps of them."""
        with self._lock:
            return dict(self._runs)

    def restore(self, runs: Mapping[int, Sequence[float]]) -> None:
        """Runs that an earlier process counted."""
        for first_row, run in runs.items():
            self.add_sums(first_row, int(run[0]), run[1:])

    def result(self) -> TensorError:
        runs = [run for _, run in sorted(self.runs.items())]
        error, weight, made, product = (math.fsum(run[index] for run in runs) for index in (1, 2, 3, 4))
        norms = math.sqrt(weight * made)
        return TensorError(
            tensor=self.tensor, preset=self.preset, num_elements=sum(int(run[0]) for run in runs),
            max_abs=max((run[5] for run in runs), default=0.0), relative=math.sqrt(error / weight) if weight else 0.0,
            cosine=product / norms if norms else 1.0,
            snr_db=10 * math.log10(weight / error) if error and weight else None,
        )  # fmt: skip
