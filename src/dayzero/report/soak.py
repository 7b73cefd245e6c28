"""A bounded run under mixed load and bad luck: a URL goes in, the record `8_stability.json` comes out.

Ordinary requests of every mix, clients that leave in the middle (closed or reset), and requests that are wrong on purpose
run side by side. Around them: the interface probe, the same greedy prompt before and after, the health endpoint
throughout, memory over time, and the server's gauge of blocks in use, which must return to 0. It can be attached to any
OpenAI-compatible server; what that server does not expose is "not shown". It never kills a process: that is the server's
own test. The time is bounded by `duration_s` + `grace_s` + `drain_s` + a few single requests.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dayzero.core.errors import DayZeroError
from dayzero.core.reports import Check, StabilityReport, Verdict, overall
from dayzero.report.answers import error_text
from dayzero.report.load_client import LoadClient, run_workers
from dayzero.report.memory import SETTLE_SHARE, MemorySource, MemoryWatch, slope_with_interval
from dayzero.report.prompts import Prompt, Prompts, completion
from dayzero.report.surface import busy_gauge, probe_interface
from dayzero.report.traffic import Deck, Fault, Task, default_faults

# Below this a slope is dominated by caches that are still filling; the interval would be honest and the reading not.
MIN_SLOPE_DURATION_S = 600.0
HEALTH_EVERY_S = 0.5
GREEDY_TOKENS = 16
MIN_MEMORY_SAMPLES = 30


@dataclass(slots=True)
class _Tally:
    """What the workers saw. Guarded by `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    sent: int = 0
    answered: int = 0
    refused: int = 0
    left: int = 0
    stayed: int = 0  # the answer was complete before the client could leave
    faults_sent: int = 0
    failures: list[str] = field(default_factory=list)
    accepted_faults: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    fault_names: set[str] = field(default_factory=set)


def soak(
    url: str, *, duration_s: float, concurrency: int = 4, pids: Sequence[int] = (), memory_of: MemorySource | None = None,
    model: str | None = None, vocab_size: int | None = None, context_tokens: int | None = None,
    input_tokens: tuple[int, ...] = (8, 48, 160), output_tokens: tuple[int, ...] = (4, 12, 32),
    faults: tuple[Fault, ...] | None = None, max_growth_share_per_hour: float = 0.05, api_key: str | None = None,
    timeout_s: float = 120.0, grace_s: float = 60.0, drain_s: float = 10.0, seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> StabilityReport:  # fmt: skip
    """Load the server for `duration_s` and judge it. `pids` are its processes (watched for life and memory); `memory_of`
    replaces them as the source of memory figures. Lengths are cut to `context_tokens`. Interruptible at any time.

    Raises DayZeroError when no server answers at the start.
    """
    if duration_s <= 0 or concurrency < 1:
        raise DayZeroError("soak: duration and concurrency must be positive", got=f"{duration_s} s, {concurrency} clients",
                           want="> 0", fix="correct the arguments")  # fmt: skip
    client = LoadClient(url, api_key=api_key, timeout_s=timeout_s)
    model = model or client.model_name()
    prompts = Prompts(vocab_size=vocab_size, seed=seed)
    if context_tokens is not None:  # a departing client asks for up to 4 times the longest output
        output_tokens = tuple(sorted({max(1, min(n, context_tokens // 8)) for n in output_tokens}))
        input_tokens = tuple(sorted({max(1, min(n, context_tokens - 4 * max(output_tokens))) for n in input_tokens}))
    probe_prompt = prompts.draw(min(16, max(input_tokens)))
    interface = probe_interface(client, model, probe_prompt)
    before, gauge_shown = _greedy(client, model, probe_prompt), busy_gauge(client) is not None
    faults = default_faults(vocab_size=vocab_size, context_tokens=context_tokens) if faults is None else faults
    deck = Deck(model=model, prompts=prompts, input_tokens=input_tokens, output_tokens=output_tokens, faults=faults, seed=seed)
    tally, health = _Tally(), _Health(client)
    if progress:
        progress(f"{concurrency} clients for {duration_s:g} s")
    with MemoryWatch(memory_of or pids, every_s=max(0.2, duration_s / 1000)) as watch:
        started = time.monotonic()
        until_s = started + duration_s
        with health:
            in_time = run_workers(lambda _: _one(client, deck.deal(), tally) and time.monotonic() < until_s, concurrency,
                                  client, until_s=until_s, grace_s=grace_s)  # fmt: skip
        lasted_s = time.monotonic() - started
        quiet = LoadClient(url, api_key=api_key, timeout_s=timeout_s)  # the first client may have been aborted
        freed = _drained(quiet, drain_s, shown_before=gauge_shown)
        after = _greedy(quiet, model, probe_prompt)
    measured = bool(memory_of or pids) and watch.peak_bytes > 0
    samples = watch.samples if measured else []
    slope, interval, slope_check = _growth(samples, lasted_s, max_growth_share_per_hour)
    checks = (
        _requests(tally, in_time, grace_s), _faults(tally, faults), _departures(tally), health.check(), freed,
        _same_answer(before, after), _alive(pids, watch.gone), slope_check, *interface,
    )  # fmt: skip
    return StabilityReport(
        verdict=overall(checks), checks=checks, duration_s=lasted_s, requests=tally.sent, failed=len(tally.failures),
        cancelled=tally.left, memory_time_s=tuple(t for t, _ in samples), memory_bytes=tuple(b for _, b in samples),
        memory_slope_bytes_per_s=slope, memory_slope_ci95_bytes_per_s=interval,
    )  # fmt: skip


def _one(client: LoadClient, task: Task, tally: _Tally) -> bool:
    """Send one task and judge its end. Always True: the caller decides when it is time to stop."""
    refused, left, failure, accepted = False, False, "", ""
    if task.fault is not None:
        reply = client.request("POST", task.fault.path, task.body, raw=task.fault.raw)
        if reply.status in (429, 503):
            refused = True
        elif reply.status not in task.fault.statuses:
            accepted = f"{task.fault.name}: HTTP {reply.status} {reply.error or error_text(reply.data)[:120]}"
    elif task.stream:
        answer = client.stream("/v1/completions", task.body, leave=task.leave)
        refused, left = answer.outcome == "refused", answer.outcome == "cancelled"
        if answer.outcome in ("failed", "tool_only", "empty"):
            failure = f"{task.kind}: {answer.outcome}, HTTP {answer.status} {answer.error}"
    else:
        reply = client.request("POST", "/v1/completions", task.body, leave=task.leave)
        refused, left = reply.status in (429, 503), reply.left
        whole = reply.status == 200 and isinstance(reply.data, dict) and bool(reply.data.get("choices"))
        if not (refused or left or whole):
            failure = f"{task.kind}: HTTP {reply.status} {reply.error or error_text(reply.data)[:200]}"
    with tally.lock:
        tally.sent += 1
        tally.refused += refused
        tally.left += left
        tally.kinds[task.kind] += 1
        if task.fault is not None:
            tally.faults_sent += 1
            tally.fault_names.add(task.fault.name)
        if failure:
            tally.failures.append(failure)
        if accepted:
            tally.accepted_faults.append(accepted)
        if task.fault is None and not (failure or refused or left):
            tally.answered += 1
            tally.stayed += task.leave is not None
    if refused or failure:
        time.sleep(0.05)  # a client that is told to wait does wait; and a dead server is not asked in a tight loop
    return True


def _greedy(client: LoadClient, model: str, prompt: Prompt) -> str | None:
    """The answer to one greedy prompt, as token ids where the server gives them. Asked twice and the second taken: both
    before and after the run it is then answered with the prompt's prefix already cached, where the server reuses one."""
    body = completion(model, prompt, max_tokens=GREEDY_TOKENS, temperature=0, ignore_eos=True)
    client.stream("/v1/completions", body)
    answer = client.stream("/v1/completions", body)
    if answer.outcome not in ("ok", "empty"):
        return None
    return " ".join(map(str, answer.token_ids)) if answer.token_ids else answer.text


class _Health:
    """Asks `/health` all through a run, from its own thread and its own connections."""

    def __init__(self, client: LoadClient) -> None:
        self._client = LoadClient(client.url + client.prefix, api_key=client.api_key, timeout_s=5.0)
        self._stop, self.asked, self.bad, self.slowest_s = threading.Event(), 0, list[str](), 0.0
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._client.abort()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.is_set():
            reply = self._client.request("GET", "/health")
            if self._stop.is_set():
                return  # cut off by the end of the run
            self.asked += 1
            self.slowest_s = max(self.slowest_s, reply.seconds)
            if reply.status != 200:
                self.bad.append(f"HTTP {reply.status} {reply.error}".strip())
            self._stop.wait(HEALTH_EVERY_S)

    def check(self) -> Check:
        verdict: Verdict = "fail" if self.bad else "pass" if self.asked else "not_shown"
        return Check(name="healthy throughout", verdict=verdict, value=len(self.bad), limit=0,
                     where=f"{self.asked} questions, slowest answer {self.slowest_s:.3f} s",
                     detail=self.bad[0] if self.bad else "")  # fmt: skip


def _drained(client: LoadClient, drain_s: float, *, shown_before: bool) -> Check:
    """After the load the gauge of what is in use returns to 0 within `drain_s`. A gauge that was there and is gone fails."""
    name, started = "everything freed after the load", time.monotonic()
    while True:
        found, waited = busy_gauge(client), time.monotonic() - started
        if found is not None and (found[1] == 0 or waited > drain_s):
            return Check(name=name, verdict="pass" if found[1] == 0 else "fail", value=found[1], limit=0,
                         where=f"{found[0]} after {waited:.1f} s")  # fmt: skip
        if found is None and (waited > drain_s or not shown_before):
            return Check(name=name, verdict="fail" if shown_before else "not_shown", value=None, limit=0, required=shown_before,
                         detail="the server shows no gauge of blocks or requests in use")  # fmt: skip
        time.sleep(0.1)


def _requests(tally: _Tally, in_time: bool, grace_s: float) -> Check:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.kinds.items()))
    if not in_time:
        tally.failures.append(f"requests still open {grace_s:g} s after the end were cut off")
    verdict: Verdict = "fail" if tally.failures else "pass" if tally.answered else "not_shown"
    return Check(name="requests answered", verdict=verdict, value=len(tally.failures), limit=0,
                 where=f"{tally.answered} answered of {tally.sent} sent, {tally.refused} told to wait",
                 detail=tally.failures[0] if tally.failures else kinds)  # fmt: skip


def _faults(tally: _Tally, faults: tuple[Fault, ...]) -> Check:
    verdict: Verdict = "fail" if tally.accepted_faults else "pass" if tally.faults_sent else "not_shown"
    return Check(name="wrong requests refused with 4xx", verdict=verdict, value=len(tally.accepted_faults), limit=0,
                 where=f"{tally.faults_sent} sent, {len(tally.fault_names)} of {len(faults)} kinds",
                 detail=tally.accepted_faults[0] if tally.accepted_faults else "")  # fmt: skip


def _departures(tally: _Tally) -> Check:
    """Clients did leave in the middle. What they left behind shows in the checks on freed blocks and on the answer after."""
    return Check(name="clients left in the middle", verdict="pass" if tally.left else "not_shown", value=tally.left, limit=None,
                 where=f"{tally.stayed} more were answered before they could leave")  # fmt: skip


def _same_answer(before: str | None, after: str | None) -> Check:
    verdict: Verdict = "fail" if after is None or before != after else "pass"
    if before is None:
        verdict = "not_shown" if after is not None else "fail"
    detail = "" if verdict == "pass" else f"before: {before!s:.80}, after: {after!s:.80}"
    return Check(name="same greedy answer before and after", verdict=verdict, limit="equal",
                 value="equal" if verdict == "pass" else "not equal", detail=detail)  # fmt: skip


def _alive(pids: Sequence[int], gone: set[int]) -> Check:
    if not pids:
        return Check(name="processes lived", verdict="not_shown", value=None, limit=0, required=False,
                     detail="none was given to watch")  # fmt: skip
    return Check(name="processes lived", verdict="fail" if gone else "pass", value=len(gone), limit=0,
                 where=", ".join(f"process {pid} ended" for pid in sorted(gone)))  # fmt: skip


def _growth(samples: list[tuple[float, int]], lasted_s: float, share_per_hour: float,
            ) -> tuple[float | None, tuple[float, float] | None, Check]:  # fmt: skip
    """The memory slope and its verdict: pass when the whole interval is under the limit, fail when it is all above."""
    name, settle_s = "memory does not grow", lasted_s * SETTLE_SHARE
    used = [(t, b) for t, b in samples if settle_s <= t <= lasted_s]
    if len(used) < MIN_MEMORY_SAMPLES:
        told = f"{len(used)} memory samples, {MIN_MEMORY_SAMPLES} needed"
        return None, None, Check(name=name, verdict="not_shown", value=None, limit=None, detail=told,
                                 required=lasted_s >= MIN_SLOPE_DURATION_S)  # fmt: skip
    slope, interval = slope_with_interval([t for t, _ in used], [float(b) for _, b in used])
    limit = share_per_hour * sorted(b for _, b in used)[len(used) // 2] / 3600
    told = (f"95% interval {interval[0]:.0f} to {interval[1]:.0f} bytes/s" if interval else
            "the samples carry too little for an interval")  # fmt: skip
    if lasted_s < MIN_SLOPE_DURATION_S:
        return slope, interval, Check(name=name, verdict="not_shown", value=slope, limit=limit, where=told, required=False,
                                      detail=f"a slope needs {MIN_SLOPE_DURATION_S / 60:g} minutes, the run had "
                                             f"{lasted_s / 60:.1f}")  # fmt: skip
    verdict: Verdict = "not_shown" if interval is None else "pass" if interval[1] <= limit else "fail"
    if interval is not None and interval[0] <= limit < interval[1]:
        verdict = "not_shown"
    return slope, interval, Check(name=name, verdict=verdict, value=slope, limit=limit, where=told,
                                  detail="a longer run narrows the interval" if verdict == "not_shown" else "")  # fmt: skip
