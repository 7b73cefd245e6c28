"""Engines whose weights stay in few bits answer as the plain module does whose weights are the numbers the codes stand for."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from dayzero.core.errors import DayZeroError
from dayzero.ops.cpu import load as load_kernels
from dayzero.ops.quantized import rounded_activations
from dayzero.runtime import load as loading
from dayzero.runtime.load import EngineSpec, load_engine
from dayzero.runtime.package import PackagedLayer
from dayzero.runtime.quantized import QuantizedLinear, QuantizedStack, resident
from dayzero.runtime.subject import EngineSubject
from dayzero.weights.quantize.presets import preset
from tests.model.engine_builders import greedy, make_prompts, run_requests, tokens_of
from tests.model.quantized_artifacts import make_quantized_artifact
from tests.model.test_engine import LOGIT_LIMIT, assert_greedy, make_reference, reference_logits

TRANSPOSED = {"gpt_oss": ("experts.",), "llama4_text": ("feed_forward.experts.",)}
SOME_SCALE = 0.05  # of inputs, where a preset has one for all rows
EVERY = ("int8", "int8-g32", "int8-asym", "int4-g32", "int4-g32-asym", "fp8", "fp8-block", "mxfp4", "w8a8", "w8a8-static")
# Dense; stacked experts; experts kept [input, output]; latent attention; a hybrid with recurrent layers; experts outside the interface.
CASES = [("llama", name) for name in EVERY]
CASES += [("mixtral", name) for name in ("int8", "int4-g32-asym", "mxfp4", "w8a8", "fp8")]
CASES += [("gpt_oss", name) for name in ("int8", "int4-g32", "mxfp4")]
CASES += [
    ("deepseek_v3", "int8"),
    ("deepseek_v3", "int4-g32"),
    ("qwen3_next", "int8"),
    ("qwen3_next", "w8a8"),
    ("llama4_text", "int8"),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("quantized")


def make_parts(model_type, name, tiny_checkpoint, folder, **options):
    checkpoint = tiny_checkpoint(model_type, dtype="float32")
    scale = SOME_SCALE if "static" in name else None
    return checkpoint, *make_quantized_artifact(
        checkpoint, folder, name, transposed=TRANSPOSED.get(model_type, ()), input_scale=scale, **options
    )


def make_quantized_engine(artifact: Path, **settings):
    values = dict(
        context_tokens=256, max_sequences=8, pool_tokens=2048, block_tokens=4, chunk_tokens=16, dtype="float32", threads=1
    )
    return load_engine(EngineSpec(artifact=str(artifact), model="quantized", **(values | settings)))


def make_plain(checkpoint, numbers):
    """The class's own module with the numbers put in; which storages they are in."""
    reference = make_reference(checkpoint)
    for module in reference.modules():
        if hasattr(module, "is_transposed"):  # a loop over experts, whose products are linears
            module.config._experts_implementation_internal = "eager"
    with torch.no_grad():
        parameters = dict(reference.named_parameters())
        for name, values in numbers.items():
            parameters[name].copy_(values)
    return reference, {parameters[name].untyped_storage().data_ptr() for name in numbers}


@contextmanager
def rounding_inputs(name, storages, monkeypatch):
    """While it lasts, `linear` with one of these weights rounds what it is given as the preset says."""
    one, linear = preset(name), F.linear
    kind = "none" if one.activations is None else "int8" if one.number == "int" else "fp8"
    scale = torch.tensor([SOME_SCALE]) if one.activations == "tensor" else None

    def rounded(x, weight, bias=None):
        if weight.untyped_storage().data_ptr() in storages:
            x = rounded_activations(x, kind, scale)
        return linear(x, weight, bias)

    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", rounded)
        yield


@pytest.mark.parametrize(("model_type", "name"), CASES)
def test_logits_are_those_of_the_numbers_that_codes_stand_for(model_type, name, tiny_checkpoint, folder, monkeypatch):
    checkpoint, artifact, numbers = make_parts(model_type, name, tiny_checkpoint, folder)
    engine = make_quantized_engine(artifact)
    held = resident(engine.runner.model.module)
    assert held.presets == (name,) and held.num_quantized == len(numbers)
    assert any("bits a number" in reason for reason in engine.info.tier_reasons)
    assert (held.whole_stacks > 0) == (model_type == "llama4_text")
    reference, storages = make_plain(checkpoint, numbers)
    text = make_prompts([61], seed=9)[0]
    with rounding_inputs(name, storages, monkeypatch):
        want = reference_logits(reference, text)
    scored = torch.from_numpy(EngineSubject(engine).score(text))
    errors = (scored - want).abs().amax(-1)
    if preset(name).activations is None:
        assert float(errors.max()) < LOGIT_LIMIT, engine.info.tier
    else:
        # The last bit of an input decides between two codes, and then a row (and, a little, those that attend to it) is off
        # by a code: a few rows may be, by less than a tenth of the step of what is compared.
        off = errors > LOGIT_LIMIT
        assert float(off.float().mean()) <= 0.25 and float(errors.median()) < LOGIT_LIMIT / 10, errors
        assert float(errors.max()) < 0.05 * float(want.abs().max()), errors
    engine.close()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("tier", ["T2", "T1", "T0"])
