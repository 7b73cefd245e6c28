"""Parameters for a description that only has counts (a release whose class nobody knows), so that it can still be planned.

Goes in: total and active parameters and the dimensions. Comes out: one estimated tensor of experts and one of everything
else per layer, embedding and head apart, that add up to the total. What experts hold follows from the two counts:
total - active = (experts - chosen) x one expert, over all expert layers. Deliberately not done: real names or rules; a
plan on them says that it rests on an estimate.
"""

from dataclasses import replace

from dayzero.core.model import ModelDescription, Parameter, Role, ShardRule


def with_parameters(model: ModelDescription) -> ModelDescription:
    """The description itself where it lists parameters, else one with estimated ones. Rounded up, never down."""
    if model.parameters or not model.total_parameters:
        return model
    dims = model.dimensions
    moe = [layer for kind in model.layer_kinds if kind.feed_forward == "moe" for layer in kind.layers]
    idle = dims.num_experts - dims.num_experts_per_token
    in_experts = (model.total_parameters - model.active_parameters) * dims.num_experts // idle if moe and idle > 0 else 0
    ends = 2 * dims.vocab_size * dims.hidden_size
    rest = max(0, model.total_parameters - in_experts - ends)
    parameters = [_matrix("embedding", "embedding", dims.vocab_size, dims.hidden_size, None, model.dtype),
                  _matrix("head", "head", dims.vocab_size, dims.hidden_size, None, model.dtype)]  # fmt: skip
    for layer in range(dims.num_layers):
        rows = -(-rest // (dims.num_layers * dims.hidden_size))
        parameters.append(_matrix(f"layers.{layer}.unlisted", "mlp", rows, dims.hidden_size, layer, model.dtype))
    for layer in moe if in_experts else ():
        shape = (dims.num_experts, -(-in_experts // (len(moe) * dims.num_experts * dims.hidden_size)), dims.hidden_size)
        rule = ShardRule(tensor_dim=1, segments=shape[1:2], units=shape[1:2], expert_dim=0)
        parameters.append(Parameter(name=f"layers.{layer}.experts", shape=shape, dtype=model.dtype, role="expert", layer=layer,
                                    shard=rule))  # fmt: skip
    return replace(model, parameters=tuple(parameters))


def _matrix(name: str, role: Role, rows: int, columns: int, layer: int | None, dtype: str) -> Parameter:
    rule = ShardRule(tensor_dim=0, segments=(rows,), units=(rows,))
    return Parameter(name=f"estimated.{name}", shape=(rows, columns), dtype=dtype, role=role, layer=layer, shard=rule)
