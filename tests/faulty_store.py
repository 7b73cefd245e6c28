"""An S3 server (moto's) with a proxy before it that delays, drops, cuts and refuses as a test says, and counts what it sends."""

from __future__ import annotations

import http.client
import http.server
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    span: str | None  # the Range header
    number: int  # of this method and path, from 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What happens to one request. `keep`: bytes of the body that are sent before the connection ends."""

    busy: bool = False
    keep: int | None = None
    before: Callable[[], Any] | None = None  # done before the request is passed on
    change: Callable[[bytes], bytes] | None = None  # of the request's body, on its way to the server


@dataclass(kw_only=True)
class Proxy:
    """`fault(request)` says what happens to it; `asked` and `sent` (bytes of bodies by path) are what happened."""

    target: tuple[str, int]
    latency_s: float = 0.0
    fault: Callable[[Request], Fault | None] = lambda request: None
    asked: list[Request] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    most_at_once: int = 0
    _now: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path, span = self.path.split("?")[0], self.headers.get("Range")
                with proxy._lock:
                    number = 1 + sum((one.method, one.path) == (self.command, path) for one in proxy.asked)
                    request = Request(self.command, path, span, number)
                    proxy.asked.append(request)
                    proxy._now += 1
                    proxy.most_at_once = max(proxy.most_at_once, proxy._now)
                try:
                    self.answer(request, body, proxy.fault(request) or Fault())
                finally:
                    with proxy._lock:
                        proxy._now -= 1

            def answer(self, request: Request, body: bytes, fault: Fault) -> None:
                time.sleep(proxy.latency_s)
                if fault.before is not None:
                    fault.before()
                if fault.busy:
                    return self.reply(503, SLOW_DOWN, [("Content-Type", "application/xml")])
                if fault.change is not None:
                    body = fault.change(body)
                connection = http.client.HTTPConnection(*proxy.target, timeout=30)
                skipped = ("content-length", "connection", "expect")
                headers = {key: value for key, value in self.headers.items() if key.lower() not in skipped}
                connection.request(self.command, self.path, body=body, headers=headers | {"Content-Length": str(len(body))})
                answer = connection.getresponse()
                content = answer.read()
                told = [(key, value) for key, value in answer.getheaders()
                        if key.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server")]  # fmt: skip
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                connection.close()
                return self.reply(answer.status, content, told, keep=fault.keep, length=length)

            def reply(self, status: int, content: bytes, headers: list[tuple[str, str]], *, keep: int | None = None,
                      length: str | None = None) -> None:  # fmt: skip
                self.send_response(status)
                for key, value in headers:
                    self.send_header(key, value)
                self.send_header("Content-Length", length or str(len(content)))
                self.end_headers()
                part = content if keep is None else content[:keep]
                if self.command != "HEAD":
                    self.wfile.write(part)
                    with proxy._lock:
                        path = self.path.split("?")[0]
                        proxy.sent[path] = proxy.sent.get(path, 0) + len(part)
                self.close_connection = self.close_connection or keep is not None

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def sent_of(self, ending: str) -> int:
        return sum(count for path, count in self.sent.items() if path.endswith(ending))

    def count(self, method: str, part: str) -> int:
        return sum(one.method == method and part in one.path for one in self.asked)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class S3Server:
    """moto's server mode. `put`, `get` and `names` go past the proxy."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._moto.start()
        self.target = self._moto.get_host_and_port()
        self.ask("PUT", "/bucket")

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        connection = http.client.HTTPConnection(*self.target, timeout=30)
        try:
            # As the same user that the tests are; moto checks no signatures.
            who = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
            connection.request(method, path, body=body, headers={"Authorization": who})
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status < 300, (method, path, answer.status, content)
            return content
        finally:
            connection.close()

    def put(self, name: str, content: bytes) -> None:
        self.ask("PUT", f"/bucket/{name}", content)

    def get(self, name: str) -> bytes:
        return self.ask("GET", f"/bucket/{name}")

    def names(self, prefix: str) -> list[str]:
        import re

        listed = self.ask("GET", f"/bucket?list-type=2&prefix={prefix}").decode()
        return sorted(re.findall(r"<Key>([^<]+)</Key>", listed))

    def close(self) -> None:
        self._moto.stop()
