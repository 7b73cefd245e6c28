"""soak: mixed load with faults and departures, what each defect of a server looks like, and the memory slope."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayzero.core.reports import Check, StabilityReport
from dayzero.report.load_client import LoadClient
from dayzero.report.memory import MemoryWatch, slope_with_interval, student_t_975
from dayzero.report.prompts import Prompts
from dayzero.report.soak import _growth, soak
from dayzero.report.surface import gauges, probe_interface
from dayzero.report.text import soak_table
from dayzero.report.traffic import Deck, default_faults
from tests.unit.serving_mock import CONTEXT_TOKENS, MockServer

pytestmark = pytest.mark.slow

DURATION_S = 1.5


def run_soak(server: MockServer, **options: object) -> tuple[StabilityReport, dict[str, Check]]:
    settings: dict[str, object] = {
        "duration_s": DURATION_S,
        "concurrency": 3,
        "vocab_size": server.vocab_size,
        "context_tokens": CONTEXT_TOKENS,
        "pids": [os.getpid()],
        "drain_s": 1.0,
        "grace_s": 5.0,
    }
    report = soak(server.url, **(settings | options))  # type: ignore[arg-type]
    return report, {check.name: check for check in report.checks}


def test_a_sound_server_passes_and_a_short_run_shows_no_slope() -> None:
    with MockServer() as server:
        report, checks = run_soak(server)
    failing = [check for check in report.checks if check.required and check.verdict != "pass"]
    assert report.verdict == "pass", failing
    assert report.failed == 0 and report.cancelled > 0 and report.requests > 20
    slope = checks["memory does not grow"]
    assert slope.verdict == "not_shown" and not slope.required
    assert len(report.memory_bytes) == len(report.memory_time_s) > 2
    assert DURATION_S <= report.duration_s < DURATION_S + 6
    assert checks["everything freed after the load"].where.startswith('cache_blocks{state="referenced"}')
    assert checks["api: official openai client"].verdict in ("pass", "not_shown")
    assert soak_table(report) is not None


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The `openai` package would send what is meant for this very machine to it."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # discard: nobody answers there
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with MockServer() as server:
        checks = probe_interface(LoadClient(server.url, timeout_s=10.0), "mock", [1, 2])
    assert [check for check in checks if check.verdict == "fail"] == []


@pytest.mark.parametrize(
    ("defect", "check"),
    [
        ("leak", "everything freed after the load"),  # KV-05's spirit: what a departed client held is never returned
        ("drift", "same greedy answer before and after"),
        ("sick", "healthy throughout"),
        ("lax", "wrong requests refused with 4xx"),
    ],
)
def test_each_defect_fails_its_own_check(defect: str, check: str) -> None:
    with MockServer(defects=(defect,)) as server:
        report, checks = run_soak(server)
    assert report.verdict == "fail" and checks[check].verdict == "fail", checks[check]


def test_what_a_server_lacks_is_not_shown_and_not_required() -> None:
    with MockServer(defects=("no metrics", "no template")) as server:
        report, checks = run_soak(server, pids=())
    assert report.verdict == "pass", [check for check in report.checks if check.required and check.verdict != "pass"]
    for name in ("everything freed after the load", "processes lived", "api: /v1/chat/completions"):
        assert checks[name].verdict == "not_shown" and not checks[name].required, name
    assert report.memory_bytes == () and report.memory_slope_bytes_per_s is None


def test_a_process_that_ends_is_a_failure() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.8)"])
    try:
        with MockServer() as server:
            report, checks = run_soak(server, pids=[child.pid])
        assert checks["processes lived"].verdict == "fail" and report.verdict == "fail"
    finally:
        child.wait()


def test_requests_that_never_end_are_cut_off_in_bounded_time() -> None:
    with MockServer(token_s=0.03) as server:
        started = time.monotonic()
        report, checks = run_soak(server, duration_s=0.5, grace_s=0.3, drain_s=0.2, input_tokens=(4,), output_tokens=(64,))
        assert time.monotonic() - started < 60
    assert checks["requests answered"].verdict == "fail" and report.verdict == "fail"


def test_a_deck_holds_every_kind_and_all_faults_come_up() -> None:
    faults = default_faults(vocab_size=100, context_tokens=64)
    deck = Deck(
        model="m", prompts=Prompts(vocab_size=100, seed=1), input_tokens=(4, 8), output_tokens=(2, 4), faults=faults, seed=1
    )
    size = 2 * 2 * 2 + 4 + 3
    dealt = [deck.deal() for _ in range(size * 4)]
    first = {task.kind for task in dealt[:size]}
    assert first == {
        "streamed, greedy",
        "streamed, sampled",
        "whole, greedy",
        "whole, sampled",
        "client left",
        "wrong on purpose",
    }
    assert {task.fault.name for task in dealt if task.fault} == {fault.name for fault in faults}
    assert any("prompt" not in task.body for task in dealt if task.fault)


def make_noise(n: int, slope: float, *, correlation: float, seed: int) -> tuple[list[float], list[float]]:
    source, value, values = random.Random(seed), 0.0, []
    for i in range(n):
        value = correlation * value + source.gauss(0, 1)
        values.append(100.0 + slope * i + value)
    return [float(i) for i in range(n)], values


@pytest.mark.parametrize("correlation", [0.0, 0.6, 0.85])
def test_the_interval_covers_the_true_slope_also_under_autocorrelation(correlation: float) -> None:
    hits = 0
    for seed in range(150):
        slope, interval = slope_with_interval(*make_noise(200, 0.01, correlation=correlation, seed=seed))
        assert interval is not None and interval[0] <= slope <= interval[1]
        hits += interval[0] <= 0.01 <= interval[1]
    assert hits / 150 >= 0.90  # 95% nominal; two standard errors of 150 trials below


def test_known_slopes_and_degenerate_samples() -> None:
    slope, interval = slope_with_interval([0.0, 1.0, 2.0, 3.0], [5.0, 7.0, 9.0, 11.0])
    assert slope == pytest.approx(2.0) and interval is not None and interval[0] == pytest.approx(2.0)
    assert slope_with_interval([0.0, 1.0, 2.0], [4.0, 4.0, 4.0]) == (0.0, (0.0, 0.0))
    assert slope_with_interval([0.0, 1.0], [1.0, 2.0])[1] is None
    assert slope_with_interval([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])[1] is None
    # a single step: the samples are nearly one observation, so there is no interval or a very wide one
    _, step = slope_with_interval([float(i) for i in range(40)], [0.0] * 20 + [1e6] * 20)
    assert step is None or step[0] < 0 or step[1] - step[0] > 1e4


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.7062), (2, 4.30265), (5, 2.57058), (30, 2.04227), (1000, 1.96234)])
def test_student_quantiles(degrees: int, quantile: float) -> None:
    assert student_t_975(degrees) == pytest.approx(quantile, rel=1e-4)


@pytest.mark.parametrize(("bytes_per_s", "verdict"), [(0.0, "pass"), (1e6, "fail")])
def test_long_runs_judge_the_slope(bytes_per_s: float, verdict: str) -> None:
    source = random.Random(0)
    samples = [(float(t), int(1e9 + bytes_per_s * t + source.gauss(0, 2e5))) for t in range(700)]
    slope, interval, check = _growth(samples, 700.0, 0.05)
    assert check.verdict == verdict and check.required and slope is not None and interval is not None


def test_a_long_run_between_the_limits_is_not_shown() -> None:
    source = random.Random(0)
    samples = [(float(t), int(1e9 + source.gauss(0, 5e7))) for t in range(700)]
    assert _growth(samples, 700.0, 0.05)[2].verdict == "not_shown"


def test_memory_of_children_counts_and_gauges_work() -> None:
    with MemoryWatch([os.getpid()], every_s=0.02) as alone:
        time.sleep(0.05)
    code = "import time; block = bytearray(b'x') * 40_000_000; print('ready', flush=True); time.sleep(30)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        with MemoryWatch([os.getpid()], every_s=0.02) as both:
            time.sleep(0.05)
        assert both.peak_bytes > alone.peak_bytes + 30_000_000
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    with MemoryWatch(lambda: 42, every_s=0.02) as gauge:
        time.sleep(0.05)
    assert gauge.peak_bytes == 42 and len(gauge.samples) >= 3


@given(st.text(max_size=200))
def test_any_text_parses_as_metrics(text: str) -> None:
    assert all(isinstance(value, float) for value in gauges(text).values())
