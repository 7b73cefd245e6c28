"""The address of a release folder in, the `Release` out that the folder itself would give. Weights stay where they are.

Fetched: config, generation, tokenizer and quantization settings, the shard index, and of every shard its header, by range;
from a web server without ranges no weights are read, which is a warning. Each header becomes the start of an otherwise
empty (sparse) file of the shard's real size in a temporary folder, which the one reader of releases then reads: all its
checks, down to a file that is too short for its tensors, hold for remote ones too. The holes are gone afterwards, so nothing
can take them for weights. `open_remote_release` is for a look: web servers are read without any package, and of code and
tokenizer.json no more is asked than whether they are there. `fetch_settings` is for work with the weights, from any store:
every small file that lies beside them comes along. Not done here: names on hubs, logins, weights that are not safetensors.
"""

from __future__ import annotations

import functools
import http.client
import json
import re
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.model.headers import LENGTH_FIELD_BYTES
from dayzero.model.paths import contained, module_file, refusal
from dayzero.model.release import (
    CONFIG,
    INDEX,
    MAX_JSON_BYTES,
    PICKLE_SUFFIXES,
    SINGLE,
    TOKENIZER_SETTINGS,
    Release,
    is_address,
    open_release,
    read_object,
)  # fmt: skip
from dayzero.model.remote.objects import ObjectFolder, normal
from dayzero.model.stored.quantization import BESIDE

__all__ = ["fetch_settings", "is_address", "open_remote_release"]

SETTINGS = ("generation_config.json", "tokenizer_config.json", BESIDE)
TOKENIZER = "tokenizer.json"
# Where files cannot be listed these are asked for by name: what decides how texts become tokens, and what a licence demands.
BESIDE_WEIGHTS = (*(name for name in TOKENIZER_SETTINGS if name not in SETTINGS), "preprocessor_config.json",
                  "processor_config.json", "chat_template.json", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE",
                  "README.md", "SHA256SUMS")  # fmt: skip
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
    """The release that a web server or an object store holds at `address`, a folder or its config.json.

    timeout_s: for each wait on the network. Raises DayZeroError when there is no config, or the server cannot be read from.
    """
    web = is_address(address) or normal(address).startswith("ftp:")  # which the web's reader refuses: it knows no versions
    objects = None if web else ObjectFolder(normal(address).removesuffix(CONFIG), timeout_s=timeout_s)
    try:
        return _opened(_WebSite(address, timeout_s) if objects is None else _StoreSite(objects), workers)
    finally:
        if objects is not None:
            objects.close()


def _opened(site: _Site, workers: int) -> Release:
    with tempfile.TemporaryDirectory(prefix="dayzero-remote-") as scratch:
        folder = Path(scratch) / site.name
        folder.mkdir()
        _save_config(site, folder)
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
        found = _read(site, folder)
    return replace(found, folder=Path(site.base), name=site.name, problems=(*found.problems, *told))


def fetch_settings(objects: ObjectFolder, scratch: Path) -> Release:
    """The release in a store, with what lies beside its weights in a folder in `scratch`. `folder` of the release is that
    one; its shards are in no folder: read them from `objects`, which noted what each was when its header was read."""
    site = _StoreSite(objects)
    folder = scratch / site.name
    folder.mkdir()
    entries = objects.entries()
    if entries is None:
        _save_config(site, folder)
        with ThreadPoolExecutor(objects.connections, thread_name_prefix="settings") as pool:
            save = functools.partial(site.save, folder=folder, max_bytes=MAX_JSON_BYTES)
            list(pool.map(save, dict.fromkeys((*SETTINGS, *BESIDE_WEIGHTS))))
            list(pool.map(save, _code_files(folder)))  # which the settings name
        weights = _shards(site, folder) if site.save(INDEX, folder, MAX_INDEX_BYTES) else [SINGLE]
    else:
        if CONFIG not in entries:
            _save_config(site, folder)  # says what is wrong
        weights = _save_entries(site, folder, entries)
    _save_headers(site, folder, weights, objects.connections)
    try:
        return _read(site, folder)
    finally:
        for name in weights:
            (folder / name).unlink(missing_ok=True)


def _save_entries(site: _StoreSite, folder: Path, entries: Mapping[str, int | None]) -> list[str]:
    """Fetch every small file; of large ones and of weights, make an empty file of that size, so that they are told of.
    Returns the shards."""
    small = []
    for name, size in entries.items():
        if refusal(name) or "/" in name:
            continue  # such keys can only be asked for by name, and are then refused
        if size is None:
            (folder / name).mkdir()
        elif name.endswith((".safetensors", *PICKLE_SUFFIXES, ".gguf")) or size > MAX_JSON_BYTES:
            _sparse(folder / name, b"", 0 if name.endswith(".safetensors") else size)
        else:
            small.append(name)
    with ThreadPoolExecutor(site.objects.connections, thread_name_prefix="settings") as pool:
        list(pool.map(lambda name: site.objects.save(name, folder / name), small))
    listed = [name for name in entries if name.endswith(".safetensors") and (folder / name).is_file()]
    indexed = _shards(site, folder) if INDEX in entries else []
    return list(dict.fromkeys([*listed, *indexed]))


