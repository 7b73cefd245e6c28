"""Where finished files go: a folder, which gets its name by one rename, or an object store, file by file, the layout last.

To a store, each file is made in a local work folder, uploaded, compared with what the server has, noted beside it (under
`.partial/`), and deleted here; a later run, on this machine or another, keeps what is noted and still the same object. The
file that makes an output usable is uploaded when all others are there, so an interrupted run leaves nothing that looks whole.
Not here: what the files hold, and any lock between machines: two conversions into one address are the user's to avoid.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dayzero.core.artifact import ShardFile
from dayzero.core.cachedir import cache_folder
from dayzero.core.errors import DayZeroError
from dayzero.core.records import STRICT, from_dict, record_json, write_text_atomic
from dayzero.model.paths import refusal
from dayzero.model.remote.objects import ObjectFolder, is_remote
from dayzero.weights.files import sync_tree
from dayzero.weights.placement import StoredFile
from dayzero.weights.places.workfolder import locked_work_folder, prepare, publish
from dayzero.weights.reading import UnsoundSource
from dayzero.weights.writing import DONE_SUFFIX, Written, done_path, finished

PARTIAL = ".partial"  # below the address: what is finished, until all is
KEY = f"{PARTIAL}/key"


class Output(Protocol):
    work: Path  # where files are made
    keeps_files: bool  # whether finished files stay in `work`

    def existing(self) -> Path | None:
        """The folder of the records of a whole output that is there already."""

    def holds(self, files: Iterable[ShardFile]) -> bool:
        """Whether an output that is there has these files, in these sizes."""

    def begin(self, state: str, *, keep: bool = False) -> None:
        """Start anew unless what is there was begun from the same inputs (`state`)."""

    def finished(self, planned: StoredFile, stop: threading.Event) -> Written | None:
        """What an earlier run finished of this file, when it is still that."""

    def store(self, planned: StoredFile, written: Written) -> None:
        """A file is finished: put it where it belongs."""

    def seal(self, files: Mapping[str, int]) -> Path:
        """All is made: publish it. `files`: sizes of all files of the output. Returns the folder of its records."""

    def discard(self) -> None:
        """Nothing is to be made after all."""


@contextlib.contextmanager
def kept_if_sound(output: Output) -> Iterator[None]:
    """What is made of a source that turns out to be unsound goes; what another try can continue stays."""
    try:
        yield
    except UnsoundSource:
        output.discard()
        raise


class LocalOutput:
    """A folder, published by one rename."""

    keeps_files = True

    def __init__(self, work: Path, out: Path, complete: str) -> None:
        self.work, self._out, self._complete = work, out, complete

    def existing(self) -> Path | None:
        return self._out if (self._out / self._complete).is_file() else None

    def holds(self, files: Iterable[ShardFile]) -> bool:
        paths = ((self._out / one.file, one.num_bytes) for one in files)
        return all(path.is_file() and path.stat().st_size == num_bytes for path, num_bytes in paths)

    def begin(self, state: str, *, keep: bool = False) -> None:
        prepare(self.work, state, keep=keep)

    def finished(self, planned: StoredFile, stop: threading.Event) -> Written | None:
        return finished(self.work, planned, stop)

    def store(self, planned: StoredFile, written: Written) -> None:
        pass

    def seal(self, files: Mapping[str, int]) -> Path:
        sync_tree(self.work)
        publish(self.work, self._out)
        return self._out

    def discard(self) -> None:
        shutil.rmtree(self.work)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """What is noted of an uploaded file: its ledger fragment, and what the object was when it was compared."""

    __pydantic_config__ = STRICT
    written: Written
    num_bytes: int
    version: str | None


class RemoteOutput:
    """An address. Used from several threads."""

    def __init__(self, objects: ObjectFolder, work: Path, scratch: Path, complete: str, keep: Path | None) -> None:
        self.work, self.keeps_files = work, keep is not None
        self._objects, self._scratch, self._complete, self._keep = objects, scratch, complete, keep
        self._there = objects.everything()
        if self._there and complete not in self._there and KEY not in self._there:
            raise DayZeroError(f"{objects.address} is in the way", got=f"objects without {complete}",
                               want="a new or empty prefix", fix="choose another --out or remove it")  # fmt: skip

    def existing(self) -> Path | None:
        if self._complete not in self._there:
            return None
        for name in self._there:
            if not name.endswith(".safetensors") and not name.startswith(f"{PARTIAL}/") and not refusal(name):
                self._objects.save(name, self._scratch / "records" / name)
        return self._scratch / "records"

    def holds(self, files: Iterable[ShardFile]) -> bool:
        return all(self._there.get(one.file) == one.num_bytes for one in files)

    def begin(self, state: str, *, keep: bool = False) -> None:
        prepare(self.work, state, keep=keep)
        self._objects.tidy()
        same = KEY in self._there and self._objects.read(KEY).decode("utf-8", "replace") == state
        if not same:
            # The one file that makes it usable goes first, so that no half of it is ever taken for a whole.
            for name in sorted(self._there, key=lambda name: name != self._complete):
                self._objects.remove(name)
            self._there = {}
            self._put_text(KEY, state)
        elif self._complete in self._there:  # sealed, then damaged
            self._objects.remove(self._complete)
            del self._there[self._complete]

    def finished(self, planned: StoredFile, stop: threading.Event) -> Written | None:
        note = f"{PARTIAL}/{planned.file}{DONE_SUFFIX}"
        if note in self._there and planned.file in self._there:
            noted = from_dict(_Stored, json.loads(self._objects.read(note)), source=self._objects.shown(note))
            now = self._objects.state(planned.file)
            whole = (now.num_bytes, now.version) == (planned.num_bytes, noted.version) == (noted.num_bytes, noted.version)
            names = [tensor.parameter for tensor in planned.tensors]
            if whole and [entry.parameter for entry in noted.written.entries] == names:
                return noted.written
        written = finished(self.work, planned, stop)
        if written is not None:
            self.store(planned, written)
        return written

    def store(self, planned: StoredFile, written: Written) -> None:
        path = self.work / planned.file
        state = self._objects.put(planned.file, path)
        noted = _Stored(written=written, num_bytes=state.num_bytes, version=state.version)
        text = json.dumps(record_json(noted), separators=(",", ":"))
        self._put_text(f"{PARTIAL}/{planned.file}{DONE_SUFFIX}", text)
        if not self.keeps_files:
            done_path(self.work, planned).unlink(missing_ok=True)
            path.unlink()

    def seal(self, files: Mapping[str, int]) -> Path:
        there = self._objects.everything()
        for name, num_bytes in sorted(files.items(), key=lambda one: one[0] == self._complete):
            if name.endswith(".safetensors"):
                if there.get(name) != num_bytes:
                    shutil.rmtree(self.work)  # it holds only what rests on those files: all is looked at again
                    raise DayZeroError(f"{self._objects.shown(name)} is not as it was uploaded", got=there.get(name, "nothing"),
                                       want=f"{num_bytes} bytes",
                                       fix="see who else writes there, then run it again: it continues")  # fmt: skip
            elif name != self._complete:
                self._objects.put(name, self.work / name)
        for name in there.keys() - files.keys():
            if not name.startswith(f"{PARTIAL}/"):
                self._objects.remove(name)
        self._objects.put(self._complete, self.work / self._complete)
        self._remove_notes()
        if self._keep is None:
            return self.work
        sync_tree(self.work)
        publish(self.work, self._keep)
        return self._keep

    def discard(self) -> None:
        there = self._objects.everything()
        if self._complete not in there:  # what was uploaded belongs to nothing
            for name in there:
                if not name.startswith(f"{PARTIAL}/"):
                    self._objects.remove(name)
        self._remove_notes()
        shutil.rmtree(self.work)

    def _remove_notes(self) -> None:
        """The key last: as long as it is there, what is there is known to be ours."""
        notes = [name for name in self._objects.everything() if name.startswith(f"{PARTIAL}/")]
        for name in sorted(notes, key=lambda name: name == KEY):
            self._objects.remove(name)

    def _put_text(self, name: str, text: str) -> None:
        place = self._scratch / "texts" / name
        write_text_atomic(place, text)
        self._objects.put(name, place)
        place.unlink()


@contextlib.contextmanager
def open_output(out: Path | str, *, complete: str, keep: Path | None = None) -> Iterator[Output]:
    """The output at a folder or an address, for this process alone on this machine.

    complete: the file that an output which is whole has. keep: of an output at an address, the folder that gets a copy too.
    Raises DayZeroError when something else is there.
    """
    if not is_remote(out):
        with locked_work_folder(Path(out), complete=complete) as work:
            yield LocalOutput(work, Path(out), complete)
        return
    objects = ObjectFolder(out)
    name = f"{objects.address.rpartition('/')[2]}-{hashlib.sha256(objects.address.encode()).hexdigest()[:16]}"
    with (
        contextlib.closing(objects),
        locked_work_folder(keep or cache_folder("conversions") / name, complete=complete) as work,
        tempfile.TemporaryDirectory(prefix="dayzero-remote-") as scratch,
    ):
        yield RemoteOutput(objects, work, Path(scratch), complete, keep)
        if keep is None and work.is_dir():
            shutil.rmtree(work)
