"""One request to an object store or web server, through fsspec: look at an object, read a range of it, list, store, remove.

Each method asks once; what came back wrong is told by the classes of `outcomes`. S3 and the web are asked through their fsspec
file systems' own clients, which tell the object's version with every range; other protocols (gs://, az://, memory://, ...) have
only fsspec's common calls, so there the version is looked at again after each range. Not here: trying again, caching.
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from dayzero.core.errors import DayZeroError, one_line
from dayzero.model.remote.outcomes import CHUNK_BYTES, Changed, ObjectState, Passing, shown, told

# What file systems call an object's version, the surest first.
VERSION_NAMES = ("ETag", "etag", "generation", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "updated",
                 "created")  # fmt: skip


class Access(Protocol):
    """A folder of objects; names are relative to it. Safe to call from several threads."""

    def look(self, name: str) -> ObjectState | None: ...
    def read(self, name: str, start: int, target: memoryview, state: ObjectState) -> None: ...
    def entries(self) -> dict[str, int | None] | None:
        """What lies at the top: sizes of files, None for folders. None where the protocol cannot list."""

    def everything(self) -> dict[str, int]:
        """All files below, with their sizes."""

    def put(self, name: str, path: Path) -> tuple[ObjectState, bool]:
        """Store a file. Its state, and whether the server's checksum of it was compared."""

    def remove(self, name: str) -> None: ...
    def tidy(self) -> None:
        """Remove what a killed upload may have left (parts that no object shows)."""

    def close(self) -> None: ...


def open_access(address: str, timeout_s: float, connections: int) -> Access:
    """Raises DayZeroError when the packages of this protocol are not installed or the address is not one."""
    scheme = address.partition("://")[0].lower()
    try:
        import fsspec

        if scheme in ("s3", "s3a"):
            from dayzero.model.remote.s3 import S3Access

            return S3Access(address, timeout_s, connections)
        if scheme in ("http", "https"):
            from dayzero.model.remote.web import WebAccess

            return WebAccess(address, timeout_s, connections)
        if scheme == "hf":
            raise DayZeroError("hubs are not read by their names", got=address, want="a folder, or the https address of one",
                               fix="download the release, or give https://huggingface.co/ORG/MODEL/resolve/main/")  # fmt: skip
        if scheme == "ftp":
            raise ValueError("ftp knows no versions of files: a changed one could not be told")
        system, path = fsspec.core.url_to_fs(address, skip_instance_cache=True, use_listings_cache=False)
        return CommonAccess(system, path)
    except ImportError as error:
        raise DayZeroError(f"{scheme}:// cannot be read here", got=one_line(error), want="the packages of this protocol",
                           fix="pip install 'dayzero[remote]'") from error  # fmt: skip
    except ValueError as error:
        raise DayZeroError(f"{address} is not an address this can read", got=one_line(error),
                           want="s3://, gs://, http(s):// or another protocol of fsspec",
                           fix="correct it") from error  # fmt: skip


class CommonAccess:
    """Any fsspec file system."""

    def __init__(self, system: Any, path: str) -> None:
        self.system, self.base = system, path.rstrip("/")

    def look(self, name: str) -> ObjectState | None:
        with told(missing=False) as outcome:
            found = self.system.info(self._path(name))
            if found.get("type") == "directory":
                return None
            return ObjectState(num_bytes=int(found["size"]), version=version_in(found))
        assert outcome.missing
        return None

    def read(self, name: str, start: int, target: memoryview, state: ObjectState) -> None:
        with told() as outcome:
            data = self.system.cat_file(self._path(name), start=start, end=start + len(target))
            outcome.done = min(len(data), len(target))
            target[: outcome.done] = data[: outcome.done]
            if (now := self.look(name)) != state:
                raise Changed(shown(now))
            if outcome.done < len(target):
                raise Passing(f"{outcome.done} of {len(target)} bytes came", done=outcome.done)

    def entries(self) -> dict[str, int | None] | None:
        with told(missing=False):
            listed = self.system.ls(self.base, detail=True)
            return {
                posixpath.basename(one["name"].rstrip("/")): None if one["type"] == "directory" else int(one["size"] or 0)
                for one in listed
                if one["name"].rstrip("/") != self.base
            }
        return {}

    def everything(self) -> dict[str, int]:
        with told(missing=False):
            listed = self.system.find(self.base, detail=True)
            return {name.removeprefix(self.base).lstrip("/"): int(one["size"] or 0) for name, one in listed.items()}
        return {}

    def put(self, name: str, path: Path) -> tuple[ObjectState, bool]:
        with told():
            self.system.makedirs(posixpath.dirname(self._path(name)), exist_ok=True)
            self.system.put_file(str(path), self._path(name))
            state = self.look(name)
            if state is None:
                raise Passing("stored, and then not there")
            md5 = self.system.info(self._path(name)).get("md5Hash")  # of gs://, for objects stored in one piece
            if md5 is not None and base64.b64decode(md5) != md5_of(path, 0, path.stat().st_size):
                raise Passing("the server's checksum of what was stored is another one")
            return state, md5 is not None

    def remove(self, name: str) -> None:
        with told(missing=False):
            self.system.rm_file(self._path(name))

    def tidy(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _path(self, name: str) -> str:
        return f"{self.base}/{name}"


class Asynchronous:
    """What S3 and the web share: a client that lives in fsspec's loop."""

    system: Any

    def _run(self, made: Callable[..., Any], *arguments: Any) -> Any:
        from fsspec.asyn import sync

        return sync(self.system.loop, made, *arguments)


def version_in(info: dict[str, Any]) -> str | None:
    """The first of what file systems call it that is there."""
    return next((str(info[name]) for name in VERSION_NAMES if info.get(name) is not None), None)


def md5_of(path: Path, start: int, num_bytes: int) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while num_bytes and (block := file.read(min(CHUNK_BYTES, num_bytes))):
            digest.update(block)
            num_bytes -= len(block)
    return digest.digest()
