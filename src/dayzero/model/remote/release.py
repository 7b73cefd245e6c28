"""The web address of a release folder in, the `Release` out that the folder itself would give. Weights stay where they are.

Fetched: config, generation, tokenizer and quantization settings, the shard index, and of every shard its header, by HTTP
range; from a server without ranges no weights are read, which is a warning. Each header becomes the start of an otherwise
empty (sparse) file of the shard's real size in a temporary folder, which the one reader of releases then reads: all its
checks, down to a file that is too short for its tensors, hold for remote ones too. The folder is gone afterwards, so nothing
can take the holes for weights. Not done here: names on hubs, logins; code; tokenizer.json, whose
presence alone is asked for, and told.
"""

from __future__ import annotations

import http.client
import json
import re
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.model.headers import LENGTH_FIELD_BYTES
from dayzero.model.paths import contained
from dayzero.model.release import CONFIG, INDEX, SINGLE, Release, is_address, open_release
from dayzero.model.stored.quantization import BESIDE

__all__ = ["is_address", "open_remote_release"]

SETTINGS = ("generation_config.json", "tokenizer_config.json", BESIDE)
TOKENIZER = "tokenizer.json"
MAX_SETTINGS_BYTES = 16 << 20
MAX_INDEX_BYTES = 256 << 20
MAX_HEADER_BYTES = 256 << 20  # that of a real file with 1.29 million tensors has 126 MB
FIRST_BYTES = 512  # what the reader looks at to tell a header from a web page or a pointer file
PIECE_BYTES = 1 << 18
ATTEMPTS = 3
PAUSE_S = 0.3
TIMEOUT_S = 30.0
RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)$")


class NoRanges(DayZeroError):
    """The server sends whole files whatever part is asked for: no header can be had without its shard."""


def open_remote_release(address: str, *, timeout_s: float = TIMEOUT_S, workers: int = 8) -> Release:
    """The release that a web server holds at `address`, a folder or its config.json.

    timeout_s: for each wait on the network. Raises DayZeroError when there is no config, or the server cannot be read from.
    """
    site = _Site(address, timeout_s)
    with tempfile.TemporaryDirectory(prefix="dayzero-remote-") as scratch:
        folder = Path(scratch) / site.name
        folder.mkdir()
        if not site.save(CONFIG, folder, MAX_SETTINGS_BYTES):
            raise DayZeroError(f"{site.base} holds no {CONFIG}", got="404 not found",
                               want="the address of a folder with a Hugging Face release",
                               fix="check the address; it is the folder that holds config.json")  # fmt: skip
        for name in SETTINGS:
            site.save(name, folder, MAX_SETTINGS_BYTES)
        unread = [_not_read(TOKENIZER, f"{TOKENIZER} is not fetched: tokens that it alone names are not known")]
        told = unread if site.holds(TOKENIZER) else []
        shards = _shards(site, folder) if site.save(INDEX, folder, MAX_INDEX_BYTES) else [SINGLE]
        try:
            _save_headers(site, folder, shards, workers)
        except NoRanges as error:
            # Also what little shards came whole: a release is described from all of its headers or from none.
            for name in (INDEX, *shards):
                (folder / name).unlink(missing_ok=True)
            said = f"{error.what}: {error.got}; the weights are not read, and every figure is from the config"
            told = [*told, _not_read(shards[0], said)]
        try:
            found = open_release(folder)
        except DayZeroError as error:
            what, got = (text.replace(f"{folder}/", site.base) for text in (error.what, error.got))
            raise DayZeroError(what, got=got, want=error.want, fix=f"check what {site.base} serves") from error
    problems = tuple(
        replace(one, detail=one.detail.replace("not on disk", "not on the server")) if one.kind == "missing_file" else one
        for one in found.problems
    )
    return replace(found, folder=Path(site.base), name=site.name, problems=(*problems, *told))


def _not_read(file: str, detail: str) -> Problem:
    return Problem(kind="not_read", severity="warning", file=file, detail=detail)


