"""The description from keys and the measured one in, warnings out: keys that say one thing where the class does another.

Only keys that nobody of the class reads are looked at: such a key changes nothing, and a reader of the config (or another
engine) would believe it. Each is compared with what was measured on the one fact that its meaning decides. Totals are
not compared: an estimate differs from them for other reasons than the key. Keys that the class does read, and the files
contradict, are named here too, by `config_against_tensors`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Problem
from dayzero.model.config_against_tensors import config_against_class
from dayzero.model.keys.tables import CONCEPTS
from dayzero.model.provisional import provisional
from dayzero.model.release import Release

Fact = Callable[[ModelDescription], Any]  # None: not known


def contradictions(first: ModelDescription, measured: ModelDescription) -> list[Problem]:
    """`first`: from the keys of the same config, as `provisional` makes it."""
    unread = {*measured.unconsumed_keys, *measured.inert_keys}
    told = []
    for path in sorted(unread & set(first.key_readers)):
        for name in _meanings(path.rpartition(".")[2], first.key_readers[path]):
            fact = FACTS.get(name)
            said, done = (fact(first), fact(measured)) if fact else (None, None)
            if said is not None and done is not None and said != done:
                detail = f"{path} ({CONCEPTS[name].meaning}) says {said}, and the class, which does not read it, does {done}"
                told.append(Problem(kind="key_overruled", severity="warning", file="config.json", detail=detail))
                break
    return told


def with_contradictions(release: Release, measured: ModelDescription) -> ModelDescription:
    """The measured description, with a warning for each. Where keys alone cannot be read, that is the warning."""
    if release.has_weights:
        behind = config_against_class(release.config, release.tensors, measured)
        measured = replace(measured, problems=(*behind, *measured.problems))
    if not {*measured.unconsumed_keys, *measured.inert_keys}:
        return measured
    try:
        found = contradictions(provisional(release, []), measured)
    except Exception as error:  # what was measured stands, whatever the second opinion stumbles over
        reason = error.what + ": " + error.got if isinstance(error, DayZeroError) else repr(error)
        detail = f"keys that the class does not read are not compared with what it does: {reason[:200]}"
        found = [Problem(kind="keys_not_compared", severity="warning", file="config.json", detail=detail)]
    return replace(measured, problems=(*measured.problems, *found))


def _meanings(key: str, reader: str) -> list[str]:
    return [name for name, concept in CONCEPTS.items() if key in concept.spellings and concept.meaning == reader]


def _routing(field: str) -> Fact:
    def fact(model: ModelDescription) -> Any:
        found = {getattr(item, field) for item in model.structure.routing}
        return found.pop() if len(found) == 1 else None

    return fact


def _dimension(field: str) -> Fact:
    return lambda model: getattr(model.dimensions, field)


def _layers(field: str) -> Fact:
    """How many layers are what, and which: counts in words, so that a sentence can hold them."""

    def fact(model: ModelDescription) -> str:
        found: dict[str, list[int]] = {}
        for kind in model.layer_kinds:
            found.setdefault(getattr(kind, field), []).extend(kind.layers)
        return ", ".join(f"{word} in {_ranges(sorted(layers))}" for word, layers in sorted(found.items()))

    return fact


def _ranges(layers: list[int]) -> str:
    """0-2, 5, 7 and so on; cut where it gets long, with the number of layers."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    words = [str(start) if start == end else f"{start}-{end}" for start, end in runs]
    return f"{len(layers)} layers (" + ", ".join(words[:6]) + (", ...)" if len(words) > 6 else ")")


def _shared(model: ModelDescription) -> str:
    return "with them" if model.parameters_by_role.get("shared_expert") else "without"


def _windows(model: ModelDescription) -> Any:
    return sorted({spec.window_tokens for kind in model.layer_kinds for spec in kind.cache if spec.window_tokens}) or None


MIXERS, FEEDS = _layers("mixer"), _layers("feed_forward")
FACTS: dict[str, Fact] = {
    "scoring": _routing("scoring"), "groups": _routing("groups"), "groups_per_token": _routing("groups_per_token"),
    "router_bias": _routing("bias"), "choice": _routing("bias"), "router_scale": _routing("scaling"),
    "normalised": _routing("normalised"), "per_token": _dimension("num_experts_per_token"),
    "hidden": _dimension("hidden_size"), "depth": _dimension("num_layers"), "vocabulary": _dimension("vocab_size"),
    "heads": _dimension("num_attention_heads"), "kv_heads": _dimension("num_key_value_heads"),
    "head_dim": _dimension("head_dim"), "value_dim": _dimension("value_head_dim"), "experts": _dimension("num_experts"),
    "shared": _shared, "positions": _dimension("max_position_tokens"), "window": _windows,
    "kv_rank": MIXERS,
    **dict.fromkeys((
        "layer_types", "hybrid_pattern", "attention_bits", "attention_layers", "full_interval", "full_every", "window_pattern",
        "attention_period", "attention_offset", "rotary_bits", "windowed", "window_from", "chunk", "index_types", "index_bits",
        "compress_ratios", "linear_nested",
    ), MIXERS),
    **dict.fromkeys((
        "feed_types", "dense_first", "moe_last", "moe_frequency", "moe_step", "moe_period", "moe_offset", "moe_layers",
        "dense_layers", "experts_used",
    ), FEEDS),
}  # fmt: skip
