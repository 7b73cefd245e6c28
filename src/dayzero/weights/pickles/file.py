"""One PyTorch checkpoint file (`torch.save`, zip format) in, where each of its tensors lies in that file out.

Members of the zip are stored as they are, so a contiguous tensor is a byte range of the file, like one of safetensors, and is
read like one. Another is a `View` of its storage. Nothing of the file is executed (`program`), and no tensor byte is
read here. All that is wrong becomes a `Problem`; a file whose container or pickle is not understood gives no tensor at all.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from dayzero.core.collector import collector_paused
from dayzero.core.model import Problem
from dayzero.core.units import DTYPE_BITS
from dayzero.model.headers import TensorEntry, _masquerade
from dayzero.weights.algebra import Digit, Piece, View
from dayzero.weights.pickles.container import BadZip, Member, read_members
from dayzero.weights.pickles.program import Entries, RefusedPickle, StoredTensor, run_pickle

# A tensor takes about 200 bytes of pickle, so this is room for 150 thousand in one file; hostile pickles of this length were
# measured to take up to 0.9 GiB and 30 s.
MAX_PICKLE_BYTES = 32 << 20
PICKLE, BYTE_ORDER, DATA = "data.pkl", "byteorder", "data/"
OTHER_MEMBERS = (BYTE_ORDER, "version", ".format_version", ".storage_alignment", ".data/serialization_id")
# Where trainers put the weights beside other things.
NESTED = ("state_dict", "model", "module")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checksum:
    """A member's CRC-32 as its zip has it: bytes `begin` to `end` of the file."""

    begin: int
    end: int
    crc32: int


@dataclass(kw_only=True, slots=True)
class PickleShard:
    """`tensors` are byte ranges. `strided` ones are views over entries of `storages`, whose names are `<file>:data/<key>`.
    `shared`: names that stand for the very same bytes. `checksums`: by member."""

    file: str
    num_bytes: int
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    strided: dict[str, View] = field(default_factory=dict)
    storages: dict[str, TensorEntry] = field(default_factory=dict)
    shared: tuple[tuple[str, ...], ...] = ()
    checksums: dict[str, Checksum] = field(default_factory=dict)
    header_hash: str = ""  # of the zip's directory and the pickle


def read_shard(path: Path, file: str, *, first_tensor: str | None = None) -> tuple[PickleShard | None, list[Problem]]:
    """The tensors of `path`, known as `file`, and everything wrong with it (None when nothing could be read).

    first_tensor: a tensor that the index maps to this file, to be named when the file cannot name one itself.
    """
    reader = _Reader(file, first_tensor)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        reader.note("unreadable_file", f"the file cannot be opened: {error.strerror}")
        return None, reader.problems
    with os.fdopen(descriptor, "rb") as handle, collector_paused():
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            reader.note("not_a_file", "not a regular file")
            return None, reader.problems
        try:
            return reader.read(handle, status.st_size), reader.problems
        except BadZip as error:
            reader.note(error.kind, error.detail, first_tensor if error.kind == "truncated" else None)
        except RefusedPickle as error:
            reader.note(error.kind, error.detail)
    return None, reader.problems


