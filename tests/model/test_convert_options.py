"""What `convert` can be asked for beside plain rank shards, end to end: other dtypes and forms, fewer bits, other containers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dayzero.conversion import Request, convert_release
from dayzero.core.artifact import ArtifactQuantization
from dayzero.core.errors import DayZeroError
from dayzero.core.plan import Layout
from dayzero.core.records import read_record
from dayzero.model.describe import describe
from dayzero.weights.changes import Changes
from dayzero.weights.convert import convert
from dayzero.weights.proof.verify import prove
from dayzero.weights.quantize.codes import decode, quantize
from dayzero.weights.quantize.policy import Policy
from dayzero.weights.quantize.presets import preset
from tests.tiny.build import make_tiny_checkpoint

Tiny = Callable[[str], Path]
LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=2, ep=2)]


def quiet(text: str) -> None:
    pass


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.rglob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe") / "release"
    make_tiny_checkpoint("qwen3_moe", folder)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: one.spelled())
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_rank_shards_in_fewer_bits_are_the_definition_and_are_proved(tmp_path: Path, model_type: str, layout: Layout) -> None:
    """Stacked experts, transposed ones, and cuts that do not fall between groups."""
    source = tmp_path / "release"
    make_tiny_checkpoint(model_type, source)
    model = describe(source)
    report = convert(source, model, layout, tmp_path / "out", changes=Changes(quantize=Policy(preset="int8")))
    record = read_record(ArtifactQuantization, tmp_path / "out" / "quantization.json")
    assert report.quantize == record and len(record.parameters) == len(record.errors) > 0
    assert {one.transposed for one in record.parameters if "experts" in one.name} == {model_type == "gpt_oss"}
    assert all(0 < one.relative < 0.01 for one in record.errors) and any("router" in why for why in record.kept.values())
    proved = prove(tmp_path / "out", source)
    assert proved.problems == () and proved.not_proved == () and len(proved.proved) == 4
    # One matrix by hand: the codes of rank 0 are those of the whole weight.
    name = "model.layers.0.self_attn.q_proj.weight"
    plain = all_tensors(source)[name]
    stored = load_file(
        next(path for path in (tmp_path / "out" / "rank-00000").glob("*.safetensors") if f"{name}_scale" in load_file(path))
    )
    wanted = quantize(plain, preset("int8"), torch.bfloat16)
    rows = stored[f"{name}_scale"].shape[0]
    assert rows == plain.shape[0] // layout.tp and torch.equal(stored[f"{name}_scale"], wanted.scales[:rows])


def test_a_flipped_code_is_found_against_the_source_alone(moe: Path, tmp_path: Path) -> None:
    """Consistent with its own ledger or not, a code that is not the weight's is named."""
    convert(moe, describe(moe), Layout(), tmp_path / "out", changes=Changes(quantize=Policy(preset="int4-g32")))
    shard = next((tmp_path / "out").rglob("model-*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert {problem.kind for problem in prove(tmp_path / "out", moe).problems} == {"checksum"}


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_transformers_loads_a_quantized_folder_and_computes_with_our_numbers(moe: Path, tmp_path: Path, name: str) -> None:
    report = convert_release(
        Request(path=str(moe), out=str(tmp_path / "out"), to="hf", quantize=name, keep=("attention",)), quiet
    )
    assert report["quantize"]["errors"] and "kept: attention" in report["quantize"]["kept"].values()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(moe, dtype=torch.bfloat16)
    one = preset(name)
    with torch.no_grad():
        for parameter, tensor in plain.named_parameters():
            if parameter.endswith("experts.gate_up_proj"):  # [experts, gate and up, hidden]: each projection by itself
                halves = [
                    decode(quantize(half, one, torch.bfloat16), one, torch.bfloat16)
                    for each in tensor
                    for half in each.chunk(2)
                ]
                tensor.copy_(torch.cat(halves).reshape(tensor.shape))
            elif parameter.endswith("experts.down_proj") and one.unfit(tensor.shape[-1], on_disk=True) is None:
                tensor.copy_(torch.stack([decode(quantize(each, one, torch.bfloat16), one, torch.bfloat16) for each in tensor]))
    ids = torch.arange(3, 40)[None]
    assert torch.equal(loaded(ids).logits, plain(ids).logits)


def test_experts_of_a_layer_are_stored_alike_or_not_at_all(moe: Path, tmp_path: Path) -> None:
    """48 columns hold no whole groups of 32: the other projections of those experts stay too, and it is said."""
    report = convert_release(Request(path=str(moe), out=str(tmp_path / "out"), to="hf", quantize="int4-g32"), quiet)["quantize"]
    assert {one["name"].split(".")[3] for one in report["parameters"]} == {"self_attn"}
    assert any("no multiple of 32" in why for why in report["kept"].values())
    assert "stored alike" in report["kept"]["model.layers.0.mlp.experts.0.up_proj.weight"]


def test_another_dtype_and_back_out_of_codes(moe: Path, tmp_path: Path) -> None:
    convert_release(Request(path=str(moe), out=str(tmp_path / "half"), to="hf", dtype="float16"), quiet)
    before, after = all_tensors(moe), all_tensors(tmp_path / "half")
    assert before.keys() == after.keys()
    assert all(
        torch.equal(tensor.to(torch.float16) if tensor.dtype == torch.bfloat16 else tensor, after[name])
        for name, tensor in before.items()
    )
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"
    convert_release(Request(path=str(moe), out=str(tmp_path / "fp8"), to="hf", quantize="fp8-block"), quiet)
    convert_release(Request(path=str(tmp_path / "fp8"), out=str(tmp_path / "plain"), to="hf", dtype="bf16"), quiet)
    plain = all_tensors(tmp_path / "plain")
    assert plain.keys() == before.keys() and not any("scale" in name for name in plain)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    one = preset("fp8-block")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(plain[name], decode(quantize(before[name], one, torch.bfloat16), one, torch.bfloat16))


def test_pickles_need_their_flag_and_give_the_same_shards(moe: Path, tmp_path: Path) -> None:
    source = tmp_path / "pickled"
    source.mkdir()
    for path in moe.iterdir():
        if "safetensors" not in path.name:
            (source / path.name).write_bytes(path.read_bytes())
    torch.save(all_tensors(moe), source / "pytorch_model.bin")
    with pytest.raises(DayZeroError, match="allow-pickle"):
        convert_release(Request(path=str(source), out=str(tmp_path / "out"), degrees=one_rank()), quiet)
    assert not (tmp_path / "out").exists()
    convert_release(Request(path=str(source), out=str(tmp_path / "out"), degrees=one_rank(), allow_pickle=True), quiet)
    convert_release(Request(path=str(moe), out=str(tmp_path / "wanted"), degrees=one_rank()), quiet)
    found, wanted = all_tensors(tmp_path / "out"), all_tensors(tmp_path / "wanted")
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_gguf_goes_out_and_comes_in(tmp_path: Path) -> None:
    source = tmp_path / "release"
    make_tiny_checkpoint("llama", source, tokenizer=False)
    convert_release(Request(path=str(source), out=str(tmp_path / "x.gguf"), to="gguf", quantize="bf16"), quiet)
    convert_release(Request(path=str(tmp_path / "x.gguf"), out=str(tmp_path / "back"), to="hf"), quiet)
    before, after = all_tensors(source), all_tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def one_rank() -> dict[str, int]:
    return {"tp": 1, "pp": 1, "dp": 1, "cp": 1, "ep": 1}


def test_values_that_speak_against_a_checkpoint_stop_it_unless_they_are_accepted(moe: Path, tmp_path: Path) -> None:
    source = tmp_path / "damaged"
    source.mkdir()
    for path in moe.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    shard = sorted(source.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    tensors[name][1, 2] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(DayZeroError, match=r"nan|NaN") as told:
        convert_release(Request(path=str(source), out=str(tmp_path / "out"), degrees=one_rank()), quiet)
    assert name in str(told.value) and "--accept-values" in told.value.fix
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]
    report = convert_release(
        Request(path=str(source), out=str(tmp_path / "out"), degrees=one_rank(), accept_values=True), quiet
    )
    assert any(problem["tensor"] == name and problem["severity"] == "warning" for problem in report["problems"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(to="gguf", degrees={"tp": 2}), "parts and degrees"),
        (dict(to="torch"), "unknown form"),
        (dict(quantize="int5"), "unknown quantization preset"),
        (dict(quantize="int8", dtype="float16"), "release's own numbers"),
        (dict(keep=("attention",)), "speak of --quantize"),
        (dict(quantize="int8", override=("attention",)), "not RULE=PRESET"),
        (dict(dtype="int8"), "cannot become that dtype"),
        (dict(quantize="int8", part="1/2"), "parts cannot be quantized"),
        (dict(part="0/2"), "not clear"),
    ],
)
def test_options_that_do_not_go_together_are_told(moe: Path, tmp_path: Path, options: dict, words: str) -> None:
    with pytest.raises(DayZeroError, match=words):
        convert_release(Request(path=str(moe), out=str(tmp_path / "out"), **({"degrees": one_rank()} | options)), quiet)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", [{"to": "hf"}, {"degrees": {"tp": 2, "pp": 1, "dp": 1, "cp": 1, "ep": 1}}], ids=["hf", "tp2"])
def test_codes_chosen_on_text_go_into_the_stream_and_say_so(moe: Path, tmp_path: Path, form: dict) -> None:
    """The same weights, other codes than from the weights alone; nothing of the calibration stays behind."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The quick brown fox jumps over {number} lazy dogs.\n\n" for number in range(1500)))
    asked = Request(path=str(moe), out=str(tmp_path / "out"), quantize="int8", calibrate=str(text), **form)
    report = convert_release(asked, quiet)["quantize"]
    assert report["calibration"]["method"] == "gptq" and len(report["calibration"]["data_sha256"]) == 64
    alone = convert_release(Request(path=str(moe), out=str(tmp_path / "alone"), quantize="int8", **form), quiet)["quantize"]
    errors = {one["tensor"]: one["relative"] for one in alone["errors"]}
    assert alone["calibration"] == {} and any(one["relative"] != errors[one["tensor"]] for one in report["errors"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "out", "text.txt"]
    if "to" not in form:
        assert prove(tmp_path / "out", moe).problems == ()


def test_what_a_resumed_run_lost_is_what_a_single_run_lost(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files kept from an interrupted run bring their sums along: the evidence is the same to the last bit."""
    import dayzero.weights.running as running

    model, changes = describe(moe), Changes(quantize=Policy(preset="int8"))
    convert(moe, model, Layout(tp=2), tmp_path / "single", changes=changes)
    written, write = [], running.write_file

    def stops(*arguments: object, **options: object) -> object:
        if written:
            raise KeyboardInterrupt
        written.append(write(*arguments, **options))
        return written[0]

    monkeypatch.setattr(running, "write_file", stops)
    with pytest.raises(KeyboardInterrupt):
        convert(moe, model, Layout(tp=2), tmp_path / "out", changes=changes, workers=1)
    monkeypatch.setattr(running, "write_file", write)
    resumed = convert(moe, model, Layout(tp=2), tmp_path / "out", changes=changes)
    single = read_record(ArtifactQuantization, tmp_path / "single" / "quantization.json")
    assert resumed.quantize == single and all(one.num_elements for one in single.errors)
    again = convert(moe, model, Layout(tp=2), tmp_path / "out", changes=changes)
    assert again.reused and again.quantize == single


def test_an_export_does_not_go_on_from_other_bytes(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards exchanged for others of the same shapes between two tries: nothing of the first try is kept."""
    import dayzero.weights.running as running

    source, other = tmp_path / "source", tmp_path / "other"
    make_tiny_checkpoint("llama", source)
    make_tiny_checkpoint("llama", other, seed=1)
    write, count = running.write_file, []

    def stops(*arguments: object, **options: object) -> object:
        count.append(1)
        if len(count) > 1:
            raise KeyboardInterrupt
        return write(*arguments, **options)

    from dayzero.weights.to_hf import export

    monkeypatch.setattr(running, "write_file", stops)
    with pytest.raises(KeyboardInterrupt):
        export(source, tmp_path / "out", shard_bytes=50_000, workers=1)
    monkeypatch.setattr(running, "write_file", write)
    for path in other.glob("*.safetensors"):
        (source / path.name).write_bytes(path.read_bytes())
    export(source, tmp_path / "out", shard_bytes=50_000)
    found, wanted = all_tensors(tmp_path / "out"), all_tensors(other)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_numbers_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_tiny_checkpoint("llama", source)
    for shard in source.glob("*.safetensors"):
        tensors = load_file(shard)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"][3] = 70000
            save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(DayZeroError, match=r"model\.norm\.weight: numbers are too large for float16"):
        convert_release(Request(path=str(source), out=str(tmp_path / "out"), to="hf", dtype="float16"), quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_accepted_damage_is_told_again_and_not_accepted_for_good(moe: Path, tmp_path: Path) -> None:
    source = tmp_path / "damaged"
    source.mkdir()
    for path in moe.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    shard = sorted(source.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    tensors[name][1, 2] = float("inf")
    save_file(tensors, shard, metadata={"format": "pt"})
    ask = Request(path=str(source), out=str(tmp_path / "out"), degrees=one_rank(), accept_values=True)
    first, again = convert_release(ask, quiet), convert_release(ask, quiet)
    assert again["reused"] and [one for one in again["problems"] if one["tensor"] == name] == [
        one for one in first["problems"] if one["tensor"] == name
    ]
    with pytest.raises(DayZeroError, match="accepted"):
        convert_release(Request(path=str(source), out=str(tmp_path / "out"), degrees=one_rank()), quiet)


def test_uneven_stacked_blocks_are_counted_whole() -> None:
    """Matrices whose rows are no multiple of a block: every element of every expert counts once."""
    from dayzero.weights.algebra import View
    from dayzero.weights.copying import BlockCopier
    from dayzero.weights.quantize.encoding import Quantized, ViewRows, encoders, view_of
    from dayzero.weights.reading import LocalStore, SourceReader

    weights = torch.randn(3, 192, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    class Memory(SourceReader):
        def read_into(self, source: str, offset: int, target: memoryview) -> None:
            target[:] = weights.reshape(-1).view(torch.uint8).numpy().data[offset : offset + len(target)]

    plain = Memory(LocalStore(Path()), {})
    view = View.of("experts", (3, 192, 256), "bfloat16")
    made, errors = encoders(
        Quantized(name="experts", view=view, preset=preset("fp8-block"), sources=()), ViewRows(plain), packed_zeros=False
    )
    reader = SourceReader(LocalStore(Path()), {}, decoders={one.name: one for one in made.values()})
    for one in made.values():
        for _ in BlockCopier(reader).blocks(view_of(one)):
            pass
    assert errors.result().num_elements == weights.numel()
