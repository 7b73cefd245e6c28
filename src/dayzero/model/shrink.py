"""A release's config in, a config of the same structure and a few hundred thousand parameters out.

Used to prove an execution tier on a small instance of the very architecture that is to be served, so it starts from any
real config and knows no architecture: `shrink_rules` maps field-name patterns to small values, `shrink_relations` keeps
what holds between sizes. Every layer kind of the full stack is kept; windows, chunks and position thresholds end up at 8
to 16 tokens (a schedule of 30 tokens crosses them all); everything not matched by a rule stays as released. Weights are
random, quantization is dropped (a note says so). It does not check what the model computes, only that it can be built.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from dayzero.core.errors import DayZeroError
from dayzero.model.classes import (
    build_model,
    build_on_meta,
    causal_class,
    class_config,
    is_index_list,
    layer_kind_signatures,
    text_config,
)
from dayzero.model.shrink_relations import distinct_size, keep_relations, keep_rotated_fraction, scale_rotary_lists
from dayzero.model.shrink_rules import (
    BACK_COUNT,
    BOOKKEEPING,
    FRONT_COUNT,
    HEAD_DIM,
    LAYER_COUNT,
    LAYER_LIST,
    LAYER_NUMBER,
    RULES,
    SIDE_CONFIG,
    TOKEN_ID,
    VOCAB,
    VOCAB_SIZE,
    ShrinkRule,
)

__all__ = ["RULES", "ShrinkRule", "ShrunkConfig", "build_shrunken", "causal_class", "shrink_config"]

MAX_PARAMETERS = 50_000_000  # 200 MB in float32; anything above means that a size escaped the rules
# A prefix longer than this is replaced by one layer of each kind, where per-layer lists make that possible.
MAX_PREFIX_LAYERS = 12
# Ways to build the small config, the most faithful first.
ATTEMPTS = (
    {"distinct": True, "derive": False},
    {"distinct": False, "derive": False},
    {"distinct": False, "derive": True},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShrunkConfig:
    """`layer_indices`: the layers of the full stack which the shrunken ones stand for, in order."""

    config: PreTrainedConfig
    layer_indices: tuple[int, ...]
    notes: tuple[str, ...]


def shrink_config(
    config: PreTrainedConfig, *, overrides: Mapping[str, Any] | None = None, vocab_size: int = VOCAB_SIZE
) -> ShrunkConfig:
    """The smallest config with every layer kind of `config`, proven by building it on the meta device.

    overrides: fields of the text config set as given, for constraints between fields that no rule can see.
    Raises DayZeroError when transformers has no class for the config or no candidate builds (the reasons are in it).
    """
    full = class_config(config)
    notes: list[str] = []
    if getattr(config, "quantization_config", None) is not None:
        notes.append("quantization_config dropped: random weights are made in the requested dtype")
    kinds: list[tuple[Hashable, ...]] = []
    try:
        kinds = layer_kind_signatures(build_on_meta(full), full)
    except DayZeroError:
        raise
    except Exception as error:  # a class default may be incomplete; overrides may complete it
        notes.append(f"the full config does not build, the first two layers were taken: {_one_line(error)}")
    num_full_layers = len(kinds) or _num_layers(text_config(full)) or 0
    failures: list[str] = []
    for indices in _candidate_selections(kinds):
        for variant in ATTEMPTS:
            shrinker = _Shrinker(
                indices=indices,
                num_full_layers=num_full_layers,
                overrides=dict(overrides or {}),
                vocab_size=vocab_size,
                **variant,
            )
            try:
                small = shrinker.shrink(full)
                small_model = build_on_meta(small, torch.float32)
                num_parameters = sum(parameter.numel() for parameter in small_model.parameters())
                if num_parameters > MAX_PARAMETERS:
                    largest = max(small_model.named_parameters(), key=lambda named: named[1].numel())[0]
                    raise ValueError(f"{num_parameters:,} parameters are left, most of them in {largest}")
                small_kinds = layer_kind_signatures(small_model, small)
            except Exception as error:
                failures.append(f"{len(indices)} layers, {variant}: {_one_line(error)}")
                continue
            lost = {_modules(kind) for kind in kinds} - {_modules(kind) for kind in small_kinds}
            if lost:
                notes.append(f"{len(lost)} of {len(set(kinds))} layer kinds are not in the shrunken stack")
            if len(small_kinds) != len(indices):
                indices = tuple(range(len(small_kinds)))
                notes.append(f"overrides set the number of layers: {len(small_kinds)}")
            notes.extend(f"rejected: {failure}" for failure in failures)
            return ShrunkConfig(config=small, layer_indices=indices, notes=tuple(notes))
    raise DayZeroError(
        what="this config could not be shrunk",
        got=f"{config.model_type}: " + "; ".join(dict.fromkeys([*notes, *failures])),
        want="a small config its class can be built from",
        fix="complete the config, or give the fields that constrain each other as overrides",
    )


def build_shrunken(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    seed: int,
    overrides: Mapping[str, Any] | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> tuple[nn.Module, ShrunkConfig]:
    """A CPU instance of the shrunken config, its weights drawn from `seed` (the global generator is left alone)."""
    shrunk = shrink_config(config, overrides=overrides, vocab_size=vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(shrunk.config, dtype)
    randomise_weights(model, seed)
    return model, shrunk


@torch.no_grad()
def randomise_weights(model: nn.Module, seed: int) -> None:
    """Weights under which every part matters.

    Initial weights of standard deviation 0.02 give nearly constant logits; ones and zeros hide norms, biases and sinks.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float32) * scale

    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        if parameter.dim() >= 2:
            # 0.6 / sqrt(inputs) keeps activations of order one through a few residual layers.
            parameter.copy_(noise(parameter, 0.5 if "embed" in name else 0.6 / parameter.shape[-1] ** 0.5))
        elif parameter.dim() == 1 and "norm" in name:
            parameter.add_(noise(parameter, 0.1).to(parameter.dtype))
        elif parameter.dim() == 1 and re.search("bias|sink", name):
            parameter.copy_(noise(parameter, 0.1))
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        # Routers keep the bias that balances experts in a buffer.
        if name in saved and buffer.is_floating_point() and "bias" in name and buffer.dim() == 1:
            buffer.copy_(noise(buffer, 0.1))


