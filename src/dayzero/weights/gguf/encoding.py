"""Rows of a parameter in, the bytes that a GGUF stores of them out, and which form each tensor is stored in.

Numbers become blocks, and blocks numbers, by the format's own package alone. Not here: which rows a tensor of the file is made
of (`inverse`), the file itself (`export`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
import torch

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Parameter
from dayzero.weights.algebra import View
from dayzero.weights.gguf.inverse import Inverter, Outgoing, read_rows
from dayzero.weights.quantize.encoding import ViewRows
from dayzero.weights.quantize.policy import QUANTIZED_ROLES, STATE_CONSTANT

FORMS = ("f16", "bf16", "q8_0", "q4_0", "q4_1")
HEAD_FORM = {"q4_0": "q8_0", "q4_1": "q8_0"}  # of the head; other forms are its own too
BLOCK = 32
CHUNK_ELEMENTS = 1 << 20


def form_of(one: Outgoing, parameter: Parameter, form: str, *, head: bool) -> str:
    """By role; a stack of matrices as one. The format's own name."""
    role = parameter.role
    matrix = len(one.shape) > 1 and min(one.shape[-2:]) > 1 and one.shape[-1] % BLOCK == 0
    constant = role == "ssm" and STATE_CONSTANT.search(parameter.name) is not None
    bias = parameter.name.rpartition(".")[2].endswith("bias")
    if not matrix or constant or bias or role not in QUANTIZED_ROLES | {"embedding", "head"}:
        return "F32"
    return (HEAD_FORM.get(form, form) if head else form).upper()


def numbers(one: Outgoing, view: View, rows: ViewRows, inverter: Inverter) -> Iterator[tuple[int, torch.Tensor]]:
    """Runs of a tensor's rows with the number of the first, in the source's own numbers."""
    shape = view.shape
    flat = view.reshape((prod(shape[:-1]), shape[-1]))
    columns, count = one.shape[-1], prod(one.shape[:-1])
    if one.whole:
        elements = torch.from_numpy(inverter.elements(one, shape))
        yield 0, rows.read(flat, 0, flat.shape[0]).reshape(-1)[elements].reshape(count, columns)
        return
    if flat.shape[1] != columns:  # a vector here, with dimensions of one there
        flat = view.reshape((count, columns))
    per = max(1, CHUNK_ELEMENTS // columns // one.step) * one.step
    for start in range(0, count, per):
        stop = min(count, start + per)
        made = None
        for first, last, taken, places in read_rows(one, start, stop):
            run = rows.read(flat, first, last)
            if len(taken) == stop - start and np.array_equal(taken, places) and len(run) == len(taken):
                made = run
                continue
            made = torch.empty((stop - start, columns), dtype=run.dtype) if made is None else made
            made[torch.from_numpy(places)] = run[torch.from_numpy(taken)]
        assert made is not None, one
        yield start, made


def encoded(one: Outgoing, values: torch.Tensor, form: str) -> tuple[np.ndarray, torch.Tensor]:
    """The bytes of rows of float32 numbers, and the numbers they stand for, both by the gguf package."""
    import gguf

    kind = gguf.GGMLQuantizationType[form]
    if form == "F32":
        return values.numpy(), values
    finite = bool(torch.isfinite(values).all())
    with np.errstate(all="ignore"):  # looked for below
        data = gguf.quantize(values.numpy(), kind)
        made = torch.from_numpy(np.array(gguf.dequantize(data.view(np.uint8), kind)))
    if not finite or not bool(torch.isfinite(made).all()):
        got = "numbers that are not finite" if not finite else f"numbers up to {float(values.abs().max()):g}"
        raise DayZeroError(f"{one.parameter} cannot be stored as {form.lower()}", got=got,
                           want="what the form's 16-bit floats hold",
                           fix="choose bf16" if finite else "check the source's weights")  # fmt: skip
    return data, made


def num_bytes(shape: tuple[int, ...], form: str) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[form]]
    return prod(shape) // per_block * block_bytes


def padded(num_bytes: int) -> int:
    from gguf import GGUF_DEFAULT_ALIGNMENT

    return -(-num_bytes // GGUF_DEFAULT_ALIGNMENT) * GGUF_DEFAULT_ALIGNMENT
