"""The zip container of a PyTorch checkpoint in, where each of its members lies out. Read by hand, and nothing is unpacked.

Only what `torch.save` writes is accepted: stored (never compressed) members that follow each other from the first byte to
the central directory, which ends with the file. The central directory is compared with the file's size and with every local
header, so that no reader can see other members than this one. Whatever is wrong raises `BadZip`, which says so.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO

LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
END64, LOCATOR64, DESCRIPTOR = b"PK\x06\x06", b"PK\x06\x07", b"PK\x07\x08"
LOCAL_BYTES, CENTRAL_BYTES, END_BYTES, END64_BYTES, LOCATOR64_BYTES = 30, 46, 22, 56, 20
ZIP64_EXTRA = 0x0001
IN_ZIP64, IN_ZIP64_SHORT = 0xFFFFFFFF, 0xFFFF  # a field whose value stands in the zip64 record
FLAG_ENCRYPTED, FLAG_DESCRIPTOR = 0x0001, 0x0008
# A checkpoint of 1.3 million tensors has a directory of under 100 MB; this bounds what a hostile file can make us allocate.
MAX_DIRECTORY_BYTES = 256 << 20


class BadZip(Exception):
    """`kind` and `detail` of the problem; `member` where one is to blame."""

    def __init__(self, kind: str, detail: str, member: str | None = None) -> None:
        super().__init__(detail)
        self.kind, self.detail, self.member = kind, detail, member


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One member's bytes: `begin` to `end` in the file. `crc32` is 0 where the writer left it out."""

    name: str
    begin: int
    end: int
    crc32: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True, slots=True)
class _Listed:
    name: str
    flags: int
    crc32: int
    num_bytes: int
    offset: int


def read_members(handle: BinaryIO) -> tuple[dict[str, Member], bytes]:
    """Members by name, in the order of their bytes, and the raw central directory. Raises BadZip."""
    file_bytes = handle.seek(0, os.SEEK_END)
    directory_offset, directory_bytes, count = _end_record(handle, file_bytes)
    raw = _take(handle, directory_offset, directory_bytes)
    listed = sorted(_directory(raw, count), key=lambda one: one.offset)
    members: dict[str, Member] = {}
    reached = 0
    for place, one in enumerate(listed):
        stop = listed[place + 1].offset if place + 1 < len(listed) else directory_offset
        if one.name in members:
            raise BadZip("duplicate_member", f"the zip holds {one.name} twice", one.name)
        if one.offset != reached:
            raise BadZip("zip_overlap" if one.offset < reached else "zip_hole",
                         f"{one.name} begins at byte {one.offset}, where {reached} was to be expected", one.name)  # fmt: skip
        begin = _data_begin(handle, one, directory_offset)
        end = begin + one.num_bytes
        if end > stop:
            raise BadZip("zip_overlap", f"{one.name} ends at byte {end}, past what follows it at byte {stop}", one.name)
        _check_gap(handle, one, end, stop)
        members[one.name] = Member(name=one.name, begin=begin, end=end, crc32=one.crc32)
        reached = stop
    return members, raw


def _end_record(handle: BinaryIO, file_bytes: int) -> tuple[int, int, int]:
    """(offset, bytes, entries) of the central directory, from the records that must end the file."""
    end = _take(handle, file_bytes - END_BYTES, END_BYTES) if file_bytes >= END_BYTES else b""
    if not end.startswith(END):
        raise BadZip("truncated", f"its zip does not end with an end record at byte {max(0, file_bytes - END_BYTES)}: the file "
                     f"of {file_bytes} bytes is cut, or other bytes follow it")  # fmt: skip
    disk, start_disk, here, count, size, offset, comment = struct.unpack("<4HIIH", end[4:])
    stop = file_bytes - END_BYTES
    locator_at = stop - LOCATOR64_BYTES
    locator = _take(handle, locator_at, LOCATOR64_BYTES) if locator_at >= 0 else b""
    if locator.startswith(LOCATOR64):
        _, record_at, disks = struct.unpack("<IQI", locator[4:])
        if record_at + END64_BYTES != locator_at:
            raise BadZip("zip_directory", f"its zip64 end record is said to be at byte {record_at}, not before its locator")
        record = _take(handle, record_at, END64_BYTES)
        if not record.startswith(END64):
            raise BadZip("zip_directory", f"no zip64 end record at byte {record_at}, where its locator says")
        length, _, _, _, _, here64, count64, size64, offset64 = struct.unpack("<QHHIIQQQQ", record[4:])
        pairs = ((here, here64, IN_ZIP64_SHORT), (count, count64, IN_ZIP64_SHORT), (size, size64, IN_ZIP64),
                 (offset, offset64, IN_ZIP64))  # fmt: skip
        if length != END64_BYTES - 12 or disks != 1 or any(short not in (long, marker) for short, long, marker in pairs):
            raise BadZip("zip_directory", "its two end records contradict each other")
        here, count, size, offset, stop = here64, count64, size64, offset64, record_at
    if comment or disk or start_disk or here != count:
        raise BadZip("zip_directory", "its end record names a comment or several disks, which torch.save does not write")
    if offset + size != stop:
        raise BadZip("zip_directory", f"its directory of {size} bytes at byte {offset} does not end at byte {stop}")
    if size > MAX_DIRECTORY_BYTES or count * CENTRAL_BYTES > size:
        raise BadZip("zip_directory", f"its directory of {size} bytes cannot hold {count} entries")
    return offset, size, count


