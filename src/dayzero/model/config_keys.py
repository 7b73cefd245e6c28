"""Keys of a config whose spelling or meaning varies between releases, read into one form each. Plain dicts; no torch.

`normalise_rope`: position scaling; `attention_shape`: heads and their sizes; `stop_tokens`: ids that end a generation;
`config_dtype` and `quantization_summary`. A contradiction or an impossible value is a DayZeroError that quotes the keys;
what is doubtful but usable becomes a `Problem`. Nothing is guessed silently: what a class would default is the caller's to
pass in.
"""

import ast
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.core.units import canonical_dtype

RopeForm = dict[str, float | str | None]

# Types that say how positions are laid out, or an old spelling, rather than how they are scaled.
ROPE_ALIASES = {"su": "longrope", "mrope": "default"}
# What says nothing about scaling: a dict of these keys alone needs no type.
ROPE_LAYOUT_KEYS = frozenset({"rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "type", "rope_type"})

@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@cache
def known_rope_types() -> frozenset[str]:
    """Scaling types of the installed transformers: the keys of its own table, read from the source without importing it."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations, "transformers is a dependency"
    source = Path(next(iter(spec.submodule_search_locations))) / "modeling_rope_utils.py"
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == "ROPE_INIT_FUNCTIONS" for target in targets):
            table = node.value  # type: ignore[attr-defined]
            assert isinstance(table, ast.Dict), ast.dump(table)
            return frozenset(
                str(key.value) for key in table.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
            ) | {"default"}
    raise AssertionError(f"no ROPE_INIT_FUNCTIONS in {source}")


def text_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the text decoder: its text_config, or the whole."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def normalise_rope(config: Mapping[str, Any]) -> dict[str, RopeForm]:
    """Position scaling of a (text) config: `{"all": form}`, or one form per layer type. Empty when nothing is said.

    A form has `rope_type` ("default": unscaled) and the parameters given; lists are joined with commas. Reads
    `rope_scaling` (old) and `rope_parameters` (new). Raises DayZeroError when they, or the two spellings of the type,
    contradict each other, when the type is unknown, or when there are scaling parameters without a type.
    """
    scaling, parameters = (_rope_dict(config, key) for key in ("rope_scaling", "rope_parameters"))
    if scaling and parameters and _scaling_part(scaling, "rope_scaling") != _scaling_part(parameters, "rope_parameters"):
        raise _rope_error(
            "rope_scaling and rope_parameters contradict each other", f"{scaling} and {parameters}", "one of them"
        )
    given = {**(scaling or {}), **(parameters or {})} if scaling or parameters else {}
    per_type = {name: value for name, value in given.items() if isinstance(value, Mapping)}
    if per_type:
        # Keys beside the per-layer-type dicts are shared by all of them.
        shared = {name: value for name, value in given.items() if name not in per_type}
        return {
            name: _rope_form({**shared, **value}, config, f"rope_parameters.{name}") for name, value in sorted(per_type.items())
        }
    if not given and config.get("rope_theta") is None:
        return {}
    return {"all": _rope_form(given, config, "rope_parameters" if parameters else "rope_scaling")}


def respelled_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config in which scaling types have the names that classes know, at the top and in nested configs.

    Some classes translate old names themselves and others fail on them, or leave positions unscaled.
    """
    respelled = dict(config)
    for key, value in config.items():
        if key in ("rope_scaling", "rope_parameters") and isinstance(value, Mapping):
            parts = {name: _respelled(part) if isinstance(part, Mapping) else part for name, part in value.items()}
            respelled[key] = _respelled(parts)
        elif key.endswith("_config") and isinstance(value, Mapping):
            respelled[key] = respelled_rope(value)
    return respelled


def _respelled(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: ROPE_ALIASES.get(value, value) if name in ("type", "rope_type") and isinstance(value, str) else value
        for name, value in rope.items()
    }


def _rope_dict(config: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    value = config.get(key)
    if value is None or isinstance(value, Mapping):
        return None if value is None else dict(value)
    raise _rope_error(f"{key} is not an object", repr(value)[:100], "an object or null")


def _rope_type(given: Mapping[str, Any], key: str) -> str:
    old, new = given.get("type"), given.get("rope_type")
    for value in (old, new):
        if value is not None and not isinstance(value, str):
            raise _rope_error(f"{key}: the type is not a string", repr(value)[:100], "the name of a scaling type")
    if old is not None and new is not None and old != new and ROPE_ALIASES.get(old, old) != ROPE_ALIASES.get(new, new):
        raise _rope_error(f"{key}: type and rope_type contradict each other", f"type={old!r}, rope_type={new!r}", "one type")
    name = new if new is not None else old
    if name is None:
        if extra := sorted(set(given) - ROPE_LAYOUT_KEYS):
            raise _rope_error(f"{key} has scaling parameters but no type", f"keys {extra}", "rope_type beside them")
        return "default"
    name = ROPE_ALIASES.get(name, name)
    if name not in known_rope_types():
        raise _rope_error(f"{key}: unknown scaling type", repr(name), f"one of {', '.join(sorted(known_rope_types()))}")
    return name


def _scaling_part(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    if any(isinstance(value, Mapping) for value in given.values()):
        return dict(given)
    return {
        **{name: value for name, value in given.items() if name not in ROPE_LAYOUT_KEYS},
        "rope_type": _rope_type(given, key),
    }


def _rope_form(given: Mapping[str, Any], config: Mapping[str, Any], key: str) -> RopeForm:
    form: RopeForm = {"rope_type": _rope_type(given, key)}
    theta, nested = config.get("rope_theta"), given.get("rope_theta")
    if theta is not None and nested is not None and float(theta) != float(nested) and not key.startswith("rope_parameters."):
        raise _rope_error(
            "rope_theta is given twice with different values", f"{theta} at the top, {nested} in {key}", "one value"
        )
    for name, value in {"rope_theta": theta if nested is None else nested, **given}.items():
        if name in ("type", "rope_type") or value is None:
            continue
        form[name] = ",".join(str(item) for item in value) if isinstance(value, (list, tuple)) else _plain(value)
    return form


def _plain(value: Any) -> float | str:
    if isinstance(value, bool):
        return str(value).lower()
    return float(value) if isinstance(value, (int, float)) else str(value)


def _rope_error(what: str, got: str, want: str) -> DayZeroError:
    return DayZeroError(what, got=got, want=want, fix="correct config.json; unscaled positions are never assumed")


def attention_shape(
    config: Mapping[str, Any], *, default_head_dim: int | None = None, default_kv_heads: int | None = None
) -> AttentionShape:
    """Heads of ordinary attention (not for latent attention or SSM layers, whose heads follow other rules).

    An explicit value wins. `head_dim` null or absent: the class's own default when it declares one, else exactly
    hidden_size / num_attention_heads. `num_key_value_heads` null or absent: the class's default, else one per head.
    Raises DayZeroError naming the key that is zero, missing or does not divide.
    """
    hidden, heads = (_count(config, key) for key in ("hidden_size", "num_attention_heads"))
    if hidden is None or heads is None:
        missing = "hidden_size" if hidden is None else "num_attention_heads"
        raise _key_error(missing, "absent", "a positive integer")
    kv_heads = _count(config, "num_key_value_heads") or default_kv_heads or heads
    if heads % kv_heads:
        raise _key_error(
            "num_key_value_heads", f"{kv_heads}, with num_attention_heads {heads}", "a divisor of num_attention_heads"
        )
    head_dim = _count(config, "head_dim") or default_head_dim
    if head_dim is None:
        if hidden % heads:
            raise _key_error(
                "head_dim",
                f"absent, and hidden_size {hidden} / num_attention_heads {heads} is not whole",
                "an explicit head_dim, or heads that divide hidden_size",
            )
        head_dim = hidden // heads
    return AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)


def _count(config: Mapping[str, Any], key: str) -> int | None:
    """A positive integer, or None when null or absent. Anything else is an error naming the key."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _key_error(key, repr(value)[:60], "a positive integer")
    return value


def _key_error(key: str, got: str, want: str) -> DayZeroError:
    return DayZeroError(f"config.json: {key} is not usable", got=got, want=want, fix=f"correct {key} in config.json")


def stop_tokens(
    config: Mapping[str, Any],
    *,
    vocab_size: int | None = None,
    generation_config: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> tuple[tuple[int, ...], tuple[Problem, ...]]:
    """The union of every source's end-of-sequence ids, sorted, and a warning for each id that cannot be one.

    Sources: `eos_token_id` of the config, of its text_config and of the generation config (an id, a list or null), and the
    tokenizer's `eos_token`, whose id is looked up in tokenizer_config.json and tokenizer.json.
    """
    text = config.get("text_config")
    sources = {
        "config.json": config.get("eos_token_id"),
        "config.json text_config": text.get("eos_token_id") if isinstance(text, Mapping) else None,
        "generation_config.json": (generation_config or {}).get("eos_token_id"),
        "tokenizer": tokenizer_eos_id(tokenizer_config or {}, tokenizer or {}),
    }
    if vocab_size is None:
        vocab_size = next(
            (part["vocab_size"] for part in (text, config) if isinstance(part, Mapping) and part.get("vocab_size")), None
        )
    found: set[int] = set()
    problems = []
    for source, value in sources.items():
        for token in value if isinstance(value, (list, tuple)) else [] if value is None else [value]:
            valid = isinstance(token, int) and not isinstance(token, bool)
            if valid and token >= 0 and (vocab_size is None or token < vocab_size):
                found.add(token)
                continue
            reason = f"is outside the vocabulary of {vocab_size}" if valid else "is not an integer"
            problems.append(
                Problem(
                    kind="stop_token",
                    severity="warning",
                    file=source.split(" ")[0] if ".json" in source else None,
                    detail=f"{source}: eos_token_id {token!r} {reason} and is left out of the stop set",
                )
            )
    return tuple(sorted(found)), tuple(problems)


def tokenizer_eos_id(tokenizer_config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> int | None:
    """Id of the tokenizer's `eos_token` (a string, or an object with `content`); None when it has none or no id is known."""
    eos = tokenizer_config.get("eos_token")
    content = eos.get("content") if isinstance(eos, Mapping) else eos
    if not isinstance(content, str):
        return None
    for entries in (_decoder_entries(tokenizer_config), tokenizer.get("added_tokens") or []):
        for entry in entries:
            if isinstance(entry, Mapping) and entry.get("content") == content and isinstance(entry.get("id"), int):
                return int(entry["id"])
    vocab = (tokenizer.get("model") or {}).get("vocab")
    return vocab.get(content) if isinstance(vocab, Mapping) else None


def tokenizer_tokens(tokenizer: Mapping[str, Any]) -> int | None:
    """One more than the largest id of a tokenizer.json, added tokens included; None where it lists none."""
    vocab = (tokenizer.get("model") or {}).get("vocab")
    # A mapping of piece to id, or (unigram) a list of pieces with their scores.
    ids = list(vocab.values()) if isinstance(vocab, Mapping) else list(range(len(vocab))) if isinstance(vocab, list) else []
    ids += [entry.get("id") for entry in tokenizer.get("added_tokens") or [] if isinstance(entry, Mapping)]
    known = [number for number in ids if isinstance(number, int) and not isinstance(number, bool)]
    return max(known) + 1 if known else None


def _decoder_entries(tokenizer_config: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    decoder = tokenizer_config.get("added_tokens_decoder")
    for key, entry in decoder.items() if isinstance(decoder, Mapping) else []:
        if isinstance(entry, Mapping) and str(key).isdigit():
            yield {**entry, "id": int(key)}


def config_dtype(config: Mapping[str, Any]) -> tuple[str | None, tuple[Problem, ...]]:
    """The dtype a config declares: `dtype`, then `torch_dtype`, then the text config's. None when none does, or "auto"."""
    text = config.get("text_config")
    parts = [config] + ([text] if isinstance(text, Mapping) else [])
    named = [(key, str(part[key])) for part in parts for key in ("dtype", "torch_dtype") if part.get(key) not in (None, "auto")]
    problems, found = [], []
    for key, value in named:
        try:
            found.append((key, canonical_dtype(value)))
        except KeyError:
            problems.append(
                Problem(kind="dtype", severity="warning", file="config.json", detail=f"{key} {value!r} is no known dtype")
            )
    if len({dtype for _, dtype in found}) > 1:
        said = ", ".join(f"{key}={dtype}" for key, dtype in found)
        problems.append(Problem(kind="dtype", severity="warning", file="config.json", detail=f"{said}: the first is used"))
    return (found[0][1] if found else None), tuple(problems)


def quantization_summary(config: Mapping[str, Any]) -> dict[str, str]:
    """What `quantization_config` says in a few strings: method, and whatever plain settings it has. Empty when none."""
    text = config.get("text_config")
    parts = [config] + ([text] if isinstance(text, Mapping) else [])
    given = next((part[key] for part in parts for key in ("quantization_config", "compression_config") if part.get(key)), None)
    if not isinstance(given, Mapping):
        return {}
    summary = {"method": str(given.get("quant_method") or given.get("quant_algo") or "unknown")}
    for key, value in given.items():
        if isinstance(value, (str, int, float, bool)) and key != "quant_method":
            summary[str(key)] = str(value)
        elif isinstance(value, list) and len(value) <= 4 and all(isinstance(item, (int, str)) for item in value):
            summary[str(key)] = ",".join(str(item) for item in value)
    groups = given.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else []:
        for part in ("weights", "input_activations"):
            scheme = group.get(part) if isinstance(group, Mapping) else None
            if isinstance(scheme, Mapping):
                bits = f"{scheme.get('type', '?')}{scheme.get('num_bits', '?')} {scheme.get('strategy') or ''}".strip()
                summary[f"{name}.{part}"] = bits + (f" {scheme['group_size']}" if scheme.get("group_size") else "")
    return summary
