"""One stored weight, its companions and the rule of its module in; its `Decoder` out, or an error that says what disagrees.

Every form that releases use has a method of `FormReader`, chosen by the weight's name, its dtype and the meaning of its
scale. Companions are found by name over all files of a release. No tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.storage import PACKED, Storage
from dayzero.model.headers import TensorEntry
from dayzero.model.stored.quantization import Rule
from dayzero.model.stored.scales import FLOAT8, WORD_BITS, Packing, logical_shape, packing_of, scale_meaning, scale_of
from dayzero.weights.decoding import Decoder
from dayzero.weights.forms.columns import LastStrip, Words, transposed_blocks_decoder, words_decoder
from dayzero.weights.forms.rows import (
    GroupOrder,
    float4_codes,
    float8_codes,
    integer_codes,
    packed_codes,
    row_decoder,
)
from dayzero.weights.forms.scales import Block, Grid, Meaning, PackedZeroPoints, ZeroPoints, fit_grid, matrices_of

# Blocks that a shape tells without a word: one scale for a matrix, a row, or a column.
TOLD_BY_SHAPE: tuple[Block, ...] = ((0, 0), (1, 0), (0, 1))
SCHEMES = {"fp8": ("fp8", "mxfp8"), "fp4": ("mxfp4", "nvfp4"), "int": ("int", "w8a8")}
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")


def names_of(name: str) -> tuple[str, str]:
    """(the stem that companions are named by, the name that a plain release would have) of a stored weight."""
    packed = PACKED.search(name)
    if packed is None:
        return name.removesuffix(".weight"), name
    stem = name[: packed.start()]
    return stem, stem + ".weight" if packed.group().startswith(".") else stem


@dataclass(frozen=True, kw_only=True, slots=True)
class FormReader:
    """`shapes`: the two integers of each `weight_shape`. `metadata`: the files' own, which may name an order of packing."""

    tensors: Mapping[str, TensorEntry]
    settings: Mapping[str, Any] | None
    metadata: Mapping[str, str]
    dtype: str
    shapes: Mapping[str, tuple[int, int]]
    upcast_unscaled: bool = False
    kept: LastStrip = field(default_factory=LastStrip)
    packings: dict[int, Packing] = field(default_factory=dict)  # by bits: the settings are searched once

    def decoder(self, name: str, rule: Rule | Storage | None) -> Decoder:
        """Raises DayZeroError where header, companions and rule do not agree, or the form is not known."""
        entry, scale = self.tensors[name], scale_of(name, self.tensors)
        stem, _ = names_of(name)
        if isinstance(rule, Rule):
            raise _wrong(name, rule.unknown, "a format that is known")
        if (smooth := f"{stem}.pre_quant_scale") in self.tensors:
            raise _wrong(name, f"{smooth}: its inputs were scaled before it was quantized", "a weight that stands by itself")
        if entry.dtype in FLOAT8:
            return self._float8(name, scale, rule)
        if scale is None:
            raise _wrong(name, "no scale in any file", "a scale beside it")
        if name.endswith("_blocks"):
            self._scheme(name, rule, "fp4")
            self._meaning(scale, "exponent")
            return transposed_blocks_decoder(name=names_of(name)[1], dtype=self.dtype, blocks=(name, entry), kept=self.kept,
                                             scales=(scale, self.tensors[scale]))  # fmt: skip
        if name.endswith(".qweight"):
            return self._words(name, scale, rule)
        if entry.dtype in ("int32", "uint32"):
            return self._packed(name, scale, rule)
        number = self.tensors[scale].dtype in ("float32", "bfloat16", "float16", "float64")
        return self._integers(name, scale, rule) if number else self._float4(name, scale, rule)

    def _float8(self, name: str, scale: str | None, storage: Storage | None) -> Decoder:
        entry, (_, logical) = self.tensors[name], names_of(name)
        codes = float8_codes(entry)
        if scale is None:
            assert self.upcast_unscaled, name
            return row_decoder(name=logical, shape=entry.shape, dtype=self.dtype, weight=name, codes=codes, scales=None)
        self._scheme(name, storage, "fp8")
        grid = self._grid(scale, name, entry.shape, storage)
        zeros = self._zeros(name, entry.shape, grid)
        form = "mxfp8" if grid.meaning == "exponent" and grid.block == (1, 32) else f"fp8, scales of {_blocks(grid.block)}"
        return row_decoder(name=logical, shape=entry.shape, dtype=self.dtype, weight=name, codes=codes, scales=grid,
                           zeros=zeros, form=form)  # fmt: skip

    def _float4(self, name: str, scale: str, storage: Storage | None) -> Decoder:
        entry, (_, logical) = self.tensors[name], names_of(name)
        storage = self._scheme(name, storage, "fp4")
        columns = entry.shape[-1] * (1 if entry.dtype == "float4_e2m1" else 2)
        shape = (*entry.shape[:-1], columns)
        grid = self._grid(scale, name, shape, storage)
        seconds = {
            other: operation
            for ending, operation in (("global_scale", "divide"), ("scale_2", "multiply"))
            if (other := self._companion(name, ending)) is not None
        }
        if (grid.meaning == "exponent") != (storage.scheme == "mxfp4"):
            raise _wrong(name, f"scales {self.tensors[scale].dtype} for {storage.scheme}",
                         "exponents for mxfp4, FP8 numbers for nvfp4")  # fmt: skip
        if len(seconds) != (grid.meaning != "exponent"):
            raise _wrong(name, f"{len(seconds)} scales of the whole tensor ({', '.join(seconds) or 'none'})",
                         "none for mxfp4, one for nvfp4")  # fmt: skip
        for other, operation in seconds.items():
            second = self.tensors[other]
            if second.num_elements != 1 or second.dtype not in ("float32", "bfloat16", "float16"):
                raise _wrong(name, f"{other} {second.dtype} {list(second.shape)}", "one number for the whole tensor")
            grid = replace(grid, second=(other, second.dtype, operation))  # type: ignore[arg-type]
        return row_decoder(name=logical, shape=shape, dtype=self.dtype, weight=name, codes=float4_codes(columns), scales=grid,
                           form=storage.scheme)  # fmt: skip

    def _integers(self, name: str, scale: str, storage: Storage | None) -> Decoder:
        entry, (_, logical) = self.tensors[name], names_of(name)
        storage = self._scheme(name, storage, "int")
        if entry.dtype != "int8":
            raise _wrong(name, f"{entry.dtype} codes with {self.tensors[scale].dtype} scales", "int8 codes, or packed ones")
        grid = self._grid(scale, name, entry.shape, storage)
        return row_decoder(name=logical, shape=entry.shape, dtype=self.dtype, weight=name, codes=integer_codes(entry),
                           scales=grid, zeros=self._zeros(name, entry.shape, grid), form=storage.scheme)  # fmt: skip

    def _packed(self, name: str, scale: str, storage: Storage | None) -> Decoder:
        entry, (_, logical) = self.tensors[name], names_of(name)
        storage = self._scheme(name, storage, "int")
        packing = self._packing(name, storage)
        declared = self._companion(name, "shape")
        if len(entry.shape) != 2 or declared is None or declared not in self.shapes:
            raise _wrong(name, "no stored shape beside it" if len(entry.shape) == 2 else "packed words that are no matrix",
                         "words [rows, words] and a weight_shape")  # fmt: skip
        bits = storage.bits
        shape = logical_shape(entry.shape, per_word=WORD_BITS // bits, declared=self.shapes[declared], name=name)
        grid = self._grid(scale, name, shape, storage)
        order = self._order(self._companion(name, "g_idx"), shape[1], grid.shape[1])
        return row_decoder(name=logical, shape=shape, dtype=self.dtype, weight=name, scales=grid, order=order,
                           form=storage.scheme, codes=packed_codes(entry.shape[1], shape[1], packing, bits), also=(declared,),
                           zeros=self._zeros(name, shape, grid, packing=packing, bits=bits))  # fmt: skip

    def _words(self, name: str, scale: str, storage: Storage | None) -> Decoder:
        """GPTQ and AWQ, by what the settings declare."""
        entry, (stem, logical) = self.tensors[name], names_of(name)
        storage = self._scheme(name, storage, "int")
        packing, per = self._packing(name, storage), WORD_BITS // storage.bits
        scales, qzeros = self.tensors[scale], f"{stem}.qzeros"
        if len(entry.shape) != 2 or len(scales.shape) != 2 or scales.dtype not in ("float16", "bfloat16", "float32"):
            raise _wrong(name, f"{scale} {scales.dtype} {list(scales.shape)}", "words and scales of a matrix")
        groups, rows = scales.shape
        columns = entry.shape[0] * (per if packing.axis == "input" else 1)
        words = entry.shape[1] if packing.axis == "input" else -(-rows // per)
        group = storage.block[1] if storage.block else 0
        if (
            words != entry.shape[1]
            or (packing.axis == "input" and words != rows)
            or groups != -(-columns // (group or columns))
        ):
            raise _wrong(name, f"{scale} {list(scales.shape)}", f"scales for {rows} outputs of {columns} inputs in groups of "
                         f"{group or columns}")  # fmt: skip
        zeros = self.tensors.get(qzeros)
        if zeros is None and not (packing.axis == "input" and (self.settings or {}).get("sym") is True):
            raise _wrong(name, f"no {qzeros}", "zero points, or settings that say the codes are symmetric")
        if zeros is not None and (zeros.dtype not in ("int32", "uint32") or zeros.shape != (groups, -(-rows // per))):
            raise _wrong(name, f"{qzeros} {zeros.dtype} {list(zeros.shape)}", f"int32 [{groups}, {-(-rows // per)}]")
        order = self._order(f"{stem}.g_idx" if f"{stem}.g_idx" in self.tensors else None, columns, groups)
        made = Words(qweight=name, scales=scale, scales_dtype=scales.dtype, qzeros=qzeros if zeros is not None else None,
                     zero=1 << (storage.bits - 1), order=order, rows=rows, columns=columns, groups=groups, group=group,
                     bits=storage.bits, packing=packing)  # fmt: skip
        form = f"{packing.name}, {storage.scheme}"
        return words_decoder(name=logical, dtype=self.dtype, words=made, kept=self.kept, form=form)

    def _scheme(self, name: str, storage: Storage | None, kind: str) -> Storage:
        """The storage that the settings have for this module, which must be of the kind that the tensor shows."""
        if storage is None:
            if kind == "fp8":
                return Storage(scheme="fp8", bits=8)
            raise _wrong(name, "no setting that says how its module is stored", "quantization settings that name it")
        if not storage.scheme.startswith(SCHEMES[kind]):
            wanted = f"settings of {' or '.join(SCHEMES[kind])} for such a tensor"
            raise _wrong(name, f"its settings say {storage.scheme}", wanted)
        return storage

    def _packing(self, name: str, storage: Storage) -> Packing:
        """The declared order of packing, for codes of this module's width. Raises DayZeroError where it is not known."""
        if (known := self.packings.get(storage.bits)) is not None:
            return known
        settings = dict(self.settings or {})
        if "mixed" in str(settings.get("format") or ""):
            settings["format"] = "pack-quantized"  # each group says its own, and words of 32 bits are of no other
        packing = packing_of(settings, self.metadata)
        if packing.name == "awq-gemm" and storage.bits != 4:
            raise _wrong(name, f"awq of {storage.bits} bits", "4 bits")
        if packing.name != "awq-gemm":
            packing = replace(packing, order=tuple(range(WORD_BITS // storage.bits)))
        return self.packings.setdefault(storage.bits, packing)

    def _meaning(self, scale: str, only: Meaning | None = None) -> Meaning:
        dtype = self.tensors[scale].dtype
        meaning = scale_meaning(dtype, self.settings)
        if meaning is None or only not in (None, meaning) or dtype == "float64":
            raise _wrong(scale, f"a scale of {dtype}", "a scale whose meaning is declared: exponents or numbers")
        return meaning

    def _grid(self, scale: str, name: str, shape: tuple[int, ...], storage: Storage | None) -> Grid:
        entry = self.tensors[scale]
        block = storage.block if storage is not None and len(storage.block) == 2 else (0, 0)
        declared = ((block[0], block[1]), *(() if max(block) > 1 else TOLD_BY_SHAPE))
        grid, found = fit_grid(scale, entry, name, shape, declared)
        return Grid(name=scale, dtype=entry.dtype, shape=grid, block=found, meaning=self._meaning(scale))

    def _zeros(
        self, name: str, shape: tuple[int, ...], grid: Grid, *, packing: Packing | None = None, bits: int = 8
    ) -> ZeroPoints | PackedZeroPoints | None:
        zeros = self._companion(name, "zero_point")
        if zeros is None:
            return None
        entry = self.tensors[zeros]
        rows = matrices_of(shape)[1]
        if packing is not None and entry.dtype in ("int32", "uint32"):
            down, across = grid.shape
            if grid.block[0] != 1 or entry.shape != (-(-rows * bits // WORD_BITS), across):
                raise _wrong(name, f"{zeros} {entry.dtype} {list(entry.shape)}",
                             f"zero points packed along {rows} rows: [{-(-rows * bits // WORD_BITS)}, {across}]")  # fmt: skip
            return PackedZeroPoints(name=zeros, bits=bits, shape=(down, across), block=grid.block, packing=packing)
        if entry.dtype not in (*INTEGERS, *FLOAT8):
            raise _wrong(name, f"{zeros} {entry.dtype} {list(entry.shape)}", "whole numbers")
        found, block = fit_grid(zeros, entry, name, shape, (grid.block,))
        return ZeroPoints(name=zeros, dtype=entry.dtype, shape=found, block=block)

    def _order(self, name: str | None, columns: int, groups: int) -> GroupOrder | None:
        if name is None:
            return None
        entry = self.tensors[name]
        if entry.shape != (columns,) or entry.dtype not in ("int32", "int64"):
            raise _wrong(name, f"{entry.dtype} {list(entry.shape)}", f"a group for each of {columns} columns")
        return GroupOrder(name=name, dtype=entry.dtype, groups=groups)

    def _companion(self, name: str, ending: str) -> str | None:
        stem = names_of(name)[0]
        return next((one for one in (f"{stem}.weight_{ending}", f"{stem}_{ending}") if one in self.tensors), None)


def _wrong(name: str, got: str, want: str) -> DayZeroError:
    return DayZeroError(f"how {name} is stored is not clear", got=got, want=want,
                        fix="download the release again, or use another one of the model")  # fmt: skip


def _blocks(block: Block) -> str:
    named = {(0, 0): "the matrix", (1, 0): "rows", (0, 1): "columns"}
    return named.get(block, f"{block[0]}x{block[1]}")
