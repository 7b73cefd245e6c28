"""One conversion on many hosts that do not talk to each other: a balanced part of its files each.

The plan of files follows from the release and the layout alone, so every host makes the same one and takes its share:
largest files first, each to the part that has least, and likewise the hashing of sources that no file takes whole. Part I
of N is a folder beside the output, `OUT.part-0000I-of-0000N`, made as an artifact is: locked, resumable, published by one
rename. Not here: starting processes, and joining the parts (`merging`), which a shared file system or a copy brings together.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from dayzero.core.artifact import LedgerCounts, ShardFile, WeightsReport
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Problem
from dayzero.core.plan import Layout
from dayzero.core.records import STRICT, read_record, to_dict, write_record, write_text_atomic
from dayzero.core.units import KIB
from dayzero.model.release import damaged
from dayzero.weights.changes import NO_CHANGES, Changes
from dayzero.weights.checks.census import TensorStatistics
from dayzero.weights.checks.examining import check_published, require_readable
from dayzero.weights.convert import artifact_key, copy_settings, left_out, settled_config, source_files
from dayzero.weights.files import Progress, hash_file, sync_tree
from dayzero.weights.finishing import source_list, stored
from dayzero.weights.ledger import SourceTensor, read_lines, to_line
from dayzero.weights.loading import CheckpointSource, open_checkpoint
from dayzero.weights.placement import StoredFile, place
from dayzero.weights.places.stores import Source, open_source
from dayzero.weights.places.workfolder import KEY_FILE, locked_work_folder, prepare, publish
from dayzero.weights.proof.expected import RELEASE_FOLDER
from dayzero.weights.proof.verify import MODEL_FILE, SOURCES_FILE, STATE_FILE, seal
from dayzero.weights.reading import SourceReader, UnsoundSource
from dayzero.weights.running import HASHES_FILE, Copying
from dayzero.weights.writing import DONE_SUFFIX, Written, whole_sources

PART_FILE, PART_SEAL = "part.json", "part.sha256"  # the record is written last: a part that has it is whole

# Enough of each file to meet several tensors, little enough to cost nothing: 320 KiB of a shard of 5 GB.
SAMPLES, SAMPLE_BYTES = 5, 64 * KIB


@dataclass(frozen=True, kw_only=True, slots=True)
class DealtFile:
    """One file of the artifact and the part that makes it."""

    __pydantic_config__ = STRICT
    file: str
    rank: int
    num_bytes: int
    part: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRecord:
    """`part.json`. Everything but `part`, `written`, `checksums` and what it cost is the same in all parts of one conversion.

    `files`: the whole plan, in its order. `written`: this part's of them. `checksums`: of the sources it answers for.
    """

    SCHEMA: ClassVar[str] = "dayzero.part/1"
    __pydantic_config__ = STRICT
    key: str
    part: int
    num_parts: int
    source_hash: str
    layout: Layout
    dtype: str | None
    model_checksum: str
    sources_checksum: str
    sample: str  # of the source's bytes, see `sample_of`
    state_checksum: str  # of the source files' sizes and times, which copies of one release may not share
    files: tuple[DealtFile, ...]
    written: tuple[Written, ...]
    checksums: dict[str, str]
    statistics: dict[str, TensorStatistics]  # of sources that no file took whole: the others' are with `written`
    settings: tuple[ShardFile, ...]
    problems: tuple[Problem, ...]
    bytes_read: int
    bytes_written: int
    seconds: float
    inputs: dict[str, str] = field(default_factory=dict)

    @property
    def shared(self) -> tuple:
        """What all parts must agree on, with the words for it."""
        return (("the release, layout or dtype", self.key), ("the number of parts", self.num_parts),
                ("the release's headers and settings", self.source_hash), ("the layout", self.layout),
                ("the dtype", self.dtype), ("the model's description", self.model_checksum),
                ("the list of source tensors", self.sources_checksum), ("the source's bytes at some places", self.sample),
                ("the plan of files", self.files))  # fmt: skip


def parse_part(text: str) -> tuple[int, int]:
    """ "2/8" -> (2, 8): the second of eight parts. They count from 1."""
    found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    part, num_parts = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= part <= num_parts:
        raise DayZeroError("which part to convert is not clear", got=text, want="I/N with I from 1 to N",
                           fix="give --part 1/8 for the first of eight (indexes from 0 need 1 added)")  # fmt: skip
    return part, num_parts


def part_folder(out: Path, part: int, num_parts: int) -> Path:
    return out.parent / f"{out.name}.part-{part:05d}-of-{num_parts:05d}"


def deal(sizes: Sequence[int], num_parts: int, loads: list[int] | None = None) -> list[int]:
    """For each size the part (from 1) that takes it: the largest first, each to the least loaded. `loads` go on growing."""
    loads = [0] * num_parts if loads is None else loads
    parts = [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        least = min(range(num_parts), key=lambda one: (loads[one], one))
        loads[least] += sizes[at]
        parts[at] = least + 1
    return parts


def deal_work(
    files: Sequence[StoredFile], checkpoint: CheckpointSource, reader: SourceReader, num_parts: int
) -> tuple[list[int], dict[str, int]]:
    """(the part of each file, the part that answers for the checksum of each used source tensor)."""
    loads = [0] * num_parts
    parts = deal([file.num_bytes for file in files], num_parts, loads)
    duties: dict[str, int] = {}
    for file, part in zip(files, parts, strict=True):
        for tensor in file.tensors:
            for name in whole_sources(tensor, reader, checkpoint.made):
                duties.setdefault(name, part)  # hashed as it goes by
    rest = sorted(checkpoint.used - duties.keys())
    duties |= zip(rest, deal([reader.entry(name).num_bytes for name in rest], num_parts, loads), strict=True)
    return parts, duties


def sample_of(source: Source) -> str:
    """A checksum of the source's bytes at a few places of each file, cheap for every part: another checkpoint of the same
    shapes is told from a copy of this one. Objects have versions, which say more."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(SAMPLE_BYTES))
    for state in source_files(source):
        if state.version is None:
            for number in range(SAMPLES):
                start = max(0, state.num_bytes - SAMPLE_BYTES) * number // (SAMPLES - 1)
                part = block[: min(SAMPLE_BYTES, state.num_bytes)]
                source.store.read_into(state.file, start, part)
                digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def convert_part(
    source: Path | str, model: ModelDescription, layout: Layout, out: Path, part: int, num_parts: int, *,
    changes: Changes = NO_CHANGES, progress: Progress | None = None, workers: int = 2,
) -> WeightsReport:  # fmt: skip
    """Make part `part` (from 1) of `num_parts` of the artifact `out`, in its own folder beside it; or reuse the one there.

    Raises DayZeroError as `convert` does, and where another process is making the same part.
    """
    started = time.monotonic()
    folder = part_folder(Path(out), part, num_parts)
    with (
        open_source(source, allow_pickle=changes.allow_pickle) as opened,
        locked_work_folder(folder, complete=PART_FILE) as work,
    ):
        require_readable(opened)
        release = opened.release
        if changes.quantize is not None:
            raise DayZeroError("parts cannot be quantized", got=f"--part {part}/{num_parts} with a quantization",
                               want="one of them: what a tensor lost is summed over all of it",
                               fix="convert and quantize in one go")  # fmt: skip
        key = artifact_key(release.source_hash, layout, changes)
        state = json.dumps([to_dict(one) for one in source_files(opened)], indent=1) + "\n"
        if (there := _reusable(folder, key, state)) is not None:
            shutil.rmtree(work)
            return _part_report(folder, there, started, reused=True)
        decoded = opened.decode(changes.dtype or model.dtype, upcast_unscaled=changes.upcast_unscaled)
        checkpoint = open_checkpoint(release, model, opened.store, decoded=decoded)
        published = check_published(opened, progress=progress, workers=workers, share=(part, num_parts))
        files, problems = place(checkpoint.views, model, layout, dtype=changes.dtype)
        if problems:
            raise damaged(problems, opened.address)
        reader = checkpoint.reader()
        parts, duties = deal_work(files, checkpoint, reader, num_parts)
        prepare(work, f"part {part}/{num_parts} of {key}\n{state}")
        mine = tuple(file for file, owner in zip(files, parts, strict=True) if owner == part)
        copying = Copying(work, mine, reader, made=checkpoint.made, progress=_named(progress, part, num_parts), workers=workers,
                          hash_sources=[name for name, owner in duties.items() if owner == part])  # fmt: skip
        try:
            written = copying.run()
        except UnsoundSource:
            shutil.rmtree(work)
            raise
        write_record(model, work / MODEL_FILE)
        sources = source_list(release.tensors, checkpoint.dropped, checkpoint.warnings, {})
        write_text_atomic(work / SOURCES_FILE, "".join(map(to_line, sources)))
        write_text_atomic(work / STATE_FILE, state)
        told = {name for one in written for name in one.statistics}
        config = settled_config(release, model, checkpoint, changes)
        record = PartRecord(
            key=key, part=part, num_parts=num_parts, source_hash=release.source_hash, layout=layout, dtype=changes.dtype,
            model_checksum=hash_file(work / MODEL_FILE), sources_checksum=hash_file(work / SOURCES_FILE),
            sample=sample_of(opened), state_checksum=hash_file(work / STATE_FILE),
            files=tuple(DealtFile(file=file.file, rank=file.rank, num_bytes=file.num_bytes, part=owner)
                        for file, owner in zip(files, parts, strict=True)),
            written=tuple(written),
            checksums={name: copying.source_checksums[name] for name, owner in sorted(duties.items()) if owner == part},
            # The settings travel with the first part alone: there is no use for them N times.
            settings=tuple(stored(work, f"{RELEASE_FOLDER}/{name}") for name in
                           (copy_settings(release, work / RELEASE_FOLDER, config=config) if part == 1 else [])),
            statistics={name: one for name, one in copying.statistics.items() if name not in told},
            problems=release.problems + checkpoint.warnings + published + left_out(release),
            bytes_read=reader.bytes_read, bytes_written=copying.bytes_written, seconds=round(time.monotonic() - started, 3),
        )  # fmt: skip
        for scrap in (*work.rglob("*" + DONE_SUFFIX), work / HASHES_FILE, work / KEY_FILE):
            scrap.unlink(missing_ok=True)
        sync_tree(work)
        write_record(record, work / PART_FILE)
        write_text_atomic(work / PART_SEAL, seal(work / PART_FILE).decode())
        publish(work, folder)
        return _part_report(folder, record, started)


