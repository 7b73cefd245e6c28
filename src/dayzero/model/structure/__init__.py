"""A model on the meta device and a small instance of its config in, its `Structure` out: facts measured, not read off names.

Frequencies of rotary tables are those of the full-size config. Everything else is measured on the small instance and the
numbers that shrinking changed are read back from the full-size one (`structure.places`). Whatever cannot be followed is
said in `notes`; nothing is raised for a model that computes in a way of its own.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from dayzero.core.errors import one_line
from dayzero.core.model import LayerKind, Parameter
from dayzero.core.structure import Positions, Structure, Tower
from dayzero.model.classes import find_layers, text_config
from dayzero.model.config_keys import text_keys
from dayzero.model.inventory import find_place
from dayzero.model.shrink import ShrunkConfig
from dayzero.model.structure.feed_forward import read_feed_forwards
from dayzero.model.structure.norms import read_norms
from dayzero.model.structure.places import Places
from dayzero.model.structure.positions import read_positions
from dayzero.model.structure.routing import read_routing
from dayzero.model.structure.watch import Runs, watch
from dayzero.model.structure.window import read_visible

Result = TypeVar("Result")

# Words for what a tower takes, tried on its name, then on the names of its classes.
TOWER_KINDS = (
    ("vision", r"vision|visual|image|pixel"),
    ("audio", r"audio|speech|sound"),
    ("video", r"video"),
)
PLACEHOLDER = re.compile(r"(image|video|audio|vision|sound|speech|media)\w*_(token_id|token_index)$")


BOUNDARY = re.compile(r"(^|_)(start|end|begin|bo\w|eo\w)_")


def read_structure(
    model: Any,
    config: Mapping[str, Any],
    layer_kinds: Sequence[LayerKind],
    parameters: Sequence[Parameter],
    *,
    small: tuple[nn.Module, ShrunkConfig] | None,
) -> Structure:
    """The structure of `model` (on meta, full size).

    config: the release's config.json as it is, for what it says and what it leaves to the class. small: an instance of the
    shrunken config on the CPU; without one, only what needs no forward is found.
    """
    notes: list[str] = []
    layers = find_layers(model)[0]
    outside = find_place(model, layers).towers
    text = text_keys(config)
    places: Places | None = None
    runs: Runs | None = None
    if small is None:
        notes.append("there is no small instance: only what needs no forward is known")
    else:
        small_layers = find_layers(small[0])[0]
        if small_layers == layers:
            places = Places(full=model, small=small[0], layers=layers, layer_indices=small[1].layer_indices)
            runs = _tried("the forward of the small instance", lambda: watch(small[0], layers), None, notes)
            if runs:
                places = replace(places, small=runs.model)
        else:
            notes.append(f"the small instance keeps its layers elsewhere ({small_layers} against {layers})")
    first = runs.first if runs else None
    if runs:
        notes += runs.notes

    routing, said = _tried("routing", lambda: read_routing(places, first, layer_kinds, model, text), ((), []), notes)
    notes += said
    positions, said = _tried("positions", lambda: read_positions(places, runs, layer_kinds, model, outside), ((), []), notes)
    notes += [*said, *_missing_theta(positions, config, text)]
    feed_forwards, said = _tried(
        "feed-forwards", lambda: read_feed_forwards(places, first, layer_kinds, parameters, model), ((), []), notes
    )
    notes += said
    norms, visible = (), None
    if places and first:
        seen = places, first
        norms = _tried("norms", lambda: read_norms(*seen, outside), (), notes)
        visible, said = _tried("visible tokens", lambda: read_visible(*seen, layer_kinds), (None, []), notes)
        notes += said
    return Structure(
        routing=routing,
        positions=positions,
        feed_forwards=feed_forwards,
        norms=norms,
        towers=read_towers(model, config, outside, parameters),
        visible_tokens=visible,
        notes=tuple(dict.fromkeys(notes)),
    )


def _tried(what: str, read: Callable[[], Result], otherwise: Any, notes: list[str]) -> Any:
    """One group of facts. A class may compute in any way, so any exception is possible; its reason becomes a note."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the class's own forward: what matters here is whether it ran
            return read()
    except Exception as error:
        notes.append(f"{what} could not be followed: {one_line(error, 200)}")
        return otherwise


def _missing_theta(positions: Sequence[Positions], *configs: Mapping[str, Any]) -> list[str]:
    """A rotary base that the config does not give, so that the class's default decided: a reader must know it."""

    def given(keys: Mapping[str, Any]) -> bool:
        ropes = [keys.get("rope_parameters"), keys.get("rope_scaling")]
        nested = [value for rope in ropes if isinstance(rope, Mapping) for value in (rope, *rope.values())]
        tops = any("theta" in key or key in ("rotary_emb_base", "rope_base") for key in keys)
        return tops or any(isinstance(rope, Mapping) and "rope_theta" in rope for rope in nested)

    thetas = sorted({item.theta for item in positions if item.kind == "rotary" and item.theta is not None})
    if not thetas or any(given(keys) for keys in configs):
        return []
    return [f"rope_theta is absent from the config: the class default {', '.join(f'{theta:g}' for theta in thetas)} decided"]


def read_towers(
    model: Any, config: Mapping[str, Any], towers: Sequence[str], parameters: Sequence[Parameter]
) -> tuple[Tower, ...]:
    """The parts beside the text decoder: what they take, how large they are, and how the text gets their output."""
    found = []
    for name in towers:
        module = model.get_submodule(name)
        words = (name, type(module).__name__, type(getattr(module, "config", None)).__name__)
        kind = next(
            (kind for word in words for kind, pattern in TOWER_KINDS if re.search(pattern, word, re.IGNORECASE)), "not known"
        )
        size = sum(
            item.num_elements
            for item in parameters
            if item.name.startswith(name + ".") and item.tied_to is None and not item.is_buffer
        )
        found.append(Tower(name=name, kind=kind, parameters=size, feeds_into=_feeds_into(model, config, kind)))
    return tuple(found)


def _feeds_into(model: Any, config: Mapping[str, Any], kind: str) -> str:
    kinds = {"vision": ("image", "video", "vision", "media"), "audio": ("audio", "sound", "speech"), "video": ("video",)}
    wanted = kinds.get(kind, ())
    values = {**{key: value for key, value in vars(model.config).items() if value is not None}, **config}
    said = [
        f"{key} {value}"
        for key, value in sorted(values.items())
        if PLACEHOLDER.search(key)
        and not BOUNDARY.search(key)
        and isinstance(value, int)
        and any(key.startswith(word) for word in wanted)
    ]
    text = text_config(model.config)
    if crossed := getattr(text, "cross_attention_layers", None):
        return f"cross-attention in layers {', '.join(map(str, crossed))}"
    return "in place of the tokens " + ", ".join(said) if said else "not known"
