"""Stored rows of a GGUF in, numbers out: only the rows asked for, or whole tensors where transformers' processing needs them.

Blocks are turned into numbers by the format's own package, in float32, and then cast once. Not here: which rows those are
(`rows`), and what is made of which tensors (`source`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import torch

from dayzero.core.errors import one_line
from dayzero.weights.decoding import ReadStored
from dayzero.weights.gguf.header import GgufTensor, block_sizes
from dayzero.weights.gguf.rows import Made, Moved, process
from dayzero.weights.symbolic import torch_dtype

# Rows further apart than this are read separately.
GAP_ROWS = 64


def moved_rows(
    sources: tuple[str, ...], stored: list[GgufTensor], how: Moved, dtype: str, exact: bool
) -> Callable[[ReadStored, int, int], torch.Tensor]:
    """Rows decoded one by one; with `exact` their bytes are the numbers."""
    columns = how.shape[-1]
    row_bytes = [(one.end - one.begin) // num_rows(one.shape) for one in stored]

    def decode(read: ReadStored, start: int, stop: int) -> torch.Tensor:
        out = torch.empty((stop - start, columns), dtype=torch_dtype(dtype))
        source, row = how.rows_between(start, stop)
        for at in dict.fromkeys(source.tolist()):
            places = np.nonzero(source == at)[0]
            places = places[np.argsort(row[places], kind="stable")]
            for span in np.split(places, np.nonzero(np.diff(row[places]) > GAP_ROWS)[0] + 1):
                first, size = int(row[span[0]]), row_bytes[at]
                data = read(sources[at], first * size, (int(row[span[-1]]) + 1 - first) * size)
                block = np.frombuffer(data, dtype=np.uint8).reshape(-1, size)
                if len(span) != len(block) or (np.diff(row[span]) != 1).any():
                    block = block[row[span] - first]
                numbers = _copied(block, dtype) if exact else torch.from_numpy(numbers_of(block, stored[at].form))
                if len(span) == stop - start and (np.diff(span) == 1).all():
                    return numbers.to(out.dtype)
                out[torch.from_numpy(span)] = numbers.to(out.dtype)
        return out

    return decode


class WholeTensors:
    """A tensor that transformers' processing makes of whole ones. Each thread keeps the last one that it made, and no other."""

    _kept = threading.local()

    def __init__(
        self, processor: Any, names: Mapping[str, str], dtype: str, target: str, made: Made, stored: list[GgufTensor]
    ) -> None:
        self._processor, self._names, self._dtype = processor, names, dtype
        self._target, self._made, self._stored = target, made, stored

    def decode(self, read: ReadStored, start: int, stop: int) -> torch.Tensor:
        if getattr(self._kept, "owner", None) is not self:
            self._kept.owner = self._kept.rows = None  # the other one is given back first
            self._kept.rows = self._make(read)
            self._kept.owner = self
        rows: torch.Tensor = self._kept.rows
        return rows[start:stop]

    def _make(self, read: ReadStored) -> torch.Tensor:
        whole = []
        for name, one in zip(self._made.sources, self._stored, strict=True):
            data = np.frombuffer(read(name, 0, one.end - one.begin), dtype=np.uint8).reshape(num_rows(one.shape), -1)
            whole.append((name, numbers_of(data, one.form).reshape(one.shape)))
        made = process(self._processor, self._names, whole)[self._target]
        assert made.shape == self._made.how.shape, (self._target, made.shape, self._made.how.shape)
        return torch.from_numpy(np.ascontiguousarray(made)).to(torch_dtype(self._dtype)).reshape(-1, made.shape[-1])


def numbers_of(data: np.ndarray, form: str) -> np.ndarray:
    """Bytes [rows, bytes a row] as float32 [rows, columns], by the gguf package."""
    from gguf import GGMLQuantizationType, dequantize

    return np.array(dequantize(data, GGMLQuantizationType[form]), dtype=np.float32)


def _copied(block: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.array(block)).view(torch_dtype(dtype))


def unreadable(form: str) -> str:
    """Why the gguf package cannot decode a form (empty when it can): asked of it with one block of zeros."""
    block_bytes = next(num_bytes for name, _, num_bytes in block_sizes().values() if name == form)
    try:
        numbers_of(np.zeros((1, block_bytes), dtype=np.uint8), form)
    except (NotImplementedError, ValueError, KeyError) as error:
        return one_line(error)
    return ""


def num_rows(shape: tuple[int, ...]) -> int:
    return prod(shape[:-1])
