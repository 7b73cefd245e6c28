"""What is told of a model, as rows of plain text: the terminal (`model_text`) and the page (`html`) show the same ones."""

from dayzero.core.model import ModelDescription
from dayzero.core.operator_totals import operator_totals
from dayzero.core.sized_operators import engine_step
from dayzero.core.structure import FeedForward, Norm, Positions, Routing
from dayzero.core.units import format_bytes, format_count

CACHE_LENGTHS = {"8K": 8_192, "128K": 131_072, "1M": 1_048_576}
CACHE_DTYPES = ("bfloat16", "float8_e4m3fn", "int4")
MOST_OPERATORS = 24  # a person reads; the record has them all
EXAMPLE_TOKENS = 8_192  # formulas become numbers here: one sequence, a prefill and a decode step of that context


def heads(model: ModelDescription) -> str:
    """Attention heads in a few words; empty where there are none."""
    size = model.dimensions
    if not size.num_attention_heads:
        return ""
    said = f"{size.num_attention_heads} query"
    said += f", {size.num_key_value_heads} key/value" if size.num_key_value_heads else ""
    return said + (f", {size.head_dim} wide" if size.head_dim else "")


def role_rows(model: ModelDescription) -> list[tuple[str, str, str]]:
    """(role, parameters, share of the total), the largest first."""
    counted = sorted(model.parameters_by_role.items(), key=lambda item: -item[1])
    total = model.total_parameters or 1
    return [(role, format_count(count), f"{count / total:.2%}") for role, count in counted if count]


def cache_rows(model: ModelDescription) -> list[tuple[str, list[str]]]:
    """(dtype of what grows, bytes of one sequence at each of CACHE_LENGTHS), the model's own dtype first."""
    dtypes = dict.fromkeys((model.dtype, *CACHE_DTYPES))
    return [(dtype, [format_bytes(model.cache_bytes(n, dtype)) for n in CACHE_LENGTHS.values()]) for dtype in dtypes]


def operator_rows(model: ModelDescription) -> list[tuple[str, str, str, str, str, str]]:
    """(operator, sites, FLOPs and bytes of a decode step at 8K, FLOPs and bytes of a prefill of 8K), of one sequence."""
    rows = []
    for one in operator_totals(model)[:MOST_OPERATORS]:
        decode = one.decode.at(sequences=1, new_tokens=1, context_tokens=EXAMPLE_TOKENS)
        prefill = one.prefill.at(sequences=1, new_tokens=EXAMPLE_TOKENS, context_tokens=EXAMPLE_TOKENS)
        sites = max(one.decode.count, one.prefill.count)
        rows.append((one.kind, str(sites), format_count(decode[0]), format_bytes(decode[1]), format_count(prefill[0]),
                     format_bytes(prefill[1])))  # fmt: skip
    return rows


def step_rows(model: ModelDescription) -> list[tuple[str, str, str, str, str]]:
    """(step, whose way, FLOPs, bytes of weights, other bytes): an engine's, and the class's own code, which may do far more."""
    rows, operators = [], operator_totals(model)
    for name, new in (("decode at 8K", 1), ("prefill of 8K", EXAMPLE_TOKENS)):
        cost = engine_step(model, new_tokens=new, context_tokens=EXAMPLE_TOKENS)
        if cost is not None:
            rows.append((name, "an engine, weights as stored", format_count(cost.flops), format_bytes(cost.weight_bytes),
                         format_bytes(cost.other_bytes)))  # fmt: skip
        phase = "decode" if new == 1 else "prefill"
        totals = [getattr(one, phase).at(sequences=1, new_tokens=new, context_tokens=EXAMPLE_TOKENS)
                  for one in operators]  # fmt: skip
        if totals and model.parameters:
            flops, moved = (sum(part) for part in zip(*totals, strict=True))
            way = f"its class as written, in {model.dtype}"
            rows.append((name, way, format_count(flops), "", f"{format_bytes(moved)} in all"))
    return rows


