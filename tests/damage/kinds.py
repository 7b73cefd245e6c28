"""One kind of damage: a function on a copy of a sound release (`bases`), and the layer of defence that can tell. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.damage.editing import Checkpoint

Layer = Literal["container", "index", "schema", "values", "digests"]
Change = Callable[[Checkpoint], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """`layer` is the first line of defence that can tell, were it perfect:

    container  the file by itself: its size, its header, what it is
    index      the index against the files and their headers
    schema     names, shapes, dtypes and settings against the model that the config defines
    values     the tensors' bytes against what such tensors hold
    digests    only what the publisher says the bytes are: what is there is a sound release of another model
    """

    name: str
    layer: Layer
    base: str
    change: Change

    def apply(self, folder: Path) -> set[str]:
        """Damage the release in `folder`; names of tensors and files, one of which a finding has to name."""
        checkpoint = Checkpoint(folder)
        self.change(checkpoint)
        return checkpoint.touched


DAMAGES: list[Damage] = []  # in the order of definition; `damages` imports every module that defines some


def damage(layer: Layer, name: str, base: str = "dense") -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        DAMAGES.append(Damage(name=name, layer=layer, base=base, change=change))
        return change

    return register


def of_layer(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}.weight"


def second(c: Checkpoint) -> str:
    """The shard that most kinds of damage hit: neither the first nor the last."""
    return c.shards[1]


def expert(layer: int, number: int, word: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{number}.{word}_proj.weight"


Q, K, V, OUT = (f"self_attn.{letter}_proj" for letter in "qkvo")
GATE, UP, DOWN = (f"mlp.{word}_proj" for word in ("gate", "up", "down"))
NORM = "input_layernorm"
