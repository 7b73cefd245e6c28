"""Calibrated codes: better than plain rounding on what they were given, resumable, the same over several processes."""

import threading
from dataclasses import replace

import pytest
import torch

from dayzero.calibrate.calibrated import open_calibrated
from dayzero.calibrate.gptq import MOST_DAMPING, inverse_factor, round_matrix, searched_scales
from dayzero.calibrate.inputs import MatrixName
from dayzero.calibrate.layer_files import FOLDER
from dayzero.calibrate.records import Settings
from dayzero.calibrate.run import Calibration, calibrate_layers, matrix
from dayzero.calibrate.skeleton import Skeleton, build_skeleton
from dayzero.calibrate.streamed import run_streamed, split_chunks
from dayzero.calibrate.variants import orientations, quantized_provider
from dayzero.core.errors import DayZeroError
from dayzero.weights.quantize.codes import decode, encode_plainly, quantize
from dayzero.weights.quantize.presets import PRESETS, preset
from tests.tiny.build import make_tiny_model

# Dense, transposed, experts as modules, stacked, stacked and transposed, all experts given all tokens, latent attention, gated
# delta and state-space hybrids, sliding, parallel blocks, per-layer inputs.
TYPES = ["llama", "gpt2", "gemma2", "falcon", "mixtral", "gpt_oss", "llama4_text", "deepseek_v3", "qwen3_next", "jamba", "jetmoe",
         "phi3", "gemma4", "kimi_linear"]  # fmt: skip


