"""How many decoder types can be shrunk, built, run and generate: one JSON line per type, then the totals.

    python -m tests.tiny.census [TYPE ...]

"agree" counts the types whose cached greedy decoding gives the logits of the uncached forward (float32, within 1e-3).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch

from dayzero.model.shrink import build_shrunken
from tests.tiny.build import DECODER_TYPES, default_config
from tests.tiny.overrides import OVERRIDES

NUM_PROMPT_TOKENS = 20
NUM_NEW_TOKENS = 6
TIMEOUT_S = 60  # a type takes 0.2 s; one that does not end is a failure with a reason
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


def survey(model_type: str) -> dict[str, Any]:
    """One type's record; `failed` names the stage and `reason` the error where a stage did not succeed."""
    record: dict[str, Any] = {"type": model_type, "failed": None}
    start = time.perf_counter()
    stage = "build"
    signal.alarm(TIMEOUT_S)
    try:
        model, shrunk = build_shrunken(
            default_config(model_type), dtype=torch.float32, seed=0, overrides=OVERRIDES.get(model_type)
        )
        record |= {"layers": len(shrunk.layer_indices), "parameters": sum(p.numel() for p in model.parameters())}
        record["notes"] = list(shrunk.notes)
        stage = "run"
        generator = torch.Generator().manual_seed(1)
        prompt = torch.randint(3, 120, (1, NUM_PROMPT_TOKENS), generator=generator)
        assert_logits(model(input_ids=prompt).logits)
        stage = "generate"
        generated = model.generate(
            prompt, max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=NUM_NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        assert generated.shape[1] >= NUM_NEW_TOKENS, generated.shape
        try:
            record["max_difference"] = decode_difference(model, prompt)
        except Exception as error:  # generation works without it, so this is a property and no failure
            record["uncached_only"] = one_line(error)
    except Exception as error:
        record |= {"failed": stage, "reason": one_line(error)}
        if os.environ.get("CENSUS_TRACEBACK"):
            traceback.print_exc()
    finally:
        signal.alarm(0)
    return record | {"seconds": round(time.perf_counter() - start, 2)}


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def assert_logits(logits: torch.Tensor) -> None:
    assert torch.isfinite(logits).all(), "logits are not finite"
    assert logits.float().std() > 1e-3, f"logits are constant: standard deviation {logits.float().std():.2e}"


def decode_difference(model: torch.nn.Module, prompt: torch.Tensor) -> float:
    """Largest logit difference between greedy decoding with the model's own cache and the uncached forward."""
    output = model(input_ids=prompt, use_cache=True)
    tokens, logits = prompt, [output.logits[:, -1]]
    for _ in range(NUM_NEW_TOKENS):
        name = next((n for n in CACHE_NAMES if output.get(n) is not None), None)
        assert name, f"no cache among the outputs {list(output)}"
        step = logits[-1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, step], dim=1)
        output = model(input_ids=step, use_cache=True, **{name: output[name]})
        assert_logits(output.logits)
        logits.append(output.logits[:, -1])
    uncached = model(input_ids=tokens, use_cache=False).logits[:, -NUM_NEW_TOKENS - 1 :]
    return float((uncached - torch.stack(logits, dim=1)).abs().max())


def main(model_types: list[str]) -> None:
    def stop(*_: object) -> None:
        raise TimeoutError(f"not done after {TIMEOUT_S} s")

    signal.signal(signal.SIGALRM, stop)
    torch.set_num_threads(1)
    order = {"build": 0, "run": 1, "generate": 2, None: 3}
    reached = []
    agree = 0
    with torch.no_grad():
        for model_type in model_types or DECODER_TYPES:
            record = survey(model_type)
            reached.append(order[record["failed"]])
            agree += record.get("max_difference", 1.0) < 1e-3
            print(json.dumps(record), flush=True)
    totals = {name: sum(stage >= least for stage in reached) for name, least in (("built", 1), ("ran", 2), ("generated", 3))}
    print(json.dumps({"types": len(reached), **totals, "agree": agree}))


if __name__ == "__main__":
    main(sys.argv[1:])
