"""Views of plain weights and presets in, the tensors that store them in fewer bits out, each a run of rows at a time.

A quantized weight is a few stored tensors (codes, scales, zero points, its shape), each of which is a `Decoder` like any
other made source: conversion cuts, hashes and writes it as it does plain ones, and the ledger says what it was made of.
Scales and codes are made in passes of their own, as they lie in different places of a file; both begin with the same bytes
and end in the same numbers. Matrices that a class stacks are quantized one by one. Names are those of the compressed-tensors
format, which for a bare parameter (stacked experts) append to its name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from dayzero.core.errors import DayZeroError
from dayzero.model.stored.scales import Packing
from dayzero.weights.algebra import View
from dayzero.weights.copying import BlockCopier
from dayzero.weights.decoding import Decoder, ReadStored
from dayzero.weights.forms.values import pack_words
from dayzero.weights.quantize import fast
from dayzero.weights.quantize.codes import Codes, decode, encode_plainly, scales_of
from dayzero.weights.quantize.evidence import ErrorSums
from dayzero.weights.quantize.presets import WORD_BITS, Preset
from dayzero.weights.reading import SourceReader
from dayzero.weights.symbolic import torch_dtype

PREFIX = "quantized:"
WORK_BYTES = 12  # of memory for each element while it is quantized: its float32 value and what is made of it


class ViewRows:
    """Rows of views as tensors. Each thread has its own buffers."""

    def __init__(self, reader: SourceReader) -> None:
        self._reader, self._local = reader, threading.local()

    def read(self, view: View, start: int, stop: int) -> torch.Tensor:
        """Rows start to stop of a view [rows, columns]."""
        if not hasattr(self._local, "copier"):
            self._local.copier = BlockCopier(self._reader)
        part = view.slice(0, start, stop)
        data = bytearray()
        for _, block in self._local.copier.blocks(part):
            data += block
        return torch.frombuffer(data, dtype=torch_dtype(view.dtype)).reshape(part.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """A weight that is to be stored quantized: `view` is [..., rows, columns] (output, input) in its own numbers."""

    name: str  # of the weight: "<module>.weight", or a bare parameter
    view: View
    preset: Preset
    sources: tuple[str, ...]  # stored tensors behind the view
    codes: Callable[[int, int], Codes] | None = None  # what calibration chose for rows; None: from the weight alone

    @property
    def matrix(self) -> tuple[int, int]:
        return self.view.shape[-2], self.view.shape[-1]

    @property
    def count(self) -> int:
        return prod(self.view.shape[:-2])

    def stored_name(self, part: str) -> str:
        """The name of one of the stored tensors: `part` is codes, scale, zero_point or shape."""
        if part == "codes":
            return f"{self.name}_packed" if self.preset.packed else self.name
        return f"{self.name}_{part}"

    def stored_parts(self, *, packed_zeros: bool) -> dict[str, tuple[tuple[int, ...], str]]:
        """Stored tensor by part: its shape and dtype. `packed_zeros`: zero points in words along the rows, as on disk in the
        compressed-tensors format, with the weight's shape beside them; else a byte each."""
        rows, columns = self.matrix
        outer, preset = self.view.shape[:-2], self.preset
        height, width = preset.block
        blocks = (-(-rows // (height or rows)), -(-columns // (width or columns)))
        code_dtype = {"pack-quantized": "int32", "int-quantized": "int8", "mxfp4-pack-quantized": "uint8"}
        parts = {
            "codes": ((*outer, rows, -(-columns // preset.word_columns)), code_dtype.get(preset.form, "float8_e4m3fn")),
            "scale": ((*outer, *blocks), preset.scale_dtype or self.view.dtype),
        }
        if not preset.symmetric:
            words = preset.form == "pack-quantized" and packed_zeros
            lines = -(-rows * preset.bits // WORD_BITS) if words else rows
            parts["zero_point"] = ((*outer, lines, blocks[1]), "int32" if words else "int8")
        if preset.form == "pack-quantized" and packed_zeros:
            parts["shape"] = ((2,), "int64")
        return parts


def encoders(weight: Quantized, rows: ViewRows, *, packed_zeros: bool) -> tuple[dict[str, Decoder], ErrorSums]:
    """Stored name -> how it is made, and what its codes will have lost when they all were. Raises DayZeroError for a shape
    that the preset's form cannot hold."""
    preset, (_, columns) = weight.preset, weight.matrix
    if (why := preset.unfit(columns, on_disk=packed_zeros)) is not None:
        raise DayZeroError(f"{weight.name} cannot be stored as {preset.name}", got=why, want="columns that fit",
                           fix="keep it in its own dtype")  # fmt: skip
    maker = _Maker(weight, rows, packed_zeros)
    made = {}
    for part, (shape, dtype) in weight.stored_parts(packed_zeros=packed_zeros).items():
        name = weight.stored_name(part)
        lines = prod(shape[:-1]) // max(weight.count, 1) if part != "shape" else 1
        height = preset.block[0] or weight.matrix[0]
        weight_rows = {"codes": 1, "scale": height, "zero_point": WORD_BITS // preset.bits}.get(part, 0)
        made[name] = Decoder(
            name=PREFIX + name, shape=shape, dtype=dtype, sources=weight.sources, operation=f"quantize:{preset.name}:{part}",
            decode=maker.maker(part, lines), row_step=height if part == "codes" else 1,
            work_bytes=weight_rows * columns * WORK_BYTES,
        )  # fmt: skip
    return made, maker.errors


class _Maker:
    """The stored parts of one weight, by rows of the part."""

    def __init__(self, weight: Quantized, rows: ViewRows, packed_zeros: bool) -> None:
        self.weight, self.rows, self.packed_zeros = weight, rows, packed_zeros
        shape = weight.view.shape
        self.flat = weight.view.reshape((prod(shape[:-1]), shape[-1]))
        self.scale_dtype = torch_dtype(weight.view.dtype)
        self.errors = ErrorSums(weight.name, weight.preset.name)

    def maker(self, part: str, lines: int) -> Callable[[ReadStored, int, int], torch.Tensor]:
        """`lines`: rows of the part that one matrix has."""
        if part == "shape":
            return lambda read, start, stop: torch.tensor([list(self.weight.matrix)], dtype=torch.int64)
        make = {"codes": self._codes, "scale": self._scales, "zero_point": self._zeros}[part]

        def decode(read: ReadStored, start: int, stop: int) -> torch.Tensor:
            made = []
            while start < stop:  # no matrix shares a block with the next
                matrix, first = divmod(start, lines)
                last = min(lines, first + stop - start)
                made.append(make(matrix, first, last))
                start += last - first
            return made[0] if len(made) == 1 else torch.cat(made)

        return decode

    def _values(self, matrix: int, first: int, last: int) -> torch.Tensor:
        start = matrix * self.weight.matrix[0]
        return self.rows.read(self.flat, start + first, start + last)

    def _chosen(self, values: torch.Tensor, matrix: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and zero points of rows first to last, which begin and end at a block's border."""
        try:
            return scales_of(values, self.weight.preset, self.scale_dtype)
        except DayZeroError as error:
            of = f" of matrix {matrix}" if self.weight.count > 1 else ""
            raise DayZeroError(f"{self.weight.name}: {error.what}", got=f"{error.got}, in rows {first} to {last}{of}",
                               want=error.want, fix=error.fix) from error  # fmt: skip

    def _codes(self, matrix: int, first: int, last: int) -> torch.Tensor:
        """Codes as they are stored; what they lose is added to the errors."""
        preset, height, rows = self.weight.preset, self.weight.preset.block[0], self.weight.matrix[0]
        low, high = (first // height * height, min(rows, -(-last // height) * height)) if height > 1 else (first, last)
        start = matrix * rows + low
        values = self._values(matrix, low, high)
        given = self.weight.codes(start, start + high - low) if self.weight.codes is not None else None
        if given is None:
            scales, zeros = self._chosen(values, matrix, low, high)
            packed = preset.form == "pack-quantized"
            if (made := fast.integer_codes(values, scales, zeros, preset, packed=packed)) is not None:
                self.errors.add_sums(start, values.numel(), made[1].tolist())  # presets of whole rows: low is first
                return made[0][first - low : last - low]
            given = Codes(codes=encode_plainly(values, scales, zeros, preset), scales=scales, zeros=zeros)
        rows_asked = slice(first - low, last - low)
        made_of = decode(given, preset)[rows_asked]
        self.errors.add(matrix * rows + first, values[rows_asked].to(torch.float32), made_of)
        return pack(given.codes[first - low : last - low], preset)

    def _scales(self, matrix: int, first: int, last: int) -> torch.Tensor:
        height = self.weight.preset.block[0] or self.weight.matrix[0]
        return self._parameters(matrix, first * height, min(self.weight.matrix[0], last * height))[0]

    def _parameters(self, matrix: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.weight.codes is not None:
            start = matrix * self.weight.matrix[0]
            given = self.weight.codes(start + first, start + last)
            return given.scales, given.zeros
        return self._chosen(self._values(matrix, first, last), matrix, first, last)

    def _zeros(self, matrix: int, first: int, last: int) -> torch.Tensor:
        preset = self.weight.preset
        per = WORD_BITS // preset.bits if self.packed_zeros and preset.form == "pack-quantized" else 1
        _, zeros = self._parameters(matrix, first * per, min(self.weight.matrix[0], last * per))
        assert zeros is not None, self.weight.name
        return zeros if per == 1 else pack_words(_unsigned(zeros, preset).T, _straight(preset), preset.bits).T.contiguous()


def pack(codes: torch.Tensor, preset: Preset) -> torch.Tensor:
    """Codes [R, C] as they are stored."""
    if preset.form == "pack-quantized":
        return pack_words(_unsigned(codes, preset), _straight(preset), preset.bits)
    if preset.form == "mxfp4-pack-quantized":
        return codes[:, 0::2] | (codes[:, 1::2] << 4)
    return codes


def _unsigned(codes: torch.Tensor, preset: Preset) -> torch.Tensor:
    return (codes.to(torch.int16) + (1 << (preset.bits - 1))).to(torch.uint8)


def _straight(preset: Preset) -> Packing:
    return Packing(name="pack-quantized", axis="input", order=tuple(range(WORD_BITS // preset.bits)))


def view_of(decoder: Decoder) -> View:
    """The whole of a stored part, as a view over it."""
    return View.of(decoder.name, decoder.shape, decoder.dtype)