def correlated(columns=256, count=2000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    return mixed * torch.rand(columns, generator=generator) ** 2


def weight(rows=96, columns=256, seed=1):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def output_error(w, codes, one, x):
    return float(((decode(codes, one) - w) @ x.T).square().sum() / (w @ x.T).square().sum())


@pytest.mark.parametrize("name", PRESETS)
def test_feedback_lowers_the_error_of_the_output(name):
    one, w, x = preset(name), weight(), correlated()
    made = round_matrix(w, x.T @ x, one, torch.bfloat16)
    plain = output_error(w, quantize(w, one, torch.bfloat16), one, x)
    assert output_error(w, made.codes, one, x) < 0.7 * plain
    assert made.loss == pytest.approx(output_error(w, made.codes, one, x), rel=1e-3)
    assert made.data_free_loss == pytest.approx(plain, rel=1e-3)
    # The stored form's own dtypes and shapes.
    like = quantize(w, one, torch.bfloat16)
    assert made.codes.codes.dtype == like.codes.dtype and made.codes.codes.shape == like.codes.shape
    assert made.codes.scales.dtype == like.scales.dtype and made.codes.scales.shape == like.scales.shape
    assert (made.codes.zeros is None) == (like.zeros is None)


@pytest.mark.parametrize("name", ["int4-g32", "int4-g128-asym", "int8", "mxfp4", "fp8-block"])
def test_on_inputs_that_were_not_calibrated_with_too(name):
    one, w, x = preset(name), weight(), correlated(count=4000)
    made = round_matrix(w, x[:2000].T @ x[:2000], one, torch.bfloat16)
    plain = quantize(w, one, torch.bfloat16)
    assert output_error(w, made.codes, one, x[2000:]) < 0.8 * output_error(w, plain, one, x[2000:])


def test_searched_scales_are_never_worse_than_the_first_and_weigh_by_input():
    one, w = preset("int4-g32"), weight()
    importance = torch.rand(256, generator=torch.Generator().manual_seed(3)) ** 4

    def error(scales):
        codes = encode_plainly(w, scales, None, one)
        from dayzero.weights.quantize.codes import Codes

        return (decode(Codes(codes=codes, scales=scales), one) - w).square().mul(importance).sum()

    weighted, _ = searched_scales(w, importance, one, torch.float32)
    even, _ = searched_scales(w, torch.ones(256), one, torch.float32)
    plain = quantize(w, one, torch.float32).scales
    assert error(weighted) < error(even) < error(plain)


def test_columns_without_input_are_rounded_plainly():
    one, w, x = preset("int4-g128"), weight(), correlated()
    dead = [5, 100, 200]
    x[:, dead] = 0
    made = round_matrix(w, x.T @ x, one, torch.bfloat16, search_scales=False)
    assert made.dead_columns == 3
    plain = quantize(w, one, torch.bfloat16)
    assert torch.equal(made.codes.codes[:, dead], plain.codes[:, dead])


@pytest.mark.parametrize("case", ["zero", "one token", "huge", "indefinite"])
def test_a_hard_factorisation_raises_the_damping_and_says_so(case):
    x = correlated()
    products = {
        "zero": torch.zeros(256, 256), "one token": torch.outer(x[0], x[0]), "huge": (x.T @ x) * 1e30,
        "indefinite": (x.T @ x) - 2 * torch.diag((x.T @ x).diagonal().roll(1)).clamp_max(1e3) * (torch.arange(256) == 3),
    }[case]  # fmt: skip
    w, one = weight(), preset("int4-g32")
    made = round_matrix(w, products, one, torch.bfloat16)
    assert decode(made.codes, one).isfinite().all()
    assert made.loss <= made.data_free_loss
    if case == "indefinite":
        bad = torch.eye(8)
        bad[0, 1] = bad[1, 0] = 1.5
        inverse, used, notes = inverse_factor(bad)
        assert used > 0.01 and "damping raised" in notes[0] and inverse.isfinite().all()
        bad[0, 1] = bad[1, 0] = 1e4
        inverse, used, notes = inverse_factor(bad)
        assert used >= MOST_DAMPING and "no usable inverse" in notes[-1] and torch.equal(inverse, torch.eye(8))


def subject(model_type, folder, name="int8", *, length=32, count=16, **options):
    model = make_tiny_model(model_type)
    model.requires_grad_(False)
    stored = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    skeleton = Skeleton(build_skeleton(model.config))
    width = preset(name).block[1] if preset(name).block[0] == 1 else 1
    presets = {
        name_: preset(name) for layer in skeleton.layers for name_, p in skeleton.parameters_of(layer).items()
        if p.dim() in (2, 3) and min(p.shape[-2:]) >= 16 and "conv" not in name_ and "bias" not in name_
        and all(size % (width or 1) == 0 for size in p.shape[-2:])
    }  # fmt: skip
    tokens = torch.randint(3, 120, (count, length), generator=torch.Generator().manual_seed(1))
    return Calibration(skeleton=skeleton, provider=stored.__getitem__, presets=presets, scale_dtype=lambda _: torch.float32,
                       chunks=split_chunks(tokens, 4), folder=folder, **options)  # fmt: skip


@pytest.mark.parametrize("model_type", TYPES)
def test_kinds_of_layers_calibrate(model_type, tmp_path):
    what = subject(model_type, tmp_path)
    calibrate_layers(what)
    found = open_calibrated(tmp_path, what.presets)
    calibrated = [one for one in found.matrices if one.method == "gptq"]
    assert len(calibrated) > 0.8 * len(found.matrices) and not found.unseen
    assert all(one.tokens < 32 for one in found.starved), "the others have a reason of their own"
    assert all(one.loss <= one.data_free_loss for one in calibrated)
    assert sum(one.loss for one in calibrated) < 0.8 * sum(one.data_free_loss for one in calibrated)
    for name in what.presets:  # what is decoded is the weight, in its own orientation
        stored, read = what.provider(name), found.codes(name)
        rows = stored.shape[-1 if name in found.transposed else -2]
        for index in range(found.layer_codes.matrices[name]):
            values = matrix(stored, index, name in found.transposed)
            made = decode(read(index * rows, (index + 1) * rows), what.presets[name])
            assert float((made - values).norm() / values.norm()) < 0.05, (name, index)
    # A run with the codes is what went from layer to layer, and is near the plain model.
    logits = {}
    for kind, provider in {"plain": what.provider, "made": quantized_provider(what.provider, what.presets, what.scale_dtype,
                                                                             calibrated=found)}.items():  # fmt: skip
        run_streamed(what.skeleton, provider, [what.chunks[0]], consume=lambda _, out, kind=kind: logits.update({kind: out}))
    # A router's near ties go either way with any change, so that of experts only the typical token is held.
    errors = (logits["made"] - logits["plain"]).norm(dim=-1) / logits["plain"].norm(dim=-1)
    assert float(errors.median()) < 0.1


def test_orientations_are_those_of_the_class(tmp_path):
    what = subject("gpt_oss", tmp_path)
    found = orientations(what.skeleton, what.provider, what.chunks[0])
    assert {name.rpartition(".")[2] for name in found} == {"gate_up_proj", "down_proj"}


def layer_bytes(folder):
    return {path.name: path.read_bytes() for path in (folder / FOLDER).glob("*.safetensors")}


def test_an_interrupted_run_goes_on_and_a_broken_file_is_made_again(tmp_path):
    whole = subject("mixtral", tmp_path / "whole")
    calibrate_layers(whole)
    wanted = layer_bytes(tmp_path / "whole")
    assert len(wanted) == 2

    what = subject("mixtral", tmp_path / "again")
    asked = []
    limit = {"left": 1}

    def provide(name):
        asked.append(name)
        if ".layers.1." in name and limit["left"]:
            raise KeyboardInterrupt
        return whole.provider(name)

    what.provider = provide
    with pytest.raises(KeyboardInterrupt):
        calibrate_layers(what)
    first = tmp_path / "again" / FOLDER / "model.layers.0.safetensors"
    stamp = first.stat().st_mtime_ns
    limit["left"] = 0
    calibrate_layers(what)
    assert layer_bytes(tmp_path / "again") == wanted and first.stat().st_mtime_ns == stamp

    second = tmp_path / "again" / FOLDER / "model.layers.1.safetensors"
    damaged = bytearray(second.read_bytes())
    damaged[-1] ^= 1
    second.write_bytes(damaged)
    with pytest.raises(DayZeroError, match="not finished"):
        open_calibrated(tmp_path / "again", what.presets)
    calibrate_layers(what)
    assert layer_bytes(tmp_path / "again") == wanted

    with pytest.raises(DayZeroError, match="another calibration"):
        calibrate_layers(replace(what, settings=Settings(method="scales")))


def test_room_for_sums_changes_passes_and_nothing_else(tmp_path):
    one = subject("mixtral", tmp_path / "one")
    few = subject("mixtral", tmp_path / "few")
    few.settings = Settings(statistics_bytes=40_000)
    calibrate_layers(one)
    calibrate_layers(few)
    assert layer_bytes(tmp_path / "one") == layer_bytes(tmp_path / "few")
    import json

    record = json.loads((tmp_path / "few" / FOLDER / "model.layers.0.json").read_text())
    assert record["passes"] > 1


def test_two_processes_make_what_one_makes(tmp_path):
    one = subject("mixtral", tmp_path / "one")
    calibrate_layers(one)
    parts = [subject("mixtral", tmp_path / "two", part=number, parts=2, wait_s=60) for number in range(2)]
    threads = [threading.Thread(target=calibrate_layers, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = open_calibrated(tmp_path / "one", one.presets), open_calibrated(tmp_path / "two", one.presets)
    assert {one.parameter for one in first.matrices} == {one.parameter for one in second.matrices}
    for name in one.presets:
        for index in range(first.layer_codes.matrices[name]):
            a, b = (made.layer_codes.read(MatrixName(name, index)) for made in (first, second))
            assert torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales), (name, index)
    shares = [len(list((tmp_path / "two" / FOLDER).glob(f"*part-{number}-of-2.safetensors"))) for number in range(2)]
    assert shares == [2, 2]


def test_a_part_that_is_alone_says_what_is_missing(tmp_path):
    with pytest.raises(DayZeroError, match="another process has not finished"):
        calibrate_layers(subject("llama", tmp_path, part=0, parts=2, wait_s=0.3))


def test_starved_experts_are_data_free_and_named(tmp_path):
    what = subject("mixtral", tmp_path, "int4-g32", count=2, length=16)
    calibrate_layers(what)
    found = open_calibrated(tmp_path, what.presets)
    assert found.starved
    for one in found.starved:
        assert ("experts" in one.parameter and one.tokens < 32 and "fewer than 32" in one.reason) or "no token" in one.reason
        values = matrix(what.provider(one.parameter), one.index, one.parameter in found.transposed)
        plain = quantize(values, what.presets[one.parameter], torch.float32)
        assert torch.equal(found.layer_codes.read(MatrixName(one.parameter, one.index)).codes, plain.codes)


@pytest.mark.parametrize("name", ["int4-g32", "mxfp4", "fp8-block", "int4-g32-asym"])
def test_codes_come_back_by_rows(name, tmp_path):
    what = subject("mixtral", tmp_path, name)
    calibrate_layers(what)
    found = open_calibrated(tmp_path, what.presets)
    parameter = next(one for one in what.presets if "experts" in one)
    read = found.codes(parameter)
    rows = what.provider(parameter).shape[-2]
    whole = read(0, 2 * rows)
    second = read(rows, 2 * rows)
    assert torch.equal(whole.codes[rows:].view(torch.uint8), second.codes.view(torch.uint8))
    if what.presets[parameter].block[0] == 1:
        part = read(rows + 3, rows + 9)
        assert torch.equal(part.codes.view(torch.uint8), second.codes[3:9].view(torch.uint8))
        assert torch.equal(part.scales, second.scales[3:9])
    assert found.codes("no.such.weight") is None


def test_inputs_have_a_scale_where_the_preset_wants_one(tmp_path):
    what = subject("llama", tmp_path, "w8a8-static")
    calibrate_layers(what)
    found = open_calibrated(tmp_path, what.presets)
    scales = found.input_scales
    assert set(scales) == set(what.presets)
    largest = next(one for one in found.matrices if one.parameter.endswith("0.self_attn.q_proj.weight")).input_max
    assert scales["model.layers.0.self_attn.q_proj.weight"] == pytest.approx(largest / 127)
    # q, k and v are given the same.
    assert len({scales[f"model.layers.0.self_attn.{one}_proj.weight"] for one in "qkv"}) == 1
