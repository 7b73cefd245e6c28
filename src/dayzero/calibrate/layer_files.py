"""A layer's codes to one file and back: written whole or not at all, with a checksum in the record beside it.

Codes of four bits are stored two in a byte. The record is written after the file: a layer that has its record is finished.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dayzero.calibrate.inputs import MatrixName
from dayzero.calibrate.records import LayerRecord
from dayzero.core.errors import DayZeroError
from dayzero.core.records import read_record, write_record
from dayzero.weights.files import hash_file
from dayzero.weights.quantize.codes import Codes
from dayzero.weights.quantize.presets import Preset

FOLDER = "layers"


def record_path(folder: Path, station: str, part: int, parts: int) -> Path:
    share = f".part-{part}-of-{parts}" if parts > 1 else ""
    return folder / FOLDER / f"{station}{share}.json"


def write_matrices(
    path: Path, codes: Mapping[MatrixName, Codes], presets: Mapping[str, Preset], plain: Mapping[str, torch.Tensor]
) -> str:
    """The checksum of the file that now is at `path`. `plain`: new values of parameters that are not quantized."""
    tensors = {f"{name}:plain": values.contiguous() for name, values in plain.items()}
    for name, one in codes.items():
        key = f"{name.parameter}:{name.index}"
        tensors[f"{key}:codes"] = _packed(one.codes, presets[name.parameter])
        tensors[f"{key}:scales"] = one.scales.contiguous()
        if one.zeros is not None:
            tensors[f"{key}:zeros"] = one.zeros.contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    scrap = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, scrap)
        with scrap.open("rb+") as file:
            os.fsync(file.fileno())
        checksum = hash_file(scrap)
        os.replace(scrap, path)
    finally:
        scrap.unlink(missing_ok=True)
    return checksum


def finished_layer(folder: Path, station: str, parts: int, fingerprint: str) -> list[LayerRecord] | None:
    """The records of all parts of a layer, when all are there, from this calibration and whole."""
    records = []
    for part in range(parts):
        path = record_path(folder, station, part, parts)
        if not path.is_file():
            return None
        record = read_record(LayerRecord, path)
        if record.fingerprint != fingerprint:
            raise DayZeroError(f"{folder} holds another calibration", got=f"{path.name} of {record.fingerprint[:12]}",
                               want=fingerprint[:12], fix="choose another folder, or remove it")  # fmt: skip
        file = folder / FOLDER / record.file
        if not file.is_file() or hash_file(file) != record.checksum:
            return None
        records.append(record)
    return records


def publish_layer(folder: Path, record: LayerRecord) -> None:
    write_record(record, record_path(folder, record.station, record.part, record.parts))


class LayerCodes:
    """Codes of the matrices of some layers, read when asked for."""

    def __init__(self, folder: Path, records: Sequence[LayerRecord], presets: Mapping[str, Preset]) -> None:
        self._presets = presets
        self._file = {
            MatrixName(one.parameter, one.index): folder / FOLDER / record.file for record in records for one in record.matrices
        }
        self.plain = {name: folder / FOLDER / record.file for record in records for name in record.plain}
        self.matrices: dict[str, int] = {}
        for name in self._file:
            self.matrices[name.parameter] = max(self.matrices.get(name.parameter, 0), name.index + 1)

    def read_plain(self, name: str) -> torch.Tensor:
        with safe_open(self.plain[name], framework="pt") as file:
            return file.get_tensor(f"{name}:plain")

    def read(self, name: MatrixName, start: int | None = None, stop: int | None = None) -> Codes:
        """Rows start to stop of one matrix; for blocks of several rows, those must be at their borders."""
        preset = self._presets[name.parameter]
        key, height = f"{name.parameter}:{name.index}", preset.block[0]
        with safe_open(self._file[name], framework="pt") as file:
            names = set(file.keys())
            codes = file.get_slice(f"{key}:codes")
            rows = codes.get_shape()[0]
            start, stop = start or 0, rows if stop is None else stop
            made = _unpacked(codes[start:stop], preset)
            per = height or rows
            assert (start % per == 0 and (stop % per == 0 or stop == rows)) or height == 1, (start, stop, height)
            first, last = start // per, -(-stop // per)
            scales = file.get_slice(f"{key}:scales")[first:last]
            zeros = file.get_slice(f"{key}:zeros")[first:last] if f"{key}:zeros" in names else None
        return Codes(codes=made, scales=scales, zeros=zeros)


def _packed(codes: torch.Tensor, preset: Preset) -> torch.Tensor:
    if preset.bits != 4:
        return codes.contiguous()
    assert codes.shape[1] % 2 == 0, "the stored forms of four bits have whole groups"
    nibbles = codes.to(torch.int16).bitwise_and(15).to(torch.uint8)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def _unpacked(stored: torch.Tensor, preset: Preset) -> torch.Tensor:
    if preset.bits != 4:
        return stored
    codes = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(1)
    if preset.number == "float":
        return codes
    signed = codes.to(torch.int8)
    return torch.where(signed > 7, signed - 16, signed)
