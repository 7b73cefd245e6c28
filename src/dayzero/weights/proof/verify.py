"""An Artifact in; everything wrong with it out, proved without the run that made it.

Three steps, each only where the one before found nothing. Files: every byte is reread against its checksum (headers byte by
byte, tensors by the ledger's), so one flipped bit anywhere is found and named. Conservation (`conservation`): each rank holds
what the layout assigns to it, replicas agree, and every source element reaches its place once. Meaning (`expected`): mapping
and placement are made anew and every ledger line is compared; with the source, its tensors are hashed again and every
stored one is gathered again. Nothing is repaired here.
"""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dayzero.core.artifact import ArtifactLayout, LedgerEntry, ShardFile
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Parameter, Problem
from dayzero.core.records import read_record
from dayzero.core.sharding import Box, local_shape
from dayzero.model.release import Release
from dayzero.weights.files import Progress, hash_file
from dayzero.weights.ledger import SourceTensor, operation_of, read_lines
from dayzero.weights.placement import is_optional, owned_parameters
from dayzero.weights.places.stores import Source, open_source
from dayzero.weights.proof.conservation import Conservation, place_of, problem
from dayzero.weights.proof.expected import MODEL_FILE, RELEASE_FOLDER, WORKERS, ByteProof, Expected, changed_sources, expect
from dayzero.weights.proof.shards import shard_problems
from dayzero.weights.reading import ByteStore, LocalStore, SourceReader

LAYOUT_FILE, SOURCES_FILE, STATE_FILE = "layout.json", "sources.jsonl", "source_files.json"
SEAL_FILE = "layout.sha256"  # of layout.json, which holds everything else's


def seal(record: Path) -> bytes:
    """What the file with a record's checksum must hold, in sha256sum's format."""
    return f"{hash_file(record).removeprefix('sha256:')}  {record.name}\n".encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """`proved` and `not_proved` say in words what was shown and what could not be, and why."""

    problems: tuple[Problem, ...]
    proved: tuple[str, ...] = ()
    not_proved: tuple[str, ...] = ()


def verify(folder: Path, source: Path | str | None = None, *, progress: Progress | None = None) -> tuple[Problem, ...]:
    """Everything wrong with the artifact; with `source` also whether it is what that release gives as it is now."""
    return prove(folder, source, progress=progress).problems


def prove(
    folder: Path, source: Path | str | None = None, *, allow_pickle: bool = False, progress: Progress | None = None
) -> Verification:
    """`verify`, with what was and was not shown. `source`: a folder or an address.

    Raises DayZeroError when the folder is no finished artifact, or there is no release at `source`.
    """
    if not (folder / LAYOUT_FILE).is_file():
        raise DayZeroError(f"{folder} is not an artifact", got=f"no {LAYOUT_FILE} in it",
                           want="a folder written by `dayzero convert`",
                           fix="convert again: an artifact without it is not finished")  # fmt: skip
    if not (folder / SEAL_FILE).is_file() or (folder / SEAL_FILE).read_bytes() != seal(folder / LAYOUT_FILE):
        return Verification(problems=(problem("checksum", f"{LAYOUT_FILE} is not what {SEAL_FILE} says", LAYOUT_FILE),))
    with contextlib.ExitStack() as stack:
        opened = None if source is None else stack.enter_context(open_source(source, allow_pickle=allow_pickle))
        try:
            checker = _Checker(folder, read_record(ArtifactLayout, folder / LAYOUT_FILE), progress)
            checker.check_artifact()
        except DayZeroError as error:  # a record whose checksum is right and which is no record
            return Verification(problems=(problem("damaged_record", f"{error.what}: {error.got}", LAYOUT_FILE),))
        checker.check_meaning(opened)
    return Verification(problems=tuple(checker.problems), proved=tuple(checker.proved), not_proved=tuple(checker.not_proved))


