"""dayzero::linear against torch's F.linear on SmolLM2-135M's shapes: medians of interleaved runs, as ratios in one process.

    python benchmarks/kernels.py [--isa avx2] [--seconds 0.15] [--threads 1]

Weights rotate over enough copies to fall out of the caches, as they do between two steps of a model; 512 rows are one prefill chunk.
"""

import argparse
import time

import torch
import torch.nn.functional as F

from dayzero.ops.cpu import load

SHAPES = [(576, 576), (576, 192), (576, 1536), (1536, 576), (576, 49152)]
ROWS = [1, 4, 8, 16, 512]
WORKING_SET_BYTES = 64 << 20  # larger than a level-2 cache; shared level-3 caches may still hold it


def median_us(functions, budget_s):
    """Median microseconds of each function, called in turns."""
    times = [[] for _ in functions]
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(times[0]) < 5:
        for function, log in zip(functions, times):
            start = time.perf_counter()
            function()
            log.append(time.perf_counter() - start)
    return [sorted(log)[len(log) // 2] * 1e6 for log in times]


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--isa")
    parser.add_argument("--seconds", type=float, default=0.15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    build = load(options.isa)
    if not build.available:
        raise SystemExit(build.reason)
    print(f"instruction set {build.isa}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for dtype in (torch.bfloat16, torch.float32):
        print(f"\n{str(dtype).removeprefix('torch.')}: torch us / dayzero us = ratio (dayzero GB/s of weights)")
        print(f"{'K -> N':>15}" + "".join(f"{f'M={m}':>30}" for m in ROWS))
        for K, N in SHAPES:
            copies = max(1, min(64, WORKING_SET_BYTES // (K * N * dtype.itemsize)))
            weights = [torch.randn(N, K).to(dtype) for _ in range(copies)]
            cells = []
            for M in ROWS:
                x, turn = torch.randn(1, M, K).to(dtype), [0, 0]

                def theirs():
                    turn[0] += 1
                    F.linear(x, weights[turn[0] % copies])

                def ours():
                    turn[1] += 1
                    torch.ops.dayzero.linear(x, weights[(turn[1] + copies // 2) % copies], None, -1)

                a, b = median_us([theirs, ours], options.seconds)
                cells.append(f"{a:9.0f} /{b:8.0f} ={a / b:5.2f} ({K * N * dtype.itemsize / b / 1e3:3.0f})")
            print(f"{K:>7} -> {N:<5}" + "".join(f"{c:>30}" for c in cells), flush=True)


if __name__ == "__main__":
    main()
