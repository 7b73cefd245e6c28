"""Headers and quantization settings in, what the stored tensors mean out: which scales which, and everything that does not fit.

Weights and scales pair by name across all files of a release. A number of one byte is what its dtype and the settings say it
is: FP8 only with an FP8 dtype, an exponent only where that is declared; integers and booleans without a scale stay what they
are. What is not declared is an error here and no guess. No tensor is read (but the two integers of a stored shape, on
request), nothing is dequantized.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.core.storage import COMPANION, PACKED
from dayzero.model.headers import TensorEntry

KV_SCALE = re.compile(r"\.(?:[kqv]_(?:scale|zero_point)|kv_scale|prob_output_scale)$")
# Companions that belong to a weight's numbers: the others describe activations or repeat what is known.
WEIGHT_SCALE = re.compile(r"(?:\.weight_(?:scale_inv|scale)|\.scales?|_(?:scales|scale_inv|scale))$")
NO_WEIGHT_SCALE = re.compile(r"(?:input|output|activation|global)_scale")
FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2"})
PACKED_DTYPES = frozenset({"int32", "uint32", "uint8", "int8", "float4_e2m1"})
WORD_BITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How codes of a few bits fill 32-bit words. `axis`: along which of the weight's dimensions (output, input) a word runs;
    `order`: which code of the run each slot holds, from the lowest bits up."""

    name: str
    axis: Literal["input", "output"]
    order: tuple[int, ...]


