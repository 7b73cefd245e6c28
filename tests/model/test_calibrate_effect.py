"""On a small trained model: what measuring says, that calibration is better than plain rounding, and the search's promises."""

import copy
import itertools
import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dayzero.calibrate.calibrated import open_calibrated
from dayzero.calibrate.effect import TokenSums, kl_difference, measure_effect, measure_sums
from dayzero.calibrate.records import Settings
from dayzero.calibrate.run import Calibration, calibrate_layers
from dayzero.calibrate.search import (
    PLAIN,
    Sensitivity,
    Subject,
    best_combinations,
    measure_sensitivities,
    search_quality,
    stored_bytes,
)
from dayzero.calibrate.skeleton import Skeleton, build_skeleton
from dayzero.calibrate.streamed import split_chunks
from dayzero.calibrate.text import byte_encoder, read_sequences
from dayzero.calibrate.variants import quantized_provider
from dayzero.core.cachedir import cache_folder
from dayzero.core.errors import DayZeroError
from dayzero.core.records import from_dict, to_dict
from dayzero.weights.quantize.presets import preset
from scripts.train_small import train

VERSION = 2  # of the recipe: another number trains anew
SEQUENCES = read_sequences(None, byte_encoder(256), length=128, calibration=64, held_out=32)
HELD_OUT = split_chunks(torch.tensor(SEQUENCES.held_out), 8)


