"""The engine's own process: commands from the front in, tokens out. Started as `python -m dayzero.serve.engine_process`.

Arguments: the front's pid and the descriptor of the socket to it. One loop: take the commands that have come, make one
step, send what it gave. An error of one request goes to that request; an exception out of a step ends the process, and the
front tells every open request and starts a new one. No text, no HTTP, no restart policy here.
"""

import importlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.serve.processes import end_own_group, end_with_parent
from dayzero.serve.wire import (
    Accepted,
    Add,
    Cancel,
    Close,
    Command,
    LoadFailed,
    Outputs,
    PrefixCacheReset,
    Ready,
    Refused,
    ResetPrefixCache,
    Start,
    pack,
    receive_blocking,
)

# Gauges of a busy engine that yields no tokens (a long prefill in chunks) are sent this often.
STATS_INTERVAL_S = 0.1

Inbox = queue.SimpleQueue[Command]
Send = Callable[[Any], None]


def load_engine(factory: str, arguments: dict[str, Any]) -> Any:
    """Call "module:function". Raises DayZeroError when there is no such function."""
    module_name, _, name = factory.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and not module_name.startswith(error.name):
            raise  # the module is there, something it needs is not
        raise DayZeroError("the engine factory does not exist", got=f"{factory} ({error})", want='"module:function"',
                           fix="name an importable function") from error  # fmt: skip
    return function(**arguments)


def read_commands(connection: socket.socket, inbox: Inbox) -> None:
    """Thread: commands into the inbox; the end of the stream is the end of the front, and so of this process."""
    try:
        while True:
            inbox.put(receive_blocking(connection))
    except (EOFError, ConnectionError):
        end_own_group()


def take(inbox: Inbox, *, wait: bool) -> Iterator[Command]:
    """All commands that have come; with `wait`, at least one."""
    if wait:
        yield inbox.get()
    while True:
        try:
            yield inbox.get_nowait()
        except queue.Empty:
            return


def obey(engine: Any, command: Command, send: Send) -> None:
    """Carry out one command. A failing `add` is an answer to that request, never the end of the engine."""
    match command:
        case Add(request=request):
            try:
                engine.add(request)
            except DayZeroError as error:
                send(Refused(request_id=request.id, error=error))
            except Exception as error:
                traceback.print_exc()
                send(Refused(request_id=request.id, internal=f"{type(error).__name__}: {error}"))
            else:
                send(Accepted(request_id=request.id))
        case Cancel(request_id=request_id):
            engine.cancel(request_id)
        case ResetPrefixCache(number=number):
            try:
                engine.reset_prefix_cache()
            except DayZeroError as error:
                send(PrefixCacheReset(number=number, error=str(error)))
            else:
                send(PrefixCacheReset(number=number))
        case _:
            raise AssertionError(command)


def serve(engine: Any, inbox: Inbox, send: Send) -> None:
    """Until `Close` comes."""
    sent_at = 0.0
    while True:
        for command in take(inbox, wait=not engine.has_work()):
            if isinstance(command, Close):
                return
            obey(engine, command, send)
        outputs = engine.step() if engine.has_work() else []
        if outputs or not engine.has_work() or time.monotonic() - sent_at > STATS_INTERVAL_S:
            send(Outputs(outputs=tuple(outputs), stats=engine.stats()))
            sent_at = time.monotonic()


def main(arguments: list[str]) -> int:
    parent_pid, descriptor = int(arguments[0]), int(arguments[1])
    end_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides when the engine stops
    os.dup2(2, 1)  # standard output belongs to the front's JSON
    connection = socket.socket(fileno=descriptor)
    start = receive_blocking(connection)
    assert isinstance(start, Start), start
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=read_commands, args=(connection, inbox), name="commands", daemon=True).start()

    def send(message: Any) -> None:
        try:
            connection.sendall(pack(message))
        except ConnectionError:
            end_own_group()

    try:
        engine = load_engine(start.factory, start.arguments)
    except DayZeroError as error:
        send(LoadFailed(error=error))
        return 2
    try:
        send(Ready(info=engine.info, stats=engine.stats()))
        serve(engine, inbox, send)
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
