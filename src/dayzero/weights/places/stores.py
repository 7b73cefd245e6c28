"""A path or an address in; the release or artifact there, open, and a store that reads its weights by ranges, out.

Of an address, config, tokenizer and the other small files lie in a temporary folder for as long as it is open, and the
weights are read from where they are (`remote_store`). Not here: what a request is (`model.remote`), writing (`publishing`).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.model.config_keys import config_dtype
from dayzero.model.describe import describe_release
from dayzero.model.paths import refusal
from dayzero.model.release import CONFIG, Release, open_release
from dayzero.model.remote.objects import CONNECTIONS, ObjectFolder, is_remote
from dayzero.model.remote.release import fetch_settings
from dayzero.weights.forms.stored import Decoded, decode_stored
from dayzero.weights.places.remote_store import BLOCK_BYTES, MEMORY_BYTES, FsspecStore
from dayzero.weights.reading import ByteStore, LocalStore

__all__ = ["FsspecStore", "OpenArtifact", "Source", "local_folder", "open_artifact", "open_source"]

GGUF = ".gguf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """An open source: the release, what its weights are read through, and the folder of its settings. `given`: its tensors in
    plain numbers where the container itself says what they are (pickles, GGUF), and not the release's settings."""

    release: Release
    store: ByteStore
    settings: Path
    address: str  # what the user gave
    given: Callable[[str], Decoded] | None = None

    def decode(self, dtype: str, *, upcast_unscaled: bool = False) -> Decoded:
        """The checkpoint in plain numbers, those that were stored as codes in `dtype`."""
        if self.given is not None:
            return self.given(dtype)
        return decode_stored(self.release, dtype, upcast_unscaled=upcast_unscaled, store=self.store)

    def describe(self) -> ModelDescription:
        """The model, by the names a plain checkpoint has."""
        if self.given is None:
            return describe_release(self.release)
        plain = self.given(config_dtype(self.release.config)[0] or "bfloat16")
        return describe_release(replace(self.release, tensors=plain.tensors))


@contextlib.contextmanager
def open_source(
    place: Path | str, *, block_bytes: int = BLOCK_BYTES, memory_bytes: int = MEMORY_BYTES, connections: int = CONNECTIONS,
    spool: Path | None = None, allow_pickle: bool = False,
) -> Iterator[Source]:  # fmt: skip
    """The release at a folder, in a Hugging Face cache, or at an address. Errors from within name the address, never the
    temporary folder.

    spool: a folder with room for the weights, in which those of an address are kept for as long as this is open.
    allow_pickle: pickle weights are read, by ranges of their containers; nothing of them is run.
    """
    if not is_remote(place) and str(place).endswith(GGUF) and local_folder(place).is_file():
        yield from _gguf(local_folder(place))
        return
    if not is_remote(place) and allow_pickle and (pickled := _pickled(local_folder(place))) is not None:
        with contextlib.closing(pickled.store):
            yield pickled
        return
    if not is_remote(place):
        release = open_release(local_folder(place))
        store = LocalStore(release.folder)
        try:
            yield Source(release=release, store=store, settings=release.folder, address=str(place))
        finally:
            store.close()
        return
    objects = ObjectFolder(str(place).removesuffix(CONFIG), connections=connections)
    with contextlib.ExitStack() as stack:
        kept = None
        if spool is not None:
            spool.mkdir(parents=True, exist_ok=True)
            kept = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".dayzero-spool-", dir=spool)))
        remote = stack.enter_context(FsspecStore(objects, block_bytes=block_bytes, memory_bytes=memory_bytes, spool=kept))
        scratch = stack.enter_context(_scratch(objects))
        release = fetch_settings(objects, scratch)
        remote.arrange(release.tensors.values())
        yield Source(release=release, store=remote, settings=release.folder, address=objects.address)


def _gguf(path: Path) -> Iterator[Source]:
    """A GGUF file, its settings written as files for as long as it is open."""
    from dayzero.weights.gguf.settings import write_settings
    from dayzero.weights.gguf.source import main_dtype, read_gguf

    found = read_gguf(path)
    if (own := main_dtype(found)) != "bfloat16":
        found = read_gguf(path, own)

    def given(dtype: str) -> Decoded:
        read = found if dtype == own else read_gguf(path, dtype)
        return Decoded(tensors=read.tensors, decoders=read.decoders, problems=read.problems)

    with tempfile.TemporaryDirectory(prefix="dayzero-gguf-") as scratch, contextlib.closing(LocalStore(path.parent)) as store:
        settings = Path(scratch) / path.stem
        write_settings(found, settings)
        yield Source(release=found.release(settings), store=store, settings=settings, address=str(path), given=given)


