"""A safetensors file in, its header out, read by hand and with suspicion. No tensor byte is read and no torch is needed.

Nothing in the file is believed before it was compared with the file's size: the length field, the JSON (duplicate keys
included), each tensor's dtype, shape and span, and that the spans tile the data exactly. Whatever is wrong becomes a
`Problem`; what could be read is returned beside it. Memory is bounded by the size of the header itself, which is read
only after it was shown to begin like one and to be no longer than the file and `MAX_HEADER_BYTES`.
"""

import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from dayzero.core.collector import collector_paused
from dayzero.core.model import Problem
from dayzero.core.units import DTYPE_BITS, SAFETENSORS_DTYPES

# A real file with 1.29 million tensors has a 126 MB header; the reference library's fixed 100 MB refuses it. Eight times
# that leaves room for larger models and still bounds what a hostile file can make us allocate.
MAX_HEADER_BYTES = 1 << 30
# Dimensions past this are nonsense, and the bound keeps products small enough to print.
MAX_DIMENSION = 1 << 60
LENGTH_FIELD_BYTES = 8
MAGICS = {
    b"PK\x03\x04": "a zip file (as PyTorch saves)", b"GGUF": "a GGUF file", b"\x80\x02": "a pickle", b"\x1f\x8b": "a gzip file"
}  # fmt: skip
FIRST_TENSOR = re.compile(rb'"((?:[^"\\]|\\.)+)"\s*:\s*\{\s*"(?:dtype|shape|data_offsets)"')


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Where one tensor lies. `begin` and `end` are absolute byte offsets in `file` (a name relative to the release)."""

    file: str
    dtype: str  # canonical, as in core.units
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardHeader:
    """One file: its size, where its data begin, its tensors by name, its free metadata and the raw header's bytes' hash."""

    file: str
    num_bytes: int
    data_begin: int
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str] = field(default_factory=dict)
    header_hash: str = ""


def read_header(
    path: Path, file: str, *, first_tensor: str | None = None, max_header_bytes: int = MAX_HEADER_BYTES
) -> tuple[ShardHeader | None, list[Problem]]:
    """The header of `path`, known as `file`, and everything wrong with it (None when nothing could be read).

    first_tensor: a tensor that the index maps to this file, to be named when the file is too short to name one itself.
    """
    reader = _Reader(file, first_tensor)
    try:
        # Not blocking: opening a FIFO or a device must neither hang nor read. Its kind is checked before anything is read.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        return None, [reader.problem("unreadable_file", f"the file cannot be opened: {error.strerror}")]
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        what = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO"}.get(stat.S_IFMT(status.st_mode), "a device or a socket")
        return None, [reader.problem("not_a_file", f"{what}, not a regular file", first_tensor)]
    with os.fdopen(descriptor, "rb", buffering=0) as handle, collector_paused():
        return reader.read(handle, status.st_size, max_header_bytes), reader.problems


class _Reader:
    def __init__(self, file: str, first_tensor: str | None) -> None:
        self.file = file
        self.first_tensor = first_tensor
        self.problems: list[Problem] = []

    def problem(self, kind: str, detail: str, tensor: str | None = None) -> Problem:
        made = Problem(kind=kind, severity="error", file=self.file, tensor=tensor, detail=f"{self.file}: {detail}")
        self.problems.append(made)
        return made

    def read(self, handle: Any, file_bytes: int, max_header_bytes: int) -> ShardHeader | None:
        start = handle.read(512)
        if masquerade := _masquerade(start, file_bytes):
            self.problem(*masquerade, tensor=self.first_tensor)
            return None
        if file_bytes < LENGTH_FIELD_BYTES:
            self.problem(
                "truncated",
                f"cut inside its length field: first affected tensor {self.first_tensor or 'is the first'}, "
                f"expected more than {LENGTH_FIELD_BYTES} bytes, got {file_bytes} bytes",
                self.first_tensor,
            )
            return None
        length = int.from_bytes(start[:LENGTH_FIELD_BYTES], "little")
        data_begin = LENGTH_FIELD_BYTES + length
        looks_like_json = start[LENGTH_FIELD_BYTES : LENGTH_FIELD_BYTES + 1] in (b"{", b"")
        if not looks_like_json or length < 2 or length > max_header_bytes:
            wanted = f"2 to {min(max_header_bytes, file_bytes - LENGTH_FIELD_BYTES)} bytes of JSON"
            self.problem(
                "header_length",
                f"its length field says {length} bytes of header, wanted {wanted} (the file has {file_bytes} bytes)",
            )
            return None
        if data_begin > file_bytes:
            handle.seek(LENGTH_FIELD_BYTES)
            found = FIRST_TENSOR.search(handle.read(min(length, 1 << 16)))
            tensor = _unescaped(found.group(1)) if found else self.first_tensor
            self.problem(
                "truncated",
                f"cut inside its header: first affected tensor {tensor or 'is the first'}, expected at least "
                f"{data_begin} bytes, got {file_bytes} bytes",
                tensor,
            )
            return None
        handle.seek(LENGTH_FIELD_BYTES)
        raw = handle.read(length)
        while len(raw) < length and (more := handle.read(length - len(raw))):
            raw += more
        data = self._parse(raw)
        if data is None:
            return None
        metadata = self._metadata(data.pop("__metadata__", {}))
        entries = {name: entry for name, value in data.items() if (entry := self._entry(name, value, data_begin))}
        self._check_spans(entries, data_begin, file_bytes, complete=len(entries) == len(data))
        return ShardHeader(
            file=self.file,
            num_bytes=file_bytes,
            data_begin=data_begin,
            tensors=entries,
            metadata=metadata,
            header_hash=hashlib.sha256(raw).hexdigest(),
        )

    def _parse(self, raw: bytes) -> dict[str, Any] | None:
        duplicates: list[str] = []

        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            made = dict(pairs)
            if len(made) < len(pairs):
                seen: set[str] = set()
                duplicates.extend(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            return made

        try:
            data = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            self.problem("header_json", f"its header is not JSON: {str(error)[:200]}")
            return None
        if not isinstance(data, dict):
            self.problem("header_json", f"its header is a {type(data).__name__}, wanted an object")
            return None
        for name in duplicates:
            self.problem("duplicate_key", f"its header defines {name!r} more than once", name)
        return data

    def _metadata(self, value: Any) -> dict[str, str]:
        if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
            return value
        self.problem("header_metadata", "its __metadata__ is not an object of strings")
        return {}

    def _entry(self, name: str, value: Any, data_begin: int) -> TensorEntry | None:
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            got = sorted(value) if isinstance(value, dict) else type(value).__name__
            self.problem("tensor_entry", f"{name}: wanted dtype, shape and data_offsets, got {got}", name)
            return None
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
            self.problem("unknown_dtype", f"{name}: dtype {dtype!r} is none of {', '.join(SAFETENSORS_DTYPES)}", name)
            return None
        if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
            self.problem("tensor_shape", f"{name}: shape {shape!r:.100} is not a list of sizes", name)
            return None
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(_is_size(offset) for offset in offsets)):
            self.problem("tensor_offsets", f"{name}: data_offsets {offsets!r:.100} are not two byte offsets", name)
            return None
        begin, end = offsets
        if begin > end:
            self.problem("tensor_offsets", f"{name}: data_offsets run backwards, {begin} to {end}", name)
            return None
        canonical = SAFETENSORS_DTYPES[dtype]
        bits = prod(shape) * DTYPE_BITS[canonical]
        if bits % 8 or bits // 8 != end - begin:
            self.problem("tensor_span", f"{name}: {dtype} {shape} needs {bits / 8:.0f} bytes, its span has {end - begin}", name)
            return None
        return TensorEntry(file=self.file, dtype=canonical, shape=tuple(shape), begin=data_begin + begin, end=data_begin + end)

    def _check_spans(self, entries: dict[str, TensorEntry], data_begin: int, file_bytes: int, *, complete: bool) -> None:
        """Spans must tile the data: no overlap, no hole, nothing after the last, and nothing past the end of the file."""
        ordered = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
        reached, before = data_begin, ""
        for name, entry in ordered:
            if entry.begin < reached:
                self.problem("overlap", f"{name} at byte {entry.begin} overlaps {before}, which ends at {reached}", name)
            elif entry.begin > reached and complete:
                self.problem("hole", f"{entry.begin - reached} bytes before {name} belong to no tensor", name)
            if entry.end > reached:
                reached, before = entry.end, name
        if reached > file_bytes:
            tensor, entry = next(item for item in ordered if item[1].end > file_bytes)
            missing = sum(entry.end > file_bytes for _, entry in ordered)
            self.problem(
                "truncated",
                f"cut inside its data: first affected tensor {tensor} (bytes {entry.begin} to {entry.end}), "
                f"expected {reached} bytes, got {file_bytes} bytes; {missing} of {len(ordered)} tensors are affected",
                tensor,
            )
        elif reached < file_bytes and complete:
            self.problem(
                "trailing_bytes",
                f"{file_bytes - reached} bytes follow the last tensor: expected {reached} bytes, got {file_bytes} bytes",
            )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DIMENSION


def _unescaped(name: bytes) -> str:
    try:
        return str(json.loads(b'"' + name + b'"'))
    except ValueError:
        return name.decode("utf-8", "replace")


def _masquerade(start: bytes, file_bytes: int) -> tuple[str, str] | None:
    """What a file that is no safetensors file at all really is, where that is easily told."""
    if file_bytes == 0:
        return "empty_file", "the file is empty (0 bytes); download it again"
    if start.startswith(b"version https://git-lfs"):
        size = re.search(rb"\nsize (\d+)", start)
        expected = f", the weights have {int(size.group(1))} bytes" if size else ""
        return "lfs_pointer", f"a Git LFS pointer of {file_bytes} bytes, not weights{expected}; run `git lfs pull`"
    if start.lstrip()[:15].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "web_page", f"a web page of {file_bytes} bytes, not weights; download it again"
    for magic, what in MAGICS.items():  # a length may begin like one, and a header follows it
        if start.startswith(magic) and start[LENGTH_FIELD_BYTES : LENGTH_FIELD_BYTES + 1] != b"{":
            return "other_format", f"{what} of {file_bytes} bytes under a name that says safetensors"
    field = start[:LENGTH_FIELD_BYTES]
    if len(field) == LENGTH_FIELD_BYTES and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in field):
        # As a length this would be more than 2^56 bytes.
        return "text", f"text of {file_bytes} bytes that begins {start[:60].decode('latin-1')!r}, not weights"
    return None
