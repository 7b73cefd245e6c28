"""Sizes of dtypes and the spelling of bytes and rates. Capacity is binary (GiB = 2**30), rates are decimal."""

from math import prod

KIB, MIB, GIB = 2**10, 2**20, 2**30

# Bits per element as stored. Names are torch's, shortened the way safetensors headers and hardware files do it.
DTYPE_BITS: dict[str, int] = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16,
    "float8_e4m3fn": 8, "float8_e5m2": 8, "float8_e8m0fnu": 8, "float4_e2m1": 4,
    "int64": 64, "int32": 32, "int16": 16, "int8": 8, "int4": 4, "uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64,
    "bool": 8, "complex64": 64,
}  # fmt: skip

# Spellings used in safetensors headers.
SAFETENSORS_DTYPES: dict[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip

_ALIASES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "fp64": "float64",
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "fp4": "float4_e2m1",
}  # fmt: skip


def canonical_dtype(name: str) -> str:
    """`bf16`, `torch.bfloat16`, `BF16` -> `bfloat16`. Raises KeyError on a name nobody knows."""
    short = name.removeprefix("torch.")
    short = SAFETENSORS_DTYPES.get(short, _ALIASES.get(short.lower(), short))
    if short not in DTYPE_BITS:
        raise KeyError(name)
    return short


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a dense tensor; sub-byte dtypes are packed and rounded up to a whole byte."""
    return -(-prod(shape) * DTYPE_BITS[dtype] // 8)


def format_bytes(num_bytes: float) -> str:
    """`1536` -> `1.5 KiB`. For people; records keep plain integers."""
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(number: float) -> str:
    """`134515008` -> `134.5M`. For people."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.0f}"
