"""A GGUF file in, its header out, read by hand and with suspicion. No tensor byte is read.

Every count and length is compared with the file's size before anything is read by it; tensors must tile the data from its
begin to the file's end with no more than alignment between them. Whatever is wrong becomes a `Problem`. Values of the
metadata that are arrays (vocabulary, merges) are stepped over: they are read by the format's own package, which maps the
file and trusts it, so it is given a file only after it passed here.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.model.headers import MAX_DIMENSION, _masquerade

MAGIC, VERSIONS = b"GGUF", (2, 3)
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 16
# Vocabularies of 262 thousand tokens with merges make 20 MB and 1.3 million array elements. The format's package makes
# several objects of each element, so their number is what a hostile header costs.
MAX_HEADER_BYTES, MAX_ELEMENTS = 512 << 20, 8 << 20
MAX_TENSORS, MAX_RANK = 1 << 20, 4
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY, U32 = 8, 9, 4
SMALLEST_PAIR, SMALLEST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """`form` is the format's own name (F32, Q4_K); rows of `shape` (largest dimension last in the file, first here)."""

    form: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(kw_only=True, slots=True)
class GgufHeader:
    """`metadata` without arrays, of which only the lengths are in `arrays`. `tensors` in the order of the header.
    `pairs` and `infos`: the bytes of each setting and of the list of tensors, begin and end in the file."""

    num_bytes: int
    version: int = 0
    alignment: int = DEFAULT_ALIGNMENT
    data_begin: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, GgufTensor] = field(default_factory=dict)
    pairs: dict[str, tuple[int, int]] = field(default_factory=dict)
    infos: tuple[int, int] = (0, 0)
    header_hash: str = ""


class _Broken(Exception):
    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail


def read_gguf_header(path: Path) -> tuple[GgufHeader | None, list[Problem]]:
    """The header and everything wrong with it (None when it could not be read). Raises DayZeroError without the package."""
    problems: list[Problem] = []

    def note(kind: str, detail: str, tensor: str | None = None) -> None:
        problems.append(Problem(kind=kind, severity="error", file=path.name, tensor=tensor, detail=f"{path.name}: {detail}"))

    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        note("unreadable_file", f"the file cannot be opened: {error.strerror}")
        return None, problems
    with os.fdopen(descriptor, "rb") as handle:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            note("not_a_file", "not a regular file")
            return None, problems
        start = handle.read(512)
        if not start.startswith(MAGIC) and (found := _masquerade(start, status.st_size)):
            note(found[0], found[1].removesuffix(" under a name that says safetensors"))
            return None, problems
        try:
            return _Reader(handle, status.st_size, note).read(), problems
        except _Broken as error:
            note(error.kind, error.detail)
    return None, problems


