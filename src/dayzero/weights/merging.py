"""The parts of one conversion in (`parts`); the artifact that a single run would have made out, byte for byte.

All N must be there and of one conversion, and every file of theirs is read back against what its part recorded; what is
missing, differs or has changed is named with its part. Nothing is published before. Files are linked, not copied, where the
file system can. Not here: the source, which is not needed any more.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from dayzero.core.artifact import ArtifactLayout, WeightsReport
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Problem
from dayzero.core.records import from_dict, read_json, read_record
from dayzero.weights.checks.examining import judge_values
from dayzero.weights.convert import report
from dayzero.weights.files import Progress, hash_file, sync_tree
from dayzero.weights.finishing import finish
from dayzero.weights.ledger import SourceFile, SourceTensor, entry_of, read_lines
from dayzero.weights.parts import PART_FILE, PART_SEAL, PartRecord, part_folder
from dayzero.weights.places.workfolder import KEY_FILE, locked_work_folder, prepare, publish
from dayzero.weights.proof.conservation import problem
from dayzero.weights.proof.shards import shard_problems
from dayzero.weights.proof.verify import LAYOUT_FILE, MODEL_FILE, SOURCES_FILE, STATE_FILE, seal
from dayzero.weights.writing import Written

Parts = dict[int, tuple[Path, PartRecord]]  # by number


def merge(
    out: Path, parts: Iterable[Path] = (), *, accept_values: bool = False, progress: Progress | None = None, workers: int = 2
) -> WeightsReport:
    """Join all parts of the artifact `out` after reading every file of theirs back. Files are linked where they can be.

    parts: their folders; those beside `out` if not given, which are then removed, as `out` has all they held.
    Raises DayZeroError naming the parts that are missing or differ, and every file that is not what its part wrote.
    """
    started, given, out = time.monotonic(), [Path(one) for one in parts], Path(out)
    with locked_work_folder(out, complete=LAYOUT_FILE) as work:
        folders = given or sorted(out.parent.glob(f"{out.name}.part-*-of-*"))
        if not folders and (out / LAYOUT_FILE).is_file():  # merged already, and asked again
            artifact = read_record(ArtifactLayout, out / LAYOUT_FILE)
            return report(str(out), out, artifact, (), 0, 0, started, reused=True)
        whole, warnings = _agreeing(out, folders)
        first_folder, first = whole[1]
        if (out / LAYOUT_FILE).is_file() and read_record(ArtifactLayout, out / LAYOUT_FILE).key != first.key:
            raise DayZeroError(f"{out} holds another artifact", got="another key", want=f"key {first.key}",
                               fix="choose another --out or remove it")  # fmt: skip
        sources = {one.tensor: one for one in read_lines(SourceTensor, first_folder / SOURCES_FILE)}
        written = _read_back(whole, sources, progress, workers)
        values = _judged(whole, sources, str(out), accept_values)
        prepare(work, f"merge of {first.num_parts} parts of {first.key}\n")
        for file in first.files:
            _link(whole[file.part][0] / file.file, work / file.file)
        for one in first.settings:
            _link(first_folder / one.file, work / one.file)
        artifact = finish(
            work, key=first.key, state=(first_folder / STATE_FILE).read_text(encoding="utf-8"), source_hash=first.source_hash,
            model=read_record(ModelDescription, first_folder / MODEL_FILE), layout=first.layout, dtype=first.dtype,
            written=[(file.rank, written[file.file]) for file in first.files],
            settings=[Path(one.file).name for one in first.settings],
            accepted=values, sources=_with_checksums(sources, [record for _, record in whole.values()]),
        )  # fmt: skip
        (work / KEY_FILE).unlink()
        sync_tree(work)
        publish(work, out)
        if not given:
            for folder, _ in whole.values():
                shutil.rmtree(folder)
        read = sum(record.bytes_read for _, record in whole.values())
        bytes_written = sum(record.bytes_written for _, record in whole.values())
        return report(str(out), out, artifact, (*first.problems, *warnings, *values), read, bytes_written, started)


def _judged(whole: Parts, sources: dict[str, SourceTensor], where: str, accept: bool) -> tuple[Problem, ...]:
    """What the values that the parts saw say together: a tensor is judged by its like in all layers."""
    statistics = {name: one for _, record in whole.values() for name, one in record.statistics.items()}
    checksums = {name: one for _, record in whole.values() for name, one in record.checksums.items()}
    for _, record in whole.values():
        for written in record.written:
            statistics.update(written.statistics)
    entries = {name: entry_of(one) for name, one in sources.items()}
    return judge_values(statistics, checksums, entries, where, accept=accept)


def _agreeing(out: Path, folders: Sequence[Path]) -> tuple[Parts, list[Problem]]:
    """The parts by number, shown to be all and of one conversion; and what about them is worth a warning."""
    found: Parts = {}
    for folder in folders:
        if not (folder / PART_FILE).is_file():
            raise DayZeroError(f"{folder} is no finished part", got=f"no {PART_FILE} in it",
                               want="a folder that `dayzero convert --part I/N` published",
                               fix="run that part again: it continues")  # fmt: skip
        if not (folder / PART_SEAL).is_file() or (folder / PART_SEAL).read_bytes() != seal(folder / PART_FILE):
            raise DayZeroError(f"{folder / PART_FILE} has changed", got=f"not what {PART_SEAL} says",
                               want="the record as it was written", fix="convert that part again")  # fmt: skip
        record = read_record(PartRecord, folder / PART_FILE)
        if record.part in found:
            raise DayZeroError(f"part {record.part} is there twice", got=f"{found[record.part][0]} and {folder}",
                               want="each part once", fix="give one of them")  # fmt: skip
        found[record.part] = (folder, record)
        records = {MODEL_FILE: record.model_checksum, SOURCES_FILE: record.sources_checksum,
                   STATE_FILE: record.state_checksum} | {one.file: one.checksum for one in record.settings}  # fmt: skip
        for name, recorded in records.items():
            if not (folder / name).is_file() or hash_file(folder / name) != recorded:
                raise DayZeroError(f"part {record.part}: {name} is missing or has changed", got=str(folder / name),
                                   want=recorded, fix="convert that part again")  # fmt: skip
    if not found:
        raise DayZeroError(f"there are no parts of {out}", got="no folder", want=f"{part_folder(out, 1, 1).name[:-14]}-...",
                           fix="run `dayzero convert --part I/N` first, or give the parts' folders")  # fmt: skip
    _, first = found[min(found)]
    for number, (folder, record) in sorted(found.items()):
        for (what, own), (_, other) in zip(record.shared, first.shared, strict=True):
            if own != other:
                raise DayZeroError(f"part {number} is of another conversion than part {first.part}: {what}",
                                   got=f"{folder}: {str(own)[:120]}", want=str(other)[:120],
                                   fix=f"convert part {number} again, from the same release and plan")  # fmt: skip
    if missing := sorted(set(range(1, first.num_parts + 1)) - found.keys()):
        names = ", ".join(f"{one}/{first.num_parts}" for one in missing)
        raise DayZeroError(f"{len(missing)} of {first.num_parts} parts of {out} are missing: {names}",
                           got=", ".join(str(folder) for folder, _ in found.values()),
                           want=str(part_folder(out, missing[0], first.num_parts)),
                           fix=f"run `dayzero convert --part {names.split(', ')[0]}` with the same options")  # fmt: skip
    return found, _states(found)


def _states(found: Parts) -> list[Problem]:
    """Source files as each part saw them. Copies of one release may differ in time; sizes and versions may not."""
    warnings, first = [], _state(found[1][0])
    for number, (folder, _) in sorted(found.items()):
        state = _state(folder)
        for name in sorted(first.keys() | state.keys()):
            one, other = first.get(name), state.get(name)
            if one is None or other is None or (one.num_bytes, one.version) != (other.num_bytes, other.version):
                raise DayZeroError(f"parts 1 and {number} were made of different files named {name}", got=str(other),
                                   want=str(one), fix="convert them again from the same release")  # fmt: skip
            if one.modified_ns != other.modified_ns:
                detail = (f"parts 1 and {number} read files named {name} with different times: copies, or changed in between; "
                          "`convert --verify --source` tells")  # fmt: skip
                warnings.append(Problem(kind="other_copy", severity="warning", file=name, detail=detail))
    return warnings


def _state(folder: Path) -> dict[str, SourceFile]:
    return {one["file"]: from_dict(SourceFile, one, source=STATE_FILE) for one in read_json(folder / STATE_FILE)}


def _read_back(whole: Parts, sources: dict[str, SourceTensor], progress: Progress | None, workers: int) -> dict[str, Written]:
    """Every file of every part, read against what its part recorded."""
    problems: list[Problem] = []
    done, total = 0, sum(file.num_bytes for file in whole[1][1].files)

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress:
            progress("reading the parts", done, total)

    written: dict[str, Written] = {}
    with ThreadPoolExecutor(workers, thread_name_prefix="merge") as pool:
        checks = []
        for number, (folder, record) in sorted(whole.items()):
            expected = {file.file: file.num_bytes for file in record.files if file.part == number}
            if expected != {one.file.file: one.file.num_bytes for one in record.written}:
                problems.append(problem("part", f"part {number} records other files than the plan gives it", PART_FILE))
                continue
            for one in record.written:
                written[one.file.file] = one
                path = folder / one.file.file
                checks.append((number, pool.submit(shard_problems, path, one.file, one.entries, sources, advance)))
        for number, check in checks:
            problems += [replace(one, detail=f"part {number}: {one.detail}") for one in check.result()]
    if problems:
        raise DayZeroError(f"the parts cannot be joined: {len(problems)} problem{'s' * (len(problems) != 1)}",
                           got="\n          ".join(one.detail for one in problems), want="what each part recorded",
                           fix="remove the folders of the named parts and convert them again")  # fmt: skip
    return written


def _with_checksums(sources: dict[str, SourceTensor], records: Sequence[PartRecord]) -> list[SourceTensor]:
    checksums: dict[str, str] = {}
    for record in records:
        checksums |= record.checksums
        for one in record.written:  # seen by another part too: it must have been the same
            for name, checksum in one.sources.items():
                if checksums.setdefault(name, checksum) != checksum:
                    raise DayZeroError(f"{name} was not the same for all parts", got=f"part {record.part} read {checksum}",
                                       want=checksums[name],
                                       fix="the source changed in between: convert all parts again")  # fmt: skip
    lacking = [name for name, one in sources.items() if one.dropped is None and name not in checksums]
    assert not lacking, f"no part answered for {lacking[:4]}"
    return [replace(one, checksum="" if one.dropped is not None else checksums[name]) for name, one in sources.items()]


def _link(source: Path, target: Path) -> None:
    """The file under a second name; copied where the file systems differ or know no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
