"""A small OpenAI-compatible server for tests: threads of the standard library, answers by script, switchable defects.

`MockServer(...)` is a context manager with `.url`. It keeps the moments at which it really sent things (`sent`), because a
busy machine sleeps longer than asked.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# One streamed event: seconds after the request arrived, and the object sent ("[DONE]" ends the stream).
Script = list[tuple[float, Any]]

CONTEXT_TOKENS = 512


class MockServer:
    def __init__(
        self,
        *,
        script: Callable[[dict[str, Any]], Script] | None = None,
        token_s: float = 0.001,
        vocab_size: int = 1000,
        defects: tuple[str, ...] = (),
    ) -> None:
        self.script, self.token_s, self.vocab_size, self.defects = script, token_s, vocab_size, defects
        self.bodies: list[dict[str, Any]] = []
        self.sent: list[list[float]] = []  # per scripted stream: when the request arrived, then when each event left
        self.referenced = 0
        self.lock = threading.Lock()
        self.greedy_salt = 0
        self.requests = 0

    def __enter__(self) -> MockServer:
        mock = self

        class Handler(_Handler):
            server_mock = mock

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                return  # clients that leave are part of these tests

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer_ids(self, body: dict[str, Any]) -> list[int]:
        """Tokens from the prompt alone: a greedy model. The defect `drift` changes them as requests go by."""
        prompt = body["prompt"]
        seed = sum(prompt) if isinstance(prompt, list) else sum(map(ord, prompt))
        salt = self.requests if "drift" in self.defects else 0
        return [(seed * 31 + 7 * i + salt) % self.vocab_size for i in range(body.get("max_tokens", 16))]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_mock: MockServer

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        mock = self.server_mock
        if self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": "mock", "object": "model", "created": 0, "owned_by": "t"}]})
        elif self.path == "/health":
            self._json(503 if "sick" in mock.defects else 200, {"status": "ok"})
        elif self.path == "/metrics" and "no metrics" not in mock.defects:
            text = (
                f'# HELP x y\ncache_blocks{{state="total"}} 64.0\ncache_blocks{{state="referenced"}} {float(mock.referenced)}\n'
            )
            self._raw(200, text.encode(), "text/plain")
        else:
            self._json(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        arrived, mock = time.perf_counter(), self.server_mock
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            body = json.loads(raw)
        except ValueError:
            return self._error(400, "the body is not JSON")
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            return self._error(404, "no such path")
        if (wrong := self._wrong(body)) and "lax" not in mock.defects:
            return self._error(*wrong)
        if not isinstance(body, dict) or not isinstance(body.get("max_tokens", 1), int):
            body = {"prompt": "x"}
        with mock.lock:
            mock.bodies.append(body)
            mock.requests += 1
        if mock.script is not None:
            return self._play(arrived, mock.script(body))
        if self.path == "/v1/chat/completions":
            if "no template" in mock.defects:
                return self._error(400, "the model has no chat template")
            message = {"role": "assistant", "content": "hi"}
            return self._json(
                200,
                {
                    "id": "c",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "mock",
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                },
            )
        with mock.lock:
            mock.referenced += 1
        done = False
        try:
            done = self._complete(body)
        finally:
            with mock.lock:
                mock.referenced -= 0 if not done and "leak" in mock.defects else 1
        return None

    def _wrong(self, body: Any) -> tuple[int, str] | None:
        if not isinstance(body, dict):
            return 400, "an object is wanted"
        if body.get("model") != "mock":
            return 404, "model: unknown"
        if self.path == "/v1/chat/completions":
            return None
        temperature, prompt = body.get("temperature", 1), body.get("prompt")
        if not isinstance(temperature, (int, float)) or temperature < 0:
            return 400, "temperature: out of range"
        if body.get("max_tokens", 1) < 1 or body.get("top_p", 1) > 1:
            return 400, "max_tokens or top_p: out of range"
        if not prompt or (isinstance(prompt, list) and not all(0 <= token < self.server_mock.vocab_size for token in prompt)):
            return 400, "prompt: missing or out of the vocabulary"
        if isinstance(prompt, list) and len(prompt) > CONTEXT_TOKENS:
            return 400, "prompt: too long"
        return None

    def _complete(self, body: dict[str, Any]) -> bool:
        mock, ids = self.server_mock, self.server_mock.answer_ids(body)
        prompt_tokens = len(body["prompt"]) if isinstance(body["prompt"], list) else len(body["prompt"].split())
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(ids),
            "total_tokens": prompt_tokens + len(ids),
            "prompt_tokens_details": {"cached_tokens": prompt_tokens // 2 if "reuse" in mock.defects else 0},
        }
        text = "".join(f"t{token} " for token in ids)
        base = {"id": "c", "object": "text_completion", "created": 0, "model": "mock"}
        if not body.get("stream"):
            for _ in ids:
                time.sleep(mock.token_s)
                if self._client_left():
                    return False
            self._json(
                200,
                base
                | {
                    "usage": usage,
                    "choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": "length", "logprobs": None}],
                },
            )
            return True
        self._start_stream()
        for place, token in enumerate(ids):
            time.sleep(mock.token_s)
            last = place == len(ids) - 1
            self._event(
                base
                | {
                    "choices": [
                        {"index": 0, "text": f"t{token} ", "token_ids": [token], "finish_reason": "length" if last else None}
                    ]
                }
            )
        self._event(base | {"choices": [], "usage": usage})
        self._event("[DONE]")
        self._chunk(b"")
        return True

    def _play(self, arrived: float, script: Script) -> None:
        times = [arrived]
        with self.server_mock.lock:
            self.server_mock.sent.append(times)
        self._start_stream()
        for at, event in script:
            time.sleep(max(0.0, arrived + at - time.perf_counter()))
            times.append(time.perf_counter())
            self._event(event)
        self._chunk(b"")

    def _client_left(self) -> bool:
        self.connection.setblocking(False)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        finally:
            self.connection.setblocking(True)

    def _start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _event(self, event: Any) -> None:
        self._chunk(b"data: " + (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n\n")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()

    def _error(self, status: int, message: str) -> None:
        self._json(status, {"error": {"message": message, "type": "invalid_request_error", "code": None, "param": None}})

    def _json(self, status: int, data: Any) -> None:
        self._raw(status, json.dumps(data).encode(), "application/json")

    def _raw(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