def block_sizes() -> dict[int, tuple[str, int, int]]:
    """Type number -> (name, elements a block, bytes a block), from the format's own package."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise DayZeroError(
            "GGUF files need the gguf package", got=str(error), want="gguf", fix="pip install 'dayzero[gguf]'"
        ) from error
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


def write_stand_in(path: Path, header: GgufHeader, target: Path, *, without: str) -> None:
    """A GGUF with the same settings and list of tensors, without arrays whose names begin with `without`, and with a hole in
    place of the data: for readers that want no tensor, and make objects of every element of every array."""
    kept = [span for key, span in header.pairs.items() if key not in header.arrays or not key.startswith(without)]
    with path.open("rb") as source, target.open("wb") as out:
        out.write(MAGIC + struct.pack("<IQQ", header.version, len(header.tensors), len(kept)))
        for begin, end in [*kept, header.infos]:
            source.seek(begin)
            out.write(source.read(end - begin))
        data_begin = -(-out.tell() // header.alignment) * header.alignment
        out.truncate(data_begin + header.num_bytes - header.data_begin)


class _Reader:
    def __init__(self, handle: BinaryIO, file_bytes: int, note: Any) -> None:
        self.handle, self.file_bytes, self.note = handle, file_bytes, note
        self.at = self.elements = 0

    def read(self) -> GgufHeader:
        self.handle.seek(0)
        if (magic := self.take(4)) != MAGIC:
            raise _Broken("not_gguf", f"it begins with {magic!r}, wanted {MAGIC!r}")
        (version,) = self.unpack("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            raise _Broken("gguf_version", "its numbers are big-endian, wanted little-endian" if swapped else
                          f"its version is {version}, wanted {' or '.join(map(str, VERSIONS))}")  # fmt: skip
        num_tensors, num_pairs = self.unpack("QQ")
        left = self.file_bytes - self.at
        if num_tensors > MAX_TENSORS or num_pairs * SMALLEST_PAIR + num_tensors * SMALLEST_TENSOR > left:
            raise _Broken("gguf_counts", f"its header counts {num_pairs} settings and {num_tensors} tensors, which {left} "
                          "bytes cannot hold")  # fmt: skip
        made = GgufHeader(num_bytes=self.file_bytes, version=version)
        for _ in range(num_pairs):
            self.pair(made)
        made.alignment = self.alignment(made)
        begin = self.at
        self.tensors(made, num_tensors)
        made.infos = (begin, self.at)
        digest, left = hashlib.sha256(), self.at
        self.handle.seek(0)
        while left:
            block = self.handle.read(min(left, 1 << 20))
            digest.update(block)
            left -= len(block)
        made.header_hash = digest.hexdigest()
        return made

    def pair(self, made: GgufHeader) -> None:
        begin = self.at
        key = self.text("the name of a setting")
        self.setting(made, key)
        made.pairs[key] = (begin, self.at)

    def setting(self, made: GgufHeader, key: str) -> None:
        (kind,) = self.unpack("I")
        if key in made.metadata or key in made.arrays:
            self.note("duplicate_key", f"its header defines {key!r:.100} more than once")
        if kind != ARRAY:
            made.metadata[key] = self.value(kind, key)
            return
        (inner,) = self.unpack("I")
        (count,) = self.unpack("Q")
        smallest = struct.calcsize(SCALARS[inner]) if inner in SCALARS else 8
        if inner not in SCALARS and inner != TEXT:
            raise _Broken("gguf_type", f"{key}: an array of type {inner} is not known (arrays of arrays are not read)")
        self.elements += count
        if count * smallest > self.file_bytes - self.at or self.elements > MAX_ELEMENTS:
            raise _Broken("gguf_counts", f"{key}: an array of {count} elements, which {self.file_bytes - self.at} bytes cannot "
                          f"hold, or more than {MAX_ELEMENTS} in all")  # fmt: skip
        if inner == TEXT:
            for _ in range(count):
                self.text(key)
        else:
            self.skip(count * smallest)
        made.arrays[key] = count

    def value(self, kind: int, key: str) -> Any:
        if kind == TEXT:
            return self.text(key)
        if kind not in SCALARS:
            raise _Broken("gguf_type", f"{key}: type {kind} is not known")
        if SCALARS[kind] == "?" and (byte := self.take(1)) not in (b"\0", b"\1"):
            raise _Broken("gguf_type", f"{key}: a truth value is {byte!r}")
        return self.last[0] == 1 if SCALARS[kind] == "?" else self.unpack(SCALARS[kind])[0]

    def alignment(self, made: GgufHeader) -> int:
        value = made.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
            raise _Broken("gguf_alignment", f"its alignment is {value!r}, wanted a power of two up to {MAX_ALIGNMENT}")
        return value

    def tensors(self, made: GgufHeader, count: int) -> None:
        forms = block_sizes()
        listed: list[tuple[str, int, tuple[int, ...], int]] = []
        for _ in range(count):
            name = self.text("the name of a tensor")
            (rank,) = self.unpack("I")
            if not 1 <= rank <= MAX_RANK:
                raise _Broken("tensor_shape", f"{name}: {rank} dimensions, wanted 1 to {MAX_RANK}")
            sizes = self.unpack(f"{rank}Q")
            kind, offset = self.unpack("IQ")
            listed.append((name, kind, tuple(reversed(sizes)), offset))
        made.data_begin = -(-self.at // made.alignment) * made.alignment
        complete = True
        for name, kind, shape, offset in listed:
            if reason := _misfit(forms, kind, shape, offset, made.alignment):
                self.note(*reason, name)
                complete = False
                continue
            form, per_block, block_bytes = forms[kind]
            begin = made.data_begin + offset
            entry = GgufTensor(form=form, shape=shape, begin=begin, end=begin + prod(shape) // per_block * block_bytes)
            if name in made.tensors:
                self.note("duplicate_tensor", f"its header defines {name} more than once", name)
            made.tensors[name] = entry
        self.spans(made, complete=complete and len(made.tensors) == count)

    def spans(self, made: GgufHeader, *, complete: bool) -> None:
        ordered = sorted(made.tensors.items(), key=lambda item: (item[1].begin, item[1].end))
        reached, before = made.data_begin, ""
        for name, entry in ordered:
            if entry.begin < reached:
                self.note("overlap", f"{name} at byte {entry.begin} overlaps {before}, which ends at {reached}", name)
            elif complete and entry.begin - reached >= made.alignment:
                self.note("hole", f"{entry.begin - reached} bytes before {name} belong to no tensor", name)
            if entry.end > reached:
                reached, before = entry.end, name
        if reached > self.file_bytes:
            tensor, entry = next(item for item in ordered if item[1].end > self.file_bytes)
            missing = sum(entry.end > self.file_bytes for _, entry in ordered)
            self.note("truncated", f"cut inside its data: first affected tensor {tensor} (bytes {entry.begin} to {entry.end}), "
                      f"expected {reached} bytes, got {self.file_bytes} bytes; {missing} of {len(ordered)} tensors are "
                      "affected", tensor)  # fmt: skip
        elif complete and self.file_bytes >= -(-reached // made.alignment) * made.alignment + 1:
            self.note("trailing_bytes", f"{self.file_bytes - reached} bytes follow the last tensor: expected {reached} bytes, "
                      f"got {self.file_bytes} bytes")  # fmt: skip

    def text(self, what: str) -> str:
        (length,) = self.unpack("Q")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _Broken("gguf_text", f"{what} at byte {self.at - length} is not UTF-8: {error.reason}") from error

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))

    def take(self, count: int, what: str = "") -> bytes:
        self._advance(count, what)
        self.last = self.handle.read(count)
        return self.last

    def skip(self, count: int) -> None:
        self._advance(count, "")
        self.handle.seek(count, os.SEEK_CUR)

    def _advance(self, count: int, what: str) -> None:
        limit = min(self.file_bytes, MAX_HEADER_BYTES)
        if count > limit - self.at:
            inside = f" ({what:.100})" if what else ""
            raise _Broken("truncated", f"cut inside its header{inside}: expected at least {self.at + count} bytes, got "
                          f"{limit} bytes")  # fmt: skip
        self.at += count


def _misfit(
    forms: dict[int, tuple[str, int, int]], kind: int, shape: tuple[int, ...], offset: int, alignment: int
) -> tuple[str, str] | None:
    """Why a tensor cannot be what its header says (kind, detail)."""
    if kind not in forms:
        return "unknown_dtype", f"a tensor has type {kind}, which the gguf package does not know"
    form, per_block, _ = forms[kind]
    if any(size > MAX_DIMENSION for size in (*shape, offset)) or 0 in shape:
        return "tensor_shape", f"shape {list(shape)} at offset {offset} is not one of sizes"
    if shape[-1] % per_block:
        return "tensor_shape", f"rows of {shape[-1]} elements are not whole blocks of {per_block}, as {form} has them"
    if offset % alignment:
        return "tensor_offsets", f"its offset {offset} is no multiple of the alignment {alignment}"
    return None
