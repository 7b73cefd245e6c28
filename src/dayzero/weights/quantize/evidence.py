"""What quantization did to each tensor: errors summed up as rows go by, and the record of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

from dayzero.core.artifact import TensorError


class ErrorSums:
    """One tensor's sums, fed by several threads. A run of rows that comes again (another rank stores it too) counts once."""

    def __init__(self, tensor: str, preset: str) -> None:
        self.tensor, self.preset = tensor, preset
        self._seen: set[int] = set()
        self._lock = threading.Lock()
        self._elements, self._max_abs = 0, 0.0
        self._error = self._weight = self._made = self._product = 0.0

    def add(self, first_row: int, values: torch.Tensor, made: torch.Tensor) -> None:
        """Rows from `first_row` on: float32 values, and the numbers that their codes stand for."""
        difference = made - values
        squares = (torch.sum(one.square(), dtype=torch.float64).item() for one in (difference, values, made))
        product = torch.sum(values * made, dtype=torch.float64).item()
        self.add_sums(first_row, values.numel(), (*squares, product, difference.abs().max().item()))

    def add_sums(self, first_row: int, num_elements: int, sums: Sequence[float]) -> None:
        """The same from sums: squares of the error, of the weight and of what was made, their product, the largest error."""
        error, weight, made, product, largest = sums
        with self._lock:
            if first_row in self._seen:
                return
            self._seen.add(first_row)
            self._elements += num_elements
            self._max_abs = max(self._max_abs, largest)
            self._error += error
            self._weight += weight
            self._made += made
            self._product += product

    def result(self) -> TensorError:
        norms = math.sqrt(self._weight * self._made)
        return TensorError(
            tensor=self.tensor, preset=self.preset, num_elements=self._elements, max_abs=self._max_abs,
            relative=math.sqrt(self._error / self._weight) if self._weight else 0.0,
            cosine=self._product / norms if norms else 1.0,
            snr_db=10 * math.log10(self._weight / self._error) if self._error and self._weight else None,
        )  # fmt: skip


def error_of(tensor: str, preset: str, values: torch.Tensor, made: torch.Tensor) -> TensorError:
    """The errors of a tensor that is there as a whole."""
    sums = ErrorSums(tensor, preset)
    sums.add(0, values.to(torch.float32), made.to(torch.float32))
    return sums.result()
