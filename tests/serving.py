"""What the tests of the server share: a server with the scripted engine, reading streams, reading gauges, waiting."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from dayzero.serve.launch import ServerProcess
from dayzero.serve.spec import ServerSpec

ROOT = Path(__file__).parent.parent
MODEL = "a/scripted-model"


def make_server(
    folder: Path, *, tokenizer: Path | None = None, engine: dict[str, Any] | None = None, **settings: Any
) -> ServerProcess:
    spec = ServerSpec(
        **{"engine_factory": "tests.scripted_engine:make_engine", "engine_arguments": engine or {}, "served_model_name": MODEL,
           "tokenizer_folder": tokenizer, "port": 0} | settings,
    )  # fmt: skip
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return ServerProcess(spec, log=folder / "server.log", ready_timeout_s=60.0, env=os.environ | {"PYTHONPATH": path})


def make_client(server: ServerProcess) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=30.0, trust_env=False)


def complete(client: httpx.Client, prompt: Any, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"model": MODEL, "prompt": prompt} | fields)


def ask(client: httpx.Client, messages: Any, **fields: Any) -> httpx.Response:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages} | fields)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON number")


def strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=refuse_constant)


def events(response: httpx.Response) -> list[Any]:
    """The events of a whole stream; the last is "[DONE]" unless it failed."""
    return list(read_events(response.text.split("\n\n")))


def read_events(lines: Iterator[str] | list[str]) -> Iterator[Any]:
    for line in lines:
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else strict_json(data)


def gauge(client: httpx.Client, name: str) -> float:
    """The value of a metric, labels included in `name`."""
    for line in client.get("/metrics").text.splitlines():
        if line.rpartition(" ")[0] == name:
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no metric {name}")


REFERENCED = 'dayzero_cache_blocks{state="referenced"}'


def wait_until(condition: Callable[[], bool], *, within_s: float, what: str) -> float:
    """Seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within_s, f"{what}: not within {within_s} s"
        time.sleep(0.02)
    return time.monotonic() - started


def health(client: httpx.Client) -> dict[str, Any]:
    return client.get("/health").json()
