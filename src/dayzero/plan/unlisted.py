"""Parameters that a description counts and does not list: all of them (a class nobody knows), or those of draft layers.

Goes in: counts by role, the dimensions and the quantization groups. Comes out: estimated tensors per layer that add up to
the counts, each in the group that the release's settings put it in. Where there are two totals only, what experts hold
follows from them: total - active = (experts - chosen) x one expert, over all expert layers. Deliberately not done: real
names or rules; a plan on them says that it rests on an estimate.
"""

from dataclasses import replace
from typing import cast

from dayzero.core.model import ModelDescription, Parameter, Role, ShardRule
from dayzero.core.storage import name_form, stand_in

# Which layers hold a role: by their feed-forward or by what they cache. The others are spread over all layers.
OUTSIDE: tuple[Role, ...] = ("embedding", "head", "tower", "projector")
IN_EXPERT_LAYERS = ("router", "router_bias", "shared_expert")
# Counted draft layers that differ by more than this from a copy of the last layer are one matrix of the counted size.
ALIKE = 0.05


def with_parameters(model: ModelDescription) -> ModelDescription:
    """The description itself where it lists parameters, else one with estimated ones. Rounded up, never down."""
    if model.parameters or not model.total_parameters:
        return model
    moe = [layer for kind in model.layer_kinds if kind.feed_forward == "moe" for layer in kind.layers]
    counts = cast(dict[Role, int], model.parameters_by_role) or _roles_of_totals(model, len(moe))
    groups = {target: group.name for group in model.quantization_groups for target in group.targets}
    parameters: list[Parameter] = []
    for role, count in counts.items():
        group = groups.get(name_form(stand_in(role)), "none")
        if role == "expert" and moe:
            for layer in moe:
                parameters += _experts(model, layer, -(-count // len(moe)), group)
        elif role in OUTSIDE:
            parameters.append(_matrix(role, role, model, count, None, group, cut=role in ("embedding", "head")))
        else:
            layers = _layers_of(model, role, moe)
            share = -(-count // len(layers))
            parameters += [_matrix(f"layers.{layer}.{role}.weight", role, model, share, layer, group) for layer in layers]
    return replace(model, parameters=tuple(parameters))


def _roles_of_totals(model: ModelDescription, moe: int) -> dict[Role, int]:
    """Counts by role from the totals alone."""
    dims = model.dimensions
    idle = dims.num_experts - dims.num_experts_per_token
    experts = (model.total_parameters - model.active_parameters) * dims.num_experts // idle if moe and idle > 0 else 0
    end = dims.vocab_size * dims.hidden_size
    counts: dict[Role, int] = {"embedding": end, "head": end, "mlp": max(0, model.total_parameters - experts - 2 * end)}
    return counts | ({"expert": experts} if experts else {})


def _layers_of(model: ModelDescription, role: str, moe: list[int]) -> list[int]:
    every = list(range(model.dimensions.num_layers))
    states = [layer for kind in model.layer_kinds if any(spec.elements_per_sequence and spec.kind in ("state", "convolution")
              for spec in kind.cache) for layer in kind.layers]  # fmt: skip
    if role in ("ssm", "convolution"):
        return states or every
    if role == "attention":
        return [layer for layer in every if layer not in set(states)] or every
    if role == "indexer":
        return [layer for kind in model.layer_kinds if any(spec.kind == "indexer" for spec in kind.cache)
                for layer in kind.layers] or every  # fmt: skip
    if role in IN_EXPERT_LAYERS:
        return moe or every
    if role == "mlp":
        return [layer for kind in model.layer_kinds if kind.feed_forward == "dense" for layer in kind.layers] or every
    return every


def _experts(model: ModelDescription, layer: int, count: int, group: str) -> list[Parameter]:
    """One layer's experts: gate and up in one matrix, down in another, as wide as the model."""
    dims = model.dimensions
    inner = -(-count // (3 * dims.num_experts * dims.hidden_size))
    up, down = (dims.num_experts, 2 * inner, dims.hidden_size), (dims.num_experts, dims.hidden_size, inner)
    names = (f"estimated.layers.{layer}.experts.gate_up_proj", f"estimated.layers.{layer}.experts.down_proj")
    rules = (ShardRule(tensor_dim=1, segments=(inner, inner), units=(inner, inner), expert_dim=0),
             ShardRule(tensor_dim=2, segments=(inner,), units=(inner,), expert_dim=0))  # fmt: skip
    return [Parameter(name=name, shape=shape, dtype=model.dtype, role="expert", layer=layer, shard=rule, group=group)
            for name, shape, rule in zip(names, (up, down), rules, strict=True)]  # fmt: skip


def _matrix(
    name: str, role: Role, model: ModelDescription, count: int, layer: int | None, group: str = "none", *, cut: bool = True
) -> Parameter:
    columns = model.dimensions.hidden_size
    rows = -(-count // columns)
    # Small tensors are whole everywhere: what little they are, no degree should fail on them.
    cut = cut and rows >= 1024 and role not in ("norm", "router", "router_bias", "indexer")
    rule = ShardRule(tensor_dim=0, segments=(rows,), units=(rows,)) if cut else ShardRule()
    return Parameter(name=f"estimated.{name}", shape=(rows, columns), dtype=model.dtype, role=role, layer=layer, shard=rule,
                     group=group)  # fmt: skip


def with_drafts(model: ModelDescription, *, own_ends: bool = False) -> ModelDescription:
    """The description with its draft layers listed, where it only counts them.

    A draft block is a decoder layer with a projection that joins two rows of the model's width, with or without an
    embedding and a head of its own: whichever comes nearer to the count; `own_ends` for engines that hold those in any case.
    Where neither is near, one estimated matrix of the counted size stands for the draft. Its matrices are in their
    counterparts' groups as far as the groups count more than the listed parameters, and else stay unquantized.
    """
    dims = model.dimensions
    if not model.mtp_parameters or any(parameter.role == "mtp" for parameter in model.parameters):
        return model
    left = {group.name: group.parameters or 0 for group in model.quantization_groups}
    for item in model.parameters:
        if item.tied_to is None and not item.is_buffer:
            left[item.group] = left.get(item.group, 0) - item.num_elements
    last = [item for item in model.parameters if item.layer == dims.num_layers - 1 and item.tied_to is None]
    ends = [item for item in model.parameters if item.role in ("embedding", "head") and item.tied_to is None]
    drafts: list[Parameter] = []
    for block in range(max(1, dims.num_mtp_layers)):
        layer = dims.num_layers + block
        for item in last:
            group = item.group if left.get(item.group, 0) >= item.num_elements else "none"
            left[group] = left.get(group, 0) - item.num_elements
            drafts.append(replace(item, name=f"draft.{block}.{item.name}", layer=layer, group=group))
        drafts.append(_matrix(f"draft.{block}.join", "mtp", model, 2 * dims.hidden_size**2, layer, cut=False))
    own = [replace(item, name=f"draft.0.{item.name}", layer=dims.num_layers) for item in ends]
    sums = [sum(item.num_elements for item in found if not item.is_buffer) for found in (drafts, drafts + own)]
    if min(abs(total - model.mtp_parameters) for total in sums) > ALIKE * model.mtp_parameters:
        group = max(left, key=lambda name: left[name], default="none")
        drafts = [_matrix("draft", "mtp", model, model.mtp_parameters, dims.num_layers, group)]
        own = own if own_ends else []
    elif not own_ends and abs(sums[0] - model.mtp_parameters) <= abs(sums[1] - model.mtp_parameters):
        own = []
    return replace(model, parameters=(*model.parameters, *drafts, *own))