def _pickled(folder: Path) -> Source | None:
    """A release whose weights are pickles alone; None when they are not."""
    from dayzero.weights.pickles.folder import read_pickled, with_pickled

    before = open_release(folder)
    release = with_pickled(before)
    if release is before:
        return None
    found = read_pickled(release.folder)
    release = replace(release, problems=(*release.problems, *found.checksum_problems()))
    plain = Decoded(tensors=found.logical, decoders=found.decoders)
    return Source(release=release, store=LocalStore(release.folder), settings=release.folder, address=str(folder),
                  given=lambda dtype: plain)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenArtifact:
    """An artifact: `folder` holds its records and settings, `store` reads its shards. `files`: all there is, with sizes."""

    folder: Path
    store: ByteStore
    files: dict[str, int]
    objects: ObjectFolder | None = None  # of one at an address

    @contextlib.contextmanager
    def on_disk(self, file: str) -> Iterator[Path]:
        """A shard as a file, for those who need one; of an address it is here for that long only."""
        place = self.folder / file
        if self.objects is None or file not in self.files:
            yield place
            return
        try:
            self.objects.save(file, place)
            yield place
        finally:
            place.unlink(missing_ok=True)


@contextlib.contextmanager
def open_artifact(place: Path | str) -> Iterator[OpenArtifact]:
    """The artifact in a folder or at an address, finished or not."""
    if not is_remote(place):
        store = LocalStore(local_folder(place))
        here = (path for path in store.folder.rglob("*") if path.is_file())
        sizes = {path.relative_to(store.folder).as_posix(): path.stat().st_size for path in here}
        try:
            yield OpenArtifact(folder=store.folder, store=store, files=sizes)
        finally:
            store.close()
        return
    objects = ObjectFolder(place)
    with FsspecStore(objects) as remote, _scratch(objects) as scratch:
        folder = scratch / "artifact"
        folder.mkdir()
        files = objects.everything()
        for name in files:
            if not name.endswith(".safetensors") and not refusal(name):
                objects.save(name, folder / name)
        yield OpenArtifact(folder=folder, store=remote, files=files, objects=objects)


def has_file(place: Path | str, name: str) -> bool:
    """Whether there is such a file at the folder or address."""
    if not is_remote(place):
        return (local_folder(place) / name).is_file()
    with contextlib.closing(ObjectFolder(place)) as objects:
        return objects.look(name) is not None


def local_folder(place: Path | str) -> Path:
    """The folder itself, or of a repository in the Hugging Face cache the snapshot that its main branch is.

    Raises DayZeroError when there are several snapshots and nothing says which.
    """
    text = str(place)
    folder = Path("/" + text.split(":", 1)[1].lstrip("/")) if text.startswith(("file:/", "local:/")) else Path(place)
    if not folder.name.startswith("models--") or not (folder / "snapshots").is_dir() or (folder / CONFIG).exists():
        return folder
    found = sorted(one.name for one in (folder / "snapshots").iterdir() if one.is_dir())
    main = folder / "refs" / "main"
    if main.is_file():
        commit = main.read_text(encoding="utf-8").strip()
        if commit in found:
            return folder / "snapshots" / commit
        raise DayZeroError(f"{folder} has no snapshot of its main branch", got=", ".join(found) or "no snapshot", want=commit,
                           fix="download it again, or give the folder of a snapshot")  # fmt: skip
    if len(found) != 1:
        raise DayZeroError(f"{folder} does not say which snapshot to use", got=", ".join(found) or "no snapshot",
                           want="refs/main, or one snapshot",
                           fix=f"give one of them: {folder / 'snapshots'}/...")  # fmt: skip
    return folder / "snapshots" / found[0]


@contextlib.contextmanager
def _scratch(objects: ObjectFolder) -> Iterator[Path]:
    """A temporary folder, whose name is replaced by the address in errors."""
    with tempfile.TemporaryDirectory(prefix="dayzero-remote-") as name:
        try:
            yield Path(name)
        except DayZeroError as error:
            made = [str(folder) for folder in Path(name).iterdir()]

            def without(text: str) -> str:
                for folder in made:
                    text = text.replace(folder, objects.address)
                return text

            if not any(name in text for text in (error.what, error.got, error.want, error.fix)):
                raise
            raise DayZeroError(without(error.what), got=without(error.got), want=without(error.want), fix=without(error.fix),
                               details=error.details) from error  # fmt: skip
