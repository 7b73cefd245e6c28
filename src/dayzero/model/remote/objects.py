"""An address in, its objects by ranges out, tried again with growing pauses for as long as that may help.

What an object is (size, version) is noted when it is first looked at, and every later byte is of that very object or refused:
a changed one, one that ends early, one that cannot be had in bounded time. Every refusal names the object. Not here: keeping
blocks in memory (`weights.stores`), what a release is made of (`remote.release`).
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from dayzero.core.errors import DayZeroError
from dayzero.model.remote.outcomes import Changed, ObjectState, Passing, Unusable
from dayzero.model.remote.protocols import Access, open_access

T = TypeVar("T")

TIMEOUT_S = 30.0  # of each wait on the network
PATIENCE_S = 120.0  # without one byte of progress: longer than a server's restart, shorter than a user's patience
PAUSE_S, LONGEST_PAUSE_S = 0.2, 20.0
ATTEMPTS = 10  # without progress; with pauses that double this is about the patience
CONNECTIONS = 8
PROGRESS_BYTES = 1 << 16
EDGE_BYTES = 1 << 20  # read back of an object whose checksum the server does not tell


def is_remote(text: object) -> bool:
    """Whether this is the address of a store; also one that went through `Path`, which makes `s3:/bucket` of it."""
    return re.match(r"(?!(file|local):)[a-zA-Z][a-zA-Z0-9+.-]+:/", str(text)) is not None


def normal(address: object) -> str:
    """The address as it was before it went through `Path`, without a slash at its end."""
    return re.sub(r"^([a-zA-Z][a-zA-Z0-9+.-]+):/+", lambda found: f"{found[1].lower()}://", str(address)).rstrip("/")


class ObjectFolder:
    """A folder of objects, used from several threads. Names are relative to the address."""

    def __init__(
        self, address: object, *, timeout_s: float = TIMEOUT_S, patience_s: float = PATIENCE_S, connections: int = CONNECTIONS
    ) -> None:
        self.address = normal(address)
        self.connections, self._patience_s = connections, patience_s
        self._access: Access = open_access(self.address, timeout_s, connections)
        self._states: dict[str, ObjectState] = {}
        self._lock = threading.Lock()
        self.bytes_fetched = 0

    def shown(self, name: str) -> str:
        return f"{self.address}/{name}"

    def look(self, name: str) -> ObjectState | None:
        """What the object is. The first look counts: later reads are of that object. None where there is none."""
        if name in self._states:
            return self._states[name]
        found = self._patiently(name, lambda: self._access.look(name))
        if found is None:
            return None
        with self._lock:
            return self._states.setdefault(name, found)

    def state(self, name: str) -> ObjectState:
        """The same of an object that must be there."""
        found = self.look(name)
        if found is None:
            raise DayZeroError(f"{self.shown(name)} is not there", got="no such object", want="the object",
                               fix="upload it again, or check the address")  # fmt: skip
        return found

    def states(self, names: Iterable[str]) -> list[ObjectState]:
        with ThreadPoolExecutor(self.connections, thread_name_prefix="look") as pool:
            return list(pool.map(self.state, names))

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill `target` with the object's bytes from `start` on. A dropped answer is continued where it ended."""
        state = self.state(name)
        if start + len(target) > state.num_bytes:
            raise DayZeroError(f"{self.shown(name)} ends early", got=f"{state.num_bytes} bytes",
                               want=f"{start + len(target)} bytes", fix="upload it again")  # fmt: skip
        done = 0

        def more() -> None:
            nonlocal done
            try:
                if done < len(target):
                    self._access.read(name, start + done, target[done:], state)
                    self._count(len(target) - done)
            except Passing as error:
                done += error.done
                self._count(error.done)
                raise

        try:
            self._patiently(name, more)
        except Changed as error:
            raise DayZeroError(
                f"{self.shown(name)} changed while it was read", got=str(error),
                want=f"{state.num_bytes} bytes, version {state.version}, as when it was first looked at",
                fix="let it be replaced in full first, then start again",
            ) from error  # fmt: skip

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        data = bytearray((self.state(name).num_bytes if stop is None else stop) - start)
        self.read_into(name, start, memoryview(data))
        return bytes(data)

    def save(self, name: str, place: Path, piece_bytes: int = 8 << 20) -> None:
        """The whole object as a file, a piece at a time."""
        size = self.state(name).num_bytes
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("wb") as file:
            for start in range(0, size, piece_bytes):
                file.write(self.read(name, start, min(start + piece_bytes, size)))

    def entries(self) -> dict[str, int | None] | None:
        """Files at the top with their sizes, and folders (None); None where this protocol cannot list."""
        return self._patiently("", self._access.entries)

    def everything(self) -> dict[str, int]:
        """All files below with their sizes."""
        return self._patiently("", self._access.everything)

    def put(self, name: str, path: Path) -> ObjectState:
        """Store a file and make sure that it is there as it is here: by the server's checksum, else by reading back its size
        and its two ends."""

        def store() -> ObjectState:
            state, compared = self._access.put(name, path)
            now = state if compared else self._access.look(name)
            if now is None or now.num_bytes != path.stat().st_size:
                raise Passing(f"stored {path.stat().st_size} bytes, and {now.num_bytes if now else 'nothing'} is there")
            if not compared:
                self._compare_ends(name, path, now)
            return now

        try:
            state = self._patiently(name, store)
        except Changed as error:
            raise DayZeroError(f"{self.shown(name)} changed while it was stored", got=str(error), want="one writer at a time",
                               fix="see who else writes there, then start again") from error  # fmt: skip
        with self._lock:
            self._states[name] = state
        return state

    def remove(self, name: str) -> None:
        self._patiently(name, lambda: self._access.remove(name))
        with self._lock:
            self._states.pop(name, None)

    def tidy(self) -> None:
        self._patiently("", self._access.tidy)

    def close(self) -> None:
        self._access.close()

    def _compare_ends(self, name: str, path: Path, state: ObjectState) -> None:
        with path.open("rb") as file:
            for start in {0, max(0, state.num_bytes - EDGE_BYTES)}:
                file.seek(start)
                wanted = file.read(EDGE_BYTES)
                if not wanted:
                    continue
                found = memoryview(bytearray(len(wanted)))
                self._access.read(name, start, found, state)
                if found != wanted:
                    raise Passing("read back, it is not what was stored")

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes_fetched += num_bytes

    def _patiently(self, name: str, action: Callable[[], T]) -> T:
        """Do it, and again for as long as what went wrong may pass. `Changed` is the caller's to explain."""
        since, attempt = time.monotonic(), 0
        while True:
            try:
                return action()
            except Unusable as error:
                raise self._refused(name, str(error), "check the address and the credentials") from error
            except Passing as error:
                if error.done >= PROGRESS_BYTES:  # a server that drips is one that does not answer
                    since, attempt = time.monotonic(), 0
                attempt += 1
                pause_s = min(PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S) * random.uniform(0.5, 1.5)
                pause_s = max(pause_s, min(error.after_s, LONGEST_PAUSE_S))
                spent_s = time.monotonic() - since
                if attempt >= ATTEMPTS or spent_s + pause_s > self._patience_s:
                    said = f"{error.reason} ({attempt} tries in {spent_s:.0f} s)"
                    raise self._refused(name, said, "try again later: what is finished is kept") from error
                time.sleep(pause_s)

    def _refused(self, name: str, got: str, fix: str) -> DayZeroError:
        return DayZeroError(f"{self.shown(name)} cannot be reached", got=got, want="an answer with what was asked for", fix=fix)
