"""Synthetic models and targets for the planner's tests, made from sizes alone (no torch, no release folder)."""

from dataclasses import replace

from dayzero.core.model import CacheSpec, Dimensions, LayerKind, ModelDescription, Parameter, ShardRule
from dayzero.core.structure import QuantizationGroup
from dayzero.core.target import Card, Node, Software, Target
from dayzero.core.units import GIB

DTYPE = "bfloat16"


def make_rule(shape, dim, units=None, *, segments=None, replicable=False, expert_dim=None):
    segments = segments or (shape[dim],)
    units = units or segments
    return ShardRule(tensor_dim=dim, segments=segments, units=units, replicable=replicable, expert_dim=expert_dim, proof="role")


class ModelBuilder:
    """Collects parameters and layer kinds. Each `add` names the parameter in the unsharded model."""

    def __init__(self):
        self.parameters = []

    def add(self, name, shape, role, layer=None, rule=None, **more):
        more.setdefault("dtype", DTYPE)
        self.parameters.append(Parameter(name=name, shape=shape, role=role, layer=layer, shard=rule or ShardRule(), **more))


def with_group(model, *, roles=("attention", "mlp", "expert", "shared_expert"), name="fp8", **figures):
    """The model as a release that stores its matrices of those roles in one quantization group."""
    figures = figures or {"scheme": "fp8-block", "weight_bits": 8.0, "block": (128, 128), "scale_dtype": "float32"}
    parameters = tuple(replace(p, group=name) if p.role in roles and len(p.shape) >= 2 else p for p in model.parameters)
    groups = (*model.quantization_groups, QuantizationGroup(name=name, **figures))
    return replace(model, parameters=parameters, quantization_groups=groups, quantization={"method": "fp8"})


def add_dense_mlp(build, layer, hidden, inner, role="mlp"):
    prefix = f"model.layers.{layer}.mlp." + ("" if role == "mlp" else "shared.")
    for name in ("gate_proj", "up_proj"):
        build.add(f"{prefix}{name}.weight", (inner, hidden), role, layer, make_rule((inner, hidden), 0))
    build.add(f"{prefix}down_proj.weight", (hidden, inner), role, layer, make_rule((hidden, inner), 1))


def add_experts(build, layer, hidden, inner, experts):
    prefix = f"model.layers.{layer}.mlp.experts."
    up, down = (experts, 2 * inner, hidden), (experts, hidden, inner)
    build.add(prefix + "gate_up_proj", up, "expert", layer,
              make_rule(up, 1, segments=(inner, inner), expert_dim=0))  # fmt: skip
    build.add(prefix + "down_proj", down, "expert", layer, make_rule(down, 2, expert_dim=0))
    build.add(f"model.layers.{layer}.mlp.gate.weight", (experts, hidden), "router", layer)


def add_ends(build, vocab, hidden, tied):
    shape = (vocab, hidden)
    build.add("model.embed_tokens.weight", shape, "embedding", rule=make_rule(shape, 0))
    build.add("model.norm.weight", (hidden,), "norm")
    build.add("lm_head.weight", shape, "head", rule=make_rule(shape, 0),
              tied_to="model.embed_tokens.weight" if tied else None)  # fmt: skip


def make_model(build, kinds, dims, *, name="toy", **more):
    total = sum(p.num_elements for p in build.parameters if p.tied_to is None and p.role != "mtp")
    return ModelDescription(name=name, model_type="toy", architecture="Toy", source_hash="0" * 8, dtype=DTYPE,
                            dimensions=dims, layer_kinds=kinds, parameters=tuple(build.parameters), total_parameters=total,
                            active_parameters=more.pop("active", total), **more)  # fmt: skip


