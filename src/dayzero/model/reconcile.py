"""A model's parameters and a checkpoint's headers in, the parameters with their sources and every disagreement out.

Nothing is dropped silently: a name that no parameter takes is classified as a draft (multi-token-prediction) tensor, as
one that transformers declares ignorable, or is an error; a parameter that no name fills is an error unless it is tied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import nn

from dayzero.core.model import Parameter, Problem
from dayzero.model.estimate import MTP
from dayzero.model.release import Release
from dayzero.model.sources import match_checkpoint, starred
from dayzero.model.stored.quantization import quantization_settings, settings_beside
from dayzero.model.stored.scales import COMPANION, logical_shapes, scale_of, storage_problems

LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
DRAFT = re.compile(r"(?:^|\.)(?:mtp|nextn|draft)(?:_[a-z]+)?(?:\.|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconciled:
    parameters: list[Parameter]
    problems: list[Problem]
    mtp_parameters: int
    mtp_tensors: tuple[str, ...]


def num_mtp_layers(config: Mapping[str, Any]) -> int:
    """Draft layers that the config announces, at the top or in its text config."""
    nested = config.get("text_config")
    parts = ([nested] if isinstance(nested, Mapping) else []) + [config]
    return next((int(part[key]) for part in parts for key in MTP if isinstance(part.get(key), int) and part[key]), 0)


def reconcile(
    model: nn.Module, parameters: Sequence[Parameter], release: Release, *, num_layers: int, num_mtp: int, num_experts: int
) -> Reconciled:
    """num_mtp: draft layers announced beside `num_layers`; num_experts: experts of a layer that have weights."""
    settings = release_settings(release)
    match = match_checkpoint(model, release.tensors, quantized=settings is not None, settings=settings)
    own = [name for names in match.sources.values() for name in names]
    metadata = {key: value for shard in release.shards.values() for key, value in shard.metadata.items()}
    problems = _storage(storage_problems(release.tensors, settings, own=own, metadata=metadata))
    drafts: list[str] = []
    ignorable = _ignorable(model)
    by_problem: dict[tuple[str, str], list[str]] = {}
    for name in match.unexpected:
        verdict = _classify(name, num_layers, num_mtp, ignorable)
        if verdict == "draft":
            drafts.append(name)
        else:
            by_problem.setdefault((verdict, "warning" if verdict == "ignored_tensor" else "error"), []).append(name)
    for (kind, severity), names in by_problem.items():
        for form in starred(names) if len(names) > 32 else names:
            problems.append(_problem(kind, severity, form, release, names[0] if "*" in form else form))
    shapes = {item.name: item.shape for item in parameters}
    for name, got in match.mismatched.items():
        problems.append(_wrong_shape(name, got, shapes[name], num_experts))
    patterns = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    filled = []
    companions: dict[str, list[str]] = {}
    for name, owner in match.companions.items():
        companions.setdefault(owner, []).append(name)
    for item in parameters:
        sources = match.sources.get(item.name, ())
        stored = release.tensors[sources[0]].dtype if sources else None
        filled.append(replace(item, sources=starred((*sources, *companions.get(item.name, ()))), stored_dtype=stored))
        problems += _integers(item, sources, release)
        if sources or item.tied_to is not None:
            if item.tied_to is not None and item.role == "head" and not sources:
                problems += _tied_by_default(item, release.config)
            continue
        if any(other.tied_to == item.name and match.sources.get(other.name) for other in parameters):
            continue  # the checkpoint stores the other name of a tied pair
        optional = item.is_buffer or any(pattern.search(item.name) for pattern in patterns)
        flag = " (tie_word_embeddings is false)" if item.role == "head" and _tie_flag(release.config) is False else ""
        problems.append(
            Problem(
                kind="missing_parameter",
                severity="warning" if optional else "error",
                tensor=item.name,
                detail=f"{item.name} {list(item.shape)} has no tensor in the checkpoint and is not tied to one that has{flag}",
            )
        )
    return Reconciled(
        parameters=filled,
        problems=problems,
        mtp_tensors=tuple(drafts),
        mtp_parameters=_count(drafts, release, settings),
    )


def _classify(name: str, num_layers: int, num_mtp: int, ignorable: re.Pattern[str] | None) -> str:
    """`draft`, `ignored_tensor`, `extra_layer` or `unexpected_tensor`. A layer past the stack is never ignored by pattern."""
    found = LAYER_NUMBER.search(name)
    inside_tower = re.search(r"vision|visual|audio", name) is not None
    if DRAFT.search(name):
        return "draft"
    if found and int(found.group(1)) >= num_layers and not inside_tower:
        return "draft" if int(found.group(1)) < num_layers + num_mtp else "extra_layer"
    if ignorable is not None and ignorable.search(name):
        return "ignored_tensor"
    return "unexpected_tensor"


def _problem(kind: str, severity: str, form: str, release: Release, example: str) -> Problem:
    entry = release.tensors.get(example) or next(
        (release.tensors[name] for name in release.tensors if name.startswith(form.split("*")[0])), None
    )
    file = entry.file if entry is not None else None
    why = {
        "ignored_tensor": "is not read by the model; transformers declares it ignorable",
        "extra_layer": "belongs to a layer past num_hidden_layers that the config does not announce",
        "unexpected_tensor": "fits no parameter of the model",
    }[kind]
    return Problem(kind=kind, severity=severity, tensor=form, file=file, detail=f"{form} {why}")  # type: ignore[arg-type]


def _wrong_shape(name: str, got: tuple[int, ...] | str, wanted: tuple[int, ...], num_experts: int) -> Problem:
    if isinstance(got, str):
        return Problem(kind="wrong_shape", severity="error", tensor=name, detail=f"{name}: {got}")
    detail = f"{name}: the checkpoint gives {list(got)}, the class wants {list(wanted)}"
    # Slots without weights behind the experts that have some: the class allocates them, no checkpoint stores them.
    weightless = got[1:] == wanted[1:] and got[0] == num_experts < wanted[0]
    return Problem(
        kind="weightless_experts" if weightless else "wrong_shape",
        severity="warning" if weightless else "error",
        tensor=name,
        detail=detail,
    )


def ignorable_patterns(model: nn.Module) -> list[str]:
    """Patterns of checkpoint names that the class does not want, and of buffers that older checkpoints stored, as
    transformers' own loader treats them."""
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return sorted(patterns)


