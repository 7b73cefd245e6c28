"""What the proving stages of a synthetic run found: numerics, speed and stability, for `run_folder`."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from dayzero.core.reports import (
    BenchPoint,
    BenchReport,
    Check,
    LayerError,
    NumericsReport,
    Sample,
    Spread,
    StabilityReport,
    overall,
)
from dayzero.core.units import GIB, MIB
from dayzero.report.answers import HOW_TIMES

LAYERS = 30

SAMPLES = (
    ("What is the capital of France?", "The capital of France is Paris.", "The capital of France is Paris.", 8),
    (
        "Write one sentence about the sea.",
        "The sea is a vast, restless body of water that has shaped the coasts, the weather and the lives of "
        "the people beside it.",
        "The sea is a vast, restless body of water that has shaped the coasts, the weather and the trade of nations.",
        24,
    ),
    ("List three colours, one a line.", "1. Red\n2. Blue\n3. Green", "1. Red\n2. Blue\n3. Green", 14),
)


def make_numerics(*, failing: bool = False) -> NumericsReport:
    source = random.Random(7)
    layers = []
    for layer in range(LAYERS):
        own = 2.2e-3 * (1 + layer / 9) * math.exp(source.gauss(0, 0.12))
        error = own * (1.02 + abs(source.gauss(0, 0.15)))
        if failing and layer >= 17:
            error *= 60
        layers.append(LayerError(layer=layer, kind="full+dense", max_abs=error * 3, relative=error, reference_relative=own))
    checks = (
        Check(
            name="layer_error",
            verdict="fail" if failing else "pass",
            value=layers[-1].relative,
            limit=layers[-1].reference_relative * 2,
            where="layer 17" if failing else "layer 29",
            detail="at most twice the reference's own error",
        ),
        Check(
            name="logits_max_abs",
            verdict="fail" if failing else "pass",
            value=11.8 if failing else 0.21,
            limit=0.43,
            where="text 2, position 118",
        ),
        Check(name="top1_agreement", verdict="pass", value=0.996, limit=0.98),
        Check(name="perplexity", verdict="pass", value=14.312, limit=14.45, where="bundled text, 2,048 tokens"),
        Check(
            name="greedy tokens",
            verdict="pass",
            value=0,
            limit=0,
            where="8 prompts, 512 tokens",
            detail="3 cut where the reference's two best are closer than 1e-4",
        ),
    )
    samples = tuple(
        Sample(prompt=p, answer=a, reference=r, same_tokens=n if a == r else n - 6, num_tokens=n) for p, a, r, n in SAMPLES
    )
    if failing:
        odd = "<script>alert('x')</script> & the the the the the the"
        samples = (replace(samples[0], answer=odd, same_tokens=1), *samples[1:])
    return NumericsReport(
        verdict=overall(checks),
        checks=checks,
        reference="the transformers class in float32",
        layers=tuple(layers),
        samples=samples,
        seconds=38.0,
    )


def make_bench(*, failing: bool = False) -> BenchReport:
    def spread(median: float, n: int) -> Spread:
        return Spread(n=n, median=median, p10=median * 0.94, p90=median * 1.21)

    points = tuple(
        BenchPoint(
            concurrency=c,
            requests=8,
            failed=3 if failing and c == 8 else 0,
            input_tokens=128,
            output_tokens=32,
            ttft_s=spread(0.21 * (1 + 0.55 * (c - 1)), 8),
            tpot_s=spread(0.0153 * (1 + 0.14 * (c - 1)), 8),
            output_tokens_per_s=61 * c / (1 + 0.21 * (c - 1)),
            peak_memory_bytes=int((1.02 + 0.01 * c) * GIB),
        )
        for c in (1, 2, 4, 8)
    )
    checks = (
        *(
            Check(
                name="requests answered",
                verdict="fail" if p.failed else "pass",
                value=8 - p.failed,
                limit=8,
                where=f"concurrency {p.concurrency}",
                detail="3 failed; HTTP 500 engine error" if p.failed else "",
            )
            for p in points
        ),
        Check(name="usage counts the tokens sent", verdict="pass", value=32, limit=32),
        Check(name="prompts not reused", verdict="pass", value=0.0, limit=0.02, required=False),
        Check(
            name="ttft_s goal",
            verdict="not_shown",
            value=1.23,
            limit=None,
            where="90th percentile of 8 requests, concurrency 8",
            required=False,
            detail="the workload sets no goal",
        ),
        Check(
            name="tpot_s goal",
            verdict="not_shown",
            value=0.0366,
            limit=None,
            where="90th percentile of 8 requests, concurrency 8",
            required=False,
            detail="the workload sets no goal",
        ),
    )
    return BenchReport(
        verdict=overall(checks), checks=checks, instruction_set="AVX2", points=points, how=HOW_TIMES, seconds=31.0
    )


def make_soak(duration_s: float, *, failing: bool = False) -> StabilityReport:
    source, times, values = random.Random(3), [], []
    for i in range(150):
        at = duration_s * i / 149
        growth = 2.4 * MIB * at if failing else 0.0
        values.append(int(1.05 * GIB + 40 * MIB * (1 - math.exp(-at / duration_s * 14)) + growth + source.gauss(0, 0.8 * MIB)))
        times.append(round(at, 3))
    slope = 2.4 * MIB if failing else 9100.0
    api = "pass"
    checks = (
        Check(name="requests answered", verdict="pass", value=0, limit=0, where="231 answered of 318 sent, 0 told to wait"),
        Check(name="wrong requests refused with 4xx", verdict="pass", value=0, limit=0, where="48 sent, 12 of 12 kinds"),
        Check(name="clients left in the middle", verdict="pass", value=39, limit=None),
        Check(name="healthy throughout", verdict="pass", value=0, limit=0, where="30 questions, slowest answer 0.012 s"),
        Check(
            name="everything freed after the load",
            verdict="fail" if failing else "pass",
            value=17 if failing else 0,
            limit=0,
            where='cache_blocks{state="referenced"} after ' + ("10.0 s" if failing else "0.2 s"),
        ),
        Check(name="same greedy answer before and after", verdict="pass", value="equal", limit="equal"),
        Check(name="processes lived", verdict="pass", value=0, limit=0),
        Check(
            name="memory does not grow",
            verdict="not_shown",
            value=slope,
            limit=15_700.0,
            required=False,
            where=f"95% interval {slope - 31000:.0f} to {slope + 31000:.0f} bytes/s",
            detail=f"a slope needs 10 minutes, the run had {duration_s / 60:.1f}",
        ),
        *(
            Check(name=f"api: {part}", verdict=api, value=200, limit=200)
            for part in ("/v1/models", "/v1/completions", "/health", "/metrics")
        ),
        Check(
            name="api: /v1/completions streamed",
            verdict="pass",
            value="ok",
            limit="ok",
            detail="streamed and whole text are equal",
        ),
        Check(
            name="api: /v1/chat/completions",
            verdict="not_shown" if failing else "pass",
            value=400 if failing else 200,
            limit=200,
            required=not failing,
            detail="no chat is offered: the model has no chat template" if failing else "",
        ),
        Check(name="api: errors in OpenAI's shape", verdict="pass", value=404, limit="400 to 499 with error.message"),
        Check(name="api: official openai client", verdict="pass", value="openai 3.57.0", limit=None),
    )
    return StabilityReport(
        verdict=overall(checks),
        checks=checks,
        duration_s=duration_s,
        requests=318,
        failed=0,
        cancelled=39,
        memory_time_s=tuple(times),
        memory_bytes=tuple(values),
        memory_slope_bytes_per_s=slope,
        memory_slope_ci95_bytes_per_s=(slope - 31000, slope + 31000),
    )
