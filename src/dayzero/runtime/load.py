"""From an Artifact to a running Engine: load the weights, prove the best tier that is right, allocate the cache.

build a shrunken instance -> try T2, T1, T0 on it -> load the real weights -> check 64 tokens -> Engine
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dayzero.core.cachedir import cache_folder
from dayzero.core.errors import DayZeroError
from dayzero.core.generation import EngineInfo
from dayzero.core.records import STRICT, from_dict
from dayzero.model.classes import find_layers, text_config
from dayzero.model.shrink import build_shrunken
from dayzero.ops.cpu import build as cpu_kernels
from dayzero.ops.paged import CompiledState, PagedState, TorchState
from dayzero.runtime.engine import Engine
from dayzero.runtime.flat import FlatRunner
from dayzero.runtime.native import NativeRunner
from dayzero.runtime.paged import PagedRunner
from dayzero.runtime.proof import (
    BLOCK_TOKENS,
    MAX_LOGIT_ERROR,
    Proof,
    appending_error,
    proof_sequences,
    prove,
    replay,
    uncached_logits,
)
from dayzero.runtime.quantized import QuantizedLinear, QuantizedWeight, quantized_modules, resident
from dayzero.runtime.runner import LoadedModel, Runner
from dayzero.runtime.weights_in import load_module, release_config

# Below this size a layer's compilation (a quarter of a minute) is not worth it, as in tests.
COMPILE_FROM_PARAMETERS = 20_000_000

# Tokens of the check on the real weights, run as one prompt chunk of 48 and 16 decode steps.
CHECK_PROMPT, CHECK_DECODED = 48, 16
# Error of a served row over the size of the reference's row (Frobenius), by dtype. float32: rounding of sums that are
# taken in another order. bfloat16: 8 bits of mantissa, over a few dozen layers; `validate` measures it properly against
# float32. A wrong mask, position or weight is off by tens of percent.
CHECK_LIMIT = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """Everything an engine process needs, as plain JSON. `tier` other than "auto" tries only that one (and below)."""

    __pydantic_config__ = STRICT
    artifact: str
    model: str
    device: str = "cpu"
    dtype: str = "auto"
    context_tokens: int = 2048
    max_sequences: int = 8
    pool_tokens: int = 16384
    block_tokens: int = 16
    chunk_tokens: int = 512
    tier: str = "auto"
    kernels: str = "auto"  # auto | compiled | torch
    compile: str = "auto"  # auto | on | off: compiled layers (T2)
    threads: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    towers_not_served: tuple[str, ...] = ()
    known_tokens: int | None = None  # ids of the tokenizer: what lies beyond is never sampled


Maker = Callable[[LoadedModel, bool], Runner]  # a model, and whether it is the shrunken one


@dataclass(frozen=True, kw_only=True, slots=True)
class TierChoice:
    make: Callable[[LoadedModel], Runner]
    proofs: tuple[Proof, ...]  # in the order tried; the last one passed


def create_engine(**arguments: Any) -> Engine:
    """Factory for an engine process: the fields of an EngineSpec."""
    return load_engine(from_dict(EngineSpec, arguments, source="engine arguments"))


def load_engine(spec: EngineSpec, log: Callable[[str], None] = lambda text: None) -> Engine:
    """Load, prove and check. Raises DayZeroError where the release cannot be served here."""
    if spec.threads:
        torch.set_num_threads(spec.threads)
    folder, device = Path(spec.artifact), open_device(spec.device)
    make_state, instruction_set, kernel_note = kernel_state(spec.kernels, device)
    started = time.perf_counter()
    config = release_config(folder)
    dtype = resolve_dtype(spec.dtype, config)
    choice = choose_tier(spec, folder, device, make_state)
    log(f"{choice.proofs[-1].tier} is right on a shrunken instance ({time.perf_counter() - started:.1f} s)")
    model = load_module(folder, dtype=dtype, device=device, compiled=make_state is CompiledState)
    if spec.pool_tokens < 1:
        raise DayZeroError(
            "the cache has no room",
            got=f"{spec.pool_tokens} tokens",
            want="at least one block",
            fix="raise --memory-fraction or lower --context",
        )
    with torch.no_grad():
        sequence = proof_sequences(model.vocab_size, seed=11)[1] * 8
        sequence = sequence[: min(CHECK_PROMPT + CHECK_DECODED, spec.context_tokens)]
        reference = uncached_logits(model.module, sequence, device)
        runner = choice.make(model)
        attach_quantized(runner)
        notes = [kernel_note] if kernel_note else []
        notes += compile_runner(runner, spec, log)
        check = check_real(runner, sequence, reference, spec, dtype)
    if (held := resident(model.module)).presets:
        notes.append(held.text)
    log(f"{check.tier} on the real weights: relative error {check.max_error:.2g}")
    if not check.passed:
        raise DayZeroError(
            "the engine disagrees with the model on the real weights",
            got=check.reason,
            want=f"a relative error of at most {CHECK_LIMIT[dtype]:g}",
            fix="serve with --tier T0 and report the model's config: this is a bug in dayzero",
        )
    warm_up(runner, spec)
    info = EngineInfo(
        model=spec.model,
        tier=runner.tier,
        tier_reasons=tier_reasons(choice.proofs, check, runner, notes),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        instruction_set=instruction_set,
        vocab_size=model.vocab_size,
        context_tokens=spec.context_tokens,
        capacity_tokens=min(spec.context_tokens, num_blocks(spec) * spec.block_tokens),
        block_tokens=spec.block_tokens,
        num_blocks=num_blocks(spec),
        max_sequences=spec.max_sequences,
        prefix_reuse=runner.prefix_reuse,
        exact_reuse=runner.prefix_reuse and dtype != torch.float32,
        batch_invariant=isinstance(runner, PagedRunner) and isinstance(runner.state, CompiledState) and not has_experts(model),
        fallbacks=fallbacks(choice.proofs, notes, runner),
        stop_token_ids=spec.stop_token_ids,
        towers_not_served=spec.towers_not_served,
        known_tokens=spec.known_tokens,
    )
    return Engine(runner, info, chunk_tokens=spec.chunk_tokens)


def num_blocks(spec: EngineSpec) -> int:
    return -(-spec.pool_tokens // spec.block_tokens)


def open_device(name: str) -> torch.device:
    """A torch device that can hold a tensor. Raises DayZeroError naming what is missing."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DayZeroError(
            f"device {name!r} cannot be used",
            got=str(error).splitlines()[0],
            want="a device torch can reach",
            fix="run `dayzero doctor --device " + name + "`",
        ) from error
    if device.type == "meta":
        raise DayZeroError(
            "the meta device holds no values", got=name, want="cpu, cuda or another accelerator", fix="--device cpu"
        )
    return device