class _Checker:
    def __init__(self, folder: Path, artifact: ArtifactLayout, progress: Progress | None) -> None:
        self.folder, self.artifact, self.progress = folder, artifact, progress
        self.problems: list[Problem] = []
        self.proved: list[str] = []
        self.not_proved: list[str] = []
        self.sources: dict[str, SourceTensor] = {}
        self._is_sound = False
        self._made: set[str] = set()  # operations that the ledgers name
        self._lock, self._done = threading.Lock(), 0
        self._total = sum(one.num_bytes for rank in artifact.files for one in rank)

    def check_artifact(self) -> None:
        """Everything that needs neither the source nor the model's class."""
        self._unlisted()
        if not self._records():
            self.not_proved.append("anything more: a record that the proof rests on is damaged")
            return
        self.model = read_record(ModelDescription, self.folder / MODEL_FILE)
        self.sources = {one.tensor: one for one in read_lines(SourceTensor, self.folder / SOURCES_FILE)}
        if len(self.artifact.files) != self.artifact.layout.num_devices or len(self.artifact.ledgers) != len(
            self.artifact.files
        ):
            self._note("ledger", f"{LAYOUT_FILE} lists {len(self.artifact.files)} ranks and {len(self.artifact.ledgers)} "
                       f"ledgers for a layout of {self.artifact.layout.num_devices}", LAYOUT_FILE)  # fmt: skip
            return
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="verify") as pool:
            for rank, files in enumerate(self.artifact.files):
                self._shards(rank, files, pool)
        if not self.problems:
            self.proved.append("every file is what its checksum says")
            self._conservation()
        self._is_sound = not self.problems
        if self._is_sound:
            made = " (tensors that an operation made: followed to the whole tensors it was given)" if self._made else ""
            self.proved.append(f"every element of every rank has one origin, and every source element reaches its places{made}")

    def check_meaning(self, source: Source | None) -> None:
        """Whether it is the artifact that its source ought to give. Raises DayZeroError where the source cannot be read."""
        if source is not None and source.release.errors:
            self.problems += source.release.errors
        elif self._is_sound:
            self._meaning(source)
        elif source is not None and self.sources:
            self.problems += source_problems(self.folder, source.release, self.progress, source.store)

    def _note(self, kind: str, detail: str, file: str | None = None, tensor: str | None = None) -> None:
        self.problems.append(problem(kind, detail, file, tensor))

    def _advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if self.progress:
                self.progress("verifying", self._done, self._total)

    # --- files -----------------------------------------------------------------------------------------------------------

    def _unlisted(self) -> None:
        """Files in the folder that layout.json does not know: harmless, and not what was published."""
        artifact = self.artifact
        listed = {one.file for rank in artifact.files for one in rank}
        listed |= {one.file for one in (*artifact.ledgers, *artifact.release_files)} | {LAYOUT_FILE, SEAL_FILE}
        for root, _, names in os.walk(self.folder):
            for name in names:
                file = os.path.relpath(os.path.join(root, name), self.folder)
                if file not in listed:
                    self._note("unlisted_file", f"{file} is not part of the artifact", file)

    def _records(self) -> bool:
        """Ledgers and settings against their checksums; whether those that the proof rests on are whole."""
        whole = True
        for one in (*self.artifact.ledgers, *self.artifact.release_files):
            path = self.folder / one.file
            if not path.is_file():
                self._note("missing_file", f"{one.file} is missing", one.file)
            elif (found := hash_file(path)) != one.checksum or path.stat().st_size != one.num_bytes:
                self._note("checksum", f"{one.file} has changed: {found}, not {one.checksum}", one.file)
            else:
                continue
            whole = whole and one.file.startswith(f"{RELEASE_FOLDER}/")
        return whole

    def _entries(self, rank: int) -> list[LedgerEntry]:
        return list(read_lines(LedgerEntry, self.folder / self.artifact.ledgers[rank].file))

    def _wanted(self, rank: int) -> dict[str, tuple[Parameter, tuple[Box, ...]]]:
        return {one.name: (one, boxes) for one, boxes in owned_parameters(self.model, self.artifact.layout, rank)}

    def _shards(self, rank: int, files: tuple[ShardFile, ...], pool: ThreadPoolExecutor) -> None:
        """One rank's ledger against the layout's list, and its shards against the ledger."""
        wanted, ledger = self._wanted(rank), self.artifact.ledgers[rank].file
        by_file: dict[str, list[LedgerEntry]] = {one.file: [] for one in files}
        seen: set[str] = set()
        for entry in self._entries(rank):
            if entry.file not in by_file or entry.parameter in seen:
                detail = f"rank {rank}: {entry.parameter} is listed twice or in an unknown file"
                self._note("ledger", detail, entry.file, entry.parameter)
                continue
            seen.add(entry.parameter)
            by_file[entry.file].append(entry)
            if entry.parameter not in wanted:
                detail = f"{place_of(rank, entry, 0)}: {entry.parameter} is not assigned to this rank by the layout"
                self._note("coverage", detail, entry.file, entry.parameter)
                continue
            parameter, boxes = wanted[entry.parameter]
            if entry.shape != (shape := local_shape(boxes, parameter.shard.tensor_dim)):
                detail = f"{place_of(rank, entry, 0)}: {entry.parameter} is {list(entry.shape)}, the layout says {list(shape)}"
                self._note("coverage", detail, entry.file, entry.parameter)
        for name in sorted(name for name in wanted.keys() - seen if not is_optional(wanted[name][0])):
            self._note("coverage", f"rank {rank} lacks {name}", ledger, name)

        def check(one: ShardFile) -> list[Problem]:
            return shard_problems(self.folder / one.file, one, by_file[one.file], self.sources, self._advance)

        for found in pool.map(check, files):
            self.problems += found

    # --- conservation ----------------------------------------------------------------------------------------------------

    def _conservation(self) -> None:
        proof, used = Conservation(self.model, self.sources), set[str]()
        for rank in range(self.artifact.layout.num_devices):
            wanted = self._wanted(rank)
            for entry in self._entries(rank):
                used.update(one.tensor for one in entry.sources)
                self._made |= {operation for one in entry.sources if (operation := operation_of(one)) is not None}
                proof.add(rank, entry, *wanted[entry.parameter])
        self.problems += proof.finish()
        for name, one in self.sources.items():
            if (one.dropped is None) != (name in used):
                state = "used nowhere and not listed as dropped" if one.dropped is None else "listed as dropped and used"
                self._note("conservation", f"source tensor {name} is {state}", SOURCES_FILE, name)

    # --- meaning ---------------------------------------------------------------------------------------------------------

    def _meaning(self, source: Source | None) -> None:
        """Every ledger line against a mapping made anew; with the source, its bytes and the stored ones."""
        try:
            decoded = any(not operation.startswith("computed:") for operation in self._made)
            expected = expect(self.folder, self.artifact, self.model, self.sources, decoded=decoded, source=source,
                              upcast_unscaled=any(one.startswith("upcast:") for one in self._made))  # fmt: skip
        except DayZeroError as error:
            where = "the source" if source is not None else "what is recorded of the source"
            self._note("mapping", f"{where} does not give this artifact: {error.what}: {error.got}", SOURCES_FILE)
            return
        if isinstance(expected, str):
            self.not_proved.append(f"that the mapping is the right one: {expected}")
            if source is not None:
                self.problems += source_problems(self.folder, source.release, self.progress, source.store)
            return
        self.problems += expected.source_problems(self.sources, SOURCES_FILE)
        for rank in range(self.artifact.layout.num_devices):
            entries = self._entries(rank)
            for entry in entries:
                self.problems += expected.ledger_problems(rank, entry)
            lacking = {name for owner, name in expected.stored if owner == rank} - {entry.parameter for entry in entries}
            for name in sorted(lacking):
                self._note("coverage", f"rank {rank} lacks {name}", self.artifact.ledgers[rank].file, name)
        if not self.problems:
            self.proved.append("every ledger line is the one that the mapping and the layout, derived again, ask for")
        if source is None:
            self.not_proved.append("that the bytes are the source's: give --source")
        else:
            self._bytes(source.release, expected)

    def _bytes(self, release: Release, expected: Expected) -> None:
        self._done, self._total = 0, self._total + sum(one.num_bytes for one in self.sources.values() if one.dropped is None)
        with expected.reader as reader:
            self.problems += changed_sources(self.sources, release.tensors, reader, self._advance)
            if self.problems:
                return
            if release.source_hash != self.artifact.source_hash:
                self._note("source_changed", "the source's settings are not those the artifact was made of", LAYOUT_FILE)
            proof = ByteProof(self.folder, expected, self.sources)

            def check(pair: tuple[int, LedgerEntry]) -> list[Problem]:
                found = proof.problems(*pair)
                self._advance(pair[1].num_bytes)
                return found

            with ThreadPoolExecutor(WORKERS, thread_name_prefix="verify") as pool:
                for rank in range(self.artifact.layout.num_devices):
                    for found in pool.map(check, ((rank, entry) for entry in self._entries(rank))):
                        self.problems += found
        if not self.problems:
            self.proved.append("every source tensor is what was read, and every stored byte is the source's")


def source_problems(
    folder: Path, release: Release, progress: Progress | None = None, store: ByteStore | None = None
) -> list[Problem]:
    """Where the release as it is now differs from what the artifact was made of. `store`: where it is not its own folder."""
    sources = {one.tensor: one for one in read_lines(SourceTensor, folder / SOURCES_FILE)}
    done, total = 0, sum(one.num_bytes for one in sources.values() if one.dropped is None)

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress:
            progress("reading the source", done, total)

    with SourceReader(store or LocalStore(release.folder), release.tensors) as reader:
        return changed_sources(sources, release.tensors, reader, advance)
