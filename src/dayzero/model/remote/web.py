"""A folder of a web server that serves ranges, through the client of fsspec's http file system. Read only, not listed."""

from __future__ import annotations

import urllib.parse
from pathlib import Path
from typing import Any

from dayzero.model.remote.outcomes import RANGE, Changed, ObjectState, Outcome, Unusable, check_range, check_version, fill, told
from dayzero.model.remote.protocols import Asynchronous


class WebAccess(Asynchronous):
    """A folder of a web server that serves ranges."""

    def __init__(self, address: str, timeout_s: float, connections: int) -> None:
        import aiohttp
        from fsspec.implementations.http import HTTPFileSystem

        parts = urllib.parse.urlsplit(address)
        if not parts.hostname or "@" in parts.netloc:
            raise ValueError("no host in the address, or a login")
        self.base = urllib.parse.urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") + "/", "", ""))
        self.query = f"?{parts.query}" if parts.query else ""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
        self.system = HTTPFileSystem(client_kwargs={"timeout": timeout, "trust_env": True, "auto_decompress": False},
                                     skip_instance_cache=True, use_listings_cache=False)  # fmt: skip

    def look(self, name: str) -> ObjectState | None:
        with told(missing=False):
            return self._run(self._look, name)
        return None

    def read(self, name: str, start: int, target: memoryview, state: ObjectState) -> None:
        with told() as outcome:
            self._run(self._read, name, start, target, state, outcome)

    def entries(self) -> dict[str, int | None] | None:
        return None

    def everything(self) -> dict[str, int]:
        raise Unusable("a web server does not list its files")

    def put(self, name: str, path: Path) -> tuple[ObjectState, bool]:
        raise Unusable("a web server does not store files")

    def remove(self, name: str) -> None:
        raise Unusable("a web server does not remove files")

    def tidy(self) -> None:
        pass

    def close(self) -> None:
        async def finish() -> None:
            if self.system._session is not None:
                await self.system._session.close()
                self.system._session = None

        self._run(finish)

    async def _get(self, name: str, start: int, stop: int) -> Any:
        import yarl

        session = await self.system.set_session()
        address = yarl.URL(self.base + urllib.parse.quote(name) + self.query, encoded=True)
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity", "User-Agent": "dayzero"}
        return session.get(address, headers=headers)

    async def _look(self, name: str) -> ObjectState:
        async with await self._get(name, 0, 1) as answer:
            version = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            given = RANGE.match(answer.headers.get("Content-Range", ""))
            if answer.status in (206, 416) and given is not None:
                return ObjectState(num_bytes=int(given.group(3)), version=version)
            answer.raise_for_status()
            answer.close()  # a whole file may be on its way
            if answer.content_length is None:
                raise Unusable("a server that ignores Range and does not tell the file's length")
            return ObjectState(num_bytes=answer.content_length, version=version)

    async def _read(self, name: str, start: int, target: memoryview, state: ObjectState, outcome: Outcome) -> None:
        async with await self._get(name, start, start + len(target)) as answer:
            if answer.status == 416:
                raise Changed(answer.headers.get("Content-Range", "a shorter file"))
            answer.raise_for_status()
            version = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            if answer.status == 200 and start == 0 and answer.content_length == len(target) == state.num_bytes:
                check_version(version, state)  # the whole file was wanted: a server without ranges will do
            elif answer.status == 200:
                answer.close()
                raise Unusable("a server that ignores Range: whole shards are not downloaded")
            else:
                check_range(answer.headers.get("Content-Range", ""), start, len(target), state, version)
            await fill(answer.content.read, target, outcome)
