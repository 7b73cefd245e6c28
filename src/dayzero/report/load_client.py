"""An HTTP client for load and measurement against any OpenAI-compatible server: plain sockets of the standard library.

One connection per request, as independent clients have; nothing is retried and nothing is pooled. Streaming requests
give an `Answer` (timing in `answers`), everything else a `Reply`. `run_workers` holds a number of requests in flight.
It deliberately does not spread load over processes: one thread per open request is enough for hundreds of streams.
"""

import http.client
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dayzero.core.errors import DayZeroError
from dayzero.report.answers import Answer, AnswerTimer, error_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A whole answer. `status` 0: no HTTP answer came, `error` says why. `data` is None where the body is not JSON."""

    status: int
    text: str = ""
    data: Any = None
    seconds: float = 0.0
    error: str = ""
    left: bool = False  # this client went away on purpose


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """When a client goes away: after so many events of a stream, or so many seconds; `reset` drops the line (RST)."""

    after_events: int | None = None
    after_s: float | None = None
    reset: bool = False


class _Left(Exception):
    """This client went away, as planned."""


class LoadClient:
    """Requests to one server. `abort` ends every open one at once, from any thread."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise DayZeroError("the server's address is not a URL", got=url, want="http://HOST:PORT", fix="give the base URL")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.timeout_s, self.api_key = timeout_s, api_key
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._aborted = False

    def stream(self, path: str, body: dict[str, Any], *, leave: Leave | None = None) -> Answer:
        """POST with `stream: true`. The server is asked for usage and for token ids; servers ignore what they lack."""
        body = {"stream_options": {"include_usage": True}, "return_token_ids": True} | body | {"stream": True}
        payload = json.dumps(body).encode()  # before the clock starts
        timer, status = AnswerTimer(started_s=time.perf_counter()), 0
        connection = self._connection(leave.after_s if leave else None)
        try:
            response = self._send(connection, "POST", path, payload)
            status = response.status
            if status != 200:
                return timer.finish(time.perf_counter(), status=status, outcome="refused" if status in (429, 503) else "failed",
                                    error=error_text(_json(response.read())))  # fmt: skip
            self._read_events(response, timer, leave)
            return timer.finish(time.perf_counter(), status=status)
        except _Left:
            return timer.finish(time.perf_counter(), status=status, outcome="cancelled")
        except TimeoutError:
            planned = leave is not None and leave.after_s is not None
            return timer.finish(time.perf_counter(), status=status, outcome="cancelled" if planned else "failed",
                                error="" if planned else f"no byte within {self.timeout_s:g} s")  # fmt: skip
        except (OSError, http.client.HTTPException, ValueError) as error:
            return timer.finish(time.perf_counter(), status=status, outcome="failed", error=_reason(error))
        finally:
            self._close(connection, reset=bool(leave and leave.reset))

    def request(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, leave: Leave | None = None,
                timeout_s: float | None = None) -> Reply:  # fmt: skip
        """A request whose answer is read whole. `raw` sends these bytes as the body, whatever they are."""
        payload = raw if raw is not None else None if body is None else json.dumps(body).encode()
        planned = leave is not None and leave.after_s is not None
        connection = self._connection(leave.after_s if leave else timeout_s)
        started = time.perf_counter()
        try:
            response = self._send(connection, method, path, payload)
            content = response.read()
            return Reply(status=response.status, text=content.decode("utf-8", "replace"), data=_json(content),
                         seconds=time.perf_counter() - started)  # fmt: skip
        except TimeoutError:
            return Reply(status=0, left=planned, seconds=time.perf_counter() - started,
                         error="" if planned else f"no answer within {timeout_s or self.timeout_s:g} s")  # fmt: skip
        except (OSError, http.client.HTTPException) as error:
            return Reply(status=0, seconds=time.perf_counter() - started, error=_reason(error))
        finally:
            self._close(connection, reset=bool(leave and leave.reset))

    def model_name(self) -> str:
        """The first model that the server lists. Raises DayZeroError when it does not answer."""
        reply = self.request("GET", "/v1/models", timeout_s=min(30.0, self.timeout_s))
        try:
            return str(reply.data["data"][0]["id"])
        except (TypeError, KeyError, IndexError):
            got = reply.error or f"HTTP {reply.status}: {reply.text[:200]}"
            raise DayZeroError(f"{self.url} does not list a model", got=got, want="an OpenAI-compatible /v1/models",
                               fix="start the server, or correct its address") from None  # fmt: skip

    def abort(self) -> None:
        """End every open request, and every later one at once: for interrupts and for the end of the time allowed."""
        with self._lock:
            self._aborted = True
            for connection in self._open:
                if connection.sock is not None:
                    _shutdown(connection.sock)

    def _connection(self, timeout_s: float | None) -> http.client.HTTPConnection:
        seconds = timeout_s or self.timeout_s
        connection = (http.client.HTTPSConnection(self._host, self._port, timeout=seconds, context=self._tls) if self._tls
                      else http.client.HTTPConnection(self._host, self._port, timeout=seconds))  # fmt: skip
        with self._lock:
            self._open.add(connection)
        return connection

    def _send(self, connection: http.client.HTTPConnection, method: str, path: str,
              payload: bytes | None) -> http.client.HTTPResponse:  # fmt: skip
        connection.connect()
        if self._aborted:
            raise ConnectionAbortedError("the run was stopped")
        connection.request(method, self.prefix + path, payload, self._headers)
        return connection.getresponse()

    def _read_events(self, response: http.client.HTTPResponse, timer: AnswerTimer, leave: Leave | None) -> None:
        for count, (event, now_s) in enumerate(_events(response), 1):
            timer.feed(event, now_s)
            if leave and ((leave.after_events and count >= leave.after_events)
                          or (leave.after_s and now_s - timer.started_s >= leave.after_s)):  # fmt: skip
                raise _Left

    def _close(self, connection: http.client.HTTPConnection, *, reset: bool) -> None:
        with self._lock:
            self._open.discard(connection)
        if connection.sock is not None:
            if reset:  # linger 0: close() sends RST, as a crashed client or a cut line does
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                _shutdown(connection.sock)  # the response object still holds the socket: close() alone would not end it
        connection.close()