def packing_of(settings: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> Packing:
    """The packing that a release declares. Raises DayZeroError where it names one that is not known: no order is guessed.

    metadata: the free metadata of its files, which may name an order too.
    """
    method, form = str(settings.get("quant_method", "")).lower(), str(settings.get("format") or "").lower()
    bits = next((value for value in _values(settings, "num_bits", "bits", "w_bit") if value in (2, 4, 8)), 4)
    straight = tuple(range(WORD_BITS // bits))
    named = {str(value).lower() for part in (settings, metadata or {}) for value in _named_orders(part)}
    unknown = named - {"sequential", "linear", "low_nibble_first"}
    if not unknown and "compressed" in method and form in ("pack-quantized", "mixed-precision", ""):
        return Packing(name="pack-quantized", axis="input", order=straight)
    version = str(settings.get("checkpoint_format", "gptq")).lower()
    if not unknown and method == "gptq" and version in ("gptq", "gptq_v2"):
        return Packing(name=version, axis="input", order=straight)
    version = str(settings.get("version", "gemm")).lower()
    if not unknown and method == "awq" and version == "gemm" and bits == 4:
        # Even codes in the lower half of the word, odd ones in the upper: as its kernel unpacks them.
        return Packing(name="awq-gemm", axis="output", order=(0, 2, 4, 6, 1, 3, 5, 7))
    got = ", ".join(sorted(unknown)) or " ".join(part for part in (method, form or version) if part) or "nothing"
    raise DayZeroError(
        "the order in which its weights are packed is not known",
        got=got,
        want="pack-quantized, gptq or awq in their own order",
        fix="unpack the release with the tool that made it, or use one in another format",
    )


def _named_orders(part: Mapping[str, Any]) -> list[Any]:
    """Values of keys that name an order of packing, at any depth."""
    found = []
    for key, value in part.items():
        if isinstance(value, Mapping):
            found += _named_orders(value)
        elif re.search(r"pack.*order|order.*pack|nibble|^pack(ing)?$|pack_method", str(key)) and isinstance(value, str):
            found.append(value)
    return found


def _values(part: Mapping[str, Any], *keys: str) -> Iterable[Any]:
    for key, value in part.items():
        if isinstance(value, Mapping):
            yield from _values(value, *keys)
        elif key in keys:
            yield value


def scale_meaning(dtype: str, settings: Mapping[str, Any] | None) -> Literal["number", "exponent", "fp8"] | None:
    """What the values of a scale tensor are: a number, an exponent byte (2^(byte - 127)), or FP8 bits. None: not declared.

    A byte without a type is what the settings declare, through `scale_fmt`, a scale dtype, or a format that has one meaning.
    """
    if dtype == "float8_e8m0fnu":
        return "exponent"
    if dtype.startswith(("float", "bfloat")):
        return "number"
    if dtype != "uint8" or settings is None:
        return None
    declared = " ".join(str(value).lower() for value in _values(settings, "scale_fmt", "scale_format", "scale_dtype"))
    if "e8m0" in declared:
        return "exponent"
    if "e4m3" in declared:
        return "fp8"
    formats = " ".join(str(value).lower() for value in _values(settings, "quant_method", "format", "quant_algo"))
    return "exponent" if "mxfp" in formats else None


def logical_shape(
    packed: tuple[int, ...], *, per_word: int, declared: tuple[int, ...] | None = None, name: str = "a packed tensor"
) -> tuple[int, ...]:
    """The shape of the matrix that packed words [rows, words] hold; `declared` is its stored shape, which cuts the padding.

    Raises DayZeroError when the words cannot hold a matrix of the declared shape.
    """
    rows, words = packed[-2], packed[-1]
    if declared is None:
        return (*packed[:-1], words * per_word)
    if len(declared) != 2 or declared[0] != rows or -(-declared[1] // per_word) != words or declared[1] < 1:
        raise DayZeroError(
            f"{name}: its stored shape does not fit its words",
            got=f"shape {list(declared)} for words {list(packed)}",
            want=f"{rows} rows and {max(0, (words - 1) * per_word) + 1} to {words * per_word} columns",
            fix="download the file again, or use another release of the model",
        )
    return declared


def read_stored_shape(path: Path, entry: TensorEntry) -> tuple[int, int]:
    """The two integers of a `weight_shape` tensor, read from its file. Raises DayZeroError when it is no such tensor."""
    if entry.shape != (2,) or entry.dtype not in ("int64", "int32"):
        raise DayZeroError(
            f"a stored shape in {entry.file} is none",
            got=f"{entry.dtype} {list(entry.shape)}",
            want="two integers",
            fix="download the file again",
        )
    with path.open("rb") as file:
        file.seek(entry.begin)
        raw = file.read(entry.num_bytes)
    size = entry.num_bytes // 2
    first, second = (int.from_bytes(raw[start : start + size], "little", signed=True) for start in (0, size))
    return first, second


def scale_of(name: str, tensors: Mapping[str, TensorEntry]) -> str | None:
    """The name of the scale of a stored weight, in whatever file it lies; None when there is none."""
    packed = PACKED.search(name)
    base = name[: packed.start()] if packed else name.removesuffix(".weight")
    # A bare parameter (stacked experts) has its scale appended; a module's weight has it beside itself.
    endings = (".weight_scale_inv", ".weight_scale", ".scale", ".scales", "_scales", "_scale_inv", "_scale")
    return next((base + ending for ending in endings if base + ending in tensors), None)


def weight_of(name: str, tensors: Mapping[str, TensorEntry]) -> str | None:
    """The stored weight that a scale, a zero point, or a stored shape belongs to; None when there is none."""
    found = COMPANION.search(name)
    if found is None:
        return None
    base = name[: found.start()]
    forms = (".weight", "", ".weight_packed", ".qweight", "_blocks", "_packed")
    return next((base + form for form in forms if base + form in tensors), None)


def storage_problems(
    tensors: Mapping[str, TensorEntry],
    settings: Mapping[str, Any] | None,
    *,
    own: Iterable[str] = (),
    metadata: Mapping[str, str] | None = None,
) -> list[Problem]:
    """Everything about quantized storage that headers and settings show to be wrong.

    own: names that fill a parameter of the model by themselves, though they may end as a scale does. metadata: the files'
    free metadata, which may name an order of packing.
    """
    own = frozenset(own)
    problems: list[Problem] = []

    def error(kind: str, name: str, detail: str) -> None:
        entry = tensors[name]
        text = f"{name} {entry.dtype} {list(entry.shape)} {detail}"
        problems.append(Problem(kind=kind, severity="error", file=entry.file, tensor=name, detail=text))

    some_packed: str | None = None
    for name, entry in tensors.items():
        companion = name not in own and COMPANION.search(name) is not None
        if companion and settings is not None:
            if weight_of(name, tensors) is None and not KV_SCALE.search(name) and _must_have_weight(name):
                error("scale_without_weight", name, "has no weight beside it in any file")
            elif (
                WEIGHT_SCALE.search(name) and not NO_WEIGHT_SCALE.search(name) and scale_meaning(entry.dtype, settings) is None
            ):
                error("scale_meaning", name, "is a scale, and no setting declares what its bytes mean: exponents or numbers")
            if name.endswith("weight_shape") and (entry.shape != (2,) or entry.dtype not in ("int64", "int32")):
                error("weight_shape", name, "is no stored shape: wanted two integers")
        if companion:
            continue
        packed = settings is not None and entry.dtype in PACKED_DTYPES and PACKED.search(name) is not None
        if entry.dtype in FLOAT8 or packed:
            scale = scale_of(name, tensors)
            if scale is None:
                what = "is packed" if packed else "is FP8"
                error("scale_missing", name, f"{what} and has no scale in any file; without one its values are not known")
            else:
                _check_scale_shape(name, entry, scale, tensors[scale], settings, error)
        if packed and entry.dtype == "int32":
            some_packed = some_packed or name
    if some_packed is not None and settings is not None:
        try:
            packing_of(settings, metadata)
        except DayZeroError as refused:
            error("packing_order", some_packed, f"and its like are packed in an order that is not known: {refused.got}")
    return problems


def _must_have_weight(name: str) -> bool:
    return re.search(r"weight_(scale|scale_inv|zero_point|shape|g_idx)$|qzeros$|\.scales$|_scale_inv$", name) is not None


def _check_scale_shape(
    name: str, weight: TensorEntry, scale_name: str, scale: TensorEntry, settings: Mapping[str, Any] | None, error: Any
) -> None:
    """Blocks as declared must give the stored number of scales: another block size rescales every weight and says nothing."""
    size = (settings or {}).get("weight_block_size")
    if weight.dtype not in FLOAT8 or len(weight.shape) < 2 or not isinstance(size, list) or len(size) != 2:
        return
    if not all(isinstance(step, int) and step > 0 for step in size) or not scale_name.endswith(("scale_inv", ".scale")):
        return
    blocks = tuple(-(-length // step) for length, step in zip(weight.shape[-2:], size, strict=True))
    wanted = (*weight.shape[:-2], *blocks)
    if scale.shape != wanted:
        detail = f"has scales {list(scale.shape)}; blocks of {size[0]}x{size[1]} as declared give {list(wanted)}"
        error("scale_shape", name, detail)


def logical_shapes(
    tensors: Mapping[str, TensorEntry], names: Iterable[str], settings: Mapping[str, Any]
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Stored weight -> (its logical shape, how many of its last columns may be padding). Formats whose stored shape says
    too little (transposed or block-wise packing) are left out."""
    bits = next((value for value in _values(settings, "num_bits") if value in (4, 8)), 4)
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for name in names:
        entry = tensors[name]
        if name.endswith(("qweight", "_blocks")) or not entry.shape:
            continue
        if name.endswith("packed"):
            per = WORD_BITS // bits if entry.dtype == "int32" else 8 // bits
            found[name] = (*entry.shape[:-1], entry.shape[-1] * per), per - 1
        elif entry.dtype in ("uint8", "int8") and (scale := scale_of(name, tensors)) is not None:
            scale_dtype = tensors[scale].dtype
            if scale_dtype in ("float8_e8m0fnu", "float8_e4m3fn", "uint8"):  # two FP4 codes to a byte
                found[name] = (*entry.shape[:-1], entry.shape[-1] * 2), 1
            else:
                found[name] = entry.shape, 0
        else:
            found[name] = entry.shape, 0
    return found
