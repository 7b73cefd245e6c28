"""A release in, a first answer from its keys alone out: what is shown within seconds, and all there is without a class.

No torch and no transformers is imported, so that the answer is there before they are. Everything in it is provisional; the
measured description (`describe`) confirms or corrects it line by line. `unknown` of the estimate becomes a warning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dayzero.core.model import ModelDescription, Problem
from dayzero.core.units import DTYPE_BITS, canonical_dtype
from dayzero.model.config_keys import (
    config_dtype,
    normalise_rope,
    quantization_summary,
    stop_tokens,
    text_keys,
    tokenizer_tokens,
)
from dayzero.model.estimate import estimate
from dayzero.model.keys.sound import config_doubts
from dayzero.model.known_keys import classes_of_type, known_elsewhere
from dayzero.model.release import Release, read_object
from dayzero.model.stored import checkpoint_bytes, estimated_parameters, quantization_groups
from dayzero.model.stored.quantization import settings_beside


def provisional(release: Release, problems: Sequence[Problem] | None = None) -> ModelDescription:
    """`problems`: what is known already (why there is no class); the release's own where not given.

    Raises DayZeroError when the config does not even give width, depth and vocabulary, or contradicts itself.
    """
    doubts = config_problems(release)  # first: it refuses values that what follows would stumble over
    dtype, dtype_problems = model_dtype(release)
    found = list(problems) if problems is not None else [*release.problems, *dtype_problems, *doubts]
    guess = estimate(release.config, dtype)
    tokens = token_facts(release, guess.dimensions.vocab_size)
    beside = settings_beside(release)
    stand_ins = estimated_parameters({**guess.by_role, "mtp": guess.mtp_parameters}, dtype)
    groups = quantization_groups(release.config, stand_ins, beside=beside)
    if guess.unknown:
        found.append(
            Problem(kind="estimate", severity="warning", file="config.json", detail="not known: " + "; ".join(guess.unknown))
        )
    return ModelDescription(
        name=release.name,
        model_type=str(release.config.get("model_type", "unknown")),
        architecture=str((release.config.get("architectures") or ["unknown"])[0]),
        source_hash=release.source_hash,
        dtype=dtype,
        dimensions=guess.dimensions,
        layer_kinds=guess.layer_kinds,
        parameters=(),
        total_parameters=guess.total_parameters,
        active_parameters=guess.active_parameters,
        mtp_parameters=guess.mtp_parameters,
        parameters_by_role=guess.by_role,
        outer_operators=guess.outer_operators,
        structure=guess.structure,
        towers=tuple(tower.name for tower in guess.structure.towers),
        stop_token_ids=tokens.stops,
        tokenizer_tokens=tokens.num_tokens,
        quantization=quantization_summary(release.config),
        rope=normalise_rope(text_keys(release.config)),
        consumed_keys=tuple(sorted(guess.consumed)),
        inert_keys=tuple(sorted(guess.inert)),
        unconsumed_keys=tuple(sorted(guess.unread)),
        novel_keys=tuple(path for path in sorted(guess.unread) if not known_elsewhere(path.rpartition(".")[2])),
        key_readers=dict(sorted(guess.consumed.items())),
        quantization_groups=groups,
        checkpoint_bytes=release.checkpoint_bytes if release.has_weights else checkpoint_bytes(groups),
        has_weights=release.has_weights,
        provisional=True,
        problems=(*found, *tokens.problems),
    )


def config_problems(release: Release) -> list[Problem]:
    """What is doubtful in the config as a whole. Raises DayZeroError for what cannot be (see `keys.sound`)."""
    found = config_doubts(release.config)
    named, model_type = release.config.get("architectures") or [], release.config.get("model_type")
    known = classes_of_type().get(model_type) if isinstance(model_type, str) else None
    if known and named and not known.intersection(named):
        names = ", ".join(named)
        detail = f"architectures names {names}, no class of model_type {model_type!r} in transformers: model_type decides"
        found.append(Problem(kind="architecture", severity="warning", file="config.json", detail=detail))
    return found


def model_dtype(release: Release) -> tuple[str, list[Problem]]:
    """The dtype to compute in: the config's (`dtype`, `torch_dtype`, the text config's, in this order), else the one that most
    of the checkpoint has, else bfloat16. Doubts become warnings: none declared, or another one than is stored."""
    declared, problems = config_dtype(release.config)
    stored = _census(release)
    dtype = compute_dtype(declared or stored)
    told = list(problems)
    if declared is None:
        why = "most of the checkpoint is stored in it" if stored == dtype else "neither the config nor the checkpoint says"
        told.append(_warning(f"no dtype in the config: {dtype} is used, since {why}"))
    elif stored not in (None, dtype) and not release.config.get("quantization_config"):
        told.append(_warning(f"the config says {declared}, but most of the checkpoint is stored in {stored}: {dtype} is used"))
    return dtype, told


def _warning(detail: str) -> Problem:
    return Problem(kind="dtype", severity="warning", file="config.json", detail=detail)


def compute_dtype(name: str | None) -> str:
    """The declared dtype where it is a floating type of at least 16 bits, else bfloat16."""
    if name is None:
        return "bfloat16"
    name = canonical_dtype(name)
    return name if name.startswith(("float", "bfloat")) and DTYPE_BITS[name] >= 16 else "bfloat16"


def _census(release: Release) -> str | None:
    """The floating dtype that most of the checkpoint's bytes have; None where it has none of at least 16 bits."""
    sizes: dict[str, int] = {}
    for entry in release.tensors.values():
        if entry.dtype in ("float32", "float16", "bfloat16", "float64"):
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.num_bytes
    return max(sizes, key=lambda name: sizes[name]) if sizes else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFacts:
    """`stops`: ids that end a generation, from every file that names one. `num_tokens`: see `config_keys.tokenizer_tokens`."""

    stops: tuple[int, ...]
    num_tokens: int | None
    problems: tuple[Problem, ...]


def token_facts(release: Release, vocab_size: int) -> TokenFacts:
    """`vocab_size`: rows of the embedding. A tokenizer with an id beyond them is an error: it would fail in a request."""
    tokenizer = read_object(release.path("tokenizer.json")) if "tokenizer.json" in release.tokenizer_files else None
    stops, problems = stop_tokens(
        release.config,
        vocab_size=vocab_size,
        generation_config=release.generation_config,
        tokenizer_config=release.tokenizer_config,
        tokenizer=tokenizer,
    )
    num_tokens = None if tokenizer is None else tokenizer_tokens(tokenizer)
    if num_tokens is not None and num_tokens > vocab_size:
        told = f"the tokenizer has the id {num_tokens - 1}, and the embedding only {vocab_size} rows"
        problems = (*problems, Problem(kind="tokenizer_larger", severity="error", file="tokenizer.json", detail=told))
    return TokenFacts(stops=stops, num_tokens=num_tokens, problems=problems)