def resolve_dtype(name: str, config: Any) -> torch.dtype:
    wanted = getattr(text_config(config), "dtype", None) or torch.float32 if name == "auto" else getattr(torch, name, None)
    if wanted not in CHECK_LIMIT:
        raise DayZeroError(
            "the engine cannot compute in this dtype",
            got=name if name != "auto" else str(wanted),
            want="float32, bfloat16 or float16",
            fix="give --dtype bfloat16 or float32",
        )
    assert isinstance(wanted, torch.dtype)
    return wanted


def kernel_state(kernels: str, device: torch.device) -> tuple[Callable[[], PagedState], str, str]:
    """How to make a paged state for the device, the instruction set in use, and a note on a fallback ("" if none)."""
    if device.type != "cpu" or kernels == "torch":
        return TorchState, torch.backends.cpu.get_cpu_capability().lower() if device.type == "cpu" else device.type, ""
    built = cpu_kernels.load()
    if built.available:
        return CompiledState, built.isa, ""
    if kernels == "compiled":
        raise DayZeroError("the CPU kernels cannot be built", got=built.reason, want="a C++ compiler", fix="install g++")
    return TorchState, torch.backends.cpu.get_cpu_capability().lower(), f"the CPU kernels are not compiled: {built.reason}"


def choose_tier(spec: EngineSpec, folder: Path, device: torch.device, make_state: Callable[[], PagedState]) -> TierChoice:
    """The first tier that is right on a shrunken instance of the release's own config."""
    shrunken, shrunk = build_shrunken(release_config(folder), dtype=torch.float32, seed=0)
    shrunken = shrunken.requires_grad_(False).to(device)
    vocab_size = text_config(shrunk.config).vocab_size
    return prove_tiers(LoadedModel(shrunken, find_layers(shrunken)[0], vocab_size, device, torch.float32), spec, make_state)


