"""Conversion against `cp -r` of the same files, side by side in one run. Ends with one JSON line.

    python benchmarks/convert.py [--gib 8] [--kind dense|moe] [--runs 3] [--folder DIR] [--tp 1]

Writes a random checkpoint of an ordinary type shard by shard, then takes turns: copy, conversion, copy, ... Both outputs
are deleted between runs and the disk is synced, so neither pays for the other's writes. Conversion runs in a process of
its own; its figures are the whole process's wall time and `ru_maxrss`, imports included, and the time of the call alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SHARD_BYTES = 2 * 10**9
WIDTHS = {
    "dense": dict(model_type="llama", hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
                  head_dim=128, vocab_size=32000),
    "moe": dict(model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
                num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=32000),
}  # fmt: skip

CHILD = """
import json, resource, sys, time
from pathlib import Path
from dayzero.core.plan import Layout
from dayzero.model.describe import describe
from dayzero.weights.convert import convert
source, out, tp = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
model = describe(source)
started = time.monotonic()
report = convert(source, model, Layout(tp=tp), out)
print(json.dumps({"call_s": time.monotonic() - started, "bytes_written": report.bytes_written,
                  "ru_maxrss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def make_checkpoint(folder: Path, num_bytes: int, kind: str) -> int:
    """Write config.json and shards of about `num_bytes` in all; returns the bytes written."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    settings = dict(WIDTHS[kind])
    model_type = settings.pop("model_type")

    def tensors(layers: int) -> dict[str, tuple[int, ...]]:
        config = AutoConfig.for_model(model_type, **settings, num_hidden_layers=layers)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}

    sizes = [sum(int(np.prod(shape)) * 2 for shape in tensors(layers).values()) for layers in (1, 2)]
    layers = max(1, round((num_bytes - sizes[0]) / (sizes[1] - sizes[0])) + 1)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in tensors(layers).items():
        size = int(np.prod(shape)) * 2
        if held + size > SHARD_BYTES and shards[-1]:
            shards.append({})
            held = 0
        shards[-1][name] = shape
        held += size
    noise = np.random.default_rng(0).integers(0, 2**16, 32 * 2**20, dtype=np.uint16).tobytes()
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += write_shard(folder / file, shard, noise, number)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]], noise: bytes, seed: int) -> int:
    header, at = {}, 0
    for name, shape in tensors.items():
        size = int(np.prod(shape)) * 2
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        left, start = at, seed * 4099 * 2
        while left:  # a different place in the noise each time, so that no two blocks are alike
            start = (start + 7919 * 2) % (len(noise) // 2)
            left -= file.write(memoryview(noise)[start : start + min(left, len(noise) // 2)])
    return at


def settle(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.sync()


def timed_copy(source: Path, target: Path) -> tuple[float, float]:
    """Seconds of `cp -r` alone, and with the sync that puts it on the disk."""
    started = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    copied = time.monotonic() - started
    os.sync()
    return copied, time.monotonic() - started


def timed_conversion(source: Path, target: Path, tp: int) -> dict[str, float]:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(source), str(target), str(tp)], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1]) | {"process_s": time.monotonic() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--kind", choices=sorted(WIDTHS), default="dense")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="where to work (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dayzero-convert-", dir=options.folder) as scratch:
        source, copy, artifact = (Path(scratch) / name for name in ("source", "copy", "artifact"))
        source.mkdir()
        total = make_checkpoint(source, int(options.gib * 2**30), options.kind)
        print(f"{total / 2**30:.2f} GiB {options.kind} checkpoint written", file=sys.stderr)
        rows = []
        for number in range(options.runs):
            settle(copy, artifact)
            copy_s, copy_sync_s = timed_copy(source, copy)
            settle(copy)
            row = timed_conversion(source, artifact, options.tp)
            row |= {"copy_s": copy_s, "copy_sync_s": copy_sync_s}
            rows.append(row)
            print(f"run {number + 1}: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()), file=sys.stderr)
        settle(artifact)
    # Speed of conversion over speed of the copy, pair by pair.
    ratios = {
        "process_vs_cp": [row["copy_s"] / row["process_s"] for row in rows],
        "process_vs_cp_sync": [row["copy_sync_s"] / row["process_s"] for row in rows],
        "call_vs_cp": [row["copy_s"] / row["call_s"] for row in rows],
        "call_vs_cp_sync": [row["copy_sync_s"] / row["call_s"] for row in rows],
    }
    print(json.dumps({
        "bytes": total, "kind": options.kind, "tp": options.tp, "runs": options.runs,
        "ratios": {name: round(statistics.median(values), 3) for name, values in ratios.items()},
        "spread": {name: [round(min(values), 3), round(max(values), 3)] for name, values in ratios.items()},
        "ru_maxrss_bytes": max(int(row["ru_maxrss_bytes"]) for row in rows),
        "self_maxrss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
