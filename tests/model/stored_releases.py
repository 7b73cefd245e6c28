"""Stored tensors and settings in, a release folder out; and the numbers that we make of one. References are in numpy, written
from the definitions of the formats and not from our code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dayzero.model.headers import TensorEntry
from dayzero.model.release import Release, open_release
from dayzero.weights.forms.stored import Decoded, decode_stored
from dayzero.weights.reading import LocalStore, SourceReader

Tensors = dict[str, torch.Tensor]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
MXFP4 = {"weights": {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"}}
NVFP4 = {"weights": {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}}
NAME = "model.layers.0.mlp.up_proj"
EXPERT = "model.layers.0.mlp.experts.0.gate_proj"


def make_release(folder: Path, *files: Tensors, settings: dict[str, Any] | None = None, metadata: dict[str, str] | None = None,
                 config: dict[str, Any] | None = None) -> Release:  # fmt: skip
    """A folder with one shard for each of `files` and an index over them."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, folder / name, metadata=metadata)
        weight_map |= dict.fromkeys(tensors, name)
    total = sum(tensor.numel() * tensor.element_size() for tensors in files for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    given = dict(config or {"model_type": "none", "torch_dtype": "bfloat16"})
    if settings is not None:
        given["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(given))
    release = open_release(folder)
    assert not release.errors, release.errors
    return release


def read_all(release: Release, decoded: Decoded) -> Tensors:
    """Every tensor of a decoded release, through the reader that conversion uses."""
    made = {}
    with SourceReader(LocalStore(release.folder), release.tensors, decoders=decoded.decoders) as reader:
        for name, entry in decoded.tensors.items():
            data = bytearray(entry.num_bytes)
            reader.read_into(name, 0, memoryview(data))
            made[name] = torch.frombuffer(data, dtype=getattr(torch, entry.dtype)).reshape(entry.shape)
    return made


def read_rows(release: Release, decoded: Decoded, name: str, start: int, stop: int) -> torch.Tensor:
    """Rows of one decoder, asked for by themselves."""
    with SourceReader(LocalStore(release.folder), release.tensors, decoders=decoded.decoders) as reader:
        return decoded.decoders[name].decode(reader._read_some, start, stop)


def decoded_tensor(release: Release, name: str, dtype: str = "bfloat16", **options: Any) -> torch.Tensor:
    decoded = decode_stored(release, dtype, **options)
    assert not [one for one in decoded.problems if one.severity == "error"], decoded.problems
    return read_all(release, decoded)[name]


def errors_of(decoded: Decoded) -> list[tuple[str, str | None]]:
    return [(one.kind, one.tensor) for one in decoded.problems if one.severity == "error"]


def warnings_of(decoded: Decoded) -> list[tuple[str, str | None]]:
    return [(one.kind, one.tensor) for one in decoded.problems if one.severity == "warning"]


def assert_accounted(release: Release, decoded: Decoded) -> None:
    """Every stored tensor is offered under its own name, a source of a decoder, or dropped for a reason; none is two of it."""
    used = {source for one in decoded.decoders.values() for source in one.sources}
    plain = {name for name in decoded.tensors if name not in decoded.decoders}
    for name in release.tensors:
        assert (name in used) + (name in decoded.dropped) + (name in plain) == 1, name


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The bit patterns of a tensor, to compare by."""
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.element_size()]
    return tensor.contiguous().view(unsigned).numpy()


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, (found.dtype, found.shape, wanted.dtype, wanted.shape)
    different = np.argwhere(bits(found) != bits(wanted))
    if len(different):
        place = tuple(int(index) for index in different[0])
        raise AssertionError(f"{len(different)} differ, first at {place}: got {found[place]}, want {wanted[place]}")


def as_dtype(numbers: np.ndarray, dtype: str) -> torch.Tensor:
    """float32 numbers rounded once. bfloat16 by the bits, to the nearest even one, as IEEE rounds."""
    assert numbers.dtype == np.float32, numbers.dtype
    if dtype == "float32":
        return torch.from_numpy(numbers.copy())
    if dtype == "float16":
        return torch.from_numpy(numbers.astype(np.float16))
    raw = np.ascontiguousarray(numbers).view(np.uint32)
    upper = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)
    return torch.from_numpy(upper).view(torch.bfloat16)


def e4m3(codes: np.ndarray) -> np.ndarray:
    """float32 of E4M3 codes: a sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity, all ones are NaN."""
    sign = np.where(codes & 0x80, np.float32(-1), np.float32(1))
    exponent, mantissa = ((codes >> 3) & 0xF).astype(np.int32), (codes & 7).astype(np.float32)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7)).astype(np.float32)
    return np.where((codes & 0x7F) == 0x7F, np.float32("nan"), sign * value).astype(np.float32)


def e5m2(codes: np.ndarray) -> np.ndarray:
    """float32 of E5M2 codes: the upper half of a float16."""
    return (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float32)


def e2m1(codes: np.ndarray) -> np.ndarray:
    """float32 of E2M1 codes: a sign, 2 bits of exponent with bias 1, 1 of mantissa."""
    sign = np.where(codes & 8, np.float32(-1), np.float32(1))
    exponent, mantissa = ((codes >> 1) & 3).astype(np.int32), (codes & 1).astype(np.float32)
    value = np.where(exponent == 0, mantissa * np.float32(0.5), np.ldexp(1 + mantissa / 2, exponent - 1))
    return (sign * value).astype(np.float32)


def spread(numbers: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    """A number for each element of a matrix from one a block, by its index alone."""
    rows, columns = np.indices(shape)
    return numbers[rows // block[0], columns // block[1]]


def float_codes(
    shape: tuple[int, ...], generator: np.random.Generator, dtype: torch.dtype = torch.float8_e4m3fn
) -> torch.Tensor:
    """Random FP8 codes of all values but NaN and infinity."""
    codes = generator.integers(0, 256, shape, dtype=np.uint8)
    largest = 0x7E if dtype == torch.float8_e4m3fn else 0x7B
    codes = np.where((codes & 0x7F) > largest, codes & 0x80, codes).astype(np.uint8)
    return torch.from_numpy(codes).view(dtype)


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def entry(dtype: str, *shape: int) -> TensorEntry:
    return TensorEntry(file="a", dtype=dtype, shape=shape, begin=0, end=0)


def words_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned codes of the last dimension packed into int32, the first one in the lowest bits; padded with zeros."""
    per = 32 // bits
    padded = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per) * per), dtype=np.int64)
    padded[..., : codes.shape[-1]] = codes
    groups = padded.reshape(*codes.shape[:-1], -1, per)
    return sum(groups[..., slot] << (bits * slot) for slot in range(per)).astype(np.uint32).view(np.int32)


def packed_fp4(generator: np.random.Generator, *shape: int) -> tuple[torch.Tensor, np.ndarray]:
    """(bytes, the float32 values of their codes, low nibble first)."""
    codes = generator.integers(0, 16, shape, dtype=np.uint8)
    return torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4), e2m1(codes)


def compressed(form: str, *groups: dict[str, Any], ignore: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    named = {f"group_{number}": {"targets": ["Linear"]} | group for number, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": named, "ignore": list(ignore)} | more


def int_weights(bits: int = 4, group: int | None = 32, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    strategy = "group" if group else "channel"
    return {
        "weights": {"num_bits": bits, "type": "int", "group_size": group, "strategy": strategy, "symmetric": symmetric} | more
    }


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
