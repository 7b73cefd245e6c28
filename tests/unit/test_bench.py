"""bench and its client: figures that follow from a known schedule (case BN-01), failures told apart, memory, no flattery."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.report.answers import AnswerTimer
from dayzero.report.bench import bench, run_point, spread
from dayzero.report.load_client import Leave, LoadClient, run_workers
from dayzero.report.prompts import Prompts
from dayzero.report.text import bench_table
from tests.unit.serving_mock import MockServer, Script

# BN-01: a role event at 5 ms, the first text at 100 ms, then three tokens every 30 ms.
FIRST_S, EVERY_S, TOKENS_PER_EVENT, EVENTS = 0.100, 0.030, 3, 6
COMPLETION_TOKENS = TOKENS_PER_EVENT * (EVENTS + 1)


def make_chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    ids = delta.pop("token_ids", None)
    choice = {"index": 0, "delta": delta, "finish_reason": finish} | ({"token_ids": ids} if ids else {})
    return {"object": "chat.completion.chunk", "choices": [choice]}


def make_usage(completion_tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": completion_tokens}}


def make_schedule(*, with_ids: bool = True) -> Script:
    def content(event: int) -> dict[str, Any]:
        ids = [event * TOKENS_PER_EVENT + i for i in range(TOKENS_PER_EVENT)]
        # 100 spaces: what a client that tokenises text again counts as a handful of tokens
        return make_chunk(
            content=" " * 100, finish="length" if event == EVENTS else None, **({"token_ids": ids} if with_ids else {})
        )

    times = [FIRST_S + EVERY_S * i for i in range(EVENTS + 1)]
    return [
        (0.005, make_chunk(role="assistant", content="")),
        *((at, content(i)) for i, at in enumerate(times)),
        (times[-1], make_usage(COMPLETION_TOKENS)),
        (times[-1], "[DONE]"),
    ]


ERROR_SCRIPT: Script = [
    (0.001, make_chunk(role="assistant")),
    (0.002, make_chunk(content="a")),
    (0.003, {"error": {"message": "engine died"}}),
]
EMPTY_SCRIPT: Script = [
    (0.001, make_chunk(role="assistant", content="")),
    (0.002, make_chunk(finish="stop")),
    (0.002, make_usage(0)),
    (0.002, "[DONE]"),
]
TOOL_SCRIPT: Script = [
    (0.001, make_chunk(role="assistant")),
    (0.002, make_chunk(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": "{}"}}])),
    (0.003, make_chunk(finish="tool_calls")),
    (0.003, make_usage(12)),
    (0.003, "[DONE]"),
]
BROKEN_SCRIPT: Script = [(0.001, make_chunk(role="assistant")), (0.002, make_chunk(content="a"))]


def time_script(script: Script) -> Any:
    """A script through the timer with exact times: no socket, no clock."""
    timer = AnswerTimer(started_s=50.0)
    for at, event in script:
        if event != "[DONE]":
            timer.feed(event, 50.0 + at)
    return timer.finish(50.0 + script[-1][0], status=200)


def test_bn01_exact_schedule_gives_exact_figures() -> None:
    answer = time_script(make_schedule())
    assert answer.outcome == "ok"
    assert answer.ttft_s == pytest.approx(FIRST_S, abs=1e-12)
    assert answer.tpot_s == pytest.approx(EVERY_S / TOKENS_PER_EVENT, abs=1e-12)
    assert (answer.first_tokens, answer.first_tokens_known, answer.completion_tokens) == (3, True, COMPLETION_TOKENS)


def test_bn01_first_event_of_unknown_size_counts_as_one_token_and_says_so() -> None:
    answer = time_script(make_schedule(with_ids=False))
    assert not answer.first_tokens_known
    assert answer.tpot_s == pytest.approx(EVERY_S * EVENTS / (COMPLETION_TOKENS - 1), abs=1e-12)


@pytest.mark.parametrize(
    ("script", "outcome"),
    [(ERROR_SCRIPT, "failed"), (EMPTY_SCRIPT, "empty"), (TOOL_SCRIPT, "tool_only"), (BROKEN_SCRIPT, "failed")],
)
def test_bn01_bad_ends_have_no_figures(script: Script, outcome: str) -> None:
    answer = time_script(script)
    assert (answer.outcome, answer.ttft_s, answer.tpot_s) == (outcome, None, None)


def test_bn01_over_http_within_5_ms() -> None:
    """Against the moments at which the server really sent. The best of five: a busy machine delays some, an error of the client
    would be in all."""
    with MockServer(script=lambda body: make_schedule()) as server:
        client = LoadClient(server.url)
        errors = []
        for _ in range(5):
            answer = client.stream("/v1/chat/completions", {"model": "mock", "messages": []})
            arrived, _role, first, *_rest = server.sent[-1]
            last = server.sent[-1][2 + EVENTS]
            assert answer.outcome == "ok" and answer.tpot_s is not None and answer.ttft_s is not None, answer
            wanted_tpot_s = (last - first) / (COMPLETION_TOKENS - TOKENS_PER_EVENT)
            errors.append(max(abs(answer.ttft_s - (first - arrived)), abs(answer.tpot_s - wanted_tpot_s)))
        assert min(errors) < 0.005, errors


def test_bn01_bench_reports_failures_apart_and_excludes_them() -> None:
    """Three of eight requests end badly: the median is the schedule's, and the check tells each kind."""
    scripts = [
        ERROR_SCRIPT,
        make_schedule(),
        EMPTY_SCRIPT,
        make_schedule(),
        TOOL_SCRIPT,
        make_schedule(),
        make_schedule(),
        make_schedule(),
    ]
    count = iter([make_schedule(), *scripts])  # the first is the warm-up's
    with MockServer(script=lambda body: next(count)) as server:
        report = bench(
            server.url,
            instruction_set="test",
            concurrencies=(1,),
            requests_per_point=8,
            output_tokens=COMPLETION_TOKENS,
            vocab_size=1000,
        )
    (point,) = report.points
    assert (point.requests, point.failed, point.ttft_s.n, point.tpot_s.n) == (8, 1, 5, 5)
    # a busy machine sends late, never early: what is excluded would pull the figures down to a few ms
    assert point.ttft_s.p10 >= FIRST_S and point.tpot_s.p10 >= EVERY_S / TOKENS_PER_EVENT / 2
    answered = next(check for check in report.checks if check.name == "requests answered")
    assert (answered.verdict, answered.value, answered.limit) == ("fail", 5, 8)
    assert "1 failed" in answered.detail and "1 empty" in answered.detail and "1 tool_only" in answered.detail
    assert "engine died" in answered.detail
    assert report.verdict == "fail"
    assert any("TTFT" in line for line in report.how) and any("told by the server in 5 of 5" in line for line in report.how)


