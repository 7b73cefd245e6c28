"""Train small byte-level models whose weights mean something, for measuring quantization: `python scripts/train_small.py`.

A dense model of about 3.5 million parameters and a mixture of 8 experts (2 per token) of about 5 million, on the sources of
Python's standard library as found beside this interpreter (PSF licence), in bfloat16 weights with float32 sums. A few minutes
each on two cores; seeded, so that the same machine makes the same weights. Written to models/small-dense and models/small-moe.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHARED = {"vocab_size": 256, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": None,
          "pad_token_id": None, "tie_word_embeddings": False}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
                        "num_key_value_heads": 2}),
    "moe": ("mixtral", {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
                        "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2}),
}  # fmt: skip
# For tests: under half a minute, and still far from random.
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1}  # fmt: skip


def library_text(num_bytes: int) -> torch.Tensor:
    """Bytes of the standard library's sources, in the order of their names; tests and non-ASCII files are left out."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if any(part in ("test", "tests", "site-packages", "idlelib", "lib2to3") for part in path.parts):
            continue
        data = path.read_bytes()
        if data.isascii():
            parts.append(data)
            size += len(data)
        if size >= num_bytes:
            break
    return torch.frombuffer(bytearray(b"".join(parts)[:num_bytes]), dtype=torch.uint8).long()


def train(kind: str, folder: Path, *, steps: int, seed: int = 0, batch: int = 16, length: int = 128, tiny: bool = False,
          quiet: bool = False) -> float:  # fmt: skip
    """Train and save; returns the last hundred steps' mean loss in nats a byte."""
    torch.manual_seed(seed)
    model_type, sizes = KINDS[kind]
    sizes = sizes | (TINY if tiny else {}) | ({"intermediate_size": 64} if tiny and kind == "moe" else {})
    config = AutoConfig.for_model(model_type, **SHARED, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    text = library_text(8_000_000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    losses, started = [], time.monotonic()
    for step in range(steps):
        starts = torch.randint(0, len(text) - length - 1, (batch,))
        tokens = torch.stack([text[start : start + length + 1] for start in starts])
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        # Weights live in bfloat16: what is trained is what is saved, and no form of fewer bits holds it exactly.
        if step % 50 == 49 or step == steps - 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.bfloat16())
        losses.append(float(loss.detach()))
        if not quiet and (step % 50 == 49 or step == steps - 1):
            print(f"{kind} step {step + 1}: {sum(losses[-50:]) / len(losses[-50:]):.3f} nats a byte, "
                  f"{time.monotonic() - started:.0f} s", flush=True)  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(folder)
    return sum(losses[-100:]) / len(losses[-100:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "models")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--kind", choices=[*KINDS, "both"], default="both")
    arguments = parser.parse_args()
    for kind in KINDS if arguments.kind == "both" else [arguments.kind]:
        train(kind, arguments.out / f"small-{kind}", steps=arguments.steps)


if __name__ == "__main__":
    main()