def make_dense_model(*, layers=4, hidden=64, heads=8, kv_heads=4, head_dim=8, inner=96, vocab=128, tied=False,
                     window=None, **more):  # fmt: skip
    """A plain decoder: every layer full attention (or sliding, with a window) and a gated feed-forward."""
    build = ModelBuilder()
    for layer in range(layers):
        prefix = f"model.layers.{layer}.self_attn."
        q, kv = (heads * head_dim, hidden), (kv_heads * head_dim, hidden)
        build.add(prefix + "q_proj.weight", q, "attention", layer, make_rule(q, 0, (heads,)))
        for name in ("k_proj", "v_proj"):
            build.add(f"{prefix}{name}.weight", kv, "attention", layer, make_rule(kv, 0, (kv_heads,), replicable=True))
        o = (hidden, heads * head_dim)
        build.add(prefix + "o_proj.weight", o, "attention", layer, make_rule(o, 1, (heads,)))
        add_dense_mlp(build, layer, hidden, inner)
        build.add(f"model.layers.{layer}.input_layernorm.weight", (hidden,), "norm", layer)
    add_ends(build, vocab, hidden, tied)
    cache = tuple(CacheSpec(kind="sliding" if window else "full", name=name, dtype=DTYPE, heads=kv_heads,
                            elements_per_token=kv_heads * head_dim, window_tokens=window)
                  for name in ("keys", "values"))  # fmt: skip
    kinds = (LayerKind(name="sliding" if window else "full", mixer="sliding" if window else "full", feed_forward="dense",
                       layers=tuple(range(layers)), cache=cache),)  # fmt: skip
    dims = Dimensions(hidden_size=hidden, num_layers=layers, vocab_size=vocab, num_attention_heads=heads,
                      num_key_value_heads=kv_heads, head_dim=head_dim, intermediate_size=inner)  # fmt: skip
    return make_model(build, kinds, dims, **more)


def make_latent_moe_model(*, layers=61, dense=3, hidden=7168, heads=128, q_rank=1536, kv_rank=512, nope=128, rope=64,
                          value=128, inner=18432, expert_inner=2048, experts=256, chosen=8, shared=1, vocab=129280,
                          **more):  # fmt: skip
    """Latent attention over a mixture of experts, the first layers dense; the defaults are the well-known 671B sizes."""
    build = ModelBuilder()
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        q, kv, out = (heads * (nope + rope), q_rank), (heads * (nope + value), kv_rank), (hidden, heads * value)
        build.add(attention + "q_a_proj.weight", (q_rank, hidden), "attention", layer)
        build.add(attention + "q_a_layernorm.weight", (q_rank,), "norm", layer)
        build.add(attention + "q_b_proj.weight", q, "attention", layer, make_rule(q, 0, (heads,)))
        build.add(attention + "kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden), "attention", layer)
        build.add(attention + "kv_a_layernorm.weight", (kv_rank,), "norm", layer)
        build.add(attention + "kv_b_proj.weight", kv, "attention", layer, make_rule(kv, 0, (heads,)))
        build.add(attention + "o_proj.weight", out, "attention", layer, make_rule(out, 1, (heads,)))
        for name in ("input_layernorm", "post_attention_layernorm"):
            build.add(f"{prefix}{name}.weight", (hidden,), "norm", layer)
        if layer < dense:
            add_dense_mlp(build, layer, hidden, inner)
        else:
            add_experts(build, layer, hidden, expert_inner, experts)
            add_dense_mlp(build, layer, hidden, shared * expert_inner, role="shared_expert")
    add_ends(build, vocab, hidden, tied=False)
    cache = (CacheSpec(kind="latent", name="keys", dtype=DTYPE, elements_per_token=kv_rank),
             CacheSpec(kind="latent", name="values", dtype=DTYPE, elements_per_token=rope))  # fmt: skip
    kinds = tuple(LayerKind(name=f"latent-{feed}", mixer="latent", feed_forward=feed, layers=tuple(span), cache=cache)
                  for feed, span in (("dense", range(dense)), ("moe", range(dense, layers))) if span)  # fmt: skip
    dims = Dimensions(hidden_size=hidden, num_layers=layers, vocab_size=vocab, num_attention_heads=heads,
                      num_key_value_heads=heads, head_dim=nope + rope, value_head_dim=value, intermediate_size=inner,
                      num_experts=experts, num_experts_per_token=chosen, num_shared_experts=shared)  # fmt: skip
    expert = 3 * hidden * expert_inner
    total = sum(p.num_elements for p in build.parameters)
    return make_model(build, kinds, dims, active=total - (layers - dense) * (experts - chosen) * expert, **more)


def make_target(*, memory_bytes=80 * GIB, num_cards=8, confidence="high", unverified=(), topology="switch", rates=True):
    card = Card(memory_bytes=memory_bytes, memory_bytes_per_s=3e12 if rates else None,
                flops_per_s={"bfloat16": 9e14} if rates else {}, native_dtypes=("bfloat16",))  # fmt: skip
    return Target(id="toy-card", vendor="Toy", card=card, confidence=confidence, unverified_fields=tuple(unverified),
                  node=Node(num_cards=num_cards, link_bytes_per_s=4e11, topology=topology), network_bytes_per_s=5e10,
                  software=Software(torch_device="cuda"))  # fmt: skip
