"""A release folder in, what its publisher says its files' bytes are out; and files held against that.

Places looked at: checksum files (`SHA256SUMS` and the like, `<file>.sha256`), blob names of the hub cache, the metadata that a
download with `--local-dir` leaves, Git LFS pointers kept beside, manifests that list files with a sha256. A digest speaks of
the one file it names and of nothing else; without any, low bits, exchanged tensors and stale shards cannot be told. A file
hashed to git's blob id or to a sha256 is proven to that; who published the digest is not proven here.

Not done here: fetching digests from a hub, signatures, digests of single tensors.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.core.records import STRICT
from dayzero.model.paths import contained
from dayzero.weights.checks.digest_files import DOWNLOAD_METADATA, Found, cache_digests, listed_digests, metadata_digests
from dayzero.weights.files import CHUNK_BYTES, Progress

WEIGHT_ENDINGS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
NONE_PUBLISHED = "no digests were published: low bits, exchanged tensors and stale shards cannot be told"


@dataclass(frozen=True, kw_only=True, slots=True)
class Digest:
    """What one place says of one file. `git-sha1`: the sha1 of `blob <size>`, a NUL and the content, as git names blobs."""

    __pydantic_config__ = STRICT
    file: str
    algorithm: Literal["sha256", "git-sha1"]
    hex: str
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Digests:
    """Everything found, one or more for a file. `problems`: lines not understood, names refused, places that disagree."""

    __pydantic_config__ = STRICT
    digests: tuple[Digest, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def found(self) -> bool:
        return bool(self.digests)

    def by_file(self) -> dict[str, list[Digest]]:
        made: dict[str, list[Digest]] = {}
        for one in self.digests:
            made.setdefault(one.file, []).append(one)
        return made

    def uncovered(self, files: Iterable[str]) -> tuple[str, ...]:
        """Of these files, those of which no place says anything."""
        known = {one.file for one in self.digests}
        return tuple(file for file in files if file not in known)

    def coverage(self, files: Iterable[str]) -> str:
        """A sentence for the report on what the digests of these files can show."""
        files = list(files)
        missing = self.uncovered(files)
        if len(missing) == len(files):
            return NONE_PUBLISHED
        places = ", ".join(dict.fromkeys(one.where for one in self.digests if one.file in set(files)))
        if not missing:
            return f"all {len(files)} files have a published digest ({places})"
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        blind = NONE_PUBLISHED.partition(": ")[2]
        return f"{len(missing)} of {len(files)} files have no published digest ({shown}): of those {blind}"


def publisher_digests(folder: Path) -> Digests:
    """All digests found in `folder`, for files inside it, present or not. Nothing is hashed, and no name is trusted."""
    found = Found()
    for collect in (listed_digests, cache_digests, metadata_digests):
        collect(folder, found)
    problems = list(found.problems)
    digests: dict[Digest, None] = {}
    first: dict[tuple[str, str], Digest] = {}
    for name, algorithm, value, where in found.entries:
        if contained(folder, name)[0] is None:
            problems.append(
                _problem("unsafe_path", where, f"it names {name!r}, which is refused: {contained(folder, name)[1]}")
            )
            continue
        # As the release calls it: without `./` in front.
        one = Digest(file=Path(name).as_posix(), algorithm=algorithm, hex=value, where=where)
        before = first.setdefault((one.file, algorithm), one)
        if before.hex != value:
            problems.append(_problem("digest_conflict", one.file, f"{where} says {algorithm} {value}, {before.where} says "
                                     f"{before.hex}"))  # fmt: skip
        digests[one] = None
    return Digests(digests=tuple(digests), problems=tuple(problems))


def check_digests(folder: Path, digests: Digests, hashes: Mapping[str, str], *, required: Iterable[str] = ()) -> list[Problem]:
    """Files whose bytes are not what was published, as errors, and `required` files without any digest, as one warning.

    hashes: file -> `sha256:<hex>` or `git-sha1:<hex>`, computed from the bytes (`hash_files`). A digest by an algorithm that
    its file was not hashed with says nothing. Lists of a whole repository name more than a download holds: only `required`
    files are missed. Settings are often edited after a download, so what its metadata alone says of them is a warning.
    """
    required = set(required)
    problems = []
    for file, published in digests.by_file().items():
        if not (folder / file).is_file():
            if file in required:
                problems.append(_problem("missing_file", file, f"{published[0].where} lists it, and it is not in the folder"))
            continue
        algorithm, _, value = hashes.get(file, "").partition(":")
        wrong = [one for one in published if one.algorithm == algorithm and one.hex != value]
        for one in wrong:
            made = _problem("digest_mismatch", file, f"its {algorithm} is {value}, {one.where} says {one.hex}: it is not the "
                            "file that was published")  # fmt: skip
            edited = one.where == DOWNLOAD_METADATA and not file.endswith(WEIGHT_ENDINGS)
            problems.append(replace(made, severity="warning") if edited else made)
    missing = digests.uncovered(sorted(required))
    if missing and digests.found:
        problems.append(Problem(kind="digest_missing", severity="warning", file=missing[0],
                                detail=f"{missing[0]}: {digests.coverage(sorted(required))}"))  # fmt: skip
    return problems


def hash_files(
    folder: Path, digests: Digests, files: Iterable[str], *, progress: Progress | None = None, workers: int = 2
) -> dict[str, str]:
    """file -> `<algorithm>:<hex>` of those of `files` that have a digest and exist, each with the best algorithm published.

    A pass over the files, `workers` at a time, in memory of CHUNK_BYTES each. Raises DayZeroError when a file cannot be read.
    """
    known = {file: {one.algorithm for one in published} for file, published in digests.by_file().items()}
    wanted = {
        file: "sha256" if "sha256" in known[file] else "git-sha1"
        for file in files
        if file in known and contained(folder, file)[0] is not None and (folder / file).is_file()
    }
    total, done, lock = sum((folder / file).stat().st_size for file in wanted), 0, threading.Lock()
    stop = threading.Event()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress:
                progress("checking digests", done, total)

    def one(file: str) -> str:
        try:
            return f"{wanted[file]}:{_hash(folder / file, wanted[file], stop, advance)}"
        except OSError as error:
            raise DayZeroError(f"cannot read {file}", got=error.strerror or str(error), want="its bytes, to check its digest",
                               fix="check the disk and permissions") from error  # fmt: skip

    # Largest first, so that no long one is left to a single thread at the end.
    order = sorted(wanted, key=lambda file: (-(folder / file).stat().st_size, file))
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="digests") as pool:
        try:
            return dict(zip(order, pool.map(one, order), strict=True))
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _hash(path: Path, algorithm: str, stop: threading.Event, advance: Callable[[int], None]) -> str:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256() if algorithm == "sha256" else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        while not stop.is_set() and (count := file.readinto(buffer)):
            digest.update(buffer[:count])
            advance(count)
    return digest.hexdigest()


def _problem(kind: str, file: str, detail: str) -> Problem:
    return Problem(kind=kind, severity="error", file=file, detail=f"{file}: {detail}")
