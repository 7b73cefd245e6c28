"""What routers handed to the experts of a small instance in, the definition that reproduces it out; and that definition.

`route` is the definition in float64. A fit tries scorings, corrections and groups on every tensor the router computed that
has a column per expert, the earliest first, until both the chosen experts and their weights come out as observed. What no
definition reproduces is read from well-known keys and marked so.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dayzero.core.model import LayerKind
from dayzero.core.structure import Routing
from dayzero.model.classes import text_config
from dayzero.model.inventory import experts_per_token
from dayzero.model.structure.places import Places
from dayzero.model.structure.watch import TOKENS, Watched

SCORINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
    "softplus": F.softplus,
    "relu": torch.relu,
    "tanh": torch.tanh,
}
# Logits are computed in float32 by the class and not by us.
TOLERANCE = 2e-5
TIE = 1e-5
LATER = 40  # operators after a choice among which its weights are looked for
# Keys that decide how tokens are routed, where a class has them.
ROUTING_KEYS = re.compile(
    r"norm_topk_prob|norm_prob|renormali[sz]e|scoring_func|score_func|topk_method|routed_scaling|rout(e|er|ing)_scal"
    r"|^n_group$|^topk_group$|num_expert_group|expert_selection|use_(expert|router|correction)_bias"
)
SCORING_KEYS = ("scoring_func", "score_function", "score_func", "expert_selection_fn", "moe_router_score_function")
NORMALISE_KEYS = ("norm_topk_prob", "moe_renormalize", "norm_prob", "route_norm")
SCALING_KEYS = ("routed_scaling_factor", "router_scaling_factor", "route_scale", "moe_router_scaling_factor")


def route(routing: Routing, logits: Tensor, *, bias: Tensor | None = None, group_rule: str = "top2") -> tuple[Tensor, Tensor]:
    """(indices, weights) [tokens, k] for logits [tokens, experts], as a `Routing` says. The chosen stand in descending order.

    Without normalisation the weights are the scores over all experts, gathered. Needs a known scoring.
    """
    scores = SCORINGS[str(routing.scoring)](logits.to(torch.float64))
    choice = scores if bias is None else scores + bias.to(torch.float64)
    choice = _grouped(choice, routing.groups, routing.groups_per_token, group_rule)
    indices = choice.topk(routing.experts_per_token, dim=-1).indices
    weights = scores.gather(-1, indices)
    if routing.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return indices, weights * (1.0 if routing.scaling is None else routing.scaling)


def read_routing(
    places: Places | None,
    watched: Watched | None,
    kinds: Sequence[LayerKind],
    model: nn.Module,
    keys: Mapping[str, Any],
) -> tuple[tuple[Routing, ...], list[str]]:
    """One `Routing` for each way of routing, with the kinds that use it, and notes on what could not be measured."""
    text = text_config(model.config)
    given = _from_keys(text, keys)
    found: list[Routing] = []
    notes: list[str] = []
    for kind in kinds:
        if kind.feed_forward != "moe":
            continue
        routing, reason = _measured(places, watched, kind, given)
        if reason:
            notes.append(f"routing of {kind.name} is not measured: {reason}")
        elif routing.scaling is None:
            notes.append(f"routing of {kind.name}: the weights are multiplied by a learned factor for each expert")
        if not reason and routing.bias is None:
            notes.append(f"routing of {kind.name}: the experts are not chosen by these scores, corrected or in groups")
        if not reason:
            notes += _contradictions(kind, routing, given)
        found.append(replace(routing, layer_kinds=(kind.name,)))
    merged: list[Routing] = []
    for routing in found:
        same = next((item for item in merged if replace(item, layer_kinds=()) == replace(routing, layer_kinds=())), None)
        if same is None:
            merged.append(routing)
        else:
            merged[merged.index(same)] = replace(same, layer_kinds=(*same.layer_kinds, *routing.layer_kinds))
    return tuple(merged), notes


def _contradictions(kind: LayerKind, routing: Routing, given: Routing) -> list[str]:
    """Keys that do not do in the router what their names say: it ignores them, or another module acts on them."""
    found = []
    if given.normalised is not None and routing.normalised is not given.normalised:
        done = "divides" if routing.normalised else "does not divide"
        found.append(f"routing of {kind.name}: a key says normalised {given.normalised}, the router {done} by the sum")
    if given.scaling is not None and routing.scaling is not None and abs(given.scaling - routing.scaling) > 1e-6:
        found.append(
            f"routing of {kind.name}: a key says scaling {given.scaling:g}, the router multiplies by {routing.scaling:g}"
        )
    return found


def _from_keys(text: Any, keys: Mapping[str, Any]) -> Routing:
    def key(*names: str) -> Any:
        return next((value for name in names if (value := getattr(text, name, None)) is not None), None)

    aliases = dict(getattr(text, "attribute_map", None) or {})
    present = {*keys, *(aliases.get(name, name) for name in keys)}
    decided = [
        name
        for name in vars(text)
        if ROUTING_KEYS.search(name) and getattr(text, name) is not None and name not in present and not name.startswith("_")
    ]
    scoring, normalised, scaling = key(*SCORING_KEYS), key(*NORMALISE_KEYS), key(*SCALING_KEYS)
    known = isinstance(scoring, str)
    return Routing(
        scoring=scoring if known else None,
        experts_per_token=experts_per_token(text),
        groups=int(key("n_group", "num_expert_group") or 1),
        groups_per_token=int(key("topk_group") or 1),
        scaling=float(scaling) if isinstance(scaling, (int, float)) else None,
        normalised=normalised if isinstance(normalised, bool) else None,
        default_keys=tuple(sorted(decided)),
        evidence="keys" if known or isinstance(normalised, bool) else "unknown",
    )


def _measured(places: Places | None, watched: Watched | None, kind: LayerKind, given: Routing) -> tuple[Routing, str | None]:
    if places is None or watched is None:
        return given, "there is no small instance"
    prefix = places.prefix(kind)
    if prefix is None:
        return given, "no small layer stands for it"
    call = next((item for item in watched.experts if item.module.startswith(prefix)), None)
    if call is not None:
        scope = call.module.rpartition(".")[0]
        fit = fit_routing(places.small, watched, scope, call.index, call.weights, call.at)
    else:
        scope, fit = _without_interface(places, watched, prefix)
    if isinstance(fit, str):
        return given, fit
    modules = [
        scope,
        *(f"{scope}.{name}" for name, _ in places.small.get_submodule(scope).named_modules() if name),
    ]
    per_token = places.carried(fit.experts_per_token, modules, r"top_?k|per_tok|selected_experts|moe_k")
    groups = places.carried(fit.groups, modules, r"^(?!.*top_?k).*group") if fit.groups > 1 else 1
    chosen = places.carried(fit.groups_per_token, modules, r"top_?k_group") if fit.groups > 1 else 1
    scaling = fit.scaling
    if scaling is not None:
        kept = places.carried(scaling, modules, "scal|factor")
        scaling = kept if kept is not None else round(scaling, 6)
    return (
        replace(
            fit,
            experts_per_token=int(per_token or given.experts_per_token or fit.experts_per_token),
            groups=int(groups or given.groups),
            groups_per_token=int(chosen or given.groups_per_token),
            scaling=scaling,
            default_keys=given.default_keys,
        ),
        None,
    )


def _without_interface(places: Places, watched: Watched, prefix: str) -> tuple[str, Routing | str]:
    """(scope, routing) of a block whose experts cannot be watched: from a choice of the largest and what was computed next."""
    for at, op in enumerate(watched.ops):
        if op.source is None or not op.owner.startswith(prefix) or op.out.numel() != TOKENS * op.out.shape[-1]:
            continue
        scope = op.owner.rpartition(".")[0]
        index, width = op.out.reshape(TOKENS, -1), op.source.shape[-1]
        for later in reversed(watched.ops[at : at + LATER]):
            if not later.owner.startswith(scope) or not later.out.is_floating_point() or later.out.dim() < 2:
                continue
            table = later.out.reshape(-1, later.out.shape[-1])
            if table.shape == (TOKENS, width) and width > index.shape[1]:
                chosen = torch.zeros_like(table).scatter(1, index, 1.0)
                table = table.gather(1, index) if bool(((table != 0) == (chosen != 0)).all()) else table
            if table.shape == index.shape:
                fit = fit_routing(places.small, watched, scope, index, table, at + 1)
                if isinstance(fit, Routing):
                    return scope, fit
    return "", "its experts are not called through transformers' interface, and nothing else it computes is known"


def fit_routing(small: nn.Module, watched: Watched, scope: str, index: Tensor, weights: Tensor, at: int) -> Routing | str:
    """The routing whose definition gives the chosen experts and weights, in the small instance's sizes; else why none does.

    scope: the block that routes; at: only operators before this one count. `bias` is None where the weights follow from the
    scores and the choice does not.
    """
    index = index.reshape(-1, index.shape[-1])
    weights = weights.reshape(-1, weights.shape[-1]).to(torch.float64)
    if weights.shape != index.shape:
        return f"weights {tuple(weights.shape)} do not match the chosen experts {tuple(index.shape)}"
    if float(weights.std()) <= TIE * float(weights.abs().max()):
        return "the weights of all tokens are alike, which shows no scoring"
    ops = [op for op in watched.ops[:at] if op.owner == scope or op.owner.startswith(scope + ".")]
    choices = [op for op in ops if op.source is not None and _same_sets(op.out.reshape(-1, op.out.shape[-1]), index)]
    width = choices[-1].source.shape[-1] if choices and choices[-1].source is not None else _num_experts(small, scope)
    tables: list[Tensor] = []
    for op in ops:
        if op.out.is_floating_point() and op.out.shape[-1] == width and op.out.numel() == index.shape[0] * width:
            table = op.out.reshape(-1, width).to(torch.float64)
            if torch.isfinite(table).all() and not any(torch.equal(table, other) for other in tables):
                tables.append(table)
    if not tables:
        return "the router computes no tensor with a column for each expert"
    biases = _vectors(small.get_submodule(scope), width)
    weighed: Routing | None = None
    for logits, (name, function) in itertools.product(tables, SCORINGS.items()):
        scores = function(logits)
        fitted = _weights_fit(scores.gather(1, index), weights, index, biases)
        if fitted is None:
            continue
        routing = Routing(
            scoring=name,
            experts_per_token=index.shape[1],
            normalised=fitted[0],
            scaling=fitted[1],
            evidence="measured",
        )
        for biased, groups, chosen in _choices(scores, logits, biases, index):
            return replace(routing, groups=groups, groups_per_token=chosen, bias=biased)
        weighed = weighed or routing
    return weighed or "no known scoring reproduces the weights"


def _weights_fit(
    gathered: Tensor, weights: Tensor, index: Tensor, vectors: Sequence[Tensor]
) -> tuple[bool, float | None] | None:
    """(normalised, scaling) under which the gathered scores are the weights; scaling None: a learned factor per expert."""
    total = gathered.sum(-1, keepdim=True)
    for factors in (None, *vectors):
        for normalised, base in ((False, gathered), (True, gathered / total)):
            scaled = base if factors is None else base * factors[index]
            if not torch.isfinite(scaled).all() or float(scaled.abs().min()) <= 0:
                continue
            ratio = weights / scaled
            scaling = float(ratio.median())
            if scaling > 0 and float((ratio / scaling - 1).abs().max()) <= TOLERANCE * 10:
                plain = 1.0 if abs(scaling - 1) < TOLERANCE * 10 else scaling
                return normalised, plain if factors is None else None
    return None


def _choices(scores: Tensor, logits: Tensor, biases: Sequence[Tensor], index: Tensor) -> Iterator[tuple[bool, int, int]]:
    """(corrected, groups, groups per token) that choose what was chosen; the simplest first."""
    width, k = scores.shape[-1], index.shape[1]
    groupings = [(1, 1, "top2")] + [
        (groups, chosen, rule)
        for groups in range(2, width // 2 + 1)
        if width % groups == 0
        for chosen in range(1, groups)
        for rule in ("top2", "max")
    ]
    for groups, chosen, rule in groupings:
        for bias in (None, *biases):
            for base in (scores,) if bias is None else (scores, logits):
                choice = _grouped(base if bias is None else base + bias, groups, chosen, rule)
                if _chosen(choice, index, k):
                    yield bias is not None, groups, chosen


def _grouped(choice: Tensor, groups: int, chosen: int, rule: str) -> Tensor:
    """Scores outside the best `chosen` of `groups` can not be chosen. rule: a group counts its two best, or its best."""
    if groups <= 1 or chosen >= groups:
        return choice
    parts = choice.unflatten(-1, (groups, choice.shape[-1] // groups))
    value = parts.amax(-1) if rule == "max" else parts.topk(min(2, parts.shape[-1]), dim=-1).values.sum(-1)
    best = torch.zeros_like(value).scatter(-1, value.topk(chosen, dim=-1).indices, 1.0)
    return parts.masked_fill(best[..., None] == 0, float("-inf")).flatten(-2)


def _chosen(choice: Tensor, index: Tensor, k: int) -> bool:
    """Whether the observed are the k best; a difference counts only where it is no tie."""
    best = choice.topk(k, dim=-1).values
    got = choice.gather(1, index).sort(dim=-1, descending=True).values
    return bool(torch.isfinite(got).all()) and float((best - got).abs().max()) <= TIE


def _num_experts(small: nn.Module, scope: str) -> int:
    """Experts of the block: the first size of its stacked matrices."""
    return max((item.shape[0] for item in small.get_submodule(scope).parameters() if item.dim() == 3), default=0)


def _same_sets(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.sort(-1).values, other.sort(-1).values)


def _vectors(module: nn.Module, width: int) -> list[Tensor]:
    """Every vector with an entry per expert that the block keeps, except zeros: what a correction could be."""
    tensors = [*module.parameters(), *module.buffers()]
    return [
        tensor.detach().reshape(-1).to(torch.float64)
        for tensor in tensors
        if tensor.numel() == width and tensor.is_floating_point() and bool(tensor.any())
    ]