def _code_files(folder: Path) -> list[str]:
    """Python files that the settings name; those that these import are not known to a store that cannot list."""
    found = []
    for name in (CONFIG, "tokenizer_config.json"):
        if (folder / name).is_file():
            auto_map = read_object(folder / name).get("auto_map")
            values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
            texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
            found += [module_file(text) for text in texts if isinstance(text, str) and "--" not in text]
    return [name for name in dict.fromkeys(found) if not refusal(name) and "/" not in name]


def _save_config(site: _Site, folder: Path) -> None:
    if not site.save(CONFIG, folder, MAX_SETTINGS_BYTES):
        raise DayZeroError(f"{site.base} holds no {CONFIG}", got="404 not found",
                           want="the address of a folder with a Hugging Face release",
                           fix="check the address; it is the folder that holds config.json")  # fmt: skip


def _read(site: _Site, folder: Path) -> Release:
    """What the one reader of releases finds in the folder, in words that fit where it came from."""
    try:
        found = open_release(folder)
    except DayZeroError as error:
        what, got = (text.replace(f"{folder}/", site.base) for text in (error.what, error.got))
        raise DayZeroError(what, got=got, want=error.want, fix=f"check what {site.base} serves") from error
    problems = tuple(
        replace(one, detail=one.detail.replace("not on disk", "not on the server")) if one.kind == "missing_file" else one
        for one in found.problems
    )
    return replace(found, name=site.name, problems=problems)


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
    """A release folder elsewhere, read by whole small files and by ranges of large ones. Used from several threads."""

    base: str  # with a slash at its end
    name: str

    def save(self, name: str, folder: Path, max_bytes: int) -> bool:
        """Fetch a whole file into the folder. False when the server has none."""
        content = self.fetch(name, None, max_bytes)
        if content is None:
            return False
        (folder / name).write_bytes(content[0])
        return True

    def holds(self, name: str) -> bool:
        """Whether the server has this file, of which no more than the first bytes are fetched."""
        try:
            return self.fetch(name, (0, FIRST_BYTES), FIRST_BYTES) is not None
        except NoRanges:
            return True

    def save_header(self, name: str, folder: Path) -> None:
        """Make a sparse file of a shard's size that begins with its header. Nothing when the server has no such file."""
        start = self.fetch(name, (0, FIRST_BYTES), FIRST_BYTES)
        if start is None:
            return
        content, size = start
        length = int.from_bytes(content[:LENGTH_FIELD_BYTES], "little")
        wanted = LENGTH_FIELD_BYTES + length
        # What does not begin like a header is not worth fetching: the reader says what it is.
        is_header = len(content) > LENGTH_FIELD_BYTES and content[LENGTH_FIELD_BYTES : LENGTH_FIELD_BYTES + 1] == b"{"
        if is_header and length <= MAX_HEADER_BYTES and len(content) < (stop := min(wanted, size)):
            rest = self.fetch(name, (len(content), stop), stop)
            if rest is None or rest[1] != size:
                raise self._failed(name, f"{size} bytes, then {'nothing' if rest is None else rest[1]}", "a file that stays")
            content += rest[0]
        elif is_header and MAX_HEADER_BYTES < length < size:
            raise self._failed(name, f"a header of {length} bytes", f"at most {MAX_HEADER_BYTES} bytes")
        try:
            _sparse(folder / name, content, size)
        except (OSError, OverflowError) as error:
            raise self._failed(name, f"{size} bytes: {error}", "a size that a file can have") from error

    def fetch(self, name: str, span: tuple[int, int] | None, max_bytes: int) -> tuple[bytes, int] | None:
        """Content (of bytes `span[0]` to `span[1]`, excluded) and the file's size; None where there is no such file."""
        raise NotImplementedError

    def _failed(self, name: str, got: str, want: str, kind: type[DayZeroError] = DayZeroError) -> DayZeroError:
        return kind(f"{self.base}{name} cannot be read", got=got, want=want,
                    fix="try again, or download config.json and the index by themselves")  # fmt: skip


class _StoreSite(_Site):
    """A folder of an object store."""

    def __init__(self, objects: ObjectFolder) -> None:
        self.objects, self.base = objects, f"{objects.address}/"
        parts = urllib.parse.urlsplit(objects.address)
        self.name = _name(parts.netloc, parts.path)

    def fetch(self, name: str, span: tuple[int, int] | None, max_bytes: int) -> tuple[bytes, int] | None:
        state = self.objects.look(name)
        if state is None:
            return None
        start, stop = span or (0, state.num_bytes)
        stop = min(stop, state.num_bytes)
        if stop - start > max_bytes:
            raise self._failed(name, f"{stop - start} bytes", f"at most {max_bytes} bytes")
        return self.objects.read(name, start, max(start, stop)), state.num_bytes


class _WebSite(_Site):
    """A folder of a web server, read with Python's own library."""

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

    def fetch(self, name: str, span: tuple[int, int] | None, max_bytes: int) -> tuple[bytes, int] | None:
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


def _sparse(place: Path, content: bytes, size: int) -> None:
    """A file of this size that begins with `content` and takes no more room."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("wb") as file:
        file.write(content)
        file.truncate(size)
    if place.stat().st_blocks * 512 > len(content) + (1 << 20):
        raise DayZeroError("the temporary folder cannot hold sparse files", got=tempfile.gettempdir(),
                           want="a file system with sparse files", fix="set TMPDIR to another folder")  # fmt: skip


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