def test_bench_measures_several_concurrencies_with_distinct_prompts() -> None:
    with MockServer(token_s=0.002) as server:
        report = bench(
            server.url,
            instruction_set="avx2",
            concurrencies=(1, 3),
            requests_per_point=4,
            input_tokens=20,
            output_tokens=6,
            vocab_size=server.vocab_size,
            memory_of=[os.getpid()],
            max_ttft_s=30.0,
            max_tpot_s=1e-9,
        )
        prompts = [tuple(body["prompt"][:4]) for body in server.bodies]
    assert [point.concurrency for point in report.points] == [1, 3]
    assert [point.requests for point in report.points] == [4, 6]  # full rounds of clients
    assert len(prompts) == len(set(prompts)) == (1 + 4) + (3 + 6)  # warm-up and measured, all different
    assert all(point.input_tokens == 20 and point.tpot_s.n == point.requests for point in report.points)
    assert all(point.peak_memory_bytes > 2**20 and point.output_tokens_per_s > 0 for point in report.points)
    verdicts = {check.name: check.verdict for check in report.checks}
    assert verdicts["ttft_s goal"] == "pass" and verdicts["tpot_s goal"] == "fail" and report.verdict == "fail"
    assert (
        verdicts["usage counts the tokens sent"]
        == verdicts["prompts not reused"]
        == verdicts["output length as asked"]
        == "pass"
    )
    assert report.instruction_set == "avx2" and bench_table(report) is not None