def quantization_rows(model: ModelDescription) -> list[tuple[str, str, str, str]]:
    """(group, scheme, parameters, bytes in the release)."""
    return [
        (
            group.name,
            f"{group.scheme}" + (f", block {'x'.join(map(str, group.block))}" if group.block else ""),
            "" if group.parameters is None else format_count(group.parameters),
            "" if group.num_bytes is None else format_bytes(group.num_bytes),
        )
        for group in model.quantization_groups
    ]


def structure_rows(model: ModelDescription) -> list[tuple[str, str]]:
    """How the model is built, one line a part; what is only read from keys says so."""
    structure = model.structure
    rows = [("routing", _routing(one)) for one in structure.routing]
    rows += [("positions", _positions(one)) for one in structure.positions]
    rows += [("feed-forward", _feed_forward(one)) for one in structure.feed_forwards]
    rows += [("norm", _norm(one)) for one in structure.norms]
    indexed = {kind.name for kind in model.layer_kinds if any(spec.kind == "indexer" for spec in kind.cache)}
    for name, tokens in (structure.visible_tokens or {}).items():
        seen = f"{tokens} tokens that its indexer picks" if name in indexed else f"the last {tokens} tokens"
        rows.append(("sees", f"{name}: {seen if tokens else 'every token before'}"))
    rows += [("tower", f"{one.name} ({one.kind}, {format_count(one.parameters)}), feeds into {one.feeds_into}")
             for one in structure.towers]  # fmt: skip
    if model.dimensions.num_mtp_layers:
        rows.append(("draft layers", f"{model.dimensions.num_mtp_layers}, {format_count(model.mtp_parameters)} parameters"))
    return rows + [("not resolved", note) for note in structure.notes]


def _routing(one: Routing) -> str:
    said = [f"{one.scoring or 'unknown scoring'}, {one.experts_per_token} per token"]
    if one.groups > 1:
        said.append(f"from {one.groups_per_token} of {one.groups} groups")
    said += ["correction bias"] if one.bias else []
    said += ["weights normalised"] if one.normalised else ["weights not normalised"] if one.normalised is False else []
    said += [f"scaled by {one.scaling:g}"] if one.scaling not in (None, 1.0) else []
    said += [f"class default for {', '.join(one.default_keys)}"] if one.default_keys else []
    return _with(said, one.evidence)


def _positions(one: Positions) -> str:
    said = [one.kind]
    said += [f"theta {one.theta:g}"] if one.theta is not None else []
    said += [f"{one.scaling} x{one.factor:g}" if one.factor else one.scaling] if one.scaling not in (None, "default") else []
    of = f" of {one.head_dims}" if one.head_dims else ""
    said += [f"{one.rotated_dims}{of} dimensions"] if one.rotated_dims else []
    said += [f"pairs {one.style}"] if one.style else []
    said += [f"cos and sin times {one.attention_factor:g}"] if one.attention_factor not in (None, 1.0) else []
    said += [f"softmax scale {one.softmax_scale:.6g}"] if one.softmax_scale is not None else []
    said += [f"in {', '.join(one.layer_kinds)}"] if one.layer_kinds else []
    return _with(said, one.evidence)


def _feed_forward(one: FeedForward) -> str:
    said = [f"{one.module}: {one.activation or 'unknown activation'}", f"gate and up {one.layout or 'unknown'}"]
    return _with(said, one.evidence)


def _norm(one: Norm) -> str:
    said = [one.kind]
    said += [f"eps {one.eps:g}"] if one.eps is not None else []
    said += [f"weight + {one.weight_offset:g}"] if one.weight_offset else []
    return _with([*said, "in " + ", ".join(one.modules)] if one.modules else said, one.evidence)


def _with(said: list[str], evidence: str) -> str:
    return ", ".join(said) + ("" if evidence == "measured" else f" ({'from keys' if evidence == 'keys' else 'not known'})")