def _candidate_selections(kinds: Sequence[Hashable]) -> list[tuple[int, ...]]:
    """Layer selections to try, best first: the smallest prefix with all kinds, one layer of each kind, longer prefixes."""
    firsts = sorted({kind: index for index, kind in reversed(list(enumerate(kinds)))}.values())
    num_prefix = max(2, firsts[-1] + 1 if firsts else 2)
    if kinds:
        num_prefix = min(num_prefix, max(len(kinds), 1))
    prefixes = [tuple(range(num_prefix + more)) for more in (0, 1, 2, 4)]
    if num_prefix <= MAX_PREFIX_LAYERS:
        return prefixes
    one_of_each = tuple(firsts if len(firsts) > 1 else [*firsts, firsts[-1] + 1])
    return [one_of_each, *prefixes]


def _modules(kind: tuple) -> tuple:
    """Module names and classes of a kind without its switches (a switch may be the number of a layer as text)."""
    return tuple((entry[0], entry[1]) for entry in kind if len(entry) == 4)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@dataclass(kw_only=True)
class _Shrinker:
    """One attempt at a small config.

    derive: leave fields out whose default is None, so that the config class computes them again.
    distinct: sizes which differ between layers in the full config keep differing.
    """

    indices: tuple[int, ...]
    num_full_layers: int
    overrides: dict[str, Any]
    vocab_size: int
    derive: bool
    distinct: bool

    def shrink(self, config: PreTrainedConfig, *, side: bool = False) -> PreTrainedConfig:
        """side: the config of an encoder beside the text decoder; its layers are alike, two of them will do."""
        if side:
            return replace(self, indices=(0, 1), num_full_layers=_num_layers(config) or 0, overrides={})._shrink(config)
        return self._shrink(config)

    def _shrink(self, config: PreTrainedConfig) -> PreTrainedConfig:
        is_text = text_config(config) is config
        per_layer = _per_layer_config(config)
        if per_layer:  # a copy, since reading what a layer may set for itself has to be allowed first
            config = copy.deepcopy(config)
            config.allow_global_per_layer_attribute_access = True
        defaults = {f.name: f.default for f in dataclasses.fields(config)}
        full = _values(config, defaults)
        derived = _derived_fields(config, defaults, full, per_layer)
        small: dict[str, Any] = {}
        for name, value in full.items():
            if name in derived:
                continue  # the class computes it from the others, in small as in full
            if isinstance(value, PreTrainedConfig):
                small[name] = self.shrink(value, side=bool(SIDE_CONFIG.search(name)))
            elif self.derive and isinstance(value, (list, dict)) and defaults.get(name, dataclasses.MISSING) is None:
                continue
            else:
                small[name] = self._value(name, value, full)
        keep_relations(full, small)
        if self.distinct:
            for name in full:
                base = re.sub(r"^(swa|global|sliding)_|(?<=^num_)(swa|global|sliding)_", "", name)
                if base != name and isinstance(small.get(name), int) and isinstance(small.get(base), int):
                    small[name] = distinct_size(full[name], full[base], small[name], small[base])
        scale_rotary_lists(full, small)
        for alias, name in (getattr(config, "attribute_map", None) or {}).items():
            if alias in small and name in small:
                small.pop(name if alias in defaults and name not in defaults else alias)
        if per_layer:
            small["per_layer_config"] = self._per_layer(per_layer, full, small)
        small.pop("allow_global_per_layer_attribute_access", None)
        if is_text:
            small.update(self.overrides)
        made = vars(type(config)(**copy.deepcopy(small)))
        # A computed field may be a constant of the class, as large as ever: then it is given after all.
        constants = {n: self._value(n, full[n], full) for n in derived if made.get(n) == full[n]}
        small |= {name: value for name, value in constants.items() if value != full[name]}
        keep_rotated_fraction(full, small, made | small)
        return type(config)(**small)

    def _per_layer(self, overrides: Mapping[int, Mapping], full: Mapping[str, Any], small: Mapping[str, Any]) -> dict:
        """What single layers set differently from the whole, renumbered."""
        layers: dict[str, dict[str, Any]] = {}
        for place, index in enumerate(self.indices):
            if index not in overrides:
                continue
            layer_full = {**full, **overrides[index]}
            layer = {name: self._value(name, value, layer_full) for name, value in overrides[index].items()}
            for name, value in layer.items():
                base = small.get(name)
                if self.distinct and isinstance(value, int) and isinstance(base, int) and not isinstance(value, bool):
                    layer[name] = distinct_size(overrides[index][name], full[name], value, base)
            layer_small = dict(small) | layer
            keep_relations(layer_full, layer_small)
            layers[str(place)] = {n: v for n, v in layer_small.items() if n in layer or v != small[n]}
        return layers

    def _value(self, name: str, value: Any, siblings: Mapping[str, Any]) -> Any:
        if isinstance(value, dict):
            return {key: self._value(key, inner, value) if isinstance(key, str) else inner for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._list(name, value, siblings))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            return copy.deepcopy(value)
        if name == "partial_rotary_factor" and value < 1:
            # An even number of dimensions, and two pairs at least: with one pair all pairings are the same.
            return max(4, 2 * round(value * HEAD_DIM / 2)) / HEAD_DIM
        if not float(value).is_integer():
            return value
        if name in LAYER_COUNT and self.num_full_layers and value % self.num_full_layers == 0:
            return value // self.num_full_layers * len(self.indices)
        if FRONT_COUNT.search(name):
            return sum(index < value for index in self.indices)
        if BACK_COUNT.search(name):
            return sum(index >= self.num_full_layers - value for index in self.indices)
        if LAYER_NUMBER.search(name):
            return min(range(len(self.indices)), key=lambda place: abs(self.indices[place] - value))
        if TOKEN_ID.search(name):
            # Spread over the last 32 ids, where small tokenizers and tests have no tokens of their own.
            return value if value < self.vocab_size else self.vocab_size - 1 - int(value) % 32
        if VOCAB.search(name):
            return min(value, self.vocab_size)
        for rule in RULES:
            if re.search(rule.pattern, name):
                return type(value)(rule.value(int(value), siblings))
        return value

    def _list(self, name: str, value: Sequence, siblings: Mapping[str, Any]) -> list:
        if TOKEN_ID.search(name):
            return [self._value(name, entry, siblings) for entry in value]
        integers = bool(value) and all(isinstance(entry, int) and not isinstance(entry, bool) for entry in value)
        num_full = self.num_full_layers
        if integers and (LAYER_LIST.search(name) or is_index_list(value)) and max(value) < num_full:
            if len(value) == num_full and not is_index_list(value):  # per layer, the number of another layer
                numbers = [value[index] for index in self.indices]
                return [max((p for p, i in enumerate(self.indices) if i <= number), default=0) for number in numbers]
            return [place for place, index in enumerate(self.indices) if index in value]
        if len(value) >= num_full > 1:
            value = [value[index] for index in self.indices]
        return [self._value(name, entry, siblings) for entry in value] if integers else copy.deepcopy(list(value))


