"""Every key of a config in, what became of it out: consumed (by what), inert (why), or unread.

A key that changes the model and that nobody reads is how a new release goes wrong silently, so nothing is left out: what is
in no table and was not read is listed, whatever it holds, unless it holds null.
"""

from collections.abc import Mapping
from typing import Any

from dayzero.model.keys.layer_pattern import Layer
from dayzero.model.keys.reader import Reader
from dayzero.model.keys.tables import (
    BEHAVIOUR,
    CONCEPTS,
    INERT,
    INERT_ENDINGS,
    TOWER_ASIDE,
    TOWER_CONFIGS,
    WITH_LATENT_ROWS,
    WITHOUT_EXPERTS,
    WITHOUT_INDEXER,
)


def accounted(
    config: Mapping[str, Any], keys: Reader, pattern: list[Layer]
) -> tuple[dict[str, str], dict[str, str], tuple[str, ...]]:
    """(consumed, inert, unread). A key that is null is as if absent; one whose meaning is known may have nothing to decide."""
    idle = _undecided(keys, pattern)
    consumed, inert, unread = {}, {}, []
    for path, value in _paths(config):
        prefix, _, key = path.rpartition(".")
        tower = prefix.partition(".")[0] in TOWER_CONFIGS
        if path in keys.account.consumed:
            consumed[path] = keys.account.consumed[path]
        elif key in BEHAVIOUR:
            consumed[path] = f"{BEHAVIOUR[key]}, no size"
        elif value is None:
            inert[path] = "null, as if absent"
        elif key in INERT or key.endswith(INERT_ENDINGS):
            inert[path] = INERT.get(key, "the id of a token")
        elif path in idle or (tower and key in TOWER_ASIDE):
            inert[path] = idle.get(path, "a part of a tower that its estimate leaves aside")
        else:
            unread.append(path)
    return dict(sorted(consumed.items())), dict(sorted(inert.items())), tuple(sorted(unread))


def _undecided(keys: Reader, pattern: list[Layer]) -> dict[str, str]:
    """Paths of keys whose meaning is known and has no object in this model."""
    groups = (
        (not keys.experts(), WITHOUT_EXPERTS, "there are no experts"),
        (bool(keys.count("kv_rank")), WITH_LATENT_ROWS, "latent attention has widths of its own"),
        (not any(layer.mixer in ("indexed", "light") for layer in pattern), WITHOUT_INDEXER, "no layer has an indexer"),
        (not keys.has("per_layer_input"), ("per_layer_vocabulary",), "there are no embeddings per layer"),
        (True, ("attention_bias", "mlp_bias", "ssm_bias", "qkv_bias"), "no part that it speaks of"),
    )
    return {
        f"{keys.prefix}{spelling}": f"{CONCEPTS[name].meaning}: {reason}"
        for applies, names, reason in groups
        if applies
        for name in names
        for spelling in CONCEPTS[name].spellings
    }


def _paths(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    paths: list[tuple[str, Any]] = []
    for key, value in config.items():
        if (
            isinstance(value, Mapping)
            and str(key).endswith("_config")
            and key not in ("quantization_config", "per_layer_config")
        ):
            paths += _paths(value, f"{prefix}{key}.")
        else:
            paths.append((f"{prefix}{key}", value))
    return paths


def some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