class _Reader:
    def __init__(self, file: str, first_tensor: str | None) -> None:
        self.file, self.first_tensor = file, first_tensor
        self.problems: list[Problem] = []

    def note(self, kind: str, detail: str, tensor: str | None = None, *, warning: bool = False) -> None:
        self.problems.append(Problem(kind=kind, severity="warning" if warning else "error", file=self.file, tensor=tensor,
                                     detail=f"{self.file}: {detail}"))  # fmt: skip

    def read(self, handle: BinaryIO, file_bytes: int) -> PickleShard | None:
        start = handle.read(512)
        if not start.startswith(b"PK"):
            self._note_what_it_is(start, file_bytes)
            return None
        members, directory = read_members(handle)
        root = self._root(members)
        inner = {name.removeprefix(root): member for name, member in members.items()}
        self._byte_order(handle, inner)
        pickle = inner[PICKLE]
        if pickle.num_bytes > MAX_PICKLE_BYTES:
            raise RefusedPickle("pickle_too_large", f"its pickle has {pickle.num_bytes} bytes, more than {MAX_PICKLE_BYTES}")
        raw = _bytes_of(handle, pickle)
        if pickle.crc32 and zlib.crc32(raw) != pickle.crc32:
            raise RefusedPickle("checksum", f"its pickle has CRC-32 {zlib.crc32(raw):08x}, the zip says {pickle.crc32:08x}")
        made = PickleShard(file=self.file, num_bytes=file_bytes, header_hash=hashlib.sha256(directory + raw).hexdigest())
        self._place(made, self._weights(run_pickle(raw)), inner)
        made.checksums = {
            f"{self.file}:{name}": Checksum(begin=one.begin, end=one.end, crc32=one.crc32)
            for name, one in inner.items()
            if one.crc32
        }
        return made

    def _note_what_it_is(self, start: bytes, file_bytes: int) -> None:
        if start.startswith(b"\x80"):
            self.note("legacy_pickle", "a pickle by itself, as torch before 1.6 wrote it: its tensors cannot be found without "
                      "running it. Load and save it with a newer torch where that can do no harm, or take the safetensors "
                      "version")  # fmt: skip
        elif found := _masquerade(start, file_bytes):
            self.note(found[0], found[1].removesuffix(" under a name that says safetensors"), self.first_tensor)
        else:
            self.note("not_a_zip", "no zip, as torch.save writes it")

    def _root(self, members: dict[str, Member]) -> str:
        """The folder inside the zip that everything lies in, with its slash."""
        roots = {name.partition("/")[0] + "/" for name in members}
        if len(roots) != 1 or f"{(root := roots.pop())}{PICKLE}" not in members:
            raise BadZip("not_a_checkpoint", f"its zip of {len(members)} members is not one folder with a {PICKLE}")
        if f"{root}constants.pkl" in members or any(name.startswith(f"{root}code/") for name in members):
            raise BadZip("torchscript", "a TorchScript program, not a checkpoint of tensors")
        return root

    def _byte_order(self, handle: BinaryIO, inner: dict[str, Member]) -> None:
        if BYTE_ORDER in inner:  # older files have none and are little-endian in practice: torch assumes so too
            order = _bytes_of(handle, inner[BYTE_ORDER]) if inner[BYTE_ORDER].num_bytes < 16 else b"unknown"
            if order != b"little":
                raise BadZip("byte_order", f"its numbers are stored in {order.decode('ascii', 'replace')} byte order, wanted "
                             "little: load and save it on a little-endian machine")  # fmt: skip

    def _weights(self, value: Any) -> dict[str, StoredTensor]:
        """The tensors by name: those at the top, or those of the one dict that trainers nest them in."""
        if not isinstance(value, Entries):
            raise RefusedPickle("no_state_dict", f"it holds a {_kind(value)}, wanted tensors by name")
        entries = value
        if not any(isinstance(one, StoredTensor) for one in value.items.values()):
            nested = [key for key in NESTED if isinstance(value.items.get(key), Entries)]
            if len(nested) != 1:
                keys = ", ".join(f"{key!r:.40}" for key in list(value.items)[:8])
                raise RefusedPickle("no_state_dict", f"it holds no tensor at the top and not exactly one of "
                                    f"{', '.join(NESTED)} (but: {keys or 'nothing'}): save the state dict alone")  # fmt: skip
            entries = value.items[nested[0]]
            self._left_out([key for key in value.items if key != nested[0]], f"lie beside {nested[0]!r}")
        for key in dict.fromkeys((*value.repeated, *entries.repeated)):
            self.note("duplicate_key", f"its pickle gives {key!r:.200} more than once", key if _is_name(key) else None)
        tensors = {key: one for key, one in entries.items.items() if isinstance(one, StoredTensor)}
        self._left_out([key for key in entries.items if key not in tensors], "are no tensors")
        for name in [name for name in tensors if not _is_name(name)]:
            self.note("tensor_name", f"a tensor's name is {name!r:.100}, wanted text in UTF-8")
            del tensors[name]
        return tensors

    def _left_out(self, keys: list[Any], why: str) -> None:
        if keys:
            shown = ", ".join(f"{key!r:.60}" for key in keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
            self.note("not_a_tensor", f"not read, as they {why}: {shown}", warning=True)

    def _place(self, made: PickleShard, tensors: dict[str, StoredTensor], inner: dict[str, Member]) -> None:
        ranges: dict[str, list[tuple[int, int, str]]] = {}
        for name, tensor in tensors.items():
            member = inner.get(DATA + tensor.storage.key)
            if reason := _misfit(tensor, member):
                self.note(*reason, name)
                continue
            assert member is not None
            size = DTYPE_BITS[tensor.dtype] // 8
            first, last = tensor.offset, tensor.offset + _extent(tensor)
            if _is_contiguous(tensor):
                begin = member.begin + first * size
                end = begin + prod(tensor.shape) * size
                made.tensors[name] = TensorEntry(file=self.file, dtype=tensor.dtype, shape=tensor.shape, begin=begin, end=end)
            else:
                storage = f"{self.file}:{DATA}{tensor.storage.key}"
                count = member.num_bytes // size
                entry = TensorEntry(file=self.file, dtype=tensor.dtype, shape=(count,), begin=member.begin,
                                    end=member.begin + count * size)  # fmt: skip
                if made.storages.setdefault(storage, entry) != entry:
                    self.note("storage_dtype", f"{name} reads {storage} as {tensor.dtype}, another tensor as "
                              f"{made.storages[storage].dtype}", name)  # fmt: skip
                    continue
                made.strided[name] = _view(storage, tensor)
                begin, end = member.begin + first * size, member.begin + last * size
            ranges.setdefault(tensor.storage.key, []).append((begin, end, name))
        made.shared = self._check_sharing(made, ranges)
        if not any(problem.severity == "error" for problem in self.problems):  # else they would be said twice
            self._check_members(ranges, inner)

    def _check_sharing(self, made: PickleShard, ranges: dict[str, list[tuple[int, int, str]]]) -> tuple[tuple[str, ...], ...]:
        """Groups of names for the same bytes (tied weights); other overlaps are warned of."""
        same: dict[object, list[str]] = {}
        for spans in ranges.values():
            for _, _, name in spans:
                same.setdefault(made.tensors.get(name, made.strided.get(name)), []).append(name)
            before = (0, "")
            for begin, end, name in sorted(spans):
                if begin < before[0] and end > begin and name in made.tensors and before[1] in made.tensors \
                        and made.tensors[name] != made.tensors[before[1]]:  # fmt: skip
                    self.note("shared_storage", f"{name} and {before[1]} share some of their bytes", name, warning=True)
                before = max(before, (end, name))
        return tuple(tuple(names) for names in same.values() if len(names) > 1)

    def _check_members(self, ranges: dict[str, list[tuple[int, int, str]]], inner: dict[str, Member]) -> None:
        """Bytes that no tensor that was read takes: whole members, and parts of storages."""
        for name, member in inner.items():
            if name == PICKLE or name in OTHER_MEMBERS:
                continue
            key = name.removeprefix(DATA)
            if not name.startswith(DATA) or key not in ranges:
                self.note("unused_member", f"no tensor that is read lies in {name} ({member.num_bytes} bytes)", warning=True)
                continue
            unused, reached = 0, member.begin
            for begin, end, _ in sorted(ranges[key]):
                unused += max(0, begin - reached)
                reached = max(reached, end)
            if unused := unused + member.end - reached:
                taker = ranges[key][0][2]
                self.note("unused_bytes", f"{unused} of the {member.num_bytes} bytes of {name}, which {taker} lies in, belong "
                          "to no tensor that is read", taker, warning=True)  # fmt: skip


def _misfit(tensor: StoredTensor, member: Member | None) -> tuple[str, str] | None:
    """Why a tensor cannot lie where it is said to (kind, detail)."""
    storage = tensor.storage
    if member is None:
        return "missing_member", f"its zip has no member {DATA + storage.key!r:.80}"
    wanted = storage.num_elements * DTYPE_BITS[storage.dtype] // 8
    if member.num_bytes != wanted:
        longer = "longer" if member.num_bytes > wanted else "shorter"
        return "storage_bytes", (f"{DATA}{storage.key} has {member.num_bytes} bytes, {longer} than the {wanted} of its "
                                 f"{storage.num_elements} elements")  # fmt: skip
    bits = DTYPE_BITS[tensor.dtype]
    if bits % 8:
        return "unknown_dtype", f"tensors of {tensor.dtype} are not read from pickles"
    stop = tensor.offset + _extent(tensor)
    if stop * bits // 8 > member.num_bytes:
        return "tensor_span", (f"shape {list(tensor.shape)} with strides {list(tensor.strides)} from element {tensor.offset} "
                               f"reaches element {stop} of {member.num_bytes * 8 // bits}")  # fmt: skip
    return None


def _extent(tensor: StoredTensor) -> int:
    """Elements of the storage from the tensor's first to its last, both included."""
    if not prod(tensor.shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))