def _save_headers(site: _Site, folder: Path, shards: list[str], workers: int) -> None:
    with ThreadPoolExecutor(max_workers=workers) as pool:
        try:
            for _ in pool.map(lambda name: site.save_header(name, folder), shards):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _shards(site: _Site, folder: Path) -> list[str]:
    """The files that the index names and that may be asked for; what is wrong with the others, the reader says."""
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except (ValueError, RecursionError):
        return []
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    names: Iterable[Any] = weight_map.values() if isinstance(weight_map, dict) else ()
    return [name for name in dict.fromkeys(map(str, names)) if contained(folder, name)[0] is not None and name != CONFIG]


class _Site:
    """One web folder, read by whole small files and by ranges of large ones. Used from several threads."""

    def __init__(self, address: str, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(re.sub(r"^(https?):/+", r"\1://", address, flags=re.IGNORECASE))
        if parts.scheme.lower() not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise DayZeroError("not a usable web address", got=address, want="http(s)://host/folder/, without a login",
                               fix="correct the address, or download the files")  # fmt: skip
        path = parts.path.removesuffix(CONFIG).rstrip("/") + "/"
        self.base = urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        self.query = parts.query
        self.name = _name(parts.hostname, path)
        self.timeout_s = timeout_s
        # Only what is needed: the default opener would also follow a redirection to ftp.
        self.opener = urllib.request.OpenerDirector()
        for handler in (urllib.request.ProxyHandler(), urllib.request.HTTPHandler(), urllib.request.HTTPSHandler(),
                        urllib.request.HTTPRedirectHandler(), urllib.request.HTTPErrorProcessor(),
                        urllib.request.HTTPDefaultErrorHandler()):  # fmt: skip
            self.opener.add_handler(handler)

    def save(self, name: str, folder: Path, max_bytes: int) -> bool:
        """Fetch a whole file into the folder. False when the server has none."""
        content = self._fetch(name, None, max_bytes)
        if content is None:
            return False
        (folder / name).write_bytes(content[0])
        return True

    def holds(self, name: str) -> bool:
        """Whether the server has this file, of which no more than the first bytes are fetched."""
        try:
            return self._fetch(name, (0, FIRST_BYTES), FIRST_BYTES) is not None
        except NoRanges:
            return True

    def save_header(self, name: str, folder: Path) -> None:
        """Make a sparse file of a shard's size that begins with its header. Nothing when the server has no such file."""
        start = self._fetch(name, (0, FIRST_BYTES), FIRST_BYTES)
        if start is None:
            return
        content, size = start
        length = int.from_bytes(content[:LENGTH_FIELD_BYTES], "little")
        wanted = LENGTH_FIELD_BYTES + length
        # What does not begin like a header is not worth fetching: the reader says what it is.
        is_header = len(content) > LENGTH_FIELD_BYTES and content[LENGTH_FIELD_BYTES : LENGTH_FIELD_BYTES + 1] == b"{"
        if is_header and length <= MAX_HEADER_BYTES and len(content) < (stop := min(wanted, size)):
            rest = self._fetch(name, (len(content), stop), stop)
            if rest is None or rest[1] != size:
                raise self._failed(name, f"{size} bytes, then {'nothing' if rest is None else rest[1]}", "a file that stays")
            content += rest[0]
        elif is_header and MAX_HEADER_BYTES < length < size:
            raise self._failed(name, f"a header of {length} bytes", f"at most {MAX_HEADER_BYTES} bytes")
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with place.open("wb") as file:
                file.write(content)
                file.truncate(size)
        except (OSError, OverflowError) as error:
            raise self._failed(name, f"{size} bytes: {error}", "a size that a file can have") from error
        if place.stat().st_blocks * 512 > len(content) + (1 << 20):
            raise DayZeroError("the temporary folder cannot hold sparse files", got=tempfile.gettempdir(),
                               want="a file system with sparse files", fix="set TMPDIR to another folder")  # fmt: skip

    def _fetch(self, name: str, span: tuple[int, int] | None, max_bytes: int) -> tuple[bytes, int] | None:
        """Content (of bytes `span[0]` to `span[1]`, excluded) and the file's size; None for 404. Tries again what may pass."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._fetch_once(name, span, max_bytes)
            except urllib.error.HTTPError as error:
                if error.code in (404, 410):
                    return None
                if error.code == 416 and (size := _total(error.headers)) is not None:  # nothing there: an empty file
                    return b"", size
                reason, final = f"HTTP {error.code} {error.reason}", error.code < 500 and error.code != 429
            except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out, cut short
                cause = error.reason if isinstance(error, urllib.error.URLError) else error
                late = isinstance(cause, TimeoutError)
                reason, final = f"no answer within {self.timeout_s:g} s" if late else f"{type(cause).__name__}: {cause}", False
            if final or attempt == ATTEMPTS:
                break
            time.sleep(PAUSE_S * attempt)
        raise self._failed(name, reason, "the file, or 404 where there is none")

    def _fetch_once(self, name: str, span: tuple[int, int] | None, max_bytes: int) -> tuple[bytes, int]:
        address = self.base + urllib.parse.quote(name) + (f"?{self.query}" if self.query else "")
        headers = {"Range": f"bytes={span[0]}-{span[1] - 1}"} if span else {}
        request = urllib.request.Request(address, headers={"User-Agent": "dayzero", "Accept-Encoding": "identity"} | headers)
        with self.opener.open(request, timeout=self.timeout_s) as response:
            size = length = _number(response.headers.get("Content-Length"))
            if span and response.status == 206:
                given = RANGE.match(response.headers.get("Content-Range", ""))
                if given is None or given.group(1) is None or int(given.group(1)) != span[0]:
                    got = f"Content-Range {response.headers.get('Content-Range')!r:.100}"
                    raise self._failed(name, got, "the bytes asked for")
                size, length = int(given.group(3)), int(given.group(2)) + 1 - span[0]
            elif span and (span[0] or length is None or length > span[1]):
                sends = "a length it does not tell" if length is None else f"{length} bytes"
                raise self._failed(name, f"a server that ignores Range and sends {sends}",
                                   "a server that serves ranges: whole shards are not downloaded", NoRanges)  # fmt: skip
            if length is not None and length > max_bytes:
                raise self._failed(name, f"{length} bytes", f"at most {max_bytes} bytes")
            content = self._read(response, name, max_bytes)
        if length is not None and len(content) != length:
            raise http.client.IncompleteRead(content, length - len(content))
        return content, len(content) if size is None else size

    def _read(self, response: Any, name: str, max_bytes: int) -> bytes:
        """A server that drips is one that does not answer: the body has as long as it takes at 10 kB/s, and the timeout."""
        content, started = bytearray(), time.monotonic()
        while piece := response.read1(PIECE_BYTES):
            content += piece
            if len(content) > max_bytes:
                raise self._failed(name, f"more than {max_bytes} bytes", f"at most {max_bytes} bytes")
            if time.monotonic() - started > self.timeout_s + len(content) / 10_000:
                raise TimeoutError
        return bytes(content)

    def _failed(self, name: str, got: str, want: str, kind: type[DayZeroError] = DayZeroError) -> DayZeroError:
        return kind(f"{self.base}{name} cannot be read", got=got, want=want,
                    fix="try again, or download config.json and the index by themselves")  # fmt: skip


def _name(host: str, path: str) -> str:
    """The last part of the path that is a name: of `.../org/model/resolve/main/` it is `model`."""
    parts = [urllib.parse.unquote(part) for part in path.split("/") if part]
    if len(parts) > 2 and parts[-2] in ("resolve", "raw"):
        parts = parts[:-2]
    name = re.sub(r"[^\w.+-]", "_", parts[-1]) if parts else host
    return name if name.strip(".") else host


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _total(headers: Any) -> int | None:
    found = RANGE.match(headers.get("Content-Range", ""))
    return int(found.group(3)) if found else None
