"""`ServerProcess`: a server as a child of this program, for the pipeline and for tests. Nothing of it outlives `stop()`,
nor this program, however it ends.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import httpx
import psutil

from dayzero.core.errors import DayZeroError
from dayzero.core.records import to_dict
from dayzero.serve.processes import describe_exit, kill_group, python_module
from dayzero.serve.spec import ServerSpec

LOG_TAIL_CHARS = 2000
POLL_S = 0.02
KILL_TIMEOUT_S = 10.0  # for the kernel to take a killed process away


class ServerProcess:
    """`with ServerProcess(spec, log=path) as server: ... server.url`. The log file gets what the server and the engine say.

    Raises DayZeroError when the server does not come up: its own error if it gave one, else with the end of the log.
    """

    def __init__(
        self, spec: ServerSpec, *, log: Path, ready_timeout_s: float = 600.0, env: Mapping[str, str] | None = None
    ) -> None:
        self.spec = spec
        self.log = log
        self.ready: dict[str, Any] = {}
        self._ready_timeout_s = ready_timeout_s
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []

    # -- life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Returns once the server is ready."""
        assert self._process is None, "started twice"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = process = subprocess.Popen(
                python_module("dayzero.serve"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=None if self._env is None else dict(self._env), process_group=0,
            )  # fmt: skip
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(to_dict(self.spec)).encode() + b"\n")
            process.stdin.flush()  # and stays open: its end is ours
            self.ready = self._read_ready(process, process.stdout)
        except BaseException:
            self.kill()
            raise

    def _read_ready(self, process: subprocess.Popen[bytes], output: IO[bytes]) -> dict[str, Any]:
        os.set_blocking(output.fileno(), False)
        line, deadline = b"", time.monotonic() + self._ready_timeout_s
        while not line.endswith(b"\n"):
            piece = output.read()
            line += piece or b""
            if piece == b"" or (piece is None and process.poll() is not None):
                code = process.wait()
                raise self._failed("the server ended before it was ready", describe_exit(process.pid, code))
            if time.monotonic() > deadline:
                raise self._failed("the server is not ready in time", f"nothing within {self._ready_timeout_s:g} s")
            time.sleep(POLL_S)
        answer = json.loads(line)
        if "error" in answer:
            error = answer["error"]
            raise DayZeroError(error["what"], got=error["got"], want=error["wanted"], fix=error["fix"])
        assert isinstance(answer, dict)
        return answer

    def _failed(self, what: str, got: str) -> DayZeroError:
        return DayZeroError(what, got=got, want="a server that answers",
                            fix=f"its log ({self.log}) ends with:\n{self.log_tail()}")  # fmt: skip

    def stop(self, *, timeout_s: float | None = None) -> int | None:
        """Drain and end it; kill what is left after `timeout_s` (default: the grace time and 10 s). Its exit status."""
        if self._process is None:
            return None
        if self._process.poll() is None:
            self._remember_family()
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):  # then it is killed below
                self._process.wait(self.spec.grace_s + 10.0 if timeout_s is None else timeout_s)
        return self.kill()

    def kill(self) -> int | None:
        """End it at once, the engine included."""
        process = self._process
        if process is None:
            return None
        self._remember_family()
        kill_group(process.pid)
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        _, alive = psutil.wait_procs(self._family, timeout=1.0)  # they end with their parent
        for survivor in alive:
            survivor.kill()
        psutil.wait_procs(alive, timeout=KILL_TIMEOUT_S)
        return code

    def _remember_family(self) -> None:
        """Everything it has started so far. psutil tells a reused pid from the process that had it."""
        assert self._process is not None
        try:
            found = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self._family = list({*self._family, *found})

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def engine_pid(self) -> int | None:
        """The engine process as it is now; None while there is none."""
        pid = httpx.get(f"{self.url}/health", timeout=30.0, trust_env=False).json()["engine_pid"]
        return None if pid is None else int(pid)

    def wait(self, timeout_s: float) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def send_signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def log_tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:] if self.log.exists() else ""
