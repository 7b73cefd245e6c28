"""Parameters of one layer after another in, how each may be cut for tensor and expert parallelism out.

Two sources, named in `ShardRule.proof`: the class's own tensor-parallel plan, and the parameter's role in a known pattern
(queries, keys and values by heads into one output projection; gate and up into down; stacked experts). A mixer is cut
as a whole or not at all: one parameter of unknown meaning inside it leaves all of it replicated, proof "none". Rules
hold for any degree. Not done here: finding patterns by data flow, mixers with recurrent state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from dayzero.core.model import Parameter, ShardRule

REPLICATED = ShardRule()
COLUMN_STYLES = frozenset({"colwise", "colwise_gather_output", "packed_colwise"})
ROW_STYLES = frozenset({"rowwise", "rowwise_split_input", "packed_rowwise"})
QUERY = re.compile(r"^(q_proj|q_b_proj|wq_b|query|q)$")
KEY_VALUE = re.compile(r"^(k_proj|v_proj|key|value|k|v)$")
LATENT_UP = re.compile(r"^(kv_b_proj|k_b_proj|v_b_proj)$")
LATENT_DOWN = re.compile(r"^(q_a_proj|kv_a_proj_with_mqa|kv_a_proj|kv_proj_with_mqa|compressed_kv|wq_a)$")
OUTPUT = re.compile(r"^(o_proj|out_proj|dense|wo)$")
GATE_UP = re.compile(r"^(gate_proj|up_proj|w1|w3|fc1|c_fc|dense_h_to_4h|wi)$")
FUSED_GATE_UP = re.compile(r"^(gate_up_proj|gate_and_up_proj)$")
DOWN = re.compile(r"^(down_proj|w2|fc2|c_proj|dense_4h_to_h)$")
EXPERT_FUSED = re.compile(r"gate_up_proj|w13|up_gate")
EXPERT_DOWN = re.compile(r"down_proj|w2|output_linear")


class ShardRules:
    """Rules for one model. `heads` per layer: (attention heads, key/value heads); layers without an entry are not cut."""

    def __init__(self, model: nn.Module, plan: Mapping[str, str], heads: Mapping[int, tuple[int, int]]) -> None:
        self.modules = dict(model.named_modules())
        self.plan = [(re.compile(re.escape(pattern).replace(r"\*", r"[^.]+") + r"$"), style) for pattern, style in plan.items()]
        self.heads = heads

    def apply(self, parameters: Sequence[Parameter]) -> list[Parameter]:
        mixers: dict[tuple[int, str], list[Parameter]] = {}
        for item in parameters:
            if item.role in ("attention", "attention_sink") and item.layer is not None:
                mixers.setdefault((item.layer, self._mixer_of(item)), []).append(item)
        rules = {item.name: rule for group in mixers.values() for item, rule in zip(group, self._mixer(group), strict=True)}
        return [replace(item, shard=rules.get(item.name) or self._other(item)) for item in parameters]

    def style(self, name: str) -> str | None:
        """What the class's plan says of the module or parameter that holds `name`."""
        owner = name.rpartition(".")[0]
        return next((style for pattern, style in self.plan if pattern.match(name) or pattern.match(owner)), None)

    def _mixer_of(self, item: Parameter) -> str:
        """The module that holds a mixer's projections: the parent of a projection, the owner of a bare parameter."""
        owner = item.name.rpartition(".")[0]
        return owner.rpartition(".")[0] if isinstance(self.modules[owner], nn.Linear) or item.role == "attention" else owner

    def _other(self, item: Parameter) -> ShardRule:
        if item.role in ("embedding", "head") and len(item.shape) == 2:
            planned = self.style(item.name) is not None
            return ShardRule(
                tensor_dim=0, segments=(item.shape[0],), units=(item.shape[0],), proof="tp_plan" if planned else "role"
            )
        if item.role == "head":
            return ShardRule(tensor_dim=0, segments=item.shape, units=item.shape, proof="role")
        if item.role == "expert":
            return self._expert(item)
        if item.role in ("mlp", "shared_expert"):
            return self._gated(item)
        return REPLICATED

    def _gated(self, item: Parameter) -> ShardRule:
        owner, _, leaf = item.name.rpartition(".")
        module, word, style = self.modules[owner], owner.rpartition(".")[2], self.style(item.name)
        if not isinstance(module, nn.Linear) or leaf not in ("weight", "bias"):
            return REPLICATED
        proof = "tp_plan" if style in COLUMN_STYLES | ROW_STYLES else "role"
        if FUSED_GATE_UP.match(word) and item.shape[0] % 2 == 0:
            half = item.shape[0] // 2
            return ShardRule(tensor_dim=0, segments=(half, half), units=(half, half), proof=proof)  # type: ignore[arg-type]
        # Styles that split or gather around one linear need communication of their own: without a known pattern, replicated.
        if GATE_UP.match(word) or style == "colwise":
            return _by_units(item, 0, item.shape[0], proof)
        if (DOWN.match(word) or style == "rowwise") and leaf == "weight":
            return _by_units(item, 1, item.shape[1], proof)
        return REPLICATED

    def _expert(self, item: Parameter) -> ShardRule:
        """Stacked experts [experts, out, in], or [experts, in, out] where the module says it is transposed."""
        if len(item.shape) < 2 or len(item.shape) > 3:
            return REPLICATED
        owner, _, leaf = item.name.rpartition(".")
        module, style = self.modules[owner], self.style(item.name)
        if isinstance(module, nn.Linear):  # one module per expert
            return self._gated(item)
        transposed = bool(
            getattr(
                module, "is_transposed", style in ("packed_rowwise",) or (style == "colwise" and bool(EXPERT_DOWN.search(leaf)))
            )
        )
        proof = "tp_plan" if style in COLUMN_STYLES | ROW_STYLES else "role"
        bias = len(item.shape) == 2
        if EXPERT_DOWN.search(leaf):
            if bias:
                return ShardRule(expert_dim=0, proof=proof)  # type: ignore[arg-type]
            dim = 1 if transposed else 2
            return replace(_by_units(item, dim, item.shape[dim], proof), expert_dim=0)
        dim = 1 if bias else 2 if transposed else 1
        size = item.shape[dim]
        if EXPERT_FUSED.search(leaf) and size % 2 == 0:
            half = size // 2
            if not getattr(module, "is_concatenated", True):  # gate and up rows alternate: a pair is one unit
                return replace(_by_units(item, dim, half, proof), expert_dim=0)
            return ShardRule(tensor_dim=dim, segments=(half, half), units=(half, half), expert_dim=0, proof=proof)  # type: ignore[arg-type]
        if GATE_UP.match(leaf.removesuffix("_bias")):
            return replace(_by_units(item, dim, size, proof), expert_dim=0)
        return ShardRule(expert_dim=0, proof=proof)  # type: ignore[arg-type]

    def _mixer(self, group: list[Parameter]) -> list[ShardRule]:
        """The rules of one mixer's parameters; all replicated unless queries and an output are found and nothing is unknown."""
        layer = group[0].layer
        counts = self.heads.get(layer) if layer is not None else None
        if counts is None:
            return [REPLICATED] * len(group)
        rules = [self._projection(item, *counts) for item in group]
        words = {item.name.split(".")[-2] for item in group}
        complete = any(QUERY.match(word) for word in words) and any(OUTPUT.match(word) for word in words)
        if not complete or any(rule is None for rule in rules):
            return [REPLICATED] * len(group)
        return [rule for rule in rules if rule is not None]

    def _projection(self, item: Parameter, num_heads: int, num_kv_heads: int) -> ShardRule | None:
        """None where the parameter's meaning is not known."""
        owner, _, leaf = item.name.rpartition(".")
        word = owner.rpartition(".")[2]
        style = self.style(item.name)
        proof = "tp_plan" if style in COLUMN_STYLES | ROW_STYLES else "role"
        if item.role == "attention_sink":
            return _by_units(item, 0, num_heads, proof) if item.shape[0] == num_heads else None
        if LATENT_DOWN.match(word):
            return replace(REPLICATED, proof="role")
        if (QUERY.match(word) or LATENT_UP.match(word)) and item.shape[0] % num_heads == 0:
            return _by_units(item, 0, num_heads, proof)
        if KEY_VALUE.match(word) and item.shape[0] % num_kv_heads == 0:
            return replace(_by_units(item, 0, num_kv_heads, proof), replicable=True)
        if OUTPUT.match(word):
            if leaf == "bias":
                return replace(REPLICATED, proof="role")
            return _by_units(item, 1, num_heads, proof) if item.shape[1] % num_heads == 0 else None
        if word.endswith(("gate_proj", "g_proj", "gate")) and item.shape[0] % num_heads == 0:
            return _by_units(item, 0, num_heads, proof)  # gates of the heads' outputs
        return None


def _by_units(item: Parameter, dim: int, units: int, proof: str) -> ShardRule:
    return ShardRule(tensor_dim=dim, segments=(item.shape[dim],), units=(units,), proof=proof)  # type: ignore[arg-type]
