"""What `--json` prints where a record is large: the fields that scripts read, under their contract names."""

from collections.abc import Sequence
from typing import Any

from dayzero.core.coverage import TargetCoverage, coverage_summary
from dayzero.core.difference import Difference
from dayzero.core.model import ModelDescription
from dayzero.core.operator_totals import Totals, operator_totals
from dayzero.core.records import record_json, to_dict
from dayzero.core.sized_operators import engine_step
from dayzero.core.structure import Routing
from dayzero.report.model_rows import CACHE_LENGTHS, EXAMPLE_TOKENS

CACHE_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8", "int4")


def inspect_summary(
    model: ModelDescription,
    *,
    corrected: Sequence[dict[str, Any]] = (),
    against: Difference | None = None,
    coverage: TargetCoverage | None = None,
) -> dict[str, Any]:
    """`dayzero inspect --json`. `cache.bytes_per_token` is the slope beyond every window, `bytes_per_sequence` the constant.

    corrected: figures of the first answer beside the measured ones.
    """
    return {
        "schema": ModelDescription.SCHEMA,
        "name": model.name,
        "model_type": model.model_type,
        "architecture": model.architecture,
        "dtype": model.dtype,
        "dimensions": to_dict(model.dimensions),
        "total_parameters": model.total_parameters,
        "active_parameters": model.active_parameters,
        "mtp_parameters": model.mtp_parameters,
        "parameters_by_role": model.parameters_by_role,
        "layer_kinds": [
            {"kind": kind.name, "count": len(kind.layers), "mixer": kind.mixer, "feed_forward": kind.feed_forward}
            for kind in model.layer_kinds
        ],
        "structure": to_dict(model.structure),
        "cache": cache_summary(model),
        "step": step_summary(model),
        "operators": operators_summary(model),
        "operator_notes": list(dict.fromkeys(
            note for graph in (*(kind.operators for kind in model.layer_kinds), model.outer_operators) for note in graph.notes
        )),
        "towers": list(model.towers),
        "stop_token_ids": list(model.stop_token_ids),
        "tokenizer_tokens": model.tokenizer_tokens,
        "rope": model.rope,
        "quantization": {"groups": {g.name: to_dict(g) for g in model.quantization_groups}} | model.quantization,
        "checkpoint_bytes": model.checkpoint_bytes,
        "has_weights": model.has_weights,
        "provisional": model.provisional,
        "corrected": list(corrected),
        "consumed_keys": model.key_readers or dict.fromkeys(model.consumed_keys, ""),
        "inert_keys": list(model.inert_keys),
        "unconsumed_keys": list(model.unconsumed_keys),
        "novel_keys": list(model.novel_keys),
        "problems": [to_dict(problem) for problem in model.problems],
        "against": None if against is None else record_json(against),
        "coverage": None if coverage is None else coverage_summary(coverage),
    }  # fmt: skip


def cache_summary(model: ModelDescription) -> dict[str, Any]:
    """Bytes of the caches of one sequence, at the model's dtype and at others (of what grows; constant states keep theirs)."""
    return {
        "dtype": model.dtype,
        "bytes_per_token": model.cache_bytes_per_token,
        "bytes_per_sequence": model.cache_bytes_per_sequence,
        "bytes_at_tokens": {str(tokens): model.cache_bytes(tokens) for tokens in CACHE_LENGTHS.values()},
        "by_dtype": {
            dtype: {str(tokens): model.cache_bytes(tokens, dtype) for tokens in CACHE_LENGTHS.values()}
            for dtype in dict.fromkeys((model.dtype, *CACHE_DTYPES))
        },
        "by_layer_kind": {
            kind.name: {
                "layers": len(kind.layers),
                "tensors": [to_dict(spec) for spec in kind.cache],
                "bytes_at_tokens": {
                    str(tokens): sum(spec.bytes_for(tokens) for spec in kind.cache) * len(kind.layers)
                    for tokens in CACHE_LENGTHS.values()
                },
            }
            for kind in model.layer_kinds
        },
    }


def operators_summary(model: ModelDescription) -> list[dict[str, Any]]:
    """Distinct operators over the whole model, as the class is written, in the model's dtype: `flops` and `bytes` are formulas
    in B, T and C, `..._at_8k` their values. What an engine has to do is `step`."""

    def phase(totals: Totals, new_tokens: int) -> dict[str, Any]:
        flops, moved = totals.at(sequences=1, new_tokens=new_tokens, context_tokens=EXAMPLE_TOKENS)
        return to_dict(totals) | {"flops_at_8k": flops, "bytes_at_8k": moved}

    return [
        {
            "name": one.kind,
            "kind": one.kind,
            "first_site": one.name,
            "count": max(one.prefill.count, one.decode.count),
            "prefill": phase(one.prefill, EXAMPLE_TOKENS),
            "decode": phase(one.decode, 1),
        }
        for one in operator_totals(model)
    ]


def step_summary(model: ModelDescription) -> dict[str, Any]:
    """One sequence at 8K, as an engine computes it (latents not expanded, routed experts alone, weights as stored)."""
    costs = {"prefill": engine_step(model, new_tokens=EXAMPLE_TOKENS, context_tokens=EXAMPLE_TOKENS),
             "decode": engine_step(model, new_tokens=1, context_tokens=EXAMPLE_TOKENS)}  # fmt: skip
    return {phase: None if cost is None else to_dict(cost) for phase, cost in costs.items()}


def corrections(first: ModelDescription, measured: ModelDescription) -> list[dict[str, Any]]:
    """Figures of the first answer and what they are when measured; `same` says whether it was confirmed."""
    figures = {
        "total_parameters": lambda m: m.total_parameters,
        "active_parameters": lambda m: m.active_parameters,
        "mtp_parameters": lambda m: m.mtp_parameters,
        "cache_bytes_per_token": lambda m: m.cache_bytes_per_token,
        "cache_bytes_per_sequence": lambda m: m.cache_bytes_per_sequence,
        "num_layers": lambda m: m.dimensions.num_layers,
        "layer_kinds": lambda m: ", ".join(f"{len(kind.layers)} x {kind.name}" for kind in m.layer_kinds),
        "num_experts": lambda m: m.dimensions.num_experts,
        "checkpoint_bytes": lambda m: m.checkpoint_bytes,
        "routing": lambda m: "; ".join(_routing(one) for one in m.structure.routing) or "none",
        "dtype": lambda m: m.dtype,
    }  # fmt: skip
    # Without headers these rest on what releases usually store, in both answers.
    assumed = () if measured.has_weights else ("mtp_parameters", "checkpoint_bytes")
    return [
        {"figure": name, "first": read(first), "measured": read(measured), "same": read(first) == read(measured),
         "note": "assumed: no tensor headers here" if name in assumed else ""}
        for name, read in figures.items()
    ]  # fmt: skip


def _routing(one: Routing) -> str:
    said = [one.scoring or "unknown", f"{one.experts_per_token} a token"]
    said += [f"{one.groups_per_token} of {one.groups} groups"] if one.groups > 1 else []
    return ", ".join(said)
