"""Two instances of one class in, the full-size value of a number that was measured on the small one out.

A small instance has the structure of the full one and other sizes. What was measured there (a window, a scale) is found
again among the numbers its modules or its config keep, and the number of that very name is read from the full-size one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dayzero.core.model import LayerKind
from dayzero.model.classes import text_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Both instances, the name of their layer list, and which layer of the full stack each small layer stands for."""

    full: nn.Module
    small: nn.Module
    layers: str
    layer_indices: tuple[int, ...]

    def small_layer(self, kind: LayerKind) -> int | None:
        """The first small layer that stands for a layer of this kind."""
        return next((place for place, index in enumerate(self.layer_indices) if index in kind.layers), None)

    def prefix(self, kind: LayerKind) -> str | None:
        """Name of that small layer, with its dot."""
        place = self.small_layer(kind)
        return None if place is None else f"{self.layers}.{place}."

    def full_name(self, small_name: str) -> str:
        """The name of the same place in the full-size instance."""
        found = re.match(re.escape(self.layers) + r"\.(\d+)(?=\.|$)", small_name)
        if not found:
            return small_name
        return f"{self.layers}.{self.layer_indices[int(found.group(1))]}{small_name[found.end() :]}"

    def inner(self, small_name: str) -> str:
        """A place inside a layer, starting with a dot; outside the layers the name as it is."""
        found = re.match(re.escape(self.layers) + r"\.\d+(?=\.|$)", small_name)
        return small_name[found.end() :] if found else small_name

    def carried(self, measured: float, modules: Sequence[str], words: str, *, near: float = 0.0) -> float | None:
        """The full-size value of a number that is `measured` on the small instance, up to `near`.

        modules: names in the small instance, looked at in order, then the configs; words: what the number's name must match.
        An exact match is preferred. The difference between the measured and the kept number is kept.
        """
        kept: list[tuple[float, float]] = []
        for name in modules:
            try:
                pair = self.small.get_submodule(name), self.full.get_submodule(self.full_name(name))
            except AttributeError:
                continue
            kept += _pairs(vars(pair[0]), vars(pair[1]), words)
        small, full = text_config(self.small.config), text_config(self.full.config)
        for limit in sorted({0.0, near}):
            for found, one_answer in ((kept, False), (_pairs(vars(small), vars(full), words), True)):
                fitting = [
                    after + (measured - before if limit else 0.0)
                    for before, after in found
                    if abs(before - measured) <= limit + 1e-6 * abs(measured)
                ]
                # Keys of a config have many meanings: two that fit and disagree say nothing.
                if fitting and (not one_answer or len(set(fitting)) == 1):
                    return fitting[0]
        return None


def _pairs(small: dict[str, Any], full: dict[str, Any], words: str) -> list[tuple[float, float]]:
    return [
        (float(value), float(full[name]))
        for name, value in small.items()
        if re.search(words, name) and _number(value) and _number(full.get(name))
    ]


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
