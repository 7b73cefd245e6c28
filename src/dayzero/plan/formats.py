"""What a weight or a cache entry takes: the release's own storage, or one that was asked for; padded as an engine needs it.

Goes in: a parameter, its group in the description, a dtype somebody asked for. Comes out: a `WeightFormat` that prices any
part of it. Deliberately not done: reading settings (`model.stored` made the groups) or choosing a kernel (`plan.engines`).
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Parameter
from dayzero.core.sharding import Box
from dayzero.core.storage import Storage, experts_with_weights, matrices
from dayzero.core.units import DTYPE_BITS, canonical_dtype

AS_PUBLISHED = "as published"

# Matrix products that releases quantize. Embedding, head, norms, routers and states stay at the model's dtype.
LINEAR_ROLES = frozenset({"attention", "mlp", "expert", "shared_expert"})
FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """Multiples that a kernel pads an expert's matrices to, after sharding: the rows (output) and columns (input) of those
    that lead into the expert (`up`) and of the one that leads out of it (`down`)."""

    up_rows: int = 1
    up_columns: int = 1
    down_rows: int = 1
    down_columns: int = 1

    def apply(self, rows: int, columns: int, *, down: bool) -> tuple[int, int]:
        row_step, column_step = (self.down_rows, self.down_columns) if down else (self.up_rows, self.up_columns)
        return -(-rows // row_step) * row_step, -(-columns // column_step) * column_step


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """How matrices are held: `storage` None is a dense tensor of `bits` an element."""

    name: str
    bits: int
    storage: Storage | None = None
    padding: Padding | None = None

    @property
    def block(self) -> tuple[int, ...]:
        """Rows and columns that share a scale; 0 spans a dimension; () where there are no scales."""
        return self.storage.block if self.storage is not None else ()

    def bytes_of(self, parameter: Parameter, boxes: tuple[Box, ...], *, hidden: int | None = None, experts: int = 0) -> int:
        """Bytes of one rank's part, scales and padding included. `hidden`, `experts`: as `core.storage.matrices` takes them."""
        if self.storage is None:
            return sum(-(-prod(stop - start for start, stop in box) * self.bits // 8) for box in boxes)
        total = 0
        for box in boxes:
            for count, (rows, columns) in matrices(parameter, hidden, box, experts=experts):
                if self.padding is not None:
                    rows, columns = self.padding.apply(rows, columns, down=leads_out(parameter))
                total += count * self.storage.bytes_of(rows, columns)
        return total


def leads_out(parameter: Parameter) -> bool:
    """Whether an expert's matrix is the one that leads back to the model's width: the one that TP cuts by columns."""
    rule = parameter.shard
    names = " ".join((parameter.name, *parameter.sources))
    return any(part in names for part in ("down", "w2", "fc2")) or (
        rule.tensor_dim is not None and rule.tensor_dim == len(parameter.shape) - 1 and len(rule.segments) <= 1
    )


# Formats that `--weights-dtype` takes beside plain dtypes. Blocks and scales as compressed-tensors' presets write them.
BLOCK_FORMATS: dict[str, WeightFormat] = {
    name: WeightFormat(name=name, bits=bits, storage=Storage(scheme=name, bits=bits, block=block, scale_dtype=scale))
    for name, bits, block, scale in (
        ("fp8", 8, (128, 128), "float32"),
        ("int8", 8, (1, 0), "bfloat16"),
        ("int4", 4, (1, 128), "bfloat16"),
        ("mxfp4", 4, (1, 32), "uint8"),
        ("nvfp4", 4, (1, 16), "float8_e4m3fn"),
    )
}  # fmt: skip
# Names that say two formats: of the experts (of everything, where there are none) and of the other linear layers.
MIXED_FORMATS: dict[str, tuple[str, str]] = {"w4a8": ("int4", "int8"), "w8a8": ("int8", "int8")}
PLAIN = ("bfloat16", "float16", "float32", "float64")

# Bits an element of a cache takes, scales included: a scale a token and head is under 1% of FP8 and INT8 entries and is kept
# per tensor by engines; blocks of 32 with an exponent, of 16 with an FP8 scale, of 32 with a 16-bit scale.
CACHE_BITS: dict[str, Fraction] = {
    "fp8": Fraction(8), "int8": Fraction(8), "int4": Fraction(9, 2), "mxfp4": Fraction(17, 4), "nvfp4": Fraction(9, 2),
    "q8_0": Fraction(17, 2),
}  # fmt: skip


def weight_dtype_name(asked: str) -> str:
    """`bf16` -> `bfloat16`, `fp8` -> `fp8`. Raises DayZeroError on a name nobody knows."""
    short = asked.lower()
    if short in BLOCK_FORMATS or short in MIXED_FORMATS:
        return short
    name = _canonical(asked)
    if name in PLAIN:
        return name
    if name.startswith("float8_e4m3"):
        return "fp8"
    raise DayZeroError(f"no weights dtype is named {asked!r}", got=asked,
                       want=", ".join([*PLAIN, *BLOCK_FORMATS, *MIXED_FORMATS]),
                       fix="give --weights-dtype one of these, or leave it out for the release's own")  # fmt: skip


def cache_dtype_name(asked: str) -> str:
    """`bf16` -> `bfloat16`, `fp8` -> `fp8`, `mxfp4` -> `mxfp4`. Raises DayZeroError on a name nobody knows."""
    short = asked.lower()
    if short in CACHE_BITS:
        return short
    if name := _canonical(asked):
        return "fp8" if name.startswith("float8_e4m3") else name
    raise DayZeroError(f"no cache dtype is named {asked!r}", got=asked, want=", ".join(["bf16", *CACHE_BITS]),
                       fix="give --cache-dtype one of these, or leave it out")  # fmt: skip


def cache_bits(dtype: str) -> Fraction:
    """Bits of one element of a cache of that dtype, by any of its names."""
    return CACHE_BITS[dtype] if dtype in CACHE_BITS else Fraction(DTYPE_BITS[dtype])


def _canonical(asked: str) -> str:
    try:
        return canonical_dtype(asked)
    except KeyError:
        return ""


def plain(dtype: str) -> WeightFormat:
    return WeightFormat(name=dtype, bits=DTYPE_BITS[dtype])


class Formats:
    """The format of each parameter of one model under one `weights_dtype`. `padding`: of the experts, as an engine needs it."""

    def __init__(self, model: ModelDescription, weights_dtype: str, padding: Padding | None = None) -> None:
        self.weights_dtype = weights_dtype
        self.model_dtype = model.dtype
        self.padding = padding
        self.groups = {group.name: group for group in model.quantization_groups}
        self.has_experts = any(parameter.role == "expert" for parameter in model.parameters)
        self.hidden = model.dimensions.hidden_size
        self.experts = experts_with_weights(model.parameters)
        # Whether formats come from settings alone, without a header that says what is stored.
        self.assumed = weights_dtype == AS_PUBLISHED and not model.has_weights and bool(model.quantization)
        self.unknown = tuple(group.scheme for group in model.quantization_groups if group.scheme.startswith("unknown"))

    def of(self, parameter: Parameter) -> WeightFormat:
        found = self._of(parameter)
        if self.padding is not None and found.storage is not None and parameter.role == "expert":
            return replace(found, padding=self.padding)
        return found

    def _of(self, parameter: Parameter) -> WeightFormat:
        if self.weights_dtype == AS_PUBLISHED:
            return self._as_published(parameter)
        if self.weights_dtype in BLOCK_FORMATS or self.weights_dtype in MIXED_FORMATS:
            quantized = parameter.role in LINEAR_ROLES and len(parameter.shape) >= 2 and parameter.dtype in FLOATS
            return BLOCK_FORMATS[self._asked(parameter)] if quantized else plain(parameter.dtype)
        # A plain dtype replaces the model's own; a parameter kept in another one on purpose (float32 gates) keeps it.
        return plain(self.weights_dtype if parameter.dtype == self.model_dtype else parameter.dtype)

    def _asked(self, parameter: Parameter) -> str:
        if self.weights_dtype not in MIXED_FORMATS:
            return self.weights_dtype
        experts, others = MIXED_FORMATS[self.weights_dtype]
        return experts if parameter.role == "expert" or not self.has_experts else others

    def _as_published(self, parameter: Parameter) -> WeightFormat:
        """By the group that the description says the release stores it in; floats at the dtype the engine computes in."""
        group = self.groups.get(parameter.group)
        storage = group.storage if group is not None else None
        if storage is None or len(parameter.shape) < 2 or parameter.dtype not in FLOATS:
            return plain(parameter.dtype)
        return WeightFormat(name=storage.scheme, bits=storage.bits, storage=storage)
