"""A tensor that a release stores in another form (quantized, or packed), as the numbers it stands for, some rows at a time.

A `Decoder` names the stored tensors it needs and turns any run of rows into numbers; what it means is in its `operation`,
which the ledger keeps. It never holds more than the rows asked for and what belongs to them. Finding decoders for a release
is not done here (`forms.stored`, `gguf.source`), nor is reading files (`reading`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from dayzero.core.units import tensor_bytes
from dayzero.model.headers import TensorEntry

if TYPE_CHECKING:
    import torch

# read(stored tensor, byte offset in it, number of bytes) -> those bytes, valid until the next call.
ReadStored = Callable[[str, int, int], memoryview]
DecodeRows = Callable[[ReadStored, int, int], "torch.Tensor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """One logical tensor. Rows are those of the tensor seen as [prod(shape[:-1]), shape[-1]].

    `decode(read, start, stop)` gives rows start to stop as a tensor [stop - start, shape[-1]] of `dtype`, for any
    0 <= start < stop. It is called from several threads. `row_step`: runs that begin at multiples of it cost nothing extra.
    `work_bytes`: what decoding a row takes beside the row itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]  # stored tensors, the weight's own first
    operation: str  # "dequantize:<form>", "unpack:<form>"
    decode: DecodeRows
    row_step: int = 1
    work_bytes: int = 0

    @property
    def columns(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        return tensor_bytes(self.shape, self.dtype)

    def entry(self, weight: TensorEntry) -> TensorEntry:
        """What a header would say of the logical tensor. `weight`: the first source's entry, whose file is named."""
        return TensorEntry(file=weight.file, dtype=self.dtype, shape=self.shape, begin=0, end=self.num_bytes)
