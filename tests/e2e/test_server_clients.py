"""Clients in numbers, clients that leave, clients that do not read (case SV-10's aborts among them).

The scripted engine repeats an ENDLESS prompt up to max_tokens, at 5 ms a step and four sequences at a time.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from dayzero.serve.launch import ServerProcess
from tests.scripted_engine import ENDLESS, EOS_ID
from tests.serving import MODEL, REFERENCED, complete, gauge, make_client, make_server, wait_until

MAX_SEQUENCES, MAX_QUEUE = 4, 40
LONG = [ENDLESS, 5, 6, 7]
FREED_WITHIN_S = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    engine = {"step_s": 0.005, "max_sequences": MAX_SEQUENCES, "context_tokens": 100_000}
    with make_server(tmp_path_factory.mktemp("server"), engine=engine, max_queue=MAX_QUEUE) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with make_client(server) as client:
        yield client


def open_raw(server: ServerProcess, **fields: object) -> socket.socket:
    """A request whose answer nobody reads."""
    body = json.dumps({"model": MODEL, "prompt": LONG, "max_tokens": 50_000} | fields).encode()
    raw = socket.create_connection(("127.0.0.1", server.ready["port"]))
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
    return raw


def num_open(client: httpx.Client) -> float:
    return gauge(client, "dayzero_engine_requests_open")


def is_idle(client: httpx.Client) -> bool:
    return num_open(client) == 0 and gauge(client, REFERENCED) == 0 and gauge(client, "dayzero_engine_requests_waiting") == 0


def test_two_hundred_clients_are_served_or_refused(server: ServerProcess, client: httpx.Client) -> None:
    async def one(session: httpx.AsyncClient, number: int) -> tuple[int, bool]:
        stream = number % 2 == 0
        body = {"model": MODEL, "prompt": [5 + number % 90, 6, 7], "stream": stream, "return_token_ids": True}
        response = await session.post("/v1/completions", json=body)
        if response.status_code == 429:
            return 429, response.json()["error"]["code"] == "queue_full" and int(response.headers["retry-after"]) > 0
        if stream:
            return response.status_code, response.text.endswith("data: [DONE]\n\n")
        return response.status_code, response.json()["choices"][0]["token_ids"] == [*body["prompt"], EOS_ID]

    async def all_of_them() -> list[tuple[int, bool]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60.0, limits=limits, trust_env=False) as session:
            return await asyncio.gather(*(one(session, number) for number in range(200)))

    answers = asyncio.run(all_of_them())
    assert all(right for _, right in answers)
    statuses = Counter(status for status, _ in answers)
    assert statuses.keys() <= {200, 429} and statuses[200] >= MAX_SEQUENCES + MAX_QUEUE, statuses
    wait_until(lambda: is_idle(client), within_s=FREED_WITHIN_S, what="idle after the crowd")


@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"n": 3, "stream": True}, {"n": 3}], ids=str)
def test_a_client_that_leaves_while_running_frees_everything(server: ServerProcess, client: httpx.Client, fields: dict) -> None:
    raw = open_raw(server, **fields)
    wait_until(lambda: gauge(client, REFERENCED) > 3, within_s=10, what="running")
    raw.close()
    wait_until(lambda: is_idle(client), within_s=FREED_WITHIN_S, what=f"freed after {fields}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_is_forgotten(server: ServerProcess, client: httpx.Client, stream: bool) -> None:
    running = [open_raw(server) for _ in range(MAX_SEQUENCES)]
    wait_until(lambda: gauge(client, "dayzero_engine_requests_running") == MAX_SEQUENCES, within_s=10, what="all running")
    queued = [open_raw(server, stream=stream) for _ in range(3)]
    wait_until(lambda: gauge(client, "dayzero_engine_requests_waiting") == 3, within_s=10, what="three waiting")
    for raw in queued:
        raw.close()
    wait_until(lambda: gauge(client, "dayzero_engine_requests_waiting") == 0, within_s=FREED_WITHIN_S, what="queue empty")
    assert gauge(client, "dayzero_engine_requests_running") == MAX_SEQUENCES, "those that stayed are not disturbed"
    for raw in running:
        raw.close()
    wait_until(lambda: is_idle(client), within_s=FREED_WITHIN_S, what="idle")


def test_a_client_that_does_not_read_holds_nobody_up(server: ServerProcess, client: httpx.Client) -> None:
    raw = open_raw(server, stream=True, return_token_ids=True, logprobs=5)
    wait_until(lambda: gauge(client, REFERENCED) > 0, within_s=10, what="running")
    assert complete(client, [5, 6, 7], return_token_ids=True).json()["choices"][0]["token_ids"] == [5, 6, 7, 1]
    raw.close()
    wait_until(lambda: is_idle(client), within_s=FREED_WITHIN_S, what="idle")


def test_more_choices_than_ever_fit_are_refused_for_good(client: httpx.Client) -> None:
    response = complete(client, [[5]] * 10, n=5)
    assert response.status_code == 400 and str(MAX_SEQUENCES + MAX_QUEUE) in response.json()["error"]["message"]


def test_the_outcomes_are_counted(client: httpx.Client) -> None:
    assert gauge(client, 'dayzero_requests_total{endpoint="completions",outcome="client_left"}') >= 1
    assert gauge(client, 'dayzero_requests_total{endpoint="completions",outcome="ok"}') >= 1
    assert gauge(client, "dayzero_time_to_first_token_seconds_count") >= 1
    assert gauge(client, "dayzero_requests_open") == 0
