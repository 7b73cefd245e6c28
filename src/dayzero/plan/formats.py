"""How many bits a weight takes: plain dtypes, block formats with their scales, and what a quantized release says of itself.

Goes in: a parameter and a model's quantization summary. Comes out: a `WeightFormat`. Deliberately not done: packing or
any other layout of a kernel (padding is the back end's).
"""

import fnmatch
import re
from dataclasses import dataclass

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Parameter
from dayzero.core.units import DTYPE_BITS, canonical_dtype

AS_PUBLISHED = "as published"

# Matrix products that releases quantize. Embedding, head, norms, routers and states stay at the model's dtype.
LINEAR_ROLES = frozenset({"attention", "mlp", "expert", "shared_expert"})
FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """Bits per element, and one scale of `scale_bits` per `block` (rows, columns of the last two dimensions).

    A block dimension of 0 spans the whole dimension (a scale per row or per tensor). `block == ()`: no scales.
    """

    name: str
    bits: int
    block: tuple[int, ...] = ()
    scale_bits: int = 0

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Bytes of a stored part of that shape, scales included; each rounded up to whole bytes."""
        elements = 1
        for size in shape:
            elements *= size
        total = -(-elements * self.bits // 8)
        if self.block and elements and len(shape) >= 2:
            rows, columns = (-(-size // (step or size)) for size, step in zip(shape[-2:], self.block, strict=True))
            total += -(-(elements // (shape[-2] * shape[-1])) * rows * columns * self.scale_bits // 8)
        return total


# Formats that `--weights-dtype` takes beside plain dtypes. Blocks and scales as compressed-tensors' presets write them.
BLOCK_FORMATS: dict[str, WeightFormat] = {
    "fp8": WeightFormat(name="fp8", bits=8, block=(128, 128), scale_bits=32),
    "int8": WeightFormat(name="int8", bits=8, block=(1, 0), scale_bits=16),
    "int4": WeightFormat(name="int4", bits=4, block=(1, 128), scale_bits=16),
    "mxfp4": WeightFormat(name="mxfp4", bits=4, block=(1, 32), scale_bits=8),
    "nvfp4": WeightFormat(name="nvfp4", bits=4, block=(1, 16), scale_bits=8),
}
PLAIN = ("bfloat16", "float16", "float32", "float64")


def weight_dtype_name(asked: str) -> str:
    """`bf16` -> `bfloat16`, `fp8` -> `fp8`. Raises DayZeroError on a name nobody knows."""
    short = asked.lower()
    if short in BLOCK_FORMATS:
        return short
    try:
        name = canonical_dtype(asked)
    except KeyError:
        name = ""
    if name in PLAIN:
        return name
    if name.startswith("float8_e4m3"):
        return "fp8"
    raise DayZeroError(f"no weights dtype is named {asked!r}", got=asked, want=", ".join([*PLAIN, *BLOCK_FORMATS]),
                       fix="give --weights-dtype one of these, or leave it out for the release's own")  # fmt: skip


def plain(dtype: str) -> WeightFormat:
    return WeightFormat(name=dtype, bits=DTYPE_BITS[dtype])


class Formats:
    """The format of each parameter of one model under one `weights_dtype`."""

    def __init__(self, model: ModelDescription, weights_dtype: str) -> None:
        self.weights_dtype = weights_dtype
        self.model_dtype = model.dtype
        self.quantization = model.quantization
        self.published = published_format(model.quantization)
        self.experts = _expert_format(model.quantization) or self.published
        self.ignored = tuple(item for key in ("ignore", "modules_to_not_convert", "exclude_modules")
                             for item in model.quantization.get(key, "").split(",") if item)  # fmt: skip
        self.has_experts = any(parameter.role == "expert" for parameter in model.parameters)
        self.assumed = False  # whether a format was guessed from the configuration, without a header that says it

    def of(self, parameter: Parameter) -> WeightFormat:
        if self.weights_dtype == AS_PUBLISHED:
            return self._as_published(parameter)
        if self.weights_dtype in BLOCK_FORMATS:
            quantized = parameter.role in LINEAR_ROLES and len(parameter.shape) >= 2 and parameter.dtype in FLOATS
            return BLOCK_FORMATS[self.weights_dtype] if quantized else plain(parameter.dtype)
        # A plain dtype replaces the model's own; a parameter kept in another one on purpose (float32 gates) keeps it.
        return plain(self.weights_dtype if parameter.dtype == self.model_dtype else parameter.dtype)

    def _as_published(self, parameter: Parameter) -> WeightFormat:
        stored = parameter.stored_dtype
        if stored is None:
            if not self._assumed_quantized(parameter):
                return plain(parameter.dtype)
            self.assumed = True
            return self.experts if parameter.role == "expert" else self.published
        if stored in FLOATS or parameter.dtype not in FLOATS:
            # Floats are loaded at the dtype the engine computes in.
            return plain(parameter.dtype)
        if stored in ("float8_e4m3fn", "float8_e5m2") or (stored == "int8" and self.published.bits == 8):
            same = self.published.bits == 8
            return self.published if same else BLOCK_FORMATS["fp8"]
        return self.published  # packed into int32, uint8, int8 or float4: the summary says how

    def _assumed_quantized(self, parameter: Parameter) -> bool:
        """Without headers: linear layers, less what the configuration excludes. Of a 4-bit mixture of experts only the
        experts, as releases do it: the others' bits are unknown, and the larger guess cannot propose what does not fit."""
        if parameter.role not in LINEAR_ROLES or len(parameter.shape) < 2 or parameter.dtype not in FLOATS:
            return False
        if self.published.bits < 8 and self.has_experts and parameter.role != "expert":
            return False
        return not any(_matches(pattern, parameter.name) for pattern in self.ignored)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return fnmatch.fnmatchcase(name, f"*{pattern}*")


def published_format(quantization: dict[str, str]) -> WeightFormat:
    """The linear layers' format from a release's own summary (`method`, `format`, `weight_block_size`, groups).

    What it leaves unsaid is taken from the preset of the same bits.
    """
    text = " ".join([*quantization.values()]).lower()
    if "mxfp4" in text:
        preset = BLOCK_FORMATS["mxfp4"]
    elif "nvfp4" in text:
        preset = BLOCK_FORMATS["nvfp4"]
    elif re.search(r"\b(int4|float4)\b", text) or quantization.get("bits") == "4":
        preset = BLOCK_FORMATS["nvfp4" if "float4" in text else "int4"]
    elif re.search(r"\bint8\b", text) or quantization.get("bits") == "8":
        preset = BLOCK_FORMATS["int8"]
    else:
        preset = BLOCK_FORMATS["fp8"]
    block = preset.block
    if size := quantization.get("weight_block_size"):
        numbers = [int(number) for number in re.findall(r"\d+", size)]
        block = tuple(numbers) if len(numbers) == 2 else block
    elif group := _group_size(quantization):
        block = (1, group)
    return WeightFormat(name=preset.name, bits=preset.bits, block=block, scale_bits=preset.scale_bits)


def _expert_format(quantization: dict[str, str]) -> WeightFormat | None:
    """The experts' own format, where a release states one apart."""
    stated = quantization.get("expert_dtype", "").lower()
    return BLOCK_FORMATS["mxfp4"] if stated in ("fp4", "mxfp4") else BLOCK_FORMATS.get(stated)


def _group_size(quantization: dict[str, str]) -> int | None:
    if quantization.get("group_size", "").isdigit():
        return int(quantization["group_size"])
    for key, value in quantization.items():
        if key.endswith(".weights") and (found := re.search(r"(\d+)$", value)) and " " in value:
            return int(found.group(1))
    return None
