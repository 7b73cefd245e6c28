"""The front's side of the engine process: starts it, restarts it, carries requests to it and tokens back (asyncio).

Requests in, per-request event queues out. A dead engine gives every open request an `EngineGone` at once and is started
again, a bounded number of times. One event loop, no locks: everything here runs in the loop's thread, which must be the
main thread (the child is bound to the life of the thread that starts it). No HTTP and no text here.
"""

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from dayzero.core.errors import DayZeroError
from dayzero.core.generation import EngineInfo, EngineStats, GenerationRequest, TokenOutput
from dayzero.serve.processes import describe_exit, kill_group, python_module
from dayzero.serve.spec import ServerSpec
from dayzero.serve.wire import (
    Accepted,
    Add,
    Cancel,
    Close,
    LoadFailed,
    Outputs,
    PrefixCacheReset,
    Ready,
    Refused,
    ResetPrefixCache,
    Start,
    pack,
    receive,
)

log = logging.getLogger("dayzero.serve")

CLOSE_TIMEOUT_S = 5.0  # for the engine to close by itself; then it is killed
FIRST_DELAY_S, MAX_DELAY_S = 0.2, 30.0  # before a restart, doubled with each failure in the window

EngineState = Literal["loading", "ready", "restarting", "failed", "closed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineGone:
    """The engine process ended while the request was open, or the server gave up on it."""

    reason: str


RequestEvent = Accepted | Refused | TokenOutput | EngineGone


@dataclass(kw_only=True, slots=True, eq=False)
class Subscription:
    """The events of a set of engine requests, in the order in which they came."""

    open_ids: set[str]
    events: "asyncio.Queue[RequestEvent]" = field(default_factory=asyncio.Queue)


class EngineLink:
    """`run()` is the supervisor's task; the rest may be called from any coroutine of the loop."""

    def __init__(self, spec: ServerSpec) -> None:
        self._spec = spec
        self.state: EngineState = "loading"
        self.info: EngineInfo | None = None
        self.stats: EngineStats | None = None
        self.pid: int | None = None
        self.restarts = 0
        self.last_exit = ""
        self.progressed_at = time.monotonic()
        self._ready = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._subscriptions: dict[str, Subscription] = {}
        self._resets: dict[int, asyncio.Future[None]] = {}
        self._num_resets = 0
        self._closing = asyncio.Event()

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Engine requests that have neither ended nor been cancelled."""
        return len(self._subscriptions)

    def submit(self, requests: Sequence[GenerationRequest]) -> Subscription:
        """Send requests to a ready engine. Their events come on one queue."""
        assert self.state == "ready", self.state
        if not self._subscriptions:
            self.progressed_at = time.monotonic()
        subscription = Subscription(open_ids={request.id for request in requests})
        for request in requests:
            assert request.id not in self._subscriptions, request.id
            self._subscriptions[request.id] = subscription
            self._send(Add(request=request))
        return subscription

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Forget requests and free what they hold. Those that have ended are left out."""
        for request_id in list(request_ids):
            subscription = self._subscriptions.pop(request_id, None)
            if subscription is not None:
                subscription.open_ids.discard(request_id)
                if self.state == "ready":
                    self._send(Cancel(request_id=request_id))

    async def reset_prefix_cache(self) -> None:
        """Returns once the engine has done so. Raises DayZeroError when it refuses or is gone."""
        assert self.state == "ready", self.state
        self._num_resets += 1
        done = self._resets[self._num_resets] = asyncio.get_running_loop().create_future()
        self._send(ResetPrefixCache(number=self._num_resets))
        await done

    def fail_open(self, reason: str) -> None:
        """End every open request with `EngineGone` (the engine itself is left as it is)."""
        for subscription in set(self._subscriptions.values()):
            subscription.open_ids.clear()
            subscription.events.put_nowait(EngineGone(reason=reason))
        self._subscriptions.clear()
        for done in self._resets.values():
            if not done.done():
                done.set_exception(DayZeroError("the engine is gone", got=reason))
        self._resets.clear()

    def _send(self, command: Any) -> None:
        assert self._writer is not None
        self._writer.write(pack(command))

    # -- the process --------------------------------------------------------------------------------------------

    async def wait_ready(self) -> None:
        await self._ready.wait()

    async def run(self) -> None:
        """Keep an engine running until `close`. Raises DayZeroError when the first load fails, or when it has died more
        often than `max_restarts` within the window; the message names the pid and the signal."""
        deaths: deque[float] = deque()
        while not self._closing.is_set():
            reason, error = await self._run_once()
            if self._closing.is_set():
                return
            if self.info is None:
                self.state = "failed"
                raise error or DayZeroError("the engine process ended while loading", got=reason, want="a loaded engine",
                                            fix="see the log above for its last words")  # fmt: skip
            now = time.monotonic()
            deaths.append(now)
            while deaths[0] < now - self._spec.restart_window_s:
                deaths.popleft()
            if len(deaths) > self._spec.max_restarts:
                self.state = "failed"
                raise DayZeroError("the engine process keeps dying", got=f"{len(deaths)} deaths, the last: {reason}",
                                   want=f"at most {self._spec.max_restarts} in {self._spec.restart_window_s:g} s",
                                   fix="see the log above for its last words")  # fmt: skip
            self.restarts += 1
            log.error("the engine is gone (%s); restart %d", reason, self.restarts)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), min(FIRST_DELAY_S * 2 ** (len(deaths) - 1), MAX_DELAY_S))

    async def _run_once(self) -> tuple[str, DayZeroError | None]:
        """One life of the engine process. Returns how it ended, and the error it gave if it failed to load."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *python_module("dayzero.serve.engine_process", str(os.getpid()), str(theirs.fileno())),
                pass_fds=(theirs.fileno(),), process_group=0, stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        self._process, self.pid = process, process.pid
        if self._closing.is_set():  # `close` came while it was being started, and found nothing to end
            kill_group(process.pid)
        load_error: DayZeroError | None = None
        watchdog: asyncio.Task[None] | None = None
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            self._send(Start(factory=self._spec.engine_factory, arguments=self._spec.engine_arguments))
            watchdog = asyncio.create_task(self._watch_progress(process.pid))
            while True:
                event = await receive(reader)
                if isinstance(event, LoadFailed):
                    load_error = event.error
                else:
                    self._handle(event)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the process ended: how, its exit status tells below
        finally:
            if not self._closing.is_set():
                self.state = "loading" if self.info is None else "restarting"
            self._ready.clear()
            if watchdog is not None:
                watchdog.cancel()
            if not self._closing.is_set():  # told at once, before the wait for the exit status
                self.fail_open(f"the engine process (pid {process.pid}) ended")
            if load_error is None and not self._closing.is_set():
                kill_group(process.pid)  # it may have closed its socket and live on, or have left children
            with suppress(ProcessLookupError):
                await self._reap(process)
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            self._process = self.pid = None
        assert process.returncode is not None
        self.last_exit = describe_exit(process.pid, process.returncode)
        return self.last_exit, load_error

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the exit status, then for all that is left of the group."""
        try:
            await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)
        except TimeoutError:
            kill_group(process.pid)
            await process.wait()
        kill_group(process.pid)

    def _handle(self, event: Any) -> None:
        match event:
            case Outputs(outputs=outputs, stats=stats):
                before, self.stats = self.stats, stats
                if outputs or before is None or _work_done(stats) != _work_done(before):
                    self.progressed_at = time.monotonic()
                for output in outputs:
                    self._deliver(output.request_id, output, ends=output.finish_reason is not None)
            case Accepted(request_id=request_id):
                self._deliver(request_id, event, ends=False)
            case Refused(request_id=request_id):
                self._deliver(request_id, event, ends=True)
            case PrefixCacheReset(number=number, error=error):
                done = self._resets.pop(number, None)
                if done is not None and not done.done():
                    done.set_result(None) if error is None else done.set_exception(DayZeroError(error))
            case Ready(info=info, stats=stats):
                self.info, self.stats = info, stats
                if not self._closing.is_set():
                    self.state = "ready"
                    self.progressed_at = time.monotonic()
                    self._ready.set()
            case _:
                raise AssertionError(event)

    def _deliver(self, request_id: str, event: RequestEvent, *, ends: bool) -> None:
        subscription = self._subscriptions.get(request_id)
        if subscription is None:
            return  # cancelled meanwhile
        if ends:
            del self._subscriptions[request_id]
            subscription.open_ids.discard(request_id)
        subscription.events.put_nowait(event)

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine last did any work while requests are open; 0 when there is nothing to do."""
        return time.monotonic() - self.progressed_at if self._subscriptions else 0.0

    async def _watch_progress(self, pid: int) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._spec.engine_stall_s / 4))
            if self.state == "ready" and self.stalled_s > self._spec.engine_stall_s:
                log.error("the engine (pid %d) has made no progress for %.0f s and is killed", pid, self.stalled_s)
                kill_group(pid)
                return

    async def close(self) -> None:
        """End the engine process: asked, then killed. `run` returns after that."""
        self._closing.set()
        self.fail_open("the server is shutting down")
        was_ready, self.state = self.state == "ready", "closed"
        process = self._process
        if process is None:
            return
        if was_ready:
            self._send(Close())
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)
        kill_group(process.pid)


def _work_done(stats: EngineStats) -> int:
    return stats.prefill_tokens + stats.decode_tokens
