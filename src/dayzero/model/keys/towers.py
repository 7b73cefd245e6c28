"""The nested configs beside the text's in, towers out: an estimate of their parameters and of what joins them to the text.

A tower is counted as a stack of ordinary encoder layers; what is special to one (windows, convolutions, adapters) is not
known, and every tower says so. Towers are small beside the decoders they feed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dayzero.core.structure import Tower
from dayzero.model.keys.reader import Account, Reader
from dayzero.model.keys.tables import PLAIN_ACTIVATIONS, TOWER_CONCEPTS, TOWER_CONFIGS


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedTower:
    """`idle`: parameters of its experts that a token, on average, does not use."""

    tower: Tower
    projector: int
    idle: int


def towers(config: Mapping[str, Any], account: Account, *, text_hidden: int) -> list[CountedTower]:
    """One for each nested config that is an object. Raises DayZeroError for wrong values."""
    found = []
    for key, kind in TOWER_CONFIGS.items():
        given = config.get(key)
        if not isinstance(given, Mapping) or not given:
            continue
        keys = Reader(given, account, prefix=f"{key}.", table=TOWER_CONCEPTS)
        counted = _tower(keys, key, kind)
        if counted is not None:
            found.append(replace(counted, projector=_projector(keys, config, text_hidden)))
    return found


def _tower(keys: Reader, name: str, kind: str) -> CountedTower | None:
    hidden, depth = keys.size("hidden"), keys.size("depth")
    if hidden is None or depth is None:
        keys.account.note(f"the size of its {kind} tower: {name} gives no width or no depth, it is counted as nothing")
        return None
    if depth > 1000:
        raise keys.wrong(keys.spelled("depth") or "", depth, "at most 1000 layers")
    layers = [_layer(keys.at(layer), hidden) for layer in range(depth)]
    total = sum(size for size, _ in layers) + 2 * hidden + _embedding(keys, hidden)
    keys.account.note(
        f"the exact layout of its {kind} tower, and whether a program loads it: ordinary encoder layers are counted, "
        f"{total / 1e6:.0f}M parameters of the total"
    )
    tower = Tower(name=name, kind=kind, parameters=total, feeds_into=f"embeddings at its {kind} tokens")
    return CountedTower(tower=tower, projector=0, idle=sum(idle for _, idle in layers))


def _layer(keys: Reader, hidden: int) -> tuple[int, int]:
    """(parameters, those of idle experts)."""
    width = keys.size("attention_width") or hidden
    heads = keys.size("heads")
    inner = keys.size("inner") or int((keys.ratio("inner_ratio") or 4.0) * hidden)
    gated = keys.has("gated_activation") or (keys.word("activation") or "gelu") not in PLAIN_ACTIVATIONS
    number = 3 if gated else 2
    attention = 4 * hidden * width + (0 if gated or not heads else 3 * width + hidden)
    words = keys.items("feed_types", kind=str)
    sparse = words is not None and keys.layer is not None and keys.layer < len(words) and words[keys.layer] != "dense"
    idle, experts = 0, keys.count("experts")
    if sparse and experts:
        one = number * hidden * (keys.size("expert_width") or inner)
        feed, idle = experts * (one + hidden), max(0, experts - (keys.size("per_token") or experts)) * one
    else:
        feed = number * hidden * inner + (0 if gated else inner + hidden)
    return attention + feed + (2 if gated else 4) * hidden, idle


def _embedding(keys: Reader, hidden: int) -> int:
    side = _side(keys, "patch")
    patch = hidden * side * side * (keys.size("channels") or 3) * (keys.size("frames") or 1) + hidden if side else 0
    height = keys.size("position_height")
    grid = height * (keys.size("position_width") or height) if height else keys.size("position_rows") or 0
    return patch + grid * hidden


def _projector(keys: Reader, config: Mapping[str, Any], text_hidden: int) -> int:
    """Merged patches through two matrices to the text's width, once more for each layer that is handed over as well."""
    hidden, out = keys.required("hidden"), keys.size("out") or text_hidden
    side = _side(keys, "merge") or _side(replace(keys, data=config, prefix=""), "merge") or 1
    merged = hidden * side * side
    if side == 1:
        return merged * text_hidden
    one = merged * merged + merged * out + merged + out + 2 * hidden
    return one * (1 + len(keys.items("deep") or ()))


def _side(keys: Reader, name: str) -> int:
    """A side of something square: a number, or a list of two."""
    value = keys.raw(name)
    number = value[0] if isinstance(value, list) and value else value
    if number is None:
        return 0
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 2**16:
        raise keys.wrong(keys.spelled(name) or "", value, "a positive integer, or a list of two")
    return number