def _is_contiguous(tensor: StoredTensor) -> bool:
    expected = 1
    if not prod(tensor.shape):
        return True
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _view(storage: str, tensor: StoredTensor) -> View:
    digits = tuple(
        Digit(size, dim, 1, stride)
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.strides, strict=True))
        if size > 1
    )
    piece = Piece(storage, tensor.dtype, tensor.offset, (0,) * len(tensor.shape), digits)
    return View(tensor.shape, tensor.dtype, (piece,))


def _bytes_of(handle: BinaryIO, member: Member) -> bytes:
    handle.seek(member.begin)
    return handle.read(member.num_bytes)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name != "" and not any("\ud800" <= letter <= "\udfff" for letter in name)


def _kind(value: object) -> str:
    return {"StoredTensor": "single tensor", "Entries": "dict"}.get(type(value).__name__, type(value).__name__)


def checksum_problems(path: Path, checksums: Iterable[tuple[str, Checksum]], file: str) -> list[Problem]:
    """Members whose bytes are not those the zip was written with. Reads all of them once, in pieces."""
    found = []
    with path.open("rb") as handle:
        for name, one in checksums:
            handle.seek(one.begin)
            crc32, left = 0, one.end - one.begin
            while left and (block := handle.read(min(left, 1 << 20))):
                crc32, left = zlib.crc32(block, crc32), left - len(block)
            if left or crc32 != one.crc32:
                found.append(Problem(kind="checksum", severity="error", file=file, tensor=name,
                                     detail=f"{name} has CRC-32 {crc32:08x}, the zip says {one.crc32:08x}"))  # fmt: skip
    return found