def _shutdown(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other side was faster: nothing is left to end


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[dict[str, Any], float]]:
    """Server-sent events as JSON objects, each with the time its line was read. Ends at `[DONE]` or with the body."""
    lines: list[bytes] = []
    now_s = 0.0
    while line := response.readline():
        if line.startswith(b"data:"):
            now_s = now_s if lines else time.perf_counter()
            lines.append(line[5:].strip())
        elif not line.strip() and lines:  # a blank line ends the event
            data, lines = b"\n".join(lines), []
            if data == b"[DONE]":
                return
            event = json.loads(data)
            yield (event if isinstance(event, dict) else {"error": event}), now_s
    if lines and lines != [b"[DONE]"]:
        raise http.client.IncompleteRead(b"\n".join(lines))


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None if not content else content.decode("utf-8", "replace")[:500]


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def run_workers(work: Callable[[int], bool], num_workers: int, client: LoadClient, *,
                until_s: float | None = None, grace_s: float = 0.0) -> bool:  # fmt: skip
    """Call `work(worker)` again and again on `num_workers` threads until it returns False everywhere.

    With `until_s` (a `time.monotonic` time) workers get `grace_s` beyond it, then every open request is aborted and False
    is returned. An interrupt or an error of a worker aborts the requests too, and is raised here.
    """
    stop, errors = threading.Event(), list[BaseException]()

    def loop(worker: int) -> None:
        try:
            while not stop.is_set() and work(worker):
                pass
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=loop, args=(worker,), daemon=True) for worker in range(num_workers)]
    in_time = True
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(0.05)
            if errors:
                break
            if until_s is not None and time.monotonic() > until_s + grace_s:
                in_time = False
                break
    finally:
        stop.set()
        if any(thread.is_alive() for thread in threads):
            client.abort()
            for thread in threads:
                thread.join(10.0)
    if errors:
        raise errors[0]
    return in_time