def test_every_tier_answers_requests_alone_and_among_others(tier, kernels, tiny_checkpoint, folder):
    checkpoint, artifact, numbers = make_parts("llama", "int4-g32", tiny_checkpoint, folder)
    reference, _ = make_plain(checkpoint, numbers)
    engine = make_quantized_engine(artifact, tier=tier, kernels=kernels)
    assert engine.info.tier == tier
    linears = [one for one in engine.runner.model.module.modules() if isinstance(one, QuantizedLinear)]
    assert len(linears) == len(numbers) and all(
        one.compiled == (kernels == "auto" and load_kernels().available) for one in linears
    )
    prompts = make_prompts([1, 7, 16, 33, 50])
    alone = run_requests(engine, {"a": (prompts[3], greedy(12))})["a"]
    together = run_requests(engine, {f"r{i}": (prompt, greedy(12)) for i, prompt in enumerate(prompts)}, every=2)
    compared = [assert_greedy(reference, prompt, tokens_of(together[f"r{i}"])) for i, prompt in enumerate(prompts)]
    assert sum(compared) > 30, f"too many ties to compare: {compared}"
    assert tokens_of(together["r3"]) == tokens_of(alone)
    engine.close()
    assert all(one.site.tolist() == [-1, -1] for one in linears)


@pytest.mark.parametrize("name", ["int4-g32-asym", "w8a8"])
def test_compiled_layers_take_the_parts_as_inputs(name, tiny_checkpoint, folder, tmp_path, monkeypatch):
    if not load_kernels().available:
        pytest.skip("no C++ compiler on this machine: layers run as modules there")
    monkeypatch.setattr(loading, "cache_folder", lambda kind: tmp_path)
    _, artifact, _ = make_parts("llama", name, tiny_checkpoint, folder)
    plain, compiled = make_quantized_engine(artifact, compile="off"), make_quantized_engine(artifact, compile="on")
    layers = list(compiled.runner.model.layers)
    assert all(isinstance(layer, PackagedLayer) for layer in layers), compiled.info.tier_reasons
    text = make_prompts([40], seed=3)[0]
    want, got = (torch.from_numpy(EngineSubject(engine).score(text)) for engine in (plain, compiled))
    errors = (got - want).abs().amax(-1)  # of w8a8 a few codes may differ, as above
    assert float(errors.max()) < 1e-4 or (name == "w8a8" and float(errors.median()) < 1e-5), errors
    plain.close()
    compiled.close()


def test_layers_with_quantized_experts_stay_modules_and_say_why(tiny_checkpoint, folder):
    if not load_kernels().available:
        pytest.skip("no C++ compiler on this machine: layers run as modules there")
    _, artifact, _ = make_parts("mixtral", "int8", tiny_checkpoint, folder)
    engine = make_quantized_engine(artifact, compile="on")
    assert any("not compiled: their experts" in reason for reason in engine.info.fallbacks)
    assert not engine.info.batch_invariant
    engine.close()


def test_whoever_reads_a_weight_finds_the_numbers(tiny_checkpoint, folder):
    _, artifact, numbers = make_parts("gpt_oss", "int4-g32", tiny_checkpoint, folder)
    engine = make_quantized_engine(artifact)
    module = engine.runner.model.module
    seen = 0
    for name, want in numbers.items():
        owner, _, leaf = name.rpartition(".")
        held = getattr(module.get_submodule(owner), leaf)
        seen += isinstance(held, QuantizedStack)
        assert tuple(held.shape) == tuple(want.shape) and held.dtype == torch.float32
        assert torch.equal(held[1], want[1]) and torch.equal(held[torch.tensor(2)], want[2])
        if isinstance(held, QuantizedStack):
            assert torch.equal(held[torch.tensor([2, 0])], want[[2, 0]]) and torch.equal(held[1:3], want[1:3])
            assert torch.equal(torch.abs(held), want.abs())
            assert held.whole_uses == 1 and torch.equal(held.transpose(1, 2), want.transpose(1, 2))
    assert seen
    engine.close()


def test_in_bfloat16_a_request_is_the_same_bits_in_any_company(tiny_checkpoint, folder):
    if not load_kernels().available:
        pytest.skip("torch's own products depend on their rows")
    for name in ("int4-g32", "w8a8"):
        _, artifact, _ = make_parts("llama", name, tiny_checkpoint, folder)
        for sequences in (4, 16):  # row kernels and tiles
            engine = make_quantized_engine(artifact, dtype="bfloat16", max_sequences=sequences)
            assert engine.info.batch_invariant
            prompts = make_prompts([13, 9, 40, 5], seed=4)
            alone = run_requests(engine, {"a": (prompts[0], greedy(16, top_logprobs=2))})["a"]
            engine.reset_prefix_cache()
            together = run_requests(
                engine,
                {n: (p, greedy(16, top_logprobs=2)) for n, p in zip("xyaz", [*prompts[1:3], prompts[0], prompts[3]])},
                every=1,
            )
            assert [one.logprob for one in together["a"]] == [one.logprob for one in alone]
            engine.close()


def test_what_does_not_fit_is_refused(tiny_checkpoint, folder):
    _, artifact, _ = make_parts("llama", "int8", tiny_checkpoint, folder)
    text = (artifact / "quantization.json").read_text()
    for before, after, says in (
        ('"model.layers.0.self_attn.q_proj.weight"', '"model.layers.0.self_attn.x_proj.weight"', "class does not have"),
        ('"preset": "int8"', '"preset": "int8-g32"', "shape"),
        ('"preset": "int8"', '"preset": "w8a8-static"', "scale of its inputs"),
    ):
        assert before in text
        (artifact / "quantization.json").write_text(text.replace(before, after))
        with pytest.raises(DayZeroError, match=says):
            make_quantized_engine(artifact)
    (artifact / "quantization.json").write_text(text)
