"""The precisions that can be asked for, as a table. No torch.

A preset says how a matrix [rows, columns] (output, input) becomes codes: their kind and bits, the rows and columns that share
a scale, whether there are zero points, and what a linear layer does with its input. `form` is the name that the
compressed-tensors format has for it on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dayzero.core.errors import DayZeroError
from dayzero.core.storage import Storage

GROUPS = (32, 64, 128)
FP8_MAX, FP4_MAX = 448.0, 6.0
WORD_BITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """`block`: rows and columns of one scale, 0 spans the whole dimension. `activations`: None leaves them alone, "token"
    scales each token when it comes, "group" each 128 inputs of a token, "tensor" has one scale per layer that was measured."""

    name: str
    bits: int
    number: Literal["int", "float"]
    block: tuple[int, int]
    form: str
    symmetric: bool = True
    activations: Literal["token", "group", "tensor"] | None = None
    scale_dtype: str | None = None  # None: the dtype that the weights had

    @property
    def code_range(self) -> tuple[float, float]:
        """The smallest and the largest code, as numbers."""
        if self.number == "int":
            return float(-(1 << (self.bits - 1))), float((1 << (self.bits - 1)) - 1)
        largest = FP8_MAX if self.bits == 8 else FP4_MAX
        return -largest, largest

    @property
    def packed(self) -> bool:
        """Whether several codes share a stored element."""
        return self.form in ("pack-quantized", "mxfp4-pack-quantized")

    @property
    def word_columns(self) -> int:
        """Columns that one stored element holds."""
        return {"pack-quantized": WORD_BITS // self.bits, "mxfp4-pack-quantized": 2}.get(self.form, 1)

    @property
    def half_step(self) -> float:
        """The largest error of a value inside the range, in scales for integers; relative to the block's largest value for
        floats, where the coarsest step is the one below the largest code."""
        if self.number == "int":
            return 0.5
        return 2.0**-4 if self.bits == 8 else 1 / 3

    def unfit(self, columns: int, *, on_disk: bool) -> str | None:
        """Why a matrix of so many columns cannot be stored so; None when it can. Readers of the compressed-tensors format
        (`on_disk`) want whole groups, this engine does not."""
        width = self.block[1] if self.block[0] == 1 else 0
        if on_disk and width and columns % width:
            return f"{columns} columns are no multiple of {width}, which the format asks for"
        if self.form == "mxfp4-pack-quantized" and columns % 2:
            return f"{columns} columns are odd, and two codes share a byte"
        return None

    def storage(self, dtype: str = "bfloat16") -> Storage:
        """What it costs in bytes, for the planner. `dtype`: the weights' own, which scales take."""
        return Storage(
            scheme=self.name, bits=self.bits, block=self.block, scale_dtype=self.scale_dtype or dtype,
            activations=f"{'int8' if self.number == 'int' else 'fp8'} {self.activations}" if self.activations else None,
            word_columns=self.word_columns if self.form == "pack-quantized" else 1,
            zero_bits=0 if self.symmetric else self.bits if self.form == "pack-quantized" else 8,
            matrix_bytes=16 if self.form == "pack-quantized" else 0,  # the stored shape
        )  # fmt: skip


def _table() -> dict[str, Preset]:
    int8 = Preset(name="int8", bits=8, number="int", block=(1, 0), form="pack-quantized")
    w8a8 = replace(int8, name="w8a8", form="int-quantized", activations="token")
    made = [int8, *(replace(int8, name=f"int8-g{size}", block=(1, size)) for size in GROUPS), w8a8,
            replace(w8a8, name="w8a8-static", activations="tensor")]  # fmt: skip
    made += [Preset(name=f"int4-g{size}", bits=4, number="int", block=(1, size), form="pack-quantized") for size in GROUPS]
    made += [replace(one, name=f"{one.name}-asym", symmetric=False) for one in made if one.activations is None]
    fp8 = Preset(name="fp8", bits=8, number="float", block=(1, 0), form="float-quantized", activations="token")
    mxfp4 = Preset(name="mxfp4", bits=4, number="float", block=(1, 32), form="mxfp4-pack-quantized", scale_dtype="uint8")
    made += [fp8, replace(fp8, name="fp8-block", block=(128, 128), activations="group"), mxfp4]
    return {one.name: one for one in made}


PRESETS = _table()


def preset(name: str) -> Preset:
    """Raises DayZeroError naming what there is."""
    if name in PRESETS:
        return PRESETS[name]
    raise DayZeroError("unknown quantization preset", got=name, want=", ".join(PRESETS), fix="choose one of them")
