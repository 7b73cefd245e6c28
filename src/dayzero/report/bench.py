"""Speed of a served model at several concurrencies: a URL goes in, the record `7_performance.json` comes out.

A closed loop: at concurrency c, c clients each send their next request as soon as the last one ended, until all requests
of the point are done. Greedy, fixed output length (`ignore_eos`), every prompt different. It measures what a client
feels, queueing included; it deliberately does not search for a best setting, nor for a rate at which the server breaks.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence

from dayzero.core.errors import DayZeroError
from dayzero.core.reports import BenchPoint, BenchReport, Check, Spread, Verdict, overall
from dayzero.report.answers import HOW_TIMES, Answer
from dayzero.report.load_client import LoadClient, run_workers
from dayzero.report.memory import HOW_MEMORY, MemorySource, MemoryWatch
from dayzero.report.prompts import Prompts, completion

WARM_UP_OUTPUT_TOKENS = 4  # enough to run prefill and a few decode steps at the point's batch size
MEMORY_EVERY_S = 0.1
# Prompts share nothing; a server that reuses more of them than this (a start token's block at most) flatters its TTFT.
MAX_REUSED_SHARE = 0.02


def bench(
    url: str, *, instruction_set: str, model: str | None = None, concurrencies: Sequence[int] = (1, 2, 4, 8),
    requests_per_point: int = 8, input_tokens: int = 128, output_tokens: int = 32, vocab_size: int | None = None,
    memory_of: MemorySource | None = None, max_ttft_s: float | None = None, max_tpot_s: float | None = None,
    goal_concurrency: int | None = None, api_key: str | None = None, timeout_s: float = 600.0, seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> BenchReport:  # fmt: skip
    """Measure TTFT, TPOT, throughput and peak memory. `requests_per_point` is rounded up to full rounds of clients.

    With `vocab_size` prompts are token ids of exactly `input_tokens`; without, text of about that length. `memory_of` is
    the server's process ids or a gauge in bytes. The goals hold at `goal_concurrency` (default: the largest) for the 90th
    percentile. Raises DayZeroError when no server answers; a failing request is a failed check.
    """
    if not concurrencies or min(*concurrencies, requests_per_point, input_tokens, output_tokens) < 1:
        raise DayZeroError("bench: every count must be at least 1", got=f"concurrencies {tuple(concurrencies)}",
                           want=">= 1", fix="correct the arguments")  # fmt: skip
    started = time.monotonic()
    client = LoadClient(url, api_key=api_key, timeout_s=timeout_s)
    model = model or client.model_name()
    prompts = Prompts(vocab_size=vocab_size, seed=seed)
    points, checks, everything = [], [], list[Answer]()
    for concurrency in concurrencies:
        if progress:
            progress(f"concurrency {concurrency}")
        bodies = [
            completion(model, prompts.draw(input_tokens), max_tokens=output_tokens, temperature=0, ignore_eos=True)
            for _ in range(concurrency * math.ceil(requests_per_point / concurrency))
        ]
        warm_up = [
            completion(model, prompts.draw(input_tokens), max_tokens=min(WARM_UP_OUTPUT_TOKENS, output_tokens),
                       temperature=0, ignore_eos=True) for _ in range(concurrency)
        ]  # fmt: skip
        run_point(client, warm_up, concurrency)
        point, answers = _measure(client, bodies, concurrency, memory_of, input_tokens, output_tokens)
        points.append(point)
        everything += answers
        checks.append(_answered(answers, concurrency))
    checks += _accounting(everything, output_tokens)
    goal_point = max((p for p in points if p.concurrency <= (goal_concurrency or max(concurrencies))),
                     key=lambda p: p.concurrency, default=points[0])  # fmt: skip
    checks += [
        _goal("ttft", goal_point.ttft_s, max_ttft_s, goal_point.concurrency),
        _goal("tpot", goal_point.tpot_s, max_tpot_s, goal_point.concurrency),
        _memory(points, memory_of),
    ]
    return BenchReport(
        verdict=overall(tuple(checks)), checks=tuple(checks), instruction_set=instruction_set, points=tuple(points),
        how=_how(everything, vocab_size), seconds=time.monotonic() - started,
    )  # fmt: skip


def run_point(client: LoadClient, bodies: list[dict[str, object]], concurrency: int) -> list[Answer]:
    """All requests, `concurrency` of them in flight, in the order given."""
    waiting, answers, lock = list(reversed(bodies)), list[Answer](), threading.Lock()

    def work(worker: int) -> bool:
        with lock:
            if not waiting:
                return False
            body = waiting.pop()
        answer = client.stream("/v1/completions", body)
        with lock:
            answers.append(answer)
        return True

    run_workers(work, min(concurrency, len(bodies)), client)
    return answers


def _measure(client: LoadClient, bodies: list[dict[str, object]], concurrency: int, memory_of: MemorySource | None,
             input_tokens: int, output_tokens: int) -> tuple[BenchPoint, list[Answer]]:  # fmt: skip
    if memory_of is None:
        peak, answers = 0, run_point(client, bodies, concurrency)
    else:
        with MemoryWatch(memory_of, every_s=MEMORY_EVERY_S) as watch:
            answers = run_point(client, bodies, concurrency)
        peak = watch.peak_bytes
    good = [answer for answer in answers if answer.outcome == "ok"]
    wall_s = max(a.finished_s for a in answers) - min(a.started_s for a in answers)
    prompt_tokens = [a.prompt_tokens for a in good if a.prompt_tokens is not None]
    return BenchPoint(
        concurrency=concurrency, requests=len(answers),
        failed=sum(answer.outcome in ("failed", "refused") for answer in answers),
        input_tokens=round(spread(prompt_tokens).median) if prompt_tokens else input_tokens, output_tokens=output_tokens,
        ttft_s=spread([a.ttft_s for a in good if a.ttft_s is not None]),
        tpot_s=spread([a.tpot_s for a in good if a.tpot_s is not None]),
        output_tokens_per_s=sum(a.completion_tokens for a in good) / wall_s if wall_s > 0 else 0.0,
        peak_memory_bytes=peak,
    ), answers  # fmt: skip


def spread(values: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile, linear between order statistics. n = 0: nothing measured, the zeros mean nothing."""
    ordered = sorted(values)
    if not ordered:
        return Spread(n=0, median=0.0, p10=0.0, p90=0.0)

    def percentile(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return Spread(n=len(ordered), median=percentile(0.5), p10=percentile(0.1), p90=percentile(0.9))


def _answered(answers: list[Answer], concurrency: int) -> Check:
    """Every request of a point ended with an answer. The kinds of bad ends are told apart."""
    bad = [answer for answer in answers if answer.outcome != "ok"]
    kinds = {kind: sum(a.outcome == kind for a in bad) for kind in ("failed", "refused", "empty", "tool_only")}
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    first = next((answer.error for answer in bad if answer.error), "")
    return Check(name="requests answered", verdict="fail" if bad else "pass", value=len(answers) - len(bad), limit=len(answers),
                 where=f"concurrency {concurrency}", detail="; ".join(filter(None, (told, first))))  # fmt: skip


def _accounting(answers: list[Answer], output_tokens: int) -> list[Check]:
    """Whether the server's own counts can carry the figures."""
    good = [answer for answer in answers if answer.outcome == "ok"]
    counted = [a for a in good if a.tokens_from == "usage"]
    differing = [a for a in counted if a.token_ids and len(a.token_ids) != a.completion_tokens]
    short = [a for a in good if a.completion_tokens != output_tokens]
    reported = [a for a in good if a.cached_tokens is not None and a.prompt_tokens]
    reused_share = sum(a.cached_tokens or 0 for a in reported) / max(1, sum(a.prompt_tokens or 0 for a in reported))
    fresh: Verdict = "not_shown" if not reported else "pass" if reused_share <= MAX_REUSED_SHARE else "fail"
    usage: Verdict = "not_shown" if not good or len(counted) < len(good) else "fail" if differing else "pass"
    return [
        Check(name="usage counts the tokens sent", verdict=usage, value=len(counted) - len(differing), limit=len(good),
              where=f"{len(differing)} answers differ" if differing else "", detail="" if usage != "not_shown" else
              "the server reports no usage in its streams"),
        Check(name="output length as asked", verdict="not_shown" if not good else "fail" if short else "pass", required=False,
              value=len(good) - len(short), limit=len(good), detail="ignore_eos was not honoured" if short else ""),
        Check(name="prompts not reused", verdict=fresh,
              value=round(reused_share, 4) if reported else None, limit=MAX_REUSED_SHARE, required=False,
              detail="" if reported else "the server does not report cached tokens"),
    ]  # fmt: skip


def _goal(name: str, measured: Spread, limit_s: float | None, concurrency: int) -> Check:
    """A latency goal at the 90th percentile. Without a goal there is nothing to judge: shown, not required."""
    where = f"90th percentile of {measured.n} requests, concurrency {concurrency}"
    if limit_s is None:
        return Check(name=f"{name}_s goal", verdict="not_shown", value=measured.p90 if measured.n else None, limit=None,
                     where=where, required=False, detail="the workload sets no goal")  # fmt: skip
    if measured.n == 0:
        return Check(name=f"{name}_s goal", verdict="not_shown", value=None, limit=limit_s, where=where, detail="not measured")
    return Check(name=f"{name}_s goal", verdict="pass" if measured.p90 <= limit_s else "fail", value=measured.p90,
                 limit=limit_s, where=where)  # fmt: skip


def _memory(points: list[BenchPoint], memory_of: MemorySource | None) -> Check:
    peak = max(point.peak_memory_bytes for point in points)
    seen = memory_of is not None and peak > 0
    return Check(name="peak memory measured", verdict="pass" if seen else "not_shown", value=peak if seen else None, limit=None,
                 required=False, detail="" if seen else "nothing was given to watch, or it showed nothing")  # fmt: skip


def _how(answers: list[Answer], vocab_size: int | None) -> tuple[str, ...]:
    good = [answer for answer in answers if answer.outcome == "ok"]
    assumed = sum(not answer.first_tokens_known for answer in good)
    counted = sum(answer.tokens_from == "usage" for answer in good)
    prompt = (f"Prompts are random token ids from the middle four fifths of a vocabulary of {vocab_size}"
              if vocab_size else "Prompts are random words")  # fmt: skip
    return (
        *HOW_TIMES,
        f"Tokens of the first event: told by the server in {len(good) - assumed} of {len(good)} answers, assumed to be one in "
        f"{assumed}. Completion tokens: from the server's usage in {counted} of {len(good)}.",
        "Throughput: completion tokens of the answered requests / time from the first request sent to the last answer ended; "
        "the tail in which fewer clients are busy is included.",
        f"{prompt}; each is different from its first tokens on, so prefix reuse cannot flatter TTFT.",
        "Warm-up: one short request per client before each concurrency, excluded from every figure.",
        "Spread: median, 10th and 90th percentile over the requests of one concurrency. Greedy decoding, ignore_eos.",
        HOW_MEMORY.format(every_s=MEMORY_EVERY_S),
    )
