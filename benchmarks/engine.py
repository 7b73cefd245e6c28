"""`make bench`: the engine against transformers' `generate` (sdpa) on the same weights, threads and prompts, in one run.

Three measurements: prefill of 512 tokens, decode at batch 1, and 8 requests of 128 in / 128 out against one batched
`generate` of 8. Each side in the better of bfloat16 and float32 on this CPU (measured here, said which). Rounds are
interleaved and gated (benchmarks/gate.py). The last line is JSON with the ratios, or "not_shown" where the machine was too
busy. Needs models/smollm2 (`dayzero fetch smollm2`), or the folder given as the first argument.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from gate import Gate, interleave, median_ratio

from dayzero.core.generation import GenerationRequest, SamplingParams
from dayzero.core.plan import Layout
from dayzero.model.describe import describe
from dayzero.runtime.engine import Engine
from dayzero.runtime.load import EngineSpec, load_engine
from dayzero.weights.convert import convert

THREADS = 2
ROUNDS, MOST_REPEATS = 5, 6
PREFILL_TOKENS = 512
DECODE_PROMPT, DECODE_TOKENS = 16, 64
CONCURRENT, CONCURRENT_IN, CONCURRENT_OUT = 8, 128, 128
DTYPES = ("bfloat16", "float32")


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1000, 40000, (count, length), generator=generator).tolist()


class Ours:
    def __init__(self, artifact: Path, dtype: str) -> None:
        spec = EngineSpec(artifact=str(artifact), model="bench", dtype=dtype, threads=THREADS, max_sequences=CONCURRENT)
        self.engine: Engine = load_engine(spec, log=lambda text: print(f"  engine {dtype}: {text}", flush=True))

    def run(self, inputs: list[list[int]], max_tokens: int) -> tuple[float, float]:
        """(seconds until every request has its first token, seconds in all)."""
        self.engine.reset_prefix_cache()
        started, first = time.perf_counter(), 0.0
        for index, prompt in enumerate(inputs):
            sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            self.engine.add(GenerationRequest(id=f"r{index}", prompt_token_ids=tuple(prompt), sampling=sampling))
        begun: set[str] = set()
        count = 0
        while self.engine.has_work():
            for output in self.engine.step():
                count += 1
                begun.add(output.request_id)
            if len(begun) == len(inputs) and not first:
                first = time.perf_counter() - started
        assert count == len(inputs) * max_tokens
        return first, time.perf_counter() - started


class Theirs:
    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self.model.generation_config.eos_token_id = None

    @torch.no_grad()
    def run(self, inputs: list[list[int]], max_tokens: int) -> float:
        ids = torch.tensor(inputs)
        started = time.perf_counter()
        out = self.model.generate(ids, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        assert out.shape[1] == ids.shape[1] + max_tokens
        return time.perf_counter() - started


def best(makers: dict[str, Callable[[], float]]) -> str:
    """The dtype with the shorter run, after one to warm up."""
    times = {}
    for dtype, run in makers.items():
        run()
        times[dtype] = run()
    return min(times, key=lambda dtype: times[dtype])


def main() -> None:
    torch.set_num_threads(THREADS)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "models/smollm2")
    gate = Gate()
    gate.quiet()
    with tempfile.TemporaryDirectory() as scratch:
        artifact = Path(scratch) / "artifact"
        convert(folder, describe(folder), Layout(), artifact)
        ours, theirs = {d: Ours(artifact, d) for d in DTYPES}, {d: Theirs(folder, d) for d in DTYPES}
        long, short, many = prompts(1, PREFILL_TOKENS, 0), prompts(1, DECODE_PROMPT, 1), prompts(CONCURRENT, CONCURRENT_IN, 2)

        def decode_ours(side: Ours) -> float:
            first, total = side.run(short, DECODE_TOKENS + 1)
            return total - first

        def decode_theirs(side: Theirs) -> float:
            return side.run(short, DECODE_TOKENS + 1) - side.run(short, 1)

        cases: dict[str, tuple[Callable[[Ours], float], Callable[[Theirs], float], int]] = {
            "prefill": (lambda side: side.run(long, 1)[1], lambda side: side.run(long, 1), PREFILL_TOKENS),
            "decode": (decode_ours, decode_theirs, DECODE_TOKENS),
            "concurrent": (lambda side: side.run(many, CONCURRENT_OUT)[1], lambda side: side.run(many, CONCURRENT_OUT),
                           CONCURRENT * CONCURRENT_OUT),
        }  # fmt: skip
        ratios: dict[str, float | str] = {}
        details: dict[str, object] = {}
        for name, (run_ours, run_theirs, tokens) in cases.items():
            mine = best({d: partial(run_ours, side) for d, side in ours.items()})
            other = best({d: partial(run_theirs, side) for d, side in theirs.items()})
            results = interleave(
                {"ours": partial(run_ours, ours[mine]), "theirs": partial(run_theirs, theirs[other])},
                rounds=ROUNDS, gate=gate, most_repeats=MOST_REPEATS,
            )  # fmt: skip
            if results is None:
                ratios[name] = "not_shown"
                print(f"{name:11} not shown: the machine was busy in every attempt", flush=True)
                continue
            ratios[name] = round(median_ratio(results, "theirs", "ours"), 2)
            rates = {side: round(tokens / statistics.median(times), 1) for side, times in results.items()}
            spread = {side: [round(min(times), 4), round(max(times), 4)] for side, times in results.items()}
            details[name] = {"tokens_per_s": rates, "dtype": {"ours": mine, "theirs": other}, "seconds_min_max": spread}
            print(f"{name:11} {ratios[name]:>5}x  ours {rates['ours']:>8} tokens/s ({mine}), "
                  f"transformers {rates['theirs']:>8} tokens/s ({other})", flush=True)  # fmt: skip
        info = ours["bfloat16"].engine.info
        summary = {"ratios": ratios, "instruction_set": info.instruction_set, "tier": info.tier, "threads": THREADS,
                   "rounds": ROUNDS, "torch": torch.__version__, "details": details}  # fmt: skip
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
