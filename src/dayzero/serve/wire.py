"""Messages between the HTTP front and the engine process: frozen records, pickled, each with its length in front.

The socket is a private pair between a process and its own child; nothing from the network is ever unpickled.
"""

import asyncio
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.generation import EngineInfo, EngineStats, GenerationRequest, TokenOutput

_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    factory: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Add:
    request: GenerationRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetPrefixCache:
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Close:
    pass


Command = Add | Cancel | ResetPrefixCache | Close


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    info: EngineInfo
    stats: EngineStats


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadFailed:
    error: DayZeroError


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    request_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """`error` is the user's; anything else that went wrong with this request alone is `internal`."""

    request_id: str
    error: DayZeroError | None = None
    internal: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixCacheReset:
    number: int
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """What one step gave (possibly nothing) and the gauges after it."""

    outputs: tuple[TokenOutput, ...]
    stats: EngineStats


Event = Ready | LoadFailed | Accepted | Refused | PrefixCacheReset | Outputs


def pack(message: Any) -> bytes:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises asyncio.IncompleteReadError or ConnectionError when the other side is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def receive_blocking(connection: socket.socket) -> Any:
    """The next message. Raises EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size))
    return pickle.loads(_read_exactly(connection, length))


def _read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        piece = connection.recv(min(num_bytes - len(data), 1 << 20))
        if not piece:
            raise EOFError("the other process closed its end")
        data += piece
    return bytes(data)
