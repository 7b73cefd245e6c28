"""Scales are moved only where the layer computes the same afterwards, and what is rounded then costs less."""

import pytest
import torch

from dayzero.calibrate.awq import absorb, find_pairs
from dayzero.calibrate.calibrated import open_calibrated
from dayzero.calibrate.inputs import InputWatch
from dayzero.calibrate.records import Settings
from dayzero.calibrate.run import calibrate_layers, repeatable
from dayzero.calibrate.skeleton import Skeleton, build_skeleton
from dayzero.calibrate.streamed import run_streamed
from dayzero.calibrate.variants import quantized_provider
from dayzero.weights.quantize.presets import preset
from tests.model.test_calibrate import subject
from tests.tiny.build import make_tiny_model

# What takes a scale exactly, by hand from the layers' algebra: norm -> projections, linear half of a gate -> its last matrix.
# Values -> output only where each output column has a value row of its own (no grouped heads), not through a nonlinearity.
WANTED = {
    "llama": {"self_attn.q_proj": "input_layernorm", "mlp.gate_proj": "post_attention_layernorm", "mlp.down_proj": "mlp.up_proj"},
    "gemma2": {"self_attn.q_proj": "input_layernorm", "mlp.gate_proj": "pre_feedforward_layernorm", "mlp.down_proj": "mlp.up_proj"},
    "gpt2": {"attn.c_attn": "ln_1", "mlp.c_fc": "ln_2", "mlp.c_proj": None, "attn.c_proj": None},
    "mixtral": {"self_attn.q_proj": "input_layernorm", "mlp.experts.gate_up_proj": "post_attention_layernorm",
                "mlp.gate": "post_attention_layernorm", "mlp.experts.down_proj": None},
    "deepseek_v3": {"self_attn.q_b_proj": "self_attn.q_a_layernorm", "self_attn.kv_b_proj": "self_attn.kv_a_layernorm"},
}  # fmt: skip


def run_layers(model_type, act):
    """`act(parameters, call)` for each layer of a tiny model."""
    model = make_tiny_model(model_type).requires_grad_(False)
    # Values that are no ones and zeros, as a norm's are when it is made.
    for name, one in model.named_parameters():
        if one.dim() == 1:
            one.add_(torch.rand(one.shape, generator=torch.Generator().manual_seed(len(name))) * 0.5)
    stored = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    skeleton = Skeleton(build_skeleton(model.config))
    skeleton.fill_resident(stored.__getitem__)

    def visit(station, calls):
        act(skeleton.parameters_of(station), calls[0])
        return [call.run() for call in calls]

    tokens = torch.randint(3, 120, (4, 24), generator=torch.Generator().manual_seed(1))
    run_streamed(skeleton, lambda name: stored[name].clone(), [tokens], visit=visit)


def short(name):
    return name.split(".", 3)[-1].removesuffix(".weight")


@pytest.mark.parametrize("model_type", WANTED)
def test_pairs_are_those_of_the_algebra(model_type):
    found = []

    def act(parameters, call):
        before = {name: one.clone() for name, one in parameters.items()}
        with InputWatch(parameters) as watch:
            repeatable(call).run()
        pairs, skipped = find_pairs(parameters, watch.seen, lambda: repeatable(call).run())
        made = {short(name): short(pair.producers[0]) for pair in pairs for name, _ in pair.consumers}
        found.append(made | dict.fromkeys(map(short, skipped)))
        assert all(torch.equal(before[name], one) for name, one in parameters.items()), "as they were"

    run_layers(model_type, act)
    first = found[0] if model_type != "deepseek_v3" else found[-1]
    assert {name: first.get(name, "not seen") for name in WANTED[model_type]} == WANTED[model_type]


@pytest.mark.parametrize("model_type", [*WANTED, "qwen3_next", "gpt_oss", "falcon", "jamba"])
def test_a_layer_with_moved_scales_computes_the_same(model_type):
    moved = []

    def act(parameters, call):
        with InputWatch(parameters) as watch:
            repeatable(call).run()
        wanted = repeatable(call).run()
        wanted = wanted if isinstance(wanted, torch.Tensor) else wanted[0]
        presets = {name: preset("int4-g128") for name in {one.parameter for one in watch.seen} if "gate.weight" not in name}
        changed, notes = absorb(parameters, watch.seen, presets, lambda name: torch.float32, lambda: repeatable(call).run())
        for name, values in changed.items():
            parameters[name].data.copy_(values)
        got = repeatable(call).run()
        got = got if isinstance(got, torch.Tensor) else got[0]
        assert float((got - wanted).abs().max()) <= 3e-5 * float(wanted.abs().max())
        moved.append(any("of what it was" in note for note in notes))

    run_layers(model_type, act)
    assert any(moved), "tiny random inputs differ enough for some scale to pay"


def test_moved_scales_travel_with_the_codes(tmp_path):
    what = subject("llama", tmp_path, "int4-g32")
    what.settings = Settings(method="data-free", absorb=True)
    calibrate_layers(what)
    found = open_calibrated(tmp_path, what.presets)
    assert found.plain and all("norm" in name for name in found.plain) and found.scaled <= set(what.presets)
    logits = {}
    for kind, provider in {
        "plain": what.provider,
        "data-free": quantized_provider(what.provider, what.presets, what.scale_dtype),
        "moved": quantized_provider(what.provider, what.presets, what.scale_dtype, calibrated=found),
    }.items():
        run_streamed(what.skeleton, provider, [what.chunks[0]], consume=lambda _, out, kind=kind: logits.update({kind: out}))
    # Without the norms that took the scales this would be another model.
    errors = {kind: float((logits[kind] - logits["plain"]).norm() / logits["plain"].norm()) for kind in ("data-free", "moved")}
    assert errors["moved"] < 1.1 * errors["data-free"], errors
