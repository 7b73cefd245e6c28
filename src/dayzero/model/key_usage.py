"""A release's config and its config object in, who reads each key out, and which keys nobody reads.

Consumed: something read it while the model was built and run on meta, its class took it as an argument, or a stage here reads
it (positions, storage, tokens). Inert: declared by the class, or known to transformers for every model, and read by nothing
that computes (initial values, training). Everything else is unconsumed and listed with its dotted path: a key that changes
the model and that nobody reads is how a new release goes wrong silently.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig

from dayzero.model.estimate import MTP
from dayzero.model.known_keys import GENERIC, STORAGE_READERS, known_elsewhere

ROPE = frozenset({"rope_scaling", "rope_theta", "rope_parameters", "partial_rotary_factor"})
# Inside these a read says nothing about the model: configs that copy, compare and print themselves.
BOOKKEEPING = ("transformers.configuration_utils", "transformers.utils", "copy", "dataclasses", "huggingface_hub")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeyUsage:
    """Dotted paths of every key of config.json. `readers`: path -> who consumes it, in a few words."""

    consumed: tuple[str, ...]
    inert: tuple[str, ...]
    unconsumed: tuple[str, ...]
    novel: tuple[str, ...]
    readers: dict[str, str]


@contextmanager
def recorded_reads(seen: dict[str, str]) -> Iterator[None]:
    """While active, names of attributes that are read from any config object are collected, with their first reader."""
    original = PreTrainedConfig.__getattribute__

    def reading(self: PreTrainedConfig, name: str) -> Any:
        if name not in seen and (reader := _reader(sys._getframe(1))):
            seen[name] = reader
        return original(self, name)

    PreTrainedConfig.__getattribute__ = reading
    try:
        yield
    finally:
        PreTrainedConfig.__getattribute__ = original


def _reader(frame: FrameType) -> str:
    """Whose code a frame runs: a class of the model, or a function. Empty where the reading means nothing."""
    module = str(frame.f_globals.get("__name__", ""))
    if module.startswith((*BOOKKEEPING, "dayzero.")):
        return ""
    owner = frame.f_locals.get("self")
    return type(owner).__name__ if owner is not None else frame.f_code.co_name


def key_usage(data: Mapping[str, Any], config: PreTrainedConfig, reads: Mapping[str, str]) -> KeyUsage:
    """What becomes of every key of `data`, the config.json that `config` was made from."""
    readers: dict[str, str] = {}
    inert: list[str] = []
    unconsumed: list[str] = []
    _walk(data, config, reads, "", readers, inert, unconsumed)
    novel = tuple(path for path in sorted(unconsumed) if not known_elsewhere(path.rpartition(".")[2]))
    return KeyUsage(
        consumed=tuple(sorted(readers)), inert=tuple(sorted(inert)), unconsumed=tuple(sorted(unconsumed)), novel=novel,
        readers=dict(sorted(readers.items())),
    )  # fmt: skip


def _walk(
    data: Mapping[str, Any],
    config: PreTrainedConfig,
    reads: Mapping[str, str],
    prefix: str,
    readers: dict[str, str],
    inert: list[str],
    unconsumed: list[str],
) -> None:
    declared = {item.name for item in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    aliases = config.attribute_map
    declared |= set(aliases) | set(aliases.values()) | set(config.sub_configs)
    generation = set(GenerationConfig._get_default_generation_params())
    for key, value in data.items():
        path, nested = prefix + key, getattr(config, key, None)
        if isinstance(value, Mapping) and isinstance(nested, PreTrainedConfig):
            readers[path] = type(nested).__name__
            _walk(value, nested, reads, f"{path}.", readers, inert, unconsumed)
            continue
        known = key in declared or key in GENERIC or key in generation
        spellings = (key, aliases.get(key, key), *(alias for alias, name in aliases.items() if name == key))
        if reader := next((reads[name] for name in spellings if name in reads), None):
            readers[path] = reader
        elif key in STORAGE_READERS:
            readers[path] = STORAGE_READERS[key]
        elif key in MTP:
            readers[path] = "the count of draft layers"
        elif key in ROPE and ("rope_parameters" in declared or hasattr(config, "rope_parameters")):
            readers[path] = "positions"
        elif isinstance(getattr(type(config), key, None), property):
            readers[path] = type(config).__name__
        elif key not in vars(config) and not known:
            readers[path] = f"{type(config).__name__} (an argument)"
        else:
            (inert if known else unconsumed).append(path)