def _values(config: PreTrainedConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Structural fields: the declared ones which are set, and whatever else a release wrote into its config."""
    names = [*defaults, *(name for name in vars(config) if name not in defaults)]
    return {
        name: getattr(config, name)
        for name in names
        if name in vars(config) and not name.startswith("_") and name not in BOOKKEEPING and getattr(config, name) is not None
    }


def _derived_fields(
    config: PreTrainedConfig, defaults: Mapping[str, Any], full: Mapping[str, Any], per_layer: Mapping[int, Mapping]
) -> set[str]:
    """Fields of `full` which the class computes by itself when they are left out.

    Found by leaving them out: numbers whose default is None or a word such as "auto", and undeclared attributes.
    """

    def computed(name: str) -> bool:
        default = defaults.get(name, None)
        number = isinstance(full[name], (int, float)) and not isinstance(full[name], bool)
        return name not in defaults or (number and (default is None or isinstance(default, str)))

    candidates = {name for name in full if computed(name)}
    given = {name: value for name, value in full.items() if name not in candidates}
    if per_layer:
        given["per_layer_config"] = per_layer
    try:
        probe = vars(type(config)(**copy.deepcopy(given)))
    except Exception:  # the class cannot do without them, so none is computed
        return set()
    return {name for name in candidates if name in probe and probe[name] == full[name]}


def _num_layers(config: PreTrainedConfig) -> int | None:
    for name in LAYER_COUNT:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def _per_layer_config(config: PreTrainedConfig) -> dict[int, dict[str, Any]]:
    if not getattr(config, "is_heterogeneous", False):
        return {}
    return {int(index): dict(fields) for index, fields in (config.to_dict().get("per_layer_config") or {}).items()}
