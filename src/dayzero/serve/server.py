"""`run_server(spec)`: one server from its start to its end, in the foreground. Returns the exit status.

The port is bound first (a port in use is known before any weights are read), then the engine process loads while `/health`
says 503. SIGTERM and SIGINT drain: new requests get 503, open ones have `grace_s` seconds, then 0 or 130. A second signal
ends it at once. An engine that cannot be kept alive ends the server with 1, one that does not load raises DayZeroError.
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from dayzero.core.errors import DayZeroError
from dayzero.core.records import to_dict
from dayzero.serve.app import build_app
from dayzero.serve.engine_link import EngineLink
from dayzero.serve.errors import ApiError
from dayzero.serve.front import Front
from dayzero.serve.spec import ServerSpec
from dayzero.serve.template import TemplateRenderer
from dayzero.serve.text import TextCodec

log = logging.getLogger("dayzero.serve")

READY_SCHEMA = "dayzero.server_ready/1"
BACKLOG = 2048  # connections the kernel keeps for us while the loop is busy
MAX_OPEN_FILES = 16384
LAST_WORDS_S = 1.0  # for the last answers to leave after the grace time
POLL_S = 0.02
EXIT_STATUS = {signal.SIGTERM: 0, signal.SIGINT: 130}


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises DayZeroError when the address is taken, foreign or not allowed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise DayZeroError(f"the host {host!r} is unknown", got=str(error), want="a name or an address of this machine",
                           fix="choose another --host") from error  # fmt: skip
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise DayZeroError(f"port {port} on {host} cannot be used", got=error.strerror or str(error), want="a free port",
                           fix="stop what uses it, choose another --port, or --port 0 for a free one") from error  # fmt: skip
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine finds it."""
    host, port = listener.getsockname()[:2]
    if listener.family == socket.AF_INET6:
        return f"http://[{'::1' if host == '::' else host}]:{port}"
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"


def allow_many_connections() -> None:
    """Raise the soft limit of open files: each client is one, and 1024 is a common default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_server(spec: ServerSpec, *, on_ready: Callable[[dict[str, Any]], None] | None = None) -> int:
    """Serve until a signal or the end of the engine. `on_ready` gets the object that describes the running server.

    Must be called in the main thread: it handles signals, and the engine's life is bound to the thread that starts it.
    """
    assert threading.current_thread() is threading.main_thread(), threading.current_thread()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    allow_many_connections()
    with bind(spec.host, spec.port) as listener:
        return asyncio.run(_Server(spec, listener, on_ready).run())


class _Uvicorn(uvicorn.Server):
    """Without signal handlers of its own: signals drain, see `_Server`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    def __init__(self, spec: ServerSpec, listener: socket.socket, on_ready: Callable[[dict[str, Any]], None] | None) -> None:
        self._spec = spec
        self._listener = listener
        self._on_ready = on_ready
        self._link = EngineLink(spec)
        self._front = Front(spec, self._link)
        config = uvicorn.Config(
            build_app(self._front), http="h11", ws="none", lifespan="off", loop="asyncio", log_level="warning",
            access_log=False, log_config=None, server_header=False, backlog=BACKLOG,
            timeout_graceful_shutdown=int(LAST_WORDS_S),
        )  # fmt: skip
        self._http = _Uvicorn(config)
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in EXIT_STATUS:
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        engine = asyncio.create_task(self._link.run())
        start = asyncio.create_task(self._start())
        stop = asyncio.create_task(self._signals.get())
        try:
            return await self._until_end(http, engine, start, stop)
        finally:
            start.cancel()
            stop.cancel()
            await self._link.close()
            self._http.should_exit = True
            if self._front.renderer is not None:
                await self._front.renderer.close()
            await asyncio.gather(http, engine, start, stop, return_exceptions=True)

    async def _until_end(
        self,
        http: asyncio.Task[None],
        engine: asyncio.Task[None],
        start: asyncio.Task[None],
        stop: asyncio.Task[signal.Signals],
    ) -> int:
        waited: set[asyncio.Task[Any]] = {http, engine, start, stop}
        while True:
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if stop in done:
                return await self._drain(stop.result())
            if engine in done:
                return await self._give_up(engine)
            if http in done:
                http.result()
                raise RuntimeError("the HTTP server ended by itself")
            start.result()
            waited.discard(start)

    async def _start(self) -> None:
        """Load the tokenizer beside the engine, then say that the server is ready."""
        folder = self._spec.tokenizer_folder
        if folder is not None:
            codec = await asyncio.to_thread(TextCodec.load, folder)
            if codec.chat_template is not None:
                renderer = TemplateRenderer(codec.chat_template, codec.special_tokens, timeout_s=self._spec.template_timeout_s,
                                            max_chars=self._spec.max_body_bytes)  # fmt: skip
                self._front.renderer = renderer
                try:
                    await renderer.start()
                except ApiError as error:
                    raise DayZeroError(error.message, fix="see the log above for its last words") from error
            self._front.codec = codec
        self._front.is_started = True
        await self._link.wait_ready()
        ready = self._describe()
        log.info("serving %s at %s (engine pid %s, tier %s, context %d tokens)", self._spec.served_model_name, ready["url"],
                 ready["engine_pid"], ready["engine"]["tier"], ready["engine"]["context_tokens"])  # fmt: skip
        if self._on_ready is not None:
            self._on_ready(ready)

    def _describe(self) -> dict[str, Any]:
        url = url_of(self._listener)
        return {
            "schema": READY_SCHEMA, "url": url, "host": self._spec.host, "port": self._listener.getsockname()[1],
            "pid": os.getpid(), "engine_pid": self._link.pid, "model": self._spec.served_model_name,
            "engine": to_dict(self._link.info),
        }  # fmt: skip

    async def _drain(self, number: signal.Signals) -> int:
        """Let open requests finish within the grace time; a second signal cuts it short."""
        log.info("%s: draining %d open requests, at most %g s", number.name, self._front.num_open, self._spec.grace_s)
        self._front.is_draining = True
        again = asyncio.create_task(self._signals.get())
        deadline = asyncio.get_running_loop().time() + self._spec.grace_s
        while self._front.num_open and not again.done() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_S)
        again.cancel()
        if self._front.num_open:
            log.warning("%d requests are cut off", self._front.num_open)
            await self._cut_off("the server is shutting down")
        return EXIT_STATUS[number]

    async def _give_up(self, engine: "asyncio.Task[None]") -> int:
        """The engine is not restarted any more: its first load failed (raised), or it kept dying (status 1)."""
        error = engine.exception()
        assert error is not None, "the engine's supervisor returned while the server runs"
        if self._link.info is None or not isinstance(error, DayZeroError):
            raise error
        await self._cut_off("the engine cannot be kept running")
        print(error, file=sys.stderr, flush=True)
        return 1

    async def _cut_off(self, reason: str) -> None:
        self._link.fail_open(reason)
        deadline = asyncio.get_running_loop().time() + LAST_WORDS_S
        while self._front.num_open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_S)
