"""Engines on converted tiny checkpoints, for tests."""

from pathlib import Path

import torch

from dayzero.core.generation import GenerationRequest, SamplingParams
from dayzero.core.plan import Layout
from dayzero.model.describe import describe
from dayzero.runtime.engine import Engine
from dayzero.runtime.load import EngineSpec, load_engine
from dayzero.weights.convert import convert


def make_artifact(checkpoint: Path, folder: Path) -> Path:
    artifact = folder / f"artifact-{checkpoint.name}"
    if not artifact.exists():
        convert(checkpoint, describe(checkpoint), Layout(), artifact)
    return artifact


def make_engine(checkpoint: Path, folder: Path, **settings) -> Engine:
    values = dict(
        context_tokens=256, max_sequences=8, pool_tokens=2048, block_tokens=4, chunk_tokens=16, dtype="float32", threads=1
    )
    spec = EngineSpec(artifact=str(make_artifact(checkpoint, folder)), model=checkpoint.name, **(values | settings))
    return load_engine(spec)


def make_prompts(lengths, seed=0, vocab_size=200):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def run_requests(engine: Engine, requests: dict[str, tuple[list[int], SamplingParams]], *, every: int = 0) -> dict[str, list]:
    """Outputs by request; with `every` the requests join one after the other, that many steps apart."""
    outputs: dict[str, list] = {name: [] for name in requests}
    waiting = list(requests.items())
    step = 0
    while waiting or engine.has_work():
        while waiting and step % max(every, 1) == 0:
            name, (prompt, sampling) = waiting.pop(0)
            engine.add(GenerationRequest(id=name, prompt_token_ids=tuple(prompt), sampling=sampling))
            if every:
                break
        for output in engine.step():
            outputs[output.request_id].append(output)
        step += 1
        assert step < 5000, "the engine does not come to an end"
    return outputs


def greedy(max_tokens: int, **settings) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **settings)


def tokens_of(outputs: list) -> list[int]:
    return [output.token_id for output in outputs]
