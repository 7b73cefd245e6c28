"""Everything a server is started with: `ServerSpec`, a record that travels to the server process as JSON."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dayzero.core.errors import DayZeroError
from dayzero.core.records import STRICT
from dayzero.core.units import MIB

# The least value of each limit. Times are in seconds.
LEAST: dict[str, float] = {
    "max_queue": 0, "max_restarts": 0, "max_body_bytes": 1, "grace_s": 0, "body_timeout_s": 0.01, "request_timeout_s": 0.01,
    "template_timeout_s": 0.01, "engine_stall_s": 0.01, "restart_window_s": 0.01,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    """`engine_factory` is "module:function"; the engine process calls it with `engine_arguments` (plain JSON types).

    Without `tokenizer_folder` the server takes token-id prompts only and its text is empty.
    """

    SCHEMA: ClassVar[str] = "dayzero.server/1"
    __pydantic_config__ = STRICT

    engine_factory: str
    served_model_name: str
    engine_arguments: dict[str, Any] = field(default_factory=dict)
    tokenizer_folder: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    max_queue: int = 256  # choices that may wait beyond those the engine runs at once; then 429
    max_body_bytes: int = 8 * MIB  # a million tokens as text or as ids
    body_timeout_s: float = 30.0  # for a client that sends its body slowly
    request_timeout_s: float = 3600.0  # the whole of a request, waiting included
    grace_s: float = 30.0  # what open requests get to finish after SIGTERM
    template_timeout_s: float = 3.0  # one chat template
    engine_stall_s: float = 300.0  # no progress with open requests for so long: the engine is killed and restarted
    max_restarts: int = 3  # of the engine, within restart_window_s
    restart_window_s: float = 600.0

    def __post_init__(self) -> None:
        module, colon, function = self.engine_factory.partition(":")
        if not (module and colon and function):
            raise DayZeroError("the engine factory has no module or no function", got=repr(self.engine_factory),
                               want='"module:function"', fix="name an importable function")  # fmt: skip
        if not 0 <= self.port <= 65535:
            raise DayZeroError("the port is out of range", got=self.port, want="0 to 65535 (0: a free one)",
                               fix="choose another --port")  # fmt: skip
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise DayZeroError(f"{name} is out of range", got=value, want=f"at least {least}", fix=f"correct {name}")
