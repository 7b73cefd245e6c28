"""A config that announces draft (multi-token-prediction) layers and the model's own parameters in, the draft block out.

Classes leave these layers out, so their size is derived: one decoder layer of the model (the last, or of the kind the config
names), a projection that joins embedding and hidden state, and norms. Two ways of storing them are told apart by the config
key that announces them. What no key says is assumed, and every assumption is a note: whether copies of embedding and head
are stored beside it, and whether its feed-forward is the last layer's. With headers the real tensors decide
(`model.reconcile`), not this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dayzero.core.model import Parameter
from dayzero.model.estimate import MTP

# Keys that say what layers a draft block is made of, one word or letter for each.
BLOCK_KEYS = ("mtp_layers_block_type", "mtp_hybrid_override_pattern", "mtp_layer_types")
MOE, DENSE, STATE, ATTENTION = ("moe", "e"), ("mlp", "-", "dense"), ("mamba", "m", "ssm"), ("attention", "*")


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftBlock:
    """The draft layers a release stores. `parameters`: as stored, copies included; `copies`: names of those that repeat the
    embedding and the head. `evidence`: the config key that announces them, or the class that knows of them, or nothing."""

    parameters: tuple[Parameter, ...] = ()
    copies: tuple[str, ...] = ()
    num_layers: int = 0
    evidence: Literal["keys", "class", "none"] = "none"
    notes: tuple[str, ...] = ()

    @property
    def stored_parameters(self) -> int:
        return sum(item.num_elements for item in self.parameters if not item.is_buffer)

    @property
    def unique_parameters(self) -> int:
        """Without copies of the model's embedding and head."""
        return sum(item.num_elements for item in self.parameters if not item.is_buffer and item.name not in self.copies)


def draft_block(
    config: Mapping[str, Any], parameters: Sequence[Parameter], *, num_layers: int, ignorable: Iterable[str] = ()
) -> DraftBlock:
    """The draft layers of a release with this config; its `num_layers` decoder layers are described by `parameters`.

    ignorable: patterns of checkpoint names that the class declares it does not want (`reconcile.ignorable_patterns`). One
    that names the layer right after the last is taken as word of a draft layer where the config is silent.
    """
    key, count = announced(config)
    evidence: Literal["keys", "class"] = "keys"
    notes: list[str] = []
    if key is None:
        if not _names_layer(ignorable, num_layers):
            if any("mtp" in pattern for pattern in ignorable):
                notes.append(_unannounced(config, parameters, num_layers))
            return DraftBlock(notes=tuple(notes))
        count, evidence = 1, "class"
        notes.append(f"no key announces draft layers; the class leaves out layer {num_layers}, counted as one draft layer")
    if count == 0:
        return DraftBlock(notes=tuple(notes))
    layers = _by_layer(parameters)
    if len(layers) < num_layers or not layers:
        return DraftBlock(num_layers=count, evidence=evidence, notes=(f"{count} draft layers: the layers are not known",))
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    made = _Maker(text, parameters, layers, num_layers, count, notes)
    named = _block_words(text)
    if named or key == "mtp_num_hidden_layers":
        found, copies = made.namespace(named, dedicated=bool(text.get("mtp_use_dedicated_embeddings")), why=str(key))
    else:
        found, copies = made.extra_layers(copied=evidence == "keys", why=key or "the class")
    return DraftBlock(
        parameters=tuple(found), copies=tuple(copies), num_layers=count, evidence=evidence, notes=tuple(made.notes)
    )


def announced(config: Mapping[str, Any]) -> tuple[str | None, int]:
    """(the key that announces draft layers, how many); an explicit 0 is a statement too. (None, 0) where no key does."""
    nested = config.get("text_config")
    parts = [nested, config] if isinstance(nested, Mapping) else [config]
    stated = [(key, part[key]) for key in MTP for part in parts if _is_count(part.get(key))]
    return next(((key, value) for key, value in stated if value), stated[0] if stated else (None, 0))


