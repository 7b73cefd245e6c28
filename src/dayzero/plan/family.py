"""An announced architecture as a family of sizes: one known configuration, and rules by which it shrinks or grows.

Goes in: a family file (a `config.json`, or YAML with a `config` or `base` and what is announced). Comes out: for a wanted
number of parameters a configuration near it, and what was changed. The rules are conventions, not laws; a family file overrides
them key by key:

- what grows, and by which power of the size: depth 0.2, width 0.2, width of an expert 0.2, number of experts 0.4 (they sum to
  1, as a mixture of experts has depth x width x expert width x experts parameters); without experts depth 1/3 and width 1/3
  (depth x width^2). A power is only where the search starts: all move together until the described total is nearest.
- width: attention heads in steps of 8, the hidden size and dense feed-forwards with them, so that a head keeps its size;
  key/value heads only where there are as many as heads. Depth: in steps of the layer pattern, whose per-layer lists are
  continued. Experts in steps of 32 (and of their groups), their width in steps of 128, as block quantization needs.
- everything else is held: vocabulary, latent ranks, experts per token, windows, positions, dense first layers.

Deliberately not done: describing a configuration (a callable is given), guessing what an announcement does not say.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.records import read_json
from dayzero.core.target import load_yaml

DEPTH = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
HIDDEN = ("hidden_size", "dim", "d_model", "n_embd")
HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")
KEY_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads")
DENSE = ("intermediate_size", "inter_dim", "ffn_dim")
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_inter_dim", "expert_dim")
SHARED_WIDTH = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
TEXT = ("text_config", "language_config", "llm_config")

HEAD_STEP, WIDTH_STEP, EXPERT_STEP, EXPERT_WIDTH_STEP = 8, 128, 32, 128
POWERS_WITH_EXPERTS = {"depth": 0.2, "width": 0.2, "expert_width": 0.2, "experts": 0.4}
POWERS = {"depth": 1 / 3, "width": 1 / 3}
# Sizes are searched for within this factor of the base's on both sides.
MOST_GROWTH = 64.0
LONGEST_PATTERN, LONGEST_EDGE = 16, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """`ranges`: key -> (lowest, highest, step), announced; `held`: keys that do not change; `sizes`: announced, else empty."""

    name: str
    config: dict[str, Any]
    ranges: dict[str, tuple[int, int, int | None]] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    weights_dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """A configuration of the family. `changed`: key -> (base, now); `notes`: what could not be followed."""

    config: dict[str, Any]
    parameters: int
    changed: dict[str, tuple[int, int]]
    notes: tuple[str, ...] = ()


def load_family(path: Path) -> Family:
    """Raises DayZeroError for a file that is neither a configuration nor a family, and for keys it does not know."""
    if not path.is_file():
        raise DayZeroError(f"there is no family file at {path}", got="no such file", want="a config.json or a YAML file",
                           fix="correct --family")  # fmt: skip
    data = load_yaml(path) if path.suffix.lower() in (".yaml", ".yml") else read_json(path)
    if not isinstance(data, dict):
        raise DayZeroError(f"{path.name} is no family", got=type(data).__name__, want="a mapping", fix="correct the file")
    if "config" not in data and "base" not in data:
        return Family(name=path.parent.name if path.name == "config.json" else path.stem, config=data)
    known = {"name", "config", "base", "ranges", "held", "sizes", "weights_dtypes"}
    if extra := sorted(set(data) - known):
        raise DayZeroError(f"{path.name}: unknown keys", got=", ".join(extra), want=", ".join(sorted(known)), fix="remove them")
    config = data.get("config") or read_json(path.parent / str(data["base"]))
    ranges = {str(key): _range(str(key), given) for key, given in (data.get("ranges") or {}).items()}
    return Family(
        name=str(data.get("name") or path.stem),
        config=config,
        ranges=ranges,
        held=tuple(data.get("held") or ()),
        sizes=tuple(parse_size(str(size)) for size in data.get("sizes") or ()),
        weights_dtypes=tuple(data.get("weights_dtypes") or ()),
    )


def _range(key: str, given: Any) -> tuple[int, int, int | None]:
    numbers = given if isinstance(given, list) else [given, given]
    if len(numbers) not in (2, 3) or not all(isinstance(item, int) and item > 0 for item in numbers) or numbers[0] > numbers[1]:
        raise DayZeroError(f"ranges: {key}", got=given, want="a number, [lowest, highest] or [lowest, highest, step]",
                           fix="correct the family file")  # fmt: skip
    return numbers[0], numbers[1], numbers[2] if len(numbers) == 3 else None


def parse_size(text: str) -> int:
    """`0.5T`, `671B`, `2_000_000_000_000` -> parameters."""
    units = {"T": 1e12, "B": 1e9, "M": 1e6}
    short = text.strip().replace("_", "").upper()
    try:
        number = float(short.rstrip("TBM")) * units.get(short[-1:], 1.0)
    except ValueError:
        number = 0.0
    if not (math.isfinite(number) and number >= 1):
        raise DayZeroError("a size that cannot be read", got=text, want="such as 0.5T or 671B", fix="correct --sizes") from None
    return round(number)


class Scaler:
    """Configurations of one family by size. `describe_total`: a configuration -> its number of parameters."""

    def __init__(self, family: Family, describe_total: Callable[[Mapping[str, Any]], int]) -> None:
        self.family, self.describe_total = family, describe_total
        self.text = _text_of(family.config)
        self.notes: list[str] = []
        self.depth, self.heads, self.hidden = self._need(DEPTH), _find(self.text, HEADS), self._need(HIDDEN)
        self.experts, self.expert_width = _find(self.text, EXPERTS), _find(self.text, EXPERT_WIDTH)
        self.per_layer = self._per_layer_lists()
        self.powers = POWERS_WITH_EXPERTS if self.experts else POWERS
        self.known: dict[tuple[int, ...], int] = {}
        unknown = [key for key in (*family.ranges, *family.held) if key not in self.text]
        if unknown:
            raise DayZeroError("the family speaks of keys its configuration does not have", got=", ".join(unknown),
                               want=", ".join(sorted(key for key, value in self.text.items() if isinstance(value, int))),
                               fix="correct the family file")  # fmt: skip

    def scaled(self, parameters: int) -> Scaled:
        """The configuration whose described total is nearest to `parameters`."""
        low, high = 1 / MOST_GROWTH, MOST_GROWTH
        for _ in range(24):  # the total grows with the factor, in steps
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._total(self._changes(middle)) < parameters else (low, middle)
        around = [low * 2 ** (step / 24) for step in range(-8, 9)]
        candidates = [self._changes(factor) for factor in around]
        candidates += [self._deeper(change, steps) for change in list(candidates) for steps in (-2, -1, 1, 2)]
        best = min(candidates, key=lambda change: (abs(math.log(self._total(change) / parameters)), sorted(change.items())))
        total = self._total(best)
        notes = list(self.notes)
        if abs(total - parameters) > 0.05 * parameters:
            notes.append(f"the nearest size within the family's ranges has {total / 1e12:.3g}T parameters")
        changed = {key: (int(self.text[key]), value) for key, value in best.items() if value != self.text[key]}
        return Scaled(config=self.config(best), parameters=total, changed=changed, notes=tuple(notes))

    def config(self, change: Mapping[str, int]) -> dict[str, Any]:
        """The base with the changed numbers, lists per layer continued, and what follows the width elsewhere."""
        config = deepcopy(self.family.config)
        text = _text_of(config)
        text.update(change)
        layers = change.get(self.depth, int(self.text[self.depth]))
        for key, pattern in self.per_layer.items():
            text[key] = pattern.of(layers + pattern.extra)
        if self.heads is not None and (heads := change.get(self.heads)) is not None:
            for inner in _inner(text):
                for key in HEADS:
                    if inner.get(key) == self.text[self.heads]:
                        inner[key] = heads
        return config

    def _total(self, change: Mapping[str, int]) -> int:
        key = tuple(change[name] for name in sorted(change))
        if key not in self.known:
            self.known[key] = self.describe_total(self.config(change))
        return self.known[key]

    def _changes(self, factor: float) -> dict[str, int]:
        """The keys that grow, at one factor of the size."""
        change = {self.depth: self._stepped(self.depth, factor ** self.powers["depth"], self._depth_step())}
        change |= self._width(factor ** self.powers["width"])
        if self.experts is not None:
            groups = int(self.text.get("n_group") or self.text.get("num_expert_group") or 1)
            step = math.lcm(EXPERT_STEP, groups)
            change[self.experts] = self._stepped(self.experts, factor ** POWERS_WITH_EXPERTS["experts"], step)
            width = self.expert_width or _find(self.text, DENSE)
            if width is not None:
                change[width] = self._stepped(width, factor ** POWERS_WITH_EXPERTS["expert_width"], EXPERT_WIDTH_STEP)
                for key in SHARED_WIDTH:
                    if isinstance(base := self.text.get(key), int) and key not in self.family.held:
                        change[key] = base * change[width] // int(self.text[width])
        return change

    def _width(self, growth: float) -> dict[str, int]:
        change: dict[str, int] = {}
        hidden = int(self.text[self.hidden])
        if self.hidden in self.family.ranges or self.heads is None:
            change[self.hidden] = self._stepped(self.hidden, growth, WIDTH_STEP)
            ratio = change[self.hidden] / hidden
            if self.heads is not None and self.heads not in self.family.held:
                change[self.heads] = self._stepped(self.heads, ratio, HEAD_STEP)
        else:
            change[self.heads] = self._stepped(self.heads, growth, HEAD_STEP)
            exact = hidden * change[self.heads]
            heads = int(self.text[self.heads])
            change[self.hidden] = exact // heads if exact % heads == 0 else _round(exact / heads, WIDTH_STEP)
            ratio = change[self.hidden] / hidden
        keys = _find(self.text, KEY_HEADS)
        if keys is not None and self.heads is not None and self.text[keys] == self.text[self.heads]:
            change[keys] = change.get(self.heads, int(self.text[self.heads]))
        dense = _find(self.text, DENSE)
        if dense is not None and (self.expert_width is not None or self.experts is None):
            change[dense] = self._stepped(dense, ratio, WIDTH_STEP)
        for key, value in self.text.items():  # widths that are a plain share of the model's, such as a narrower expert input
            if key.endswith("hidden_size") and key != self.hidden and isinstance(value, int) and hidden % value == 0:
                change[key] = change[self.hidden] // (hidden // value)
        return {key: value for key, value in change.items() if key not in self.family.held}

    def _deeper(self, change: dict[str, int], steps: int) -> dict[str, int]:
        wanted = change[self.depth] + steps * self._depth_step()
        return change | {self.depth: self._clamped(self.depth, max(1, wanted))}

    def _stepped(self, key: str, growth: float, step: int) -> int:
        """The base times `growth`, off the base by whole steps, within what was announced."""
        base = int(self.text[key])
        if key in self.family.held:
            return base
        step = (self.family.ranges[key][2] or step) if key in self.family.ranges else step
        moved = base + round((base * growth - base) / step) * step
        return self._clamped(key, max(moved, base % step or step))

    def _clamped(self, key: str, value: int) -> int:
        if key in self.family.held:
            return int(self.text[key])
        low, high, _ = self.family.ranges.get(key, (1, value, None))
        return min(max(value, low), high)

    def _depth_step(self) -> int:
        periods = [pattern.period for pattern in self.per_layer.values()]
        interval = self.text.get("full_attention_interval")
        return math.lcm(*periods, interval if isinstance(interval, int) and 0 < interval <= LONGEST_PATTERN else 1)

    def _per_layer_lists(self) -> dict[str, "Pattern"]:
        """Lists with an entry per layer. Where one has no pattern, or layers are listed by number, the depth is held."""
        depth, found = int(self.text[self.depth]), {}
        for key, value in self.text.items():
            if isinstance(value, str) and "pattern" in key and len(value) == depth:
                self._hold_depth(f"{key} spells the layers as text")
            if isinstance(value, list) and depth > 4 and depth <= len(value) <= depth + 4:
                pattern = Pattern.read(value, depth)
                if pattern is None:
                    self._hold_depth(f"{key} has no repeating pattern")
                else:
                    found[key] = pattern
        for inner in _inner(self.text):
            for key, value in inner.items():
                if key.endswith("layers") and isinstance(value, list) and value and all(type(item) is int for item in value):
                    self._hold_depth(f"{key} lists layers by number")
        return found

    def _hold_depth(self, why: str) -> None:
        if self.depth not in self.family.held:
            self.family = Family(**{name: getattr(self.family, name) for name in Family.__dataclass_fields__}
                                 | {"held": (*self.family.held, self.depth)})  # fmt: skip
        self.notes.append(f"the depth is held at {self.text[self.depth]}: {why}")

    def _need(self, names: tuple[str, ...]) -> str:
        found = _find(self.text, names)
        if found is None:
            raise DayZeroError("the family's configuration does not say its sizes", got="none of " + ", ".join(names),
                               want="one of these keys", fix="give a configuration with it")  # fmt: skip
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """A list per layer: some first entries, a repeated middle, some last ones. `extra`: entries beyond the layers (drafts)."""

    first: tuple[Any, ...]
    repeated: tuple[Any, ...]
    last: tuple[Any, ...]
    extra: int

    @property
    def period(self) -> int:
        return len(self.repeated)

    @classmethod
    def read(cls, values: list[Any], depth: int) -> "Pattern | None":
        """The repetition that leaves least to be listed beside it; None where none repeats twice."""
        number, found = len(values), []
        for period in range(1, LONGEST_PATTERN + 1):
            for first in range(LONGEST_EDGE + 1):
                for last in range(LONGEST_EDGE + 1):
                    middle = values[first : number - last]
                    if len(middle) < 2 * period:
                        break
                    if all(middle[i] == middle[i + period] for i in range(len(middle) - period)):
                        found.append((period + first + last, last, first, period))
        if not found:
            return None
        _, last, first, period = min(found)
        return cls(first=tuple(values[:first]), repeated=tuple(values[first : first + period]),
                   last=tuple(values[number - last :]), extra=number - depth)  # fmt: skip

    def of(self, number: int) -> list[Any]:
        middle = max(0, number - len(self.first) - len(self.last))
        repeats = -(-middle // self.period)
        return [*self.first, *(list(self.repeated) * repeats)[:middle], *self.last][:number]


def _text_of(config: dict[str, Any]) -> dict[str, Any]:
    return next((config[key] for key in TEXT if isinstance(config.get(key), dict)), config)


def _inner(mapping: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Objects inside the text configuration that describe layers (positions and quantization do not)."""
    for key, value in mapping.items():
        if isinstance(value, dict) and not key.startswith(("rope", "quantization", "vision", "auto_map")):
            yield value
            yield from _inner(value)


def _find(mapping: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(mapping.get(name), int) and mapping[name] > 0), None)


def _round(number: float, step: int) -> int:
    return max(step, round(number / step) * step)
