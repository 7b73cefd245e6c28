"""Codes and scales of quantized formats in, numbers out: the arithmetic on values that loading and conversion share.

Every function takes what the settings were shown to mean (`model.scales`) as an argument and guesses nothing. Codes become
exact integers or floats, scales float32; products are float32. Not done here: finding pairs, reading files, choosing dtypes.

Shape suffixes: R rows (output), C columns (input), W words or bytes, G groups or blocks.
"""

from collections.abc import Sequence

import torch

from dayzero.core.errors import DayZeroError
from dayzero.model.stored.scales import WORD_BITS, Packing

# E2M1: a sign, two bits of exponent, one of mantissa. Code 8 is -0.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127
EXPONENT_NAN = 255


def unpack_words(words: torch.Tensor, packing: Packing, bits: int, shape: Sequence[int]) -> torch.Tensor:
    """uint8 codes [R, C] of a matrix of `shape` [R, C] packed into int32 words; padding is cut off.

    words: [R, W] with `pack-quantized`, [W, R] along the input as GPTQ has it, [C, W] along the output as AWQ has it.
    Raises DayZeroError when the words cannot hold that many codes.
    """
    rows, columns = shape
    # As [outer, words of the packed dimension]: packed along the input is [R, W], along the output [C, W].
    gptq = packing.name.startswith("gptq")
    lines = words.T if gptq else words
    outer, inner = (columns, rows) if packing.axis == "output" else (rows, columns)
    per_word = WORD_BITS // bits
    if lines.shape[0] != outer or lines.shape[1] != -(-inner // per_word):
        raise DayZeroError(
            "packed words do not hold a matrix of that shape",
            got=f"words {list(words.shape)} for a matrix {list(shape)} of {bits}-bit codes",
            want=f"{outer} lines of {-(-inner // per_word)} words",
            fix="use the shape that the release stores beside the words",
        )
    # int64 keeps the highest code of a word from carrying the sign.
    wide = lines.to(torch.int64) & 0xFFFFFFFF
    slots = torch.arange(per_word, device=words.device) * bits
    codes = (wide.unsqueeze(-1) >> slots) & ((1 << bits) - 1)
    ordered = torch.empty_like(codes)
    ordered[..., list(packing.order)] = codes
    flat = ordered.reshape(outer, -1)[:, :inner].to(torch.uint8)
    return flat.T.contiguous() if packing.axis == "output" else flat


def pack_words(codes: torch.Tensor, packing: Packing, bits: int) -> torch.Tensor:
    """The reverse of `unpack_words`; padding is code 0."""
    lines = codes.T if packing.axis == "output" else codes
    per_word = WORD_BITS // bits
    padding = -lines.shape[1] % per_word
    padded = torch.nn.functional.pad(lines.to(torch.int64), (0, padding)).reshape(lines.shape[0], -1, per_word)
    slots = torch.arange(per_word, device=codes.device) * bits
    words = (padded[..., list(packing.order)] << slots).sum(-1)
    signed = torch.where(words >= 1 << (WORD_BITS - 1), words - (1 << WORD_BITS), words).to(torch.int32)
    return signed.T.contiguous() if packing.name.startswith("gptq") else signed


def signed_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 values of codes stored as value + 2^(bits - 1), as `pack-quantized` does."""
    return (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """float32 values of FP4 codes two to a byte, low nibble first: [..., W] uint8 or int8 -> [..., 2 W]."""
    codes = packed.view(torch.uint8) if packed.dtype != torch.uint8 else packed
    table = torch.tensor(FP4_VALUES, device=packed.device)
    both = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    return table[both.long()]


def exponent_scales(scales: torch.Tensor, *, name: str = "a scale") -> torch.Tensor:
    """float32 scales 2^(byte - 127) of exponent bytes, stored as uint8 or as float8_e8m0fnu.

    Raises DayZeroError at byte 255, which means NaN: a weight with such a scale is damaged.
    """
    exponents = scales.view(torch.uint8).to(torch.int32)
    bad = (exponents == EXPONENT_NAN).nonzero()
    if len(bad):
        raise DayZeroError(
            f"{name} holds NaN",
            got=f"byte 255 at {bad[0].tolist()}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else ""),
            want="exponents 0 to 254",
            fix="download the file again, or use another release of the model",
        )
    return torch.ldexp(torch.ones(exponents.shape, device=scales.device), exponents - EXPONENT_BIAS)


def spread_scales(scales: torch.Tensor, shape: Sequence[int], block: Sequence[int]) -> torch.Tensor:
    """Scales [..., G, G] of blocks (rows, columns; 0 spans the dimension) as one for each element of `shape` [..., R, C].

    The last block of a dimension may be partial. Raises DayZeroError when there are not as many scales as blocks.
    """
    spread = scales
    wanted = tuple(-(-size // (step or size)) for size, step in zip(shape[-2:], block, strict=True))
    if tuple(scales.shape[-2:]) != wanted:
        raise DayZeroError(
            "the scales are not as many as the blocks",
            got=f"scales {list(scales.shape)} for {list(shape)} in blocks of {list(block)}",
            want=f"{list(wanted)}",
            fix="check the block size that the release declares",
        )
    for dim, size, step in ((-2, shape[-2], block[0] or shape[-2]), (-1, shape[-1], block[1] or shape[-1])):
        spread = spread.repeat_interleave(step, dim=dim).narrow(dim, 0, size)
    return spread


def scaled(values: torch.Tensor, scales: torch.Tensor, block: Sequence[int]) -> torch.Tensor:
    """float32 products of values [..., R, C] and the float scales of their blocks."""
    return values.to(torch.float32) * spread_scales(scales.to(torch.float32), values.shape, block)
