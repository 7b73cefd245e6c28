"""Operator graphs of a tiny model of every decoder type, and of full-size configs on meta.

For each type, at two lengths that no recording had and that cross windows and chunks, in prefill and in decode: matrix
products by formula are within 1% of what torch counts on the eager path, and the graph run again gives the module's output.
`NOT_FOLLOWED` is all that does not, with the reason; the types are cut into parts so that they run side by side.
"""

from __future__ import annotations

import time

import pytest
import torch

from dayzero.core.errors import DayZeroError
from dayzero.core.formulas import evaluate
from dayzero.core.model import OperatorGraph
from dayzero.model.classes import build_on_meta, text_config
from dayzero.model.operator_graph import operator_graphs
from tests.model.graph_check import Verdict, examine, make_kinds
from tests.tiny.build import DECODER_TYPES, default_config

NUM_PARTS = 16
MIN_FOLLOWED = 153
# Type -> words of the reason.
NOT_FOLLOWED = {
    "blt": "has no attribute 'num_hidden_layers'",  # three stacks, none of which is the decoder
    "cohere_compass_text": "could not be shrunk",
    "dbrx": "could not be shrunk",
    "gemma3n": "could not be shrunk",
    "gemma4_assistant": "Class validation error",
    "gemma4_unified_assistant": "inputs_embeds and shared_kv_states cannot be None",  # no model of its own
    # How many tokens are routed to experts that compute nothing depends on values: the formula is an upper bound.
    "longcat_flash": "FLOPs by formula",
}
# Types whose outputs have other last bits, within the tolerance, and why.
OTHER_BITS = {
    # The head dimension is split without a copy for one sequence and with one for several: another order of the same sums.
    "falcon",
}


def _verdict(model_type: str) -> Verdict:
    try:
        return examine(model_type)
    except DayZeroError as error:
        return Verdict(flops=[f"{error.what}: {error.got}"])
    except Exception as error:
        return Verdict(flops=[f"{type(error).__name__}: {error}"])


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_decoder_type(part: int) -> None:
    torch.set_num_threads(1)
    wrong: dict[str, list[str]] = {}
    types = DECODER_TYPES[part::NUM_PARTS]
    shut, whole = 0, 0
    for model_type in types:
        start = time.perf_counter()
        verdict = _verdict(model_type)
        shut += bool(verdict.opaque)
        whole += any("outer" in note for note in verdict.opaque)
        if verdict.failures:
            wrong[model_type] = verdict.failures
        told = "; ".join(verdict.failures[:1] or verdict.opaque[:1])
        print(f"{model_type:28} {time.perf_counter() - start:5.1f} s  worst output {verdict.worst:.0e}  {told[:150]}")
        if model_type not in {*NOT_FOLLOWED, *OTHER_BITS}:
            assert verdict.worst == 0.0, f"{model_type}: the same operators gave other bits ({verdict.worst:.1e})"
    print(
        f"{len(types) - len(wrong)} of {len(types)} right; {shut} with a module as one node, {whole} of them outside the layers"
    )
    known = {name for name in NOT_FOLLOWED if name in types}
    assert set(wrong) == known, {name: reasons[:3] for name, reasons in wrong.items() if name not in known} or known - set(
        wrong
    )
    for name in known:
        assert NOT_FOLLOWED[name] in " ".join(wrong[name]), (name, wrong[name])


def test_enough_types_are_followed() -> None:
    assert len(DECODER_TYPES) - len(NOT_FOLLOWED) >= MIN_FOLLOWED, (len(DECODER_TYPES), len(NOT_FOLLOWED))


def _total(graph: OperatorGraph, phase: str, **sizes: int) -> float:
    return sum(evaluate(node.flops, **sizes) for node in getattr(graph, phase))


def test_full_size_on_meta() -> None:
    """The class default (the released size): nothing is computed, and the formulas are those of the real widths."""
    config = default_config("deepseek_v3")
    model = build_on_meta(config)
    kinds = make_kinds(model)
    start = time.process_time()
    result = operator_graphs(model, kinds, text_config(config))
    seconds = time.process_time() - start
    print(f"{len(kinds)} kinds of {sum(len(kind.layers) for kind in kinds)} layers in {seconds:.1f} s")
    assert not result.notes
    experts = [node for kind in kinds for node in result.by_kind[kind.name].decode if node.kind == "experts"]
    assert len(experts) == 1
    width, inner, active = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
    assert evaluate(experts[0].flops, B=3, T=1, C=999) == 3 * active * 3 * width * inner * 2
    weights = 3 * width * inner * 2
    full = evaluate(experts[0].bytes, B=10_000, T=1, C=999) - 10_000 * width * 2 * 2
    assert full == config.n_routed_experts * weights
    head = next(node for node in result.outer.prefill if node.name == "lm_head")
    assert head.flops == f"{2 * width * config.vocab_size}*B*T"
    # Twice the length is more than twice the work, and decoding one token of a long context is less than prefilling it.
    for kind in kinds:
        graph = result.by_kind[kind.name]
        short, long = (_total(graph, "prefill", B=1, T=n, C=n) for n in (1000, 2000))
        assert 2 * short < long < 4 * short
        assert _total(graph, "decode", B=1, T=1, C=2000) < long


def test_experts_that_are_not_behind_the_interface_are_no_loop_on_meta() -> None:
    config = default_config("longcat_flash")
    model = build_on_meta(config)
    kinds = make_kinds(model)
    result = operator_graphs(model, kinds, text_config(config))
    assert [node.count for node in result.by_kind[kinds[0].name].decode if node.kind == "experts"] == [1]


def test_a_model_that_cannot_be_followed_says_why() -> None:
    model = build_on_meta(default_config("qwen3"))
    kinds = make_kinds(model)
    model.forward = lambda **_: 1 / 0  # type: ignore[method-assign]
    result = operator_graphs(model, kinds, text_config(default_config("qwen3")))
    assert "division by zero" in result.notes[0]
    assert result.outer.prefill == () and "division by zero" in result.by_kind[kinds[0].name].notes[0]