def _directory(raw: bytes, count: int) -> list[_Listed]:
    found: list[_Listed] = []
    at = 0
    while at < len(raw):
        fixed = raw[at : at + CENTRAL_BYTES]
        if len(fixed) < CENTRAL_BYTES or not fixed.startswith(CENTRAL):
            raise BadZip("zip_directory", f"entry {len(found)} of its directory is no entry")
        _, _, flags, method, _, _, crc32, packed, size, name_length, extra_length, comment, disk, _, _, offset = struct.unpack(
            "<6H3I5H2I", fixed[4:]
        )
        stop = at + CENTRAL_BYTES + name_length + extra_length + comment
        if stop > len(raw):
            raise BadZip("zip_directory", f"entry {len(found)} of its directory runs past the directory's end")
        try:
            name = raw[at + CENTRAL_BYTES : at + CENTRAL_BYTES + name_length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadZip("zip_directory", f"the name of entry {len(found)} is not UTF-8: {error.reason}") from error
        extra = raw[at + CENTRAL_BYTES + name_length : stop - comment]
        size, packed, offset = _widened(extra, name, size, packed, offset)
        if flags & FLAG_ENCRYPTED:
            raise BadZip("encrypted_member", f"{name} is encrypted", name)
        if method != 0:
            raise BadZip("compressed_member", f"{name} is compressed (method {method}): only stored members, as torch.save "
                         "writes them, can be read by ranges", name)  # fmt: skip
        if packed != size or disk:
            raise BadZip("zip_directory", f"{name} is stored and has two sizes, {packed} and {size} bytes", name)
        found.append(_Listed(name=name, flags=flags, crc32=crc32, num_bytes=size, offset=offset))
        at = stop
    if len(found) != count:
        raise BadZip("zip_directory", f"its directory has {len(found)} entries, its end record says {count}")
    return found


def _widened(extra: bytes, name: str, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """The three fields with their zip64 values, which must be there exactly for the fields that say so."""
    wanted = [value == IN_ZIP64 for value in (size, packed, offset)]
    values: list[int] = []
    at, seen = 0, False
    while at + 4 <= len(extra):
        kind, length = struct.unpack("<HH", extra[at : at + 4])
        if at + 4 + length > len(extra):
            raise BadZip("zip_directory", f"the extra field of {name} runs past its end", name)
        if kind == ZIP64_EXTRA:
            if seen or length != 8 * sum(wanted):
                raise BadZip("zip_directory", f"the zip64 field of {name} has {length} bytes for {sum(wanted)} values", name)
            values, seen = list(struct.unpack(f"<{sum(wanted)}Q", extra[at + 4 : at + 4 + length])), True
        at += 4 + length
    if any(wanted) and not seen:
        raise BadZip("zip_directory", f"{name} refers to a zip64 field that it does not have", name)
    taken = iter(values)
    wide = [next(taken) if is_wide else value for is_wide, value in zip(wanted, (size, packed, offset), strict=True)]
    return wide[0], wide[1], wide[2]


def _data_begin(handle: BinaryIO, one: _Listed, limit: int) -> int:
    """Where the member's bytes begin: after its local header, which must say the same as the directory."""
    if one.offset + LOCAL_BYTES > limit:
        raise BadZip("zip_directory", f"{one.name} is said to begin at byte {one.offset}, past the last {limit}", one.name)
    header = _take(handle, one.offset, LOCAL_BYTES)
    if not header.startswith(LOCAL):
        raise BadZip("zip_local_header", f"no member begins at byte {one.offset}, where {one.name} should", one.name)
    _, flags, method, _, _, crc32, packed, size, name_length, extra_length = struct.unpack("<5H3I2H", header[4:])
    begin = one.offset + LOCAL_BYTES + name_length + extra_length
    if begin > limit:
        raise BadZip("zip_local_header", f"the local header of {one.name} runs past the members' end {limit}", one.name)
    name = _take(handle, one.offset + LOCAL_BYTES, name_length)
    # With a descriptor the sizes may be left for later (0); else they are there, or stand in a zip64 field.
    later = (0,) if one.flags & FLAG_DESCRIPTOR else ()
    sizes_agree = all(value in (one.num_bytes, IN_ZIP64, *later) for value in (packed, size))
    same = name == one.name.encode() and flags == one.flags and method == 0 and crc32 in (one.crc32, *later)
    if not (sizes_agree and same):
        raise BadZip("zip_local_header", f"the directory and the local header of {one.name} contradict each other", one.name)
    return begin


def _check_gap(handle: BinaryIO, one: _Listed, end: int, stop: int) -> None:
    """Between a member's bytes and the next member there is its descriptor, where it has one, and nothing else."""
    gap = stop - end
    if not one.flags & FLAG_DESCRIPTOR:
        if gap:
            raise BadZip("zip_hole", f"{gap} bytes after {one.name} belong to no member", one.name)
        return
    for length, form in ((16, "<III"), (24, "<IQQ")):
        if gap == length:
            raw = _take(handle, end, length)
            if raw.startswith(DESCRIPTOR) and struct.unpack(form, raw[4:]) == (one.crc32, one.num_bytes, one.num_bytes):
                return
    raise BadZip("zip_hole", f"the {gap} bytes after {one.name} are not its descriptor", one.name)


def _take(handle: BinaryIO, offset: int, count: int) -> bytes:
    handle.seek(offset)
    data = handle.read(count)
    if len(data) < count:
        raise BadZip("truncated", f"the file ends early: expected {offset + count} bytes, got {offset + len(data)} bytes")
    return data
