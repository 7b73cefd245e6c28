"""Processes that end, by themselves or by force: nobody is left waiting and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from dayzero.core.errors import DayZeroError
from dayzero.serve.engine_link import EngineLink
from dayzero.serve.launch import ServerProcess
from dayzero.serve.server import bind
from dayzero.serve.spec import ServerSpec
from tests.made_tokenizers import make_byte_level_folder
from tests.scripted_engine import CRASH, ENDLESS, HANG
from tests.serving import MODEL, ROOT, ask, complete, events, health, make_client, make_server, wait_until

LONG = [ENDLESS, 5, 6, 7]
STREAM = {"model": MODEL, "prompt": LONG, "max_tokens": 90_000, "stream": True, "return_token_ids": True}
SLOW = {"step_s": 0.01, "context_tokens": 100_000}


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Started; its result is in the list once the thread is joined."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def start_requests(server: ServerProcess, streams: tuple[bool, ...], **fields: Any) -> list[tuple[threading.Thread, list[Any]]]:
    def send(stream: bool) -> httpx.Response:
        with make_client(server) as client:
            return complete(client, LONG, stream=stream, **({"max_tokens": 90_000} | fields))

    return [in_background(lambda stream=stream: send(stream)) for stream in streams]


def results_of(requests: list[tuple[threading.Thread, list[Any]]], within_s: float) -> list[httpx.Response]:
    deadline = time.monotonic() + within_s
    for thread, results in requests:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert results, "a client is still waiting"
    return [results[0] for _, results in requests]


def assert_gone(pid: int, within_s: float = 5.0) -> None:
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE,
               within_s=within_s, what=f"end of pid {pid}")  # fmt: skip


def assert_cut_off(response: httpx.Response, stream: bool, code: str = "engine_gone") -> None:
    """The error in the shape that suits the request."""
    if stream:
        assert response.status_code == 200
        assert events(response)[-1]["error"]["code"] == code
    else:
        assert response.status_code == 503 and response.json()["error"]["code"] == code, response.text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """For the tests after which it lives on."""
    engine = SLOW | {"max_sequences": 2}
    with make_server(tmp_path_factory.mktemp("server"), engine=engine, max_restarts=20, engine_stall_s=1.0) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with make_client(server) as client:
        yield client


def test_a_killed_engine_is_told_to_everyone_and_comes_back(server: ServerProcess, client: httpx.Client) -> None:
    streams = (True, False, True, False)  # two run, two wait
    requests = start_requests(server, streams)
    wait_until(lambda: health(client)["open_requests"] == 4, within_s=10, what="four open requests")
    time.sleep(0.2)
    pid = health(client)["engine_pid"]
    os.kill(pid, signal.SIGKILL)
    for response, stream in zip(results_of(requests, within_s=10.0), streams, strict=True):
        assert_cut_off(response, stream)
        assert str(pid) in response.text
    wait_until(lambda: client.get("/health").status_code == 200, within_s=20, what="a new engine")
    after = health(client)
    assert after["engine_pid"] not in (None, pid) and "SIGKILL" in after["last_engine_exit"]
    assert complete(client, [5, 6], return_token_ids=True).json()["choices"][0]["token_ids"] == [5, 6, 1]


def test_while_there_is_no_engine_requests_get_503(server: ServerProcess, client: httpx.Client) -> None:
    os.kill(health(client)["engine_pid"], signal.SIGKILL)
    wait_until(lambda: client.get("/health").status_code == 503, within_s=5, what="health 503")
    response = complete(client, [5, 6])
    assert response.status_code == 503 and response.json()["error"]["code"] == "engine_restarting"
    assert response.headers["retry-after"] == "1" and client.get("/v1/models").status_code == 200
    wait_until(lambda: client.get("/health").status_code == 200, within_s=20, what="a new engine")


@pytest.mark.parametrize("fault", [CRASH, HANG], ids=["crash", "hang"])
def test_an_engine_that_fails_in_a_step_is_replaced(server: ServerProcess, client: httpx.Client, fault: int) -> None:
    """A crash is noticed at once, a hang when there has been no progress for `engine_stall_s`."""
    response = complete(client, [fault, 5, 6, 7, 8], stream=True)
    assert_cut_off(response, stream=True)
    wait_until(lambda: client.get("/health").status_code == 200, within_s=20, what="a new engine")


def test_an_engine_that_keeps_dying_ends_the_server(tmp_path: Path) -> None:
    with make_server(tmp_path, max_restarts=0) as server:
        pid = server.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert server.wait(10.0) == 1
        log = server.log_tail()
        assert "keeps dying" in log and f"pid {pid} was killed by SIGKILL" in log


def test_sigterm_drains(tmp_path: Path) -> None:
    with make_server(tmp_path, engine={"step_s": 0.01}) as server, make_client(server) as client:
        engine_pid = server.engine_pid
        requests = start_requests(server, (True, False), max_tokens=60)
        wait_until(lambda: health(client)["open_requests"] == 2, within_s=10, what="two open requests")
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: health(client)["status"] == "draining", within_s=5, what="draining")
        refused = complete(client, [5, 6])
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        streamed, whole = results_of(requests, within_s=15.0)
        assert events(streamed)[-1] == "[DONE]" and whole.json()["usage"]["completion_tokens"] == 60
        assert server.wait(10.0) == 0
        assert engine_pid is not None
        assert_gone(engine_pid)


def test_after_the_grace_time_requests_are_cut_off(tmp_path: Path) -> None:
    """Here after an interrupt, which drains too, and says so by its exit status."""
    with make_server(tmp_path, engine=SLOW, grace_s=0.3) as server, make_client(server) as client:
        requests = start_requests(server, (True, False))
        wait_until(lambda: health(client)["open_requests"] == 2, within_s=10, what="two open requests")
        server.send_signal(signal.SIGINT)
        for response, stream in zip(results_of(requests, within_s=5.0), (True, False), strict=True):
            assert_cut_off(response, stream)
            assert "shutting down" in response.text
        assert server.wait(10.0) == 130


def make_link(monkeypatch: pytest.MonkeyPatch, **engine: Any) -> EngineLink:
    """To be called in the loop."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
    spec = ServerSpec(engine_factory="tests.scripted_engine:make_engine", engine_arguments=engine, served_model_name=MODEL)
    return EngineLink(spec)