def prove_tiers(tiny: LoadedModel, spec: EngineSpec, make_state: Callable[[], PagedState]) -> TierChoice:
    """Try tiers on a small float32 model, best first, until one is right; every attempt's proof is kept.

    Raises DayZeroError when none is, with every reason.
    """
    sequences, proofs = proof_sequences(tiny.vocab_size), []
    with torch.no_grad():
        references = [uncached_logits(tiny.module, tokens, tiny.device) for tokens in sequences]
    for tier, make in candidates(spec, make_state):
        proofs.append(prove(partial(make, tiny, True), tier, references, sequences))
        if proofs[-1].passed:
            return TierChoice(make=lambda model, make=make: make(model, False), proofs=tuple(proofs))  # type: ignore[misc]
    drift = appending_error(tiny.module, sequences[1], tiny.device)
    if drift > MAX_LOGIT_ERROR:
        raise DayZeroError(
            "the model's own forward is not causal",
            got=f"earlier logits change by {drift:.2g} when tokens are appended, without any cache",
            want="logits that do not depend on later tokens",
            fix="none: no engine can generate with it step by step; see the model's own code",
        )
    raise DayZeroError(
        "no way of running this model was shown to be right",
        got="; ".join(f"{proof.tier}: {proof.reason}" for proof in proofs),
        want="logits equal to the uncached forward",
        fix="report the model's config: this is a bug in dayzero",
    )


def candidates(spec: EngineSpec, make_state: Callable[[], PagedState]) -> list[tuple[str, Maker]]:
    """Tiers to try, best first. Each maker takes a model and whether it is the shrunken one (which needs few blocks)."""

    def paged(model: LoadedModel, is_tiny: bool) -> Runner:
        blocks, block_tokens = (64, BLOCK_TOKENS) if is_tiny else (num_blocks(spec), spec.block_tokens)
        return PagedRunner(model, make_state(), num_blocks=blocks, block_tokens=block_tokens, max_sequences=spec.max_sequences)

    every: list[tuple[str, Maker]] = [
        ("T2", paged),
        ("T1", lambda model, _: FlatRunner(model, whole_prompts=False)),
        ("T1 (prompts in one piece)", lambda model, _: FlatRunner(model, whole_prompts=True)),
        ("T0", lambda model, _: NativeRunner(model, cached=True, whole_prompts=False)),
        ("T0 (prompts in one piece)", lambda model, _: NativeRunner(model, cached=True, whole_prompts=True)),
        ("T0 (computed anew at every step)", lambda model, _: NativeRunner(model, cached=False, whole_prompts=False)),
    ]
    if spec.tier == "auto":
        return every
    known = ("T2", "T1", "T0")
    if spec.tier not in known:
        raise DayZeroError("unknown tier", got=spec.tier, want=", ".join(["auto", *known]), fix="give --tier auto")
    return every[next(index for index, (name, _) in enumerate(every) if name.startswith(spec.tier)) :]


def check_real(runner: Runner, tokens: list[int], reference: torch.Tensor, spec: EngineSpec, dtype: torch.dtype) -> Proof:
    """One sequence on the real weights, as a prompt and single tokens, in the served dtype: every row in float32, the median
    row in a reduced dtype, where a tie between two experts may go either way and turns a few rows round. So may a code of a
    layer that rounds what it is given: the last bit of an input decides between two codes."""
    prompt = max(1, len(tokens) - CHECK_DECODED)
    steps = [[(0, prompt)], *([[(0, 1)]] * (len(tokens) - prompt))]
    got = replay(runner, [tokens], steps, block_tokens=spec.block_tokens, num_blocks=num_blocks(spec))[0]
    errors = (got - reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-12)
    every_row = dtype == torch.float32 and not rounds_inputs(runner)
    error = float(errors.max() if every_row else errors.median())
    passed = bool(torch.isfinite(errors).all()) and error <= CHECK_LIMIT[dtype]
    return Proof(tier=runner.tier, passed=passed, max_error=error, reason="" if passed else f"a relative error of {error:.2g}")