class Trained:
    """A trained model's weights by name, and what runs on them."""

    def __init__(self, kind):
        folder = cache_folder("test-models") / f"tiny-{kind}-{VERSION}-{torch.__version__}"
        if not (folder / "config.json").is_file():
            scrap = folder.with_name(folder.name + ".new")
            train(kind, scrap, steps=150, tiny=True, quiet=True)
            scrap.rename(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
        self.stored = dict(self.model.named_parameters())
        self.names = [
            name for name, one in self.stored.items()
            if one.dim() >= 2 and ".layers." in name and "gate.weight" not in name.removesuffix("mlp.gate_proj.weight")
        ]  # fmt: skip

    def skeleton(self):
        return Skeleton(build_skeleton(self.model.config))

    def calibrate(self, name, folder, **settings):
        presets = dict.fromkeys(self.names, preset(name))
        what = Calibration(skeleton=self.skeleton(), provider=self.stored.__getitem__, presets=presets, folder=folder,
                           scale_dtype=lambda _: torch.bfloat16, settings=Settings(**settings),
                           chunks=split_chunks(torch.tensor(SEQUENCES.calibration), 8))  # fmt: skip
        calibrate_layers(what)
        return open_calibrated(folder, presets)

    def provider(self, name, calibrated=None):
        return quantized_provider(self.stored.__getitem__, dict.fromkeys(self.names, preset(name)), lambda _: torch.bfloat16,
                                  calibrated=calibrated)  # fmt: skip


@pytest.fixture(scope="module")
def dense():
    return Trained("dense")


@pytest.fixture(scope="module")
def moe():
    return Trained("moe")


@pytest.mark.parametrize("name", ["int4-g128", "int4-g32", "mxfp4", "int4-g32-asym"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_calibrated_is_better_than_data_free_on_text_not_calibrated_on(kind, name, request, tmp_path):
    model = request.getfixturevalue(kind)
    if any(model.stored[one].shape[-1] % preset(name).block[1] for one in model.names):
        pytest.skip("a width is no multiple of the group")
    calibrated = model.calibrate(name, tmp_path)
    variants = [(model.skeleton(), model.provider(name)), (model.skeleton(), model.provider(name, calibrated))]
    plain, made = measure_sums(model.skeleton(), model.stored.__getitem__, variants, HELD_OUT)
    less = kl_difference(made, plain)
    assert less.high < 0, less  # the whole interval
    assert made.effect().kl.value < 0.6 * plain.effect().kl.value
    assert made.effect().top1.value > plain.effect().top1.value


def test_the_figures_are_what_whole_models_give(dense):
    effect = measure_effect(
        (dense.skeleton(), dense.skeleton()), dense.stored.__getitem__, dense.provider("int4-g32"), HELD_OUT
    )
    other = copy.deepcopy(dense.model)
    provide = dense.provider("int4-g32")
    for name, parameter in other.named_parameters():
        parameter.copy_(provide(name))
    tokens = torch.tensor(SEQUENCES.held_out)
    first, second = (torch.log_softmax(one(input_ids=tokens).logits[:, :-1].double(), -1) for one in (dense.model, other))
    assert effect.kl.value == pytest.approx(float((first.exp() * (first - second)).sum(-1).mean()), rel=1e-3)
    assert effect.top1.value == pytest.approx(float((first.argmax(-1) == second.argmax(-1)).double().mean()), abs=2e-3)
    loss = -second.gather(-1, tokens[:, 1:, None]).mean()
    assert effect.perplexity.value == pytest.approx(float(loss.exp()), rel=1e-4)
    assert effect.num_tokens == tokens.shape[0] * (tokens.shape[1] - 1)
    assert effect.kl.low < effect.kl.value < effect.kl.high
    assert from_dict(type(effect), json.loads(json.dumps(to_dict(effect)))) == effect


def test_nothing_quantized_has_no_effect(dense):
    provider = dense.stored.__getitem__
    effect = measure_effect((dense.skeleton(), dense.skeleton()), provider, provider, HELD_OUT[:1])
    assert effect.kl.value == 0 and effect.top1.value == 1 and effect.perplexity_ratio.value == 1


def test_intervals_hold_the_mean_about_as_often_as_they_say():
    """Of 200 samples of 24 sequences with a known mean, 95% intervals of a bootstrap hold it in a little under 95%."""
    held = 0
    for seed in range(200):
        values = np.random.default_rng(seed).gamma(4.0, 0.25, 24)
        figure = TokenSums(kl=values, top1=values, original=values, quantized=values, tokens=24).effect(seed).kl
        held += figure.low <= 1.0 <= figure.high
    assert 0.86 <= held / 200 <= 0.98


def test_error_feedback_beats_scales_alone_and_more_text_is_not_worse(dense, tmp_path):
    losses = {}
    for method in ("scales", "gptq"):
        found = dense.calibrate("int4-g32", tmp_path / method, method=method)
        losses[method] = sum(one.loss for one in found.matrices)
        assert all(one.loss <= one.data_free_loss for one in found.matrices)
    assert losses["gptq"] < losses["scales"]


# The search.


def made_subject(model, calibrated=None):
    roles = {"attention": {}, "mlp": {}}
    for name in model.names:
        roles["attention" if "attn" in name else "mlp"][name] = tuple(model.stored[name].shape)
    return Subject(skeletons=model.skeleton, provider=model.stored.__getitem__, roles=roles, chunks=HELD_OUT[:2],
                   scale_dtype=lambda _: torch.bfloat16, transposed=frozenset(), calibrated=calibrated or {})  # fmt: skip


def test_the_search_meets_its_bound_at_the_smallest_size_that_was_measured(dense, tmp_path):
    presets = {name: preset(name) for name in ("int4-g128", "int4-g32", "int8", "mxfp4")}
    subject = made_subject(dense, {"int4-g32": dense.calibrate("int4-g32", tmp_path)})
    sensitivities = measure_sensitivities(subject, presets)
    assert len(sensitivities) == 2 * (len(presets) + 1)
    kl = {(one.role, one.preset): one.kl for one in sensitivities}
    assert all(kl[role, PLAIN] == 0 < kl[role, "int8"] < kl[role, "int4-g128"] for role in subject.roles)
    # Calibrated codes are used where there are some.
    assert all(kl[role, "int4-g32"] < 0.6 * kl[role, "mxfp4"] for role in subject.roles)
    between = math.sqrt(kl["mlp", "int8"] * kl["mlp", "int4-g32"])
    found = search_quality(subject, presets, sensitivities, max_kl=between)
    assert found.chosen.measured is not None and found.chosen.measured.kl.value <= between
    assert found.chosen.presets["mlp"] == "int8"
    # Every combination that the sums call smaller and good enough was tried, and none is left.
    smaller = [one for one in found.frontier if one.num_bytes < found.chosen.num_bytes and one.predicted_kl <= between]
    assert all(one.measured is not None for one in smaller)
    with pytest.raises(DayZeroError, match="no precision"):
        search_quality(subject, presets, sensitivities, max_kl=1e-12)


def test_the_frontier_is_that_of_all_combinations():
    generator = np.random.default_rng(0)
    sensitivities = [
        Sensitivity(role=f"role{r}", preset=f"p{p}", num_bytes=int(generator.integers(1, 40)), kl=float(generator.random()))
        for r in range(4) for p in range(4)
    ]  # fmt: skip
    by_role = [[one for one in sensitivities if one.role == f"role{r}"] for r in range(4)]
    every = [(sum(one.num_bytes for one in made), sum(one.kl for one in made)) for made in itertools.product(*by_role)]
    wanted = sorted({one for one in every if not any(o != one and o[0] <= one[0] and o[1] <= one[1] for o in every)})
    got = [(one.num_bytes, one.predicted_kl) for one in best_combinations(sensitivities)]
    assert [size for size, _ in got] == [size for size, _ in wanted]
    assert [kl for _, kl in got] == pytest.approx([kl for _, kl in wanted])


def test_a_bound_that_sums_miss_is_tried_again(dense, monkeypatch):
    """Where whole models diverge more than their roles' sum says, the search allows for it."""
    presets = {"int4-g32": preset("int4-g32"), "int8": preset("int8")}
    subject = made_subject(dense)
    sensitivities = measure_sensitivities(subject, presets)
    hopeful = [Sensitivity(role=one.role, preset=one.preset, num_bytes=one.num_bytes, kl=one.kl / 3) for one in sensitivities]
    whole = subject.effects([dict.fromkeys(subject.roles, preset("int4-g32"))])[0].kl.value
    found = search_quality(subject, presets, hopeful, max_kl=0.7 * whole)
    assert len(found.tried) > 1 and found.tried[0].measured.kl.value > 0.7 * whole
    assert found.chosen.measured.kl.value <= 0.7 * whole


@pytest.mark.parametrize("name", ["int8", "int4-g32", "int4-g32-asym", "mxfp4", "fp8", "fp8-block"])
def test_sizes_are_those_of_the_stored_parts(name):
    from dayzero.weights.algebra import View
    from dayzero.weights.quantize.encoding import Quantized

    one = preset(name)
    parts = Quantized(name="w", view=View.of("w", (3, 130, 256), "bfloat16"), preset=one, sources=()).stored_parts(
        packed_zeros=False
    )
    wanted = sum(math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in parts.values())
    assert stored_bytes((3, 130, 256), one, torch.bfloat16) == wanted
    assert stored_bytes((3, 256, 130), one, torch.bfloat16, turned=True) == wanted