def test_a_close_while_the_engine_process_is_being_started_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The moment in which there is a process and nobody knows it yet. An engine that loads for a minute is not waited for."""

    async def run() -> int:
        link = make_link(monkeypatch, load_s=60.0)
        started, go_on = asyncio.Event(), asyncio.Event()
        start_really, pids = asyncio.create_subprocess_exec, []

        async def start(*command: Any, **options: Any) -> asyncio.subprocess.Process:
            process = await start_really(*command, **options)
            pids.append(process.pid)
            started.set()
            await go_on.wait()
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        running = asyncio.create_task(link.run())
        await started.wait()
        await link.close()
        go_on.set()
        await asyncio.wait_for(running, 5.0)
        assert link.state == "closed" and link.pid is None
        (pid,) = pids
        return pid

    assert_gone(asyncio.run(run()))


def test_a_close_between_two_engines_does_not_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dayzero.serve.engine_link.FIRST_DELAY_S", 30.0)

    async def run() -> None:
        link = make_link(monkeypatch)
        running = asyncio.create_task(link.run())
        await asyncio.wait_for(link.wait_ready(), 30.0)
        assert link.pid is not None
        os.kill(link.pid, signal.SIGKILL)
        async with asyncio.timeout(10.0):
            while not link.restarts:
                await asyncio.sleep(0.02)
        await link.close()
        await asyncio.wait_for(running, 5.0)

    asyncio.run(run())


def test_the_users_folder_is_not_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with a queue.py of the user's own: neither the server nor the engine nor the templates' process runs it."""
    folder = tmp_path / "users"
    folder.mkdir()
    for name in ("queue", "html", "json", "random", "dayzero", "transformers", "httpx"):
        (folder / f"{name}.py").write_text("open('was_run', 'w').close(); raise RuntimeError('this is not the module')")
    monkeypatch.chdir(folder)
    tokenizer = make_byte_level_folder(tmp_path / "tokenizer")
    with make_server(tmp_path, tokenizer=tokenizer) as server, make_client(server) as client:
        assert ask(client, "hello").json()["choices"][0]["message"]["content"] == "user:helloassistant:"
    assert not (folder / "was_run").exists()


def test_a_killed_front_leaves_no_engine(tmp_path: Path) -> None:
    with (
        make_server(tmp_path, engine=SLOW) as server,
        make_client(server) as client,
        pytest.raises(httpx.RemoteProtocolError),
        client.stream("POST", "/v1/completions", json=STREAM) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        family = psutil.Process(server.pid).children(recursive=True)
        assert family, "no engine"
        os.kill(server.pid, signal.SIGKILL)
        for process in family:
            assert_gone(process.pid)
        list(lines)


def test_a_killed_parent_leaves_no_server(tmp_path: Path) -> None:
    """`adapt` killed by force: its server goes with it, and so does the engine."""
    code = (
        "import sys, time; from pathlib import Path; from tests.serving import make_server; "
        f"server = make_server(Path({str(tmp_path)!r})); server.start(); "
        "print(server.pid, server.engine_pid, flush=True); time.sleep(60)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    for pid in pids:
        assert_gone(pid)


def test_a_port_in_use_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(DayZeroError, match=f"port {port}"):
            bind("127.0.0.1", port)
        assert time.monotonic() - started < 1.0
        # An engine that would take a minute to load is never started.
        with pytest.raises(DayZeroError, match=f"port {port}"), make_server(tmp_path, port=port, engine={"load_s": 60.0}):
            pass


def test_an_engine_that_does_not_load_says_why(tmp_path: Path) -> None:
    refusing = make_server(tmp_path, engine={"refuse": "the weights are not there"})
    with pytest.raises(DayZeroError, match="the weights are not there") as refused, refusing:
        pass
    assert (refused.value.got, refused.value.fix) == ("a scripted refusal", "try another model")
    marker = tmp_path / "die"
    marker.touch()
    dying = make_server(tmp_path, engine={"die_once_file": str(marker)})
    with pytest.raises(DayZeroError, match="ended while loading") as died, dying:
        pass
    assert "exited with status 7" in died.value.got


def test_a_server_without_tokenizer_takes_ids_only(server: ServerProcess, client: httpx.Client) -> None:
    choice = complete(client, [5, 6], return_token_ids=True, logprobs=1).json()["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", [5, 6, 1]) and choice["logprobs"]["tokens"][0] == "token_id:5"
    for response, param in (
        (complete(client, "text"), "prompt"),
        (complete(client, [5, 6], stop="x"), "stop"),
        (ask(client, "hello"), "messages"),
    ):
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, "no_tokenizer"), json.dumps(error)
        assert "no tokenizer" in error["message"]