def test_bench_without_goals_passes_and_says_what_flatters() -> None:
    with MockServer(defects=("reuse",)) as server:
        report = bench(server.url, instruction_set="x", concurrencies=(2,), requests_per_point=2, output_tokens=3)
    assert report.verdict == "pass"
    checks = {check.name: check for check in report.checks}
    assert checks["ttft_s goal"].verdict == "not_shown" and not checks["ttft_s goal"].required
    assert checks["prompts not reused"].verdict == "fail" and not checks["prompts not reused"].required
    assert checks["peak memory measured"].verdict == "not_shown"


def test_bench_of_a_server_that_always_fails_has_no_figures() -> None:
    with MockServer(script=lambda body: ERROR_SCRIPT) as server:
        report = bench(server.url, instruction_set="x", concurrencies=(1,), requests_per_point=2, output_tokens=3)
    (point,) = report.points
    assert report.verdict == "fail" and (point.failed, point.ttft_s.n, point.output_tokens_per_s) == (2, 0, 0.0)


def test_no_server_is_an_error_with_a_fix() -> None:
    with pytest.raises(DayZeroError) as caught:
        bench("http://127.0.0.1:9", instruction_set="x")
    assert caught.value.fix
    with pytest.raises(DayZeroError):
        LoadClient("ftp://somewhere")


def test_url_forms_reach_the_same_server() -> None:
    with MockServer() as server:
        for url in (server.url, server.url + "/", server.url + "/v1", server.url.removeprefix("http://")):
            assert LoadClient(url).model_name() == "mock"


def test_clients_in_flight_never_exceed_the_concurrency() -> None:
    """Counted in the client: a server lets go of a request a moment after its last byte was read."""
    lock, now, most = threading.Lock(), [0], [0]

    class Counting(LoadClient):
        def stream(self, *args: Any, **kwargs: Any) -> Any:
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            try:
                return super().stream(*args, **kwargs)
            finally:
                with lock:
                    now[0] -= 1

    with MockServer(token_s=0.005) as server:
        answers = run_point(Counting(server.url), [{"model": "mock", "prompt": [i], "max_tokens": 4} for i in range(9)], 3)
    assert len(answers) == 9 and all(answer.outcome == "ok" for answer in answers)
    assert most[0] == 3


def test_a_client_leaves_when_told_to() -> None:
    with MockServer(token_s=0.01) as server:
        client, body = LoadClient(server.url), {"model": "mock", "prompt": [5], "max_tokens": 500}
        left = client.stream("/v1/completions", body, leave=Leave(after_events=3, reset=True))
        assert left.outcome == "cancelled" and len(left.token_ids) == 3
        assert client.stream("/v1/completions", body, leave=Leave(after_s=0.05)).outcome == "cancelled"
        assert client.request("POST", "/v1/completions", body, leave=Leave(after_s=0.05)).left
        deadline = time.monotonic() + 5
        while server.referenced and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.referenced == 0


def test_an_error_in_a_worker_ends_the_others_and_is_raised() -> None:
    with MockServer(token_s=0.05) as server:
        client = LoadClient(server.url)

        def work(worker: int) -> bool:
            if worker == 1:
                raise KeyboardInterrupt
            return client.stream("/v1/completions", {"model": "mock", "prompt": [1], "max_tokens": 10_000}).outcome == "ok"

        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run_workers(work, 3, client)
        assert time.monotonic() - started < 5


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_spread_is_ordered_and_within_the_values(values: list[float]) -> None:
    found = spread(values)
    assert found.n == len(values) and min(values) <= found.p10 <= found.median <= found.p90 <= max(values)


def test_prompts_are_seeded_distinct_and_in_the_vocabulary() -> None:
    first, second = Prompts(vocab_size=50, seed=3), Prompts(vocab_size=50, seed=3)
    drawn = [first.draw(8) for _ in range(200)]
    assert drawn == [second.draw(8) for _ in range(200)]
    assert len({tuple(ids[:4]) for ids in drawn}) == 200 and all(5 <= token < 45 for ids in drawn for token in ids)
    assert len(set(map(str, (Prompts(vocab_size=None, seed=i).draw(5) for i in range(20))))) == 20
    assert all(0 <= token < 3 for token in Prompts(vocab_size=3, seed=0).draw(6))