def _ignorable(model: nn.Module) -> re.Pattern[str] | None:
    patterns = ignorable_patterns(model)
    return re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None


def _count(names: Sequence[str], release: Release, settings: Mapping[str, Any] | None) -> int:
    """Elements of the matrices that these tensors hold, without the scales beside them."""
    if settings is None:
        return sum(release.tensors[name].num_elements for name in names)
    weights = [name for name in names if COMPANION.search(name) is None]
    shapes = logical_shapes(release.tensors, weights, settings)
    return sum(prod(shapes[name][0]) if name in shapes else release.tensors[name].num_elements for name in weights)


def release_settings(release: Release) -> Mapping[str, Any] | None:
    """The quantization settings of a release: its config's or those in the file beside it. None when it has none."""
    return quantization_settings(release.config, settings_beside(release))


def _storage(found: list[Problem]) -> list[Problem]:
    """Problems of storage as found or, where one kind has many, one for each form of name with how many it stands for."""
    by_kind: dict[str, list[Problem]] = {}
    for problem in found:
        by_kind.setdefault(problem.kind, []).append(problem)
    shown: list[Problem] = []
    for problems in by_kind.values():
        if len(problems) <= 32:
            shown += problems
            continue
        forms: dict[str, list[Problem]] = {}
        for problem in problems:
            forms.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", str(problem.tensor)), []).append(problem)
        shown += [
            replace(alike[0], tensor=form, detail=f"{form}: {len(alike)} tensors, the first: {alike[0].detail}")
            if len(alike) > 1
            else alike[0]
            for form, alike in forms.items()
        ]
    return shown


def _integers(item: Parameter, sources: Sequence[str], release: Release) -> list[Problem]:
    """Integers without a scale in the place of a weight: their values say nothing, so no number is made of them."""
    if not item.dtype.startswith(("float", "bfloat")):
        return []
    plain = [
        name
        for name in sources
        if release.tensors[name].dtype in ("int8", "uint8", "bool", "int16", "int32", "int64")
        and scale_of(name, release.tensors) is None
        and not name.endswith(("qweight", "weight_packed", "_blocks"))
    ]
    return [
        Problem(
            kind="integer_weight", severity="error", tensor=name, file=release.tensors[name].file,
            detail=f"{name} is {release.tensors[name].dtype}, {item.name} wants numbers, and no scale says what they mean",
        )
        for name in plain
    ]  # fmt: skip


def _tie_flag(config: Mapping[str, Any]) -> bool | None:
    """Whether the head is declared to be the embedding, in the text config or at the top; None where nothing is said."""
    nested = config.get("text_config")
    parts = [nested, config] if isinstance(nested, Mapping) else [config]
    return next((part["tie_word_embeddings"] for part in parts if isinstance(part.get("tie_word_embeddings"), bool)), None)


def _tied_by_default(item: Parameter, config: Mapping[str, Any]) -> list[Problem]:
    """A word on a head that is neither stored nor declared tied: the class decided."""
    if _tie_flag(config) is not None:
        return []
    detail = (
        f"{item.name} is not stored and tie_word_embeddings is not given: tied to {item.tied_to}, as the class does by default"
    )
    return [Problem(kind="tied_by_default", severity="warning", tensor=item.name, file="config.json", detail=detail)]