def _unannounced(config: Mapping[str, Any], parameters: Sequence[Parameter], num_layers: int) -> str:
    """The size of the one draft layer that a release may hold though its config is silent."""
    one = draft_block({**config, "mtp_num_hidden_layers": 1}, parameters, num_layers=num_layers)
    size = f"; one layer would add {one.unique_parameters} parameters" if one.parameters else ""
    return f"the class knows of draft tensors (mtp) and the config announces none: none are counted{size}"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _names_layer(patterns: Iterable[str], number: int) -> bool:
    return any(re.search(rf"layers\\?\.{number}(\D|$)", pattern) is not None for pattern in patterns)


def _by_layer(parameters: Sequence[Parameter]) -> dict[int, list[Parameter]]:
    layers: dict[int, list[Parameter]] = {}
    for item in parameters:
        if item.layer is not None and item.tied_to is None:
            layers.setdefault(item.layer, []).append(item)
    return layers


def _block_words(text: Mapping[str, Any]) -> list[str]:
    """The kinds of layers that a key names for one draft block; empty where none does."""
    for key in BLOCK_KEYS:
        value = text.get(key)
        if isinstance(value, str) and value:
            return list(value)
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            return value
    return []


class _Maker:
    """Draft parameters from the model's own."""

    def __init__(
        self,
        text: Mapping[str, Any],
        parameters: Sequence[Parameter],
        layers: dict[int, list[Parameter]],
        num_layers: int,
        count: int,
        notes: list[str],
    ) -> None:
        self.text, self.layers, self.num_layers, self.count, self.notes = text, layers, num_layers, count, notes
        outer = [item for item in parameters if item.layer is None and item.tied_to is None and len(item.shape) == 2]
        self.embedding = next((item for item in outer if item.role == "embedding"), None)
        self.head = next((item for item in outer if item.role == "head"), None)
        self.norm = next(item for item in layers[num_layers - 1] if item.role == "norm")
        width = self.embedding.shape[1] if self.embedding else text.get("hidden_size")
        self.hidden = width if isinstance(width, int) else self.norm.shape[0]

    def namespace(self, named: list[str], *, dedicated: bool, why: str) -> tuple[list[Parameter], list[str]]:
        """`mtp.fc`, norms of its own, and whole layers `mtp.layers.*`."""
        templates = [self._named(word) for word in named] * self.count or [self._template(index) for index in range(self.count)]
        first = self.num_layers
        names = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")
        found = [*(self._vector(name, first) for name in names), self._joint("mtp.fc.weight", first)]
        for index, template in enumerate(templates):
            found += [_renamed(item, f"mtp.layers.{index}", self.num_layers + index) for item in self.layers[template]]
        copies = []
        if dedicated and self.embedding is not None:
            found.append(replace(self.embedding, name="mtp.embed_tokens.weight", sources=(), role="mtp", layer=first))
            copies.append(found[-1].name)
        kinds = f"layers of the kinds {', '.join(named)}" if named else f"layer {templates[0]} once more"
        self.notes.append(
            f"draft layers announced by {why}: assumed are mtp.fc [{self.hidden}, {2 * self.hidden}], three norms and {kinds}, "
            f"with {'an embedding of its own' if copies else 'the embedding and head of the model'}"
        )
        return found, copies

    def extra_layers(self, *, copied: bool, why: str) -> tuple[list[Parameter], list[str]]:
        """Layers after the last, each with a joint and three norms and, where `copied`, an embedding and a head."""
        found: list[Parameter] = []
        copies: list[str] = []
        for index in range(self.count):
            template, layer = self._template(index), self.num_layers + index
            example = self.layers[template][0].name
            prefix = example[: example.index(f".{template}.") + 1] + str(layer)
            found += [_renamed(item, prefix, layer) for item in self.layers[template]]
            found += [self._vector(f"{prefix}.{name}.weight", layer) for name in ("enorm", "hnorm", "shared_head.norm")]
            found.append(self._joint(f"{prefix}.eh_proj.weight", layer))
            for name, item in (("embed_tokens", self.embedding), ("shared_head.head", self.head or self.embedding)):
                if copied and item is not None:
                    found.append(replace(item, name=f"{prefix}.{name}.weight", sources=(), role="mtp", layer=layer))
                    copies.append(found[-1].name)
        self.notes.append(
            f"draft layers announced by {why}: assumed is layer {self._template(0)} once more for each, with eh_proj "
            f"[{self.hidden}, {2 * self.hidden}], three norms and "
            f"{'copies of embedding and head, which some releases leave out' if copies else 'no copies of embedding and head'}"
        )
        self._note_dense(found)
        return found, copies

    def _note_dense(self, found: list[Parameter]) -> None:
        """The size with a dense feed-forward, where the model has both kinds: no key says which a draft layer has."""
        template = self._template(0)
        dense = [index for index, items in self.layers.items() if not _has(items, "expert") and _has(items, "mlp")]
        if not _has(self.layers[template], "expert") or not dense:
            return
        mlp = sum(item.num_elements for item in self.layers[dense[-1]] if item.role == "mlp")
        moe = sum(
            item.num_elements
            for item in self.layers[template]
            if item.role in ("expert", "shared_expert", "router") and not item.is_buffer
        )
        size = sum(item.num_elements for item in found if not item.is_buffer) - self.count * (moe - mlp)
        self.notes.append(
            f"its feed-forward is assumed to be the last layer's; with a dense one the block has {size} parameters"
        )

    def _template(self, index: int) -> int:
        """The decoder layer that a draft layer repeats: as lists that cover it say, else the last that is no linear one."""
        wanted = self.num_layers + index
        lists = [
            value for value in self.text.values() if isinstance(value, list) and len(value) == self.num_layers + self.count
        ]
        if lists:
            alike = [layer for layer in range(self.num_layers) if all(items[layer] == items[wanted] for items in lists)]
            if alike:
                return alike[-1]
        plain = [layer for layer in range(self.num_layers) if not _has(self.layers[layer], "ssm")]
        return plain[-1] if plain else self.num_layers - 1

    def _named(self, word: str) -> int:
        """The last layer of the kind that a config names by a word or a letter."""
        short = word.lower().removesuffix("_attention").replace("full", "attention")
        role = "expert" if short in MOE else "ssm" if short in STATE else "mlp" if short in DENSE else "attention"
        if role == "attention" and short not in ATTENTION:
            self.notes.append(f"draft layer of kind {word!r}: an attention layer is assumed")
        fitting = [layer for layer in range(self.num_layers) if _has(self.layers[layer], role)]
        return fitting[-1] if fitting else self._template(0)

    def _vector(self, name: str, layer: int) -> Parameter:
        return Parameter(name=name, shape=(self.hidden,), dtype=self.norm.dtype, role="mtp", layer=layer)

    def _joint(self, name: str, layer: int) -> Parameter:
        dtype = self.embedding.dtype if self.embedding else self.norm.dtype
        return Parameter(name=name, shape=(self.hidden, 2 * self.hidden), dtype=dtype, role="mtp", layer=layer)


def _has(items: Sequence[Parameter], role: str) -> bool:
    return any(item.role == role for item in items)


def _renamed(item: Parameter, prefix: str, layer: int) -> Parameter:
    """A layer's parameter under the name of a draft layer; its checkpoint names likewise."""

    def moved(name: str) -> str:
        before, mark, inner = name.partition(f".{item.layer}.")
        if not mark:
            return name
        own = prefix.rpartition(".")[2] if not prefix.startswith("mtp.") else None
        return f"{before}.{own}.{inner}" if own is not None else f"{prefix}.{inner}"

    return replace(item, name=moved(item.name), sources=tuple(moved(name) for name in item.sources), role="mtp", layer=layer)
