"""`make sweep`: the engine's equality check on a tiny instance of every decoder type that transformers has.

Each type runs a schedule with prompts in pieces, sequences that join and windows that are crossed, on the best tier that
is right; every logit is compared with the uncached forward. Prints a line a type, the tally, and one JSON line. Exit
status 1 when fewer than 140 types run on a tier that keeps a cache.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from dayzero.core.errors import DayZeroError
from dayzero.model.classes import find_layers, text_config
from dayzero.runtime.load import EngineSpec, TierChoice, kernel_state, prove_tiers
from dayzero.runtime.runner import LoadedModel
from tests.tiny.build import DECODER_TYPES, make_tiny_model

MIN_CACHED = 140  # what one uniform mechanism reached in the study
RECOMPUTED = "T0 (computed anew at every step)"


def prove_type(model_type: str) -> TierChoice:
    device = torch.device("cpu")
    make_state, _, _ = kernel_state("auto", device)
    module = make_tiny_model(model_type).requires_grad_(False)
    vocab_size = text_config(module.config).vocab_size
    tiny = LoadedModel(module, find_layers(module)[0], vocab_size, device, torch.float32)
    return prove_tiers(tiny, EngineSpec(artifact="", model=model_type), make_state)


def main() -> None:
    torch.set_num_threads(1)  # tiny matrices: threads cost more than they give
    started, tally, failed = time.monotonic(), Counter[str](), {}
    for model_type in sys.argv[1:] or DECODER_TYPES:
        try:
            proof = prove_type(model_type).proofs[-1]
        except DayZeroError as error:
            failed[model_type] = f"{error.what}: {error.got}"
        except Exception as error:  # the instance itself cannot be built or run: transformers' own reason is the result
            failed[model_type] = f"no tiny instance: {type(error).__name__}: {' '.join(str(error).split())}"
        else:
            tally[proof.tier] += 1
            print(f"{model_type:32} {proof.tier:34} worst logit error {proof.max_error:.1e}", flush=True)
            continue
        print(f"{model_type:32} {'not served':34} {failed[model_type][:200]}", flush=True)
    cached = sum(count for tier, count in tally.items() if tier != RECOMPUTED)
    print(f"\n{sum(tally.values())} of {sum(tally.values()) + len(failed)} types are right, {cached} of them with a cache")
    print(json.dumps({"tiers": dict(tally), "with_cache": cached, "not_served": failed, "seconds": time.monotonic() - started}))
    if len(sys.argv) == 1 and cached < MIN_CACHED:
        sys.exit(1)


if __name__ == "__main__":
    main()
