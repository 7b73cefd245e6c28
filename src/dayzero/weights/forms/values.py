"""Codes and scales of quantized formats in, numbers out: the arithmetic on values that loading and conversion share.

Every function takes what the settings were shown to mean (`model.stored.scales`) as an argument and guesses nothing. Codes
become exact integers or floats, scales float32; products are float32. Not done here: finding pairs, reading
files, choosing dtypes.

Shape suffixes: R rows (output), C columns (input), W words or bytes, G groups or blocks.
"""

from collections.abc import Sequence
from functools import cache
from typing import Literal

import torch

from dayzero.core.errors import DayZeroError
from dayzero.model.stored.scales import WORD_BITS, Packing

# E2M1: a sign, two bits of exponent, one of mantissa. Code 8 is -0.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127
EXPONENT_NAN = 255
# What the code for NaN in E4M3 would be if it were a number; the largest one is 448.
E4M3_NAN = 480.0
# Blocks of fewer rows than this are combined row by row: a loop in Python over them would cost more than the arithmetic.
FEW_ROWS = 16


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
    # The lowest byte of a word comes first in memory, as in the files; codes never cross a byte.
    raw = lines.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    mask = (1 << bits) - 1
    if packing.order == tuple(range(per_word)):
        codes = torch.stack([(raw >> slot) & mask for slot in range(0, 8, bits)], dim=-1) if bits < 8 else raw
    else:
        in_words = raw.reshape(outer, -1, WORD_BITS // 8)
        slots = [bits * slot for slot in sorted(range(per_word), key=packing.order.__getitem__)]
        codes = torch.stack([(in_words[..., slot // 8] >> slot % 8) & mask for slot in slots], dim=-1)
    codes = codes.reshape(outer, -1)[:, :inner]
    return codes.T.contiguous() if packing.axis == "output" else codes


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
    codes = packed.contiguous().view(torch.uint8).to(torch.int32).reshape(-1)
    values = torch.index_select(_fp4_pairs(), 0, codes).view(torch.float32)
    return values.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


@cache
def _fp4_pairs() -> torch.Tensor:
    """Two float32 values for each byte, as one element of 64 bits: a look-up in it is five times as fast as one by nibble."""
    byte, table = torch.arange(256), torch.tensor(FP4_VALUES)
    return torch.stack((table[byte & 0xF], table[byte >> 4]), dim=-1).view(torch.int64).reshape(256)


def float8_values(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of an FP8 tensor, by way of float16, whose bits contain those of both formats: six times as fast as the
    cast of torch, which is taken for NaN in E4M3 (the one code that float16 reads as a number)."""
    raw = codes.contiguous().view(torch.int8)
    if codes.dtype == torch.float8_e5m2:
        return raw.to(torch.int16).bitwise_left_shift_(8).view(torch.float16).to(torch.float32)
    if codes.dtype != torch.float8_e4m3fn or codes.numel() == 0:
        return codes.to(torch.float32)
    # Sign to bit 15, exponent and mantissa to bits 7 to 13; a bias of 15 where 7 is meant: less by 2^8, subnormals too.
    values = raw.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-16512).view(torch.float16).to(torch.float32).mul_(256.0)
    low, high = values.aminmax()
    return codes.to(torch.float32) if float(high) == E4M3_NAN or float(low) == -E4M3_NAN else values


def exponent_scales(scales: torch.Tensor, *, name: str = "a scale", first: Sequence[int] = ()) -> torch.Tensor:
    """float32 scales 2^(byte - 127) of exponent bytes, stored as uint8 or as float8_e8m0fnu.

    first: where in the whole tensor these begin. Raises DayZeroError at byte 255, which means NaN: a weight with such a scale
    is damaged.
    """
    exponents = scales.view(torch.uint8).to(torch.int32)
    _refuse(exponents == EXPONENT_NAN, name, first, "byte 255", "exponents 0 to 254")
    return torch.ldexp(torch.ones(exponents.shape, device=scales.device), exponents - EXPONENT_BIAS)


def number_scales(scales: torch.Tensor, *, name: str = "a scale", first: Sequence[int] = ()) -> torch.Tensor:
    """float32 scales stored as floats of any width. Raises DayZeroError at NaN and at infinity."""
    numbers = float8_values(scales) if scales.element_size() == 1 else scales.to(torch.float32)
    _refuse(~numbers.isfinite(), name, first, "NaN or infinity", "finite numbers")
    return numbers


def _refuse(bad: torch.Tensor, name: str, first: Sequence[int], found: str, want: str) -> None:
    if not bool(bad.any()):
        return
    places = bad.nonzero()
    place = [at + start for at, start in zip(places[0].tolist(), first or [0] * bad.dim(), strict=True)]
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    raise DayZeroError(f"{name} holds NaN, or no number", got=f"{found} at {place}{more}", want=want,
                       fix="download the file again, or use another release of the model")  # fmt: skip


def combine(
    values: torch.Tensor, numbers: torch.Tensor, block: Sequence[int], *, first_row: int = 0,
    operation: Literal["multiply", "subtract"] = "multiply",
) -> torch.Tensor:  # fmt: skip
    """Multiply float32 `values` [R, C] in place by the number of their block, or subtract it.

    block: rows and columns, 0 spans the dimension; the last one may be partial. first_row: where in its matrix the first row
    of `values` lies. numbers: float32 [G, G] of the blocks that these rows touch.
    """
    rows, columns = values.shape
    height, width = block[0] or max(first_row + rows, 1), block[1] or max(columns, 1)
    wanted = (-(-(first_row + rows) // height) - first_row // height, -(-columns // width))
    if tuple(numbers.shape) != wanted:
        raise DayZeroError(
            "the scales are not as many as the blocks",
            got=f"{list(numbers.shape)} for {list(values.shape)} in blocks of {list(block)}, from row {first_row} on",
            want=f"{list(wanted)}",
            fix="check the block size that the release declares",
        )
    apply = torch.Tensor.mul_ if operation == "multiply" else torch.Tensor.sub_
    if height >= FEW_ROWS:
        # One line of factors for all rows of a block: the only thing of full width that is made.
        for index, line in enumerate(numbers):
            start = max((first_row // height + index) * height - first_row, 0)
            stop = min((first_row // height + index + 1) * height - first_row, rows)
            apply(values[start:stop], line.repeat_interleave(width)[:columns])
        return values
    if height > 1:
        numbers = numbers[(torch.arange(rows) + first_row) // height - first_row // height]
    if width == 1:
        return apply(values, numbers)
    whole = columns // width
    apply(values[:, : whole * width].unflatten(1, (whole, width)), numbers[:, :whole, None])
    if whole * width < columns:
        apply(values[:, whole * width :], numbers[:, whole:])
    return values
