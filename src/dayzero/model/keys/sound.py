"""A whole config in, before anything is computed from it: refusals of what no model can have, and doubts as warnings.

Both answers, the one from keys and the measured one, start here, so that neither accepts what the other refuses. What is
refused: numbers that are no numbers, position bases that are not positive, control characters, objects and lists that are
something else, experts and groups that do not fit each other. What a class makes of a value is not checked.
"""

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.model.keys.reader import Account, Reader
from dayzero.model.keys.tables import CONCEPTS, TEXT_CONFIGS, TOWER_CONFIGS

# Infinity is a bound that does not bind; anywhere else it is a mistake.
UNBOUNDED = re.compile(r"(^|_)(limits?|clip|clamp|cap|softcapping|bound)(_|$)")
THETA = re.compile(r"(rope_theta|^rotary_emb_base|^rope_local_base_freq)$")
# What transformers writes for a float that JSON does not have.
FLOAT_TAG = "__float__"
# All but tab and newlines, which templates have.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")
# More layers that predict further tokens than this are a typing error: releases have up to a handful.
MOST_DRAFTS = 1000


def config_doubts(config: Mapping[str, Any]) -> list[Problem]:
    """Raises DayZeroError that names the key, for what cannot be; warns of what is said twice and not alike."""
    for path, key, value in _values(config):
        _check_value(path, key, value)
    for name in (*TEXT_CONFIGS, *TOWER_CONFIGS):
        if config.get(name) is not None and not isinstance(config[name], Mapping):
            raise unusable(name, config[name], "an object or null")
    architectures = config.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(item, str) for item in architectures)
    ):
        raise unusable("architectures", architectures, "a list of names of classes, or null")
    check_experts(text_reader(config, Account()))
    return _said_twice(config)


def text_reader(config: Mapping[str, Any], account: Account) -> Reader:
    """The keys of the text decoder."""
    if not isinstance(config, Mapping):
        raise DayZeroError(
            "config.json is not an object", got=type(config).__name__, want="an object", fix="correct config.json"
        )
    for name in TEXT_CONFIGS:
        nested = config.get(name)
        if isinstance(nested, Mapping):
            inner = nested.get("text_config")
            if isinstance(inner, Mapping):
                return Reader(inner, account, prefix=f"{name}.text_config.")
            return Reader(nested, account, prefix=f"{name}.")
    return Reader(config, account)


def check_experts(keys: Reader) -> None:
    """Experts, groups of them and what a token uses fit each other; layers that predict further tokens can be counted."""
    drafts = keys.count("mtp")
    if drafts > MOST_DRAFTS:
        raise keys.wrong(keys.spelled("mtp") or "", drafts, f"at most {MOST_DRAFTS} layers that predict further tokens")
    experts = keys.experts()
    if not experts:
        return
    choices, per_token = experts + keys.count("zero_experts"), keys.size("per_token") or 1
    if per_token > choices:
        raise keys.wrong(keys.spelled("per_token") or "", per_token, f"at most {choices}, the experts there are")
    groups, chosen = keys.count("groups") or 1, keys.count("groups_per_token") or 1
    if groups == 1:
        return
    if experts % groups:
        raise keys.wrong(keys.spelled("groups") or "", f"{groups}, with {experts} experts", "a divisor of their number")
    if chosen > groups:
        raise keys.wrong(keys.spelled("groups_per_token") or "", f"{chosen} of {groups} groups", "at most the groups there are")
    if keys.has("groups_per_token") and chosen * (experts // groups) < per_token:
        got = f"{chosen} groups of {experts // groups} experts, for {per_token} experts a token"
        raise keys.wrong(keys.spelled("groups_per_token") or "", got, "groups that hold the experts of a token")


def unusable(key: str, got: Any, want: str) -> DayZeroError:
    return DayZeroError(
        f"config.json: {key} is not usable", got=ascii(got)[:80], want=want, fix=f"correct {key} in config.json"
    )


def _values(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(dotted path, nearest key, value) of everything that is no container. A stack: files nest deeper than Python calls."""
    waiting: list[tuple[str, str, Any]] = [("", "", config)]
    while waiting:
        path, key, value = waiting.pop()
        if isinstance(value, Mapping):
            if set(value) == {FLOAT_TAG}:
                yield path, key, _untagged(path, value[FLOAT_TAG])
                continue
            for name, item in reversed(list(value.items())):
                if CONTROL.search(str(name)) or "\n" in str(name):
                    raise unusable(ascii(f"{path}.{name}" if path else str(name))[1:-1], "control characters", "a plain name")
                waiting.append((f"{path}.{name}" if path else str(name), str(name), item))
        elif isinstance(value, (list, tuple)):
            bases = bool(THETA.search(key))
            if bases and not any(isinstance(item, (int, float)) and item > 0 for item in value):
                raise unusable(path, value, "a positive number, or one for each layer (0: without positions)")
            waiting += [(path, key, item) for item in reversed(value) if not (bases and item == 0)]
        else:
            yield path, key, value


def _untagged(path: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise unusable(path, value, "NaN, Infinity or -Infinity behind " + FLOAT_TAG) from None


def _check_value(path: str, key: str, value: Any) -> None:
    if isinstance(value, str) and CONTROL.search(value):
        raise unusable(path, value, "text without control characters")
    if isinstance(value, float) and not isfinite(value) and (value != value or not UNBOUNDED.search(key)):
        raise unusable(path, value, "a finite number")
    if (
        THETA.search(key)
        and value is not None
        and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0)
    ):
        raise unusable(path, value, "a positive number")


def _said_twice(config: Mapping[str, Any]) -> list[Problem]:
    """Sizes that the top of a config and its text part give differently."""
    keys = text_reader(config, Account())
    if not keys.prefix:
        return []
    names = {spelling for concept in CONCEPTS.values() if concept.kind in ("size", "count", "items", "ratio")
             for spelling in concept.spellings}  # fmt: skip
    told = [
        f"{key} is {ascii(config[key])[:40]} at the top and {ascii(keys.data[key])[:40]} in {keys.prefix[:-1]}"
        for key in sorted(names & set(config) & set(keys.data))
        if config[key] is not None and keys.data[key] is not None and config[key] != keys.data[key]
    ]
    if not told:
        return []
    detail = "; ".join(told) + f": figures from keys use {keys.prefix[:-1]}, a class may use the other"
    return [Problem(kind="said_twice", severity="warning", file="config.json", detail=detail)]