def attach_quantized(runner: Runner) -> None:
    """Let quantized layers of a T2 runner know its steps, so that a row's numbers do not depend on its company."""
    if not isinstance(runner, PagedRunner):
        return
    head = runner.model.module.get_output_embeddings()
    held = list(quantized_modules(runner.model.layers)) + [one for one in (head,) if isinstance(one, QuantizedLinear)]
    for one in held:
        one.attach(runner.state.site(-1).to(runner.model.device), runner.state.linear)
    if held:
        runner.before_close = partial(_detach, held)


def _detach(held: list[QuantizedWeight]) -> None:
    for one in held:
        one.attach(None)


def rounds_inputs(runner: Runner) -> bool:
    model = getattr(runner, "model", None)
    return model is not None and any(one.form.activations != "none" for one in quantized_modules(model.module))


def compile_runner(runner: Runner, spec: EngineSpec, log: Callable[[str], None]) -> list[str]:
    """Compile the layers of a T2 runner on the CPU, and say in words what was done or why not."""
    if spec.compile not in ("auto", "on", "off"):
        raise DayZeroError("unknown compile setting", got=spec.compile, want="auto, on or off", fix="give --compile auto")
    if spec.compile == "off" or not isinstance(runner, PagedRunner) or not isinstance(runner.state, CompiledState):
        return []
    module = runner.model.module
    size = sum(one.numel() for one in module.parameters()) + sum(one.num_elements for one in quantized_modules(module))
    if spec.compile == "auto" and size < COMPILE_FROM_PARAMETERS:
        return []
    from dayzero.runtime.package import NotCompilable, compile_layers, restore_layers

    try:
        compiled = compile_layers(runner, cache_folder("layers"), log)
    except NotCompilable as error:
        return [f"the layers are not compiled: {error}"]
    before_close = runner.before_close

    def close() -> None:
        restore_layers(runner)
        before_close()

    runner.before_close = close
    log(f"{compiled.layers} layers compiled in {compiled.packages} packages ({compiled.seconds:.1f} s)")
    return [f"{compiled.layers} of {len(runner.model.layers)} layers run compiled", *compiled.notes]


@torch.no_grad()
def warm_up(runner: Runner, spec: EngineSpec) -> None:
    """Run one whole chunk and one decode step, so that the first request does not pay for what libraries set up once per
    shape. T2 only: its caches are pools that nobody has written to yet."""
    if runner.tier != "T2":
        return
    count = max(1, min(spec.chunk_tokens, spec.context_tokens - 1, num_blocks(spec) * spec.block_tokens - 1))
    replay(runner, [[3] * (count + 1)], [[(0, count)], [(0, 1)]], block_tokens=spec.block_tokens, num_blocks=num_blocks(spec))


def has_experts(model: LoadedModel) -> bool:
    """Whether rows are grouped by expert: then what is multiplied together depends on who is running."""
    return any("expert" in name for name, _ in (*model.module.named_parameters(), *model.module.named_buffers()))


def refuted(proofs: tuple[Proof, ...]) -> list[str]:
    """The better tiers, and what spoke against each."""
    return [f"{proof.tier} is not used: {proof.reason}" for proof in proofs[:-1]]


def fallbacks(proofs: tuple[Proof, ...], notes: list[str], runner: Runner) -> tuple[str, ...]:
    """What runs in a lesser way than it could, each in plain words for the report."""
    found = refuted(proofs)
    found += [note for note in notes if "not compiled" in note]
    if runner.tier != "T2":
        found.append(
            f"tier {runner.tier}: mixers run one sequence at a time, in the model's own modules; the operator map's custom "
            "kernels for linears and attention are tier T2's; no prefix is reused"
        )
    return tuple(found)


def tier_reasons(proofs: tuple[Proof, ...], check: Proof, runner: Runner, notes: list[str]) -> tuple[str, ...]:
    """Why this tier: what refuted the better ones, in words for the report."""
    chosen = proofs[-1]
    shown = f"{chosen.tier} is right on a shrunken instance: worst logit error {chosen.max_error:.2g} in float32"
    real = f"on the real weights the relative error against the uncached forward is {check.max_error:.2g}"
    if runner.whole_prompts:
        notes.append("prompts are run in one piece: this model's state cannot be continued in the middle of a prompt")
    return (*refuted(proofs), shown, real, *notes)