def _reusable(folder: Path, key: str, state: str) -> PartRecord | None:
    if not (folder / PART_FILE).is_file():
        return None
    record = read_record(PartRecord, folder / PART_FILE)
    if record.key != key:
        raise DayZeroError(f"{folder} holds a part of another artifact", got=f"key {record.key}", want=f"key {key}",
                           fix="choose another --out or remove it")  # fmt: skip
    sizes = ((folder / one.file.file, one.file.num_bytes) for one in record.written)
    if any(not path.is_file() or path.stat().st_size != num_bytes for path, num_bytes in sizes):
        return None
    return record if (folder / STATE_FILE).read_text(encoding="utf-8") == state else None


def _part_report(folder: Path, record: PartRecord, started: float, *, reused: bool = False) -> WeightsReport:
    entries = [entry for one in record.written for entry in one.entries]
    sizes = {one.tensor: one.num_bytes for one in read_lines(SourceTensor, folder / SOURCES_FILE)}
    used = sum(sizes[name] for name in record.checksums)
    counts = LedgerCounts(source_bytes=used, used_bytes=used, filled_parameters=len({entry.parameter for entry in entries}))
    return WeightsReport(
        artifact=str(folder), key=record.key, ledger=counts, problems=record.problems,
        bytes_read=0 if reused else record.bytes_read, bytes_written=0 if reused else record.bytes_written,
        seconds=round(time.monotonic() - started, 3), reused=reused,
    )  # fmt: skip


def _named(progress: Progress | None, part: int, num_parts: int) -> Progress | None:
    """Progress that says which part it is of."""
    if progress is None:
        return None
    shown = progress
    return lambda what, done, total: shown(f"part {part}/{num_parts}: {what}", done, total)
