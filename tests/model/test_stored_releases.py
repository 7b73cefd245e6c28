"""What full-size configs say a release stores, against published sizes and a published manifest; and tiny quantized
checkpoints whose headers are wrong."""

import json
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dayzero.core.model import ModelDescription, Parameter
from dayzero.core.units import DTYPE_BITS, SAFETENSORS_DTYPES
from dayzero.model.describe import describe
from dayzero.model.release import INDEX, open_release, read_object
from dayzero.model.stored import checkpoint_bytes, quantization_groups
from dayzero.model.stored.drafts import DraftBlock, draft_block
from dayzero.model.stored.quantization import BESIDE

DATA = Path(__file__).parents[1] / "data"
CONFIGS = DATA / "configs"
MANIFEST = read_object(DATA / "naming" / "stacked_manifest.json")
STACKED = "Qwen3.8-2.4T-A95B"

# Published sizes on disk in bytes, and how far from them the config's own figure may be: 0 where the figure is a byte count,
# otherwise what its rounding leaves, and 1% where the config does not say that copies are left out of the draft layer.
PUBLISHED: dict[str, tuple[float, float]] = {
    "DeepSeek-V3": (688.6e9, 1e-4),
    "DeepSeek-V3.2": (689.5e9, 1e-4),
    "Kimi-K2-Instruct": (1029.2e9, 1e-4),
    "Kimi-K2.5": (595e9, 1e-3),
    "MiniMax-M2.5": (230.1e9, 1e-3),
    "GLM-5.2-NVFP4": (465.8e9, 1e-2),
    "gpt-oss-20b": (13_761_264_768, 0),
    "gpt-oss-120b": (65.2e9, 1e-3),
    "Meta-Llama-3.1-8B": (16.1e9, 4e-3),
    "Qwen3-Coder-480B-A35B-Instruct": (960.3e9, 1e-4),
    STACKED: (4_892_365_451_008, 0),
}


@cache
def full_size(name: str) -> ModelDescription:
    return describe(CONFIGS / name)


def drafts_of(name: str) -> DraftBlock:
    found = full_size(name)
    return draft_block(read_object(CONFIGS / name / "config.json"), found.parameters, num_layers=found.dimensions.num_layers)


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_predict_the_published_size_on_disk(name: str) -> None:
    published, tolerance = PUBLISHED[name]
    config, beside = read_object(CONFIGS / name / "config.json"), CONFIGS / name / BESIDE
    parameters = (*full_size(name).parameters, *drafts_of(name).parameters)
    groups = quantization_groups(config, parameters, beside=read_object(beside) if beside.exists() else None)
    found = checkpoint_bytes(groups)
    assert found is not None and abs(found - published) <= tolerance * published, (
        f"{name}: {found} bytes, published {published}"
    )
    assert (
        sum(group.parameters or 0 for group in groups) == full_size(name).total_parameters + drafts_of(name).stored_parameters
    )


def test_draft_layers_have_their_published_size() -> None:
    latent, stacked = drafts_of("DeepSeek-V3"), drafts_of(STACKED)
    # 11.5B unique are published; copies of embedding and head are stored with it, and 685B in all.
    assert latent.unique_parameters == pytest.approx(11.5e9, rel=0.01)
    assert latent.stored_parameters - latent.unique_parameters == 2 * 129280 * 7168
    assert full_size("DeepSeek-V3").total_parameters + latent.stored_parameters == pytest.approx(685e9, rel=1e-3)
    assert full_size(STACKED).total_parameters + stacked.stored_parameters == 2446182725504
    assert drafts_of("Kimi-K2-Instruct").stored_parameters == 0


# The manifest.


def manifest_tensors() -> dict[str, list[int]]:
    """Names and shapes of all 1609 tensors, from the pattern of the layers."""
    tensors = dict(MANIFEST["outer"])
    layers = [("linear", "linear", "linear", "full")[number % 4] for number in range(MANIFEST["num_layers"])]
    for prefix, kind in [(f"model.layers.{number}", kind) for number, kind in enumerate(layers)] + [("mtp.layers.0", "full")]:
        tensors |= {f"{prefix}.{name}": shape for name, shape in (MANIFEST["common"] | MANIFEST["layers"][kind]).items()}
    return tensors | MANIFEST["draft"]


def write_shards(folder: Path, files: Iterable[dict[str, tuple[str, list[int]]]]) -> None:
    """Header-only shards and their index: each file is as long as its header says and holds nothing."""
    parts = list(files)
    weight_map, total = {}, 0
    for number, tensors in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        header, offset = {}, 0
        for name, (dtype, shape) in tensors.items():
            size = DTYPE_BITS[SAFETENSORS_DTYPES[dtype]]
            for length in shape:
                size *= length
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size // 8]}
            offset += size // 8
        raw = json.dumps(header).encode()
        with (folder / file).open("wb") as handle:
            handle.write(len(raw).to_bytes(8, "little") + raw)
            handle.truncate(8 + len(raw) + offset)
        weight_map |= dict.fromkeys(tensors, file)
        total += offset
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": float(total)}, "weight_map": weight_map}))


@pytest.fixture(scope="module")
def stacked_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stacked")
    shutil.copy(CONFIGS / STACKED / "config.json", folder)
    tensors = [(name, (MANIFEST["dtype"], shape)) for name, shape in manifest_tensors().items()]
    # A sparse file cannot be longer than the file system allows (16 TiB on ext4, less elsewhere): the published 213 shards.
    write_shards(folder, [dict(tensors[start : start + 8]) for start in range(0, len(tensors), 8)])
    return folder


def test_the_manifest_sums_to_its_published_bytes_through_our_reader(stacked_release: Path) -> None:
    release = open_release(stacked_release)
    assert release.problems == () and len(release.tensors) == MANIFEST["published_tensor_count"] == 1609
    assert release.checkpoint_bytes == release.metadata_total_bytes == MANIFEST["published_total_size"] == 4_892_365_451_008


def test_the_config_alone_predicts_every_tensor_of_the_manifest() -> None:
    predicted = {item.name: list(item.shape) for item in (*full_size(STACKED).parameters, *drafts_of(STACKED).parameters)}
    assert predicted == manifest_tensors()
    assert {item.dtype for item in full_size(STACKED).parameters} == {"bfloat16"}


def test_the_manifest_fills_the_model_and_its_draft_layer(stacked_release: Path) -> None:
    found = describe(stacked_release)
    assert found.problems == () and found.checkpoint_bytes == 4_892_365_451_008
    assert found.mtp_parameters == drafts_of(STACKED).stored_parameters and found.dimensions.num_mtp_layers == 1
    assert all(item.stored_dtype == "bfloat16" for item in found.parameters)


# Tiny checkpoints.

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def as_fp8(folder: Path, place: Path, *, change: Callable[[dict[str, tuple[str, list[int]]]], object] = len) -> Path:
    """The checkpoint's headers as an FP8 release of the same model: scales of all weights in a second file."""
    names = {dtype: short for short, dtype in SAFETENSORS_DTYPES.items()}
    kept = ("norm", "embed", "lm_head", "mlp.gate.")
    weights, scales = {}, {}
    for name, entry in open_release(folder).tensors.items():
        quantized = len(entry.shape) == 2 and not any(word in name for word in kept)
        weights[name] = ("F8_E4M3" if quantized else names[entry.dtype], list(entry.shape))
        if quantized:
            scales[f"{name}_scale_inv"] = ("F32", [-(-length // 128) for length in entry.shape])
    both = {**weights, **scales}
    change(both)
    place.mkdir()
    write_shards(place, [{name: both[name] for name in both if name.endswith("_scale_inv") == late} for late in (False, True)])
    config = read_object(folder / "config.json")
    (place / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    return place


def errors_of(folder: Path) -> dict[str, list[str | None]]:
    found: dict[str, list[str | None]] = {}
    for problem in describe(folder).problems:
        if problem.severity == "error":
            found.setdefault(problem.kind, []).append(problem.tensor)
    return found


def replaced(name: str, dtype: str) -> Callable[[dict[str, tuple[str, list[int]]]], object]:
    def change(tensors: dict[str, tuple[str, list[int]]]) -> None:
        tensors[name] = (dtype, tensors[name][1])

    return change


def test_ck_08_a_sound_fp8_release_has_no_errors_and_the_predicted_size(tiny_checkpoint: Any, tmp_path: Path) -> None:
    folder = as_fp8(tiny_checkpoint("qwen3_moe"), tmp_path / "fp8")
    found = describe(folder)
    assert [problem for problem in found.problems if problem.severity == "error"] == []
    experts = [item for item in found.parameters if item.role == "expert"]
    assert experts and all(item.stored_dtype == "float8_e4m3fn" for item in experts)
    assert all(any("scale_inv" in form for form in item.sources) for item in experts)
    # The sources of an opened release name the experts that the price is made of, scales aside.
    own: list[Parameter] = list(describe(folder / "config.json").parameters)
    assert checkpoint_bytes(quantization_groups(read_object(folder / "config.json"), own)) == found.checkpoint_bytes


def test_ck_08_what_is_no_pair_is_an_error(tiny_checkpoint: Any, tmp_path: Path) -> None:
    expert = "model.layers.1.mlp.experts.1.gate_proj.weight"
    source = tiny_checkpoint("qwen3_moe")
    lost = as_fp8(source, tmp_path / "a", change=lambda tensors: tensors.pop(f"{expert}_scale_inv"))
    assert errors_of(lost) == {"scale_missing": [expert]}
    alone = as_fp8(source, tmp_path / "b", change=lambda tensors: tensors.pop(expert))
    assert errors_of(alone)["scale_without_weight"] == [f"{expert}_scale_inv"]
    for number, dtype in enumerate(("I8", "BOOL", "U8")):
        drop = replaced(expert, dtype)

        def change(tensors: dict[str, tuple[str, list[int]]], drop: Any = drop) -> None:
            drop(tensors)
            tensors.pop(f"{expert}_scale_inv")

        assert errors_of(as_fp8(source, tmp_path / f"c{number}", change=change))["integer_weight"] == [expert]


def test_ck_08_wrong_shapes_show_through_quantization(tiny_checkpoint: Any, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"

    def change(tensors: dict[str, tuple[str, list[int]]]) -> None:
        tensors[name] = ("F8_E4M3", tensors[name][1][::-1])

    folder = as_fp8(tiny_checkpoint("qwen3_moe"), tmp_path / "a", change=change)
    shape = next(item.shape for item in describe(folder).parameters if item.name == name)
    assert shape[0] != shape[1] and errors_of(folder)["wrong_shape"] == [name]


def test_ck_17_scale_bytes_without_a_declared_meaning_are_refused(tiny_checkpoint: Any, tmp_path: Path) -> None:
    scale = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    folder = as_fp8(tiny_checkpoint("qwen3_moe"), tmp_path / "a", change=replaced(scale, "U8"))
    assert errors_of(folder) == {"scale_meaning": [scale]}
    config = read_object(folder / "config.json")
    declared = {**config, "quantization_config": {**FP8, "scale_fmt": "ue8m0"}}
    (folder / "config.json").write_text(json.dumps(declared))
    assert errors_of(folder) == {}
    typed = as_fp8(tiny_checkpoint("qwen3_moe"), tmp_path / "b", change=replaced(scale, "F8_E8M0"))
    assert errors_of(typed) == {}


def packed(folder: Path, place: Path, *, width: int, columns: int = 0, order: dict[str, Any] | None = None) -> Path:
    """The headers as a release with experts of this width packed to four bits; `columns` words too many in one of them."""
    names = {dtype: short for short, dtype in SAFETENSORS_DTYPES.items()}
    tensors: dict[str, tuple[str, list[int]]] = {}
    for name, entry in open_release(folder).tensors.items():
        if ".experts." not in name:
            tensors[name] = (names[entry.dtype], list(entry.shape))
            continue
        base = name.removesuffix(".weight")
        rows, across = (entry.shape[0], width) if base.endswith("down_proj") else (width, entry.shape[1])
        extra = columns if base.endswith("layers.1.mlp.experts.1.down_proj") else 0
        tensors[f"{base}.weight_packed"] = ("I32", [rows, -(-across // 8) + extra])
        tensors[f"{base}.weight_scale"] = ("BF16", [rows, -(-across // 32)])
        tensors[f"{base}.weight_shape"] = ("I64", [2])
    place.mkdir()
    write_shards(place, [tensors])
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    settings = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, **(order or {}),
    }  # fmt: skip
    config = {**read_object(folder / "config.json"), "moe_intermediate_size": width, "quantization_config": settings}
    (place / "config.json").write_text(json.dumps(config))
    return place


def test_ck_16_packed_experts_have_the_shape_of_their_words(tiny_checkpoint: Any, tmp_path: Path) -> None:
    """Twenty columns of down_proj fill two words and a half."""
    source = tiny_checkpoint("qwen3_moe")
    sound = packed(source, tmp_path / "a", width=20)
    assert errors_of(sound) == {}
    found = describe(sound)
    assert {item.stored_dtype for item in found.parameters if item.role == "expert"} == {"int32"}
    groups = quantization_groups(read_object(sound / "config.json"), found.parameters)
    assert checkpoint_bytes(groups) == found.checkpoint_bytes and groups[0].scheme == "int4-g32"
    assert "wrong_shape" in errors_of(packed(source, tmp_path / "b", width=20, columns=1))
    refused = errors_of(packed(source, tmp_path / "c", width=20, order={"pack_order": "interleaved"}))
    assert list(refused) == ["packing_order"] and len(refused["packing_order"]) == 1


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_ck_14_prefixes_change_nothing(tiny_checkpoint: Any, tmp_path: Path, prefix: str) -> None:
    """A layer past the stack is a draft where announced and an error where not, whatever its name begins with."""
    from dayzero.model.reconcile import _classify

    for name in ("self_attn.q_proj.weight", "eh_proj.weight", "mlp.experts.0.up_proj.weight"):
        assert _classify(f"{prefix}layers.4.{name}", 4, 1, None) == "draft"
        assert _classify(f"{prefix}layers.5.{name}", 4, 1, None) == "extra_layer"
        assert _classify(f"{prefix}layers.4.{name}", 4, 0, None) == "extra_layer"
        assert _classify(f"{prefix}layers.3.{name}", 4, 1, None) == "unexpected_tensor"


def test_ck_14_a_quantized_draft_layer_is_counted_without_its_scales(tiny_checkpoint: Any, tmp_path: Path) -> None:
    source = tiny_checkpoint("deepseek_v3")
    last = read_object(source / "config.json")["num_hidden_layers"] - 1
    folder = as_fp8(source, tmp_path / "a")
    config = read_object(folder / "config.json")
    counts = []
    for settings in ({"quantization_config": FP8}, {}):
        place = folder if settings else shutil.copytree(source, tmp_path / "b")
        config.pop("quantization_config", None)
        changed = {**config, **settings, "num_hidden_layers": last, "num_nextn_predict_layers": 1}
        (place / "config.json").write_text(json.dumps(changed))
        assert errors_of(place) == {}
        counts.append(describe(place).mtp_parameters)
    assert counts[0] == counts[1] > 0


def without_head(source: Path, place: Path, **changes: Any) -> Path:
    names = {dtype: short for short, dtype in SAFETENSORS_DTYPES.items()}
    place.mkdir()
    entries = open_release(source).tensors.items()
    write_shards(place, [{name: (names[e.dtype], list(e.shape)) for name, e in entries if "lm_head" not in name}])
    config = {**read_object(source / "config.json"), **changes}
    (place / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return place


def test_ck_09_a_head_that_is_not_stored(tiny_checkpoint: Any, tmp_path: Path) -> None:
    source = tiny_checkpoint("qwen3")
    untied = describe(without_head(source, tmp_path / "a", tie_word_embeddings=False))
    (problem,) = [problem for problem in untied.problems if problem.severity == "error"]
    assert problem.kind == "missing_parameter" and problem.tensor == "lm_head.weight"
    assert "tie_word_embeddings is false" in problem.detail and "not tied" in problem.detail
    tied = describe(without_head(source, tmp_path / "b", tie_word_embeddings=True))
    head = next(item for item in tied.parameters if item.role == "head")
    assert head.tied_to == "model.embed_tokens.weight" and tied.problems == ()


def test_ck_09_an_absent_flag_is_the_classs_and_said(tiny_checkpoint: Any, tmp_path: Path) -> None:
    """This class ties by default; with the flag absent everywhere the description says that it did."""
    source = tiny_checkpoint("gemma3_text")
    found = describe(without_head(source, tmp_path / "a", tie_word_embeddings=...))
    (problem,) = found.problems
    assert (problem.kind, problem.severity, problem.tensor) == ("tied_by_default", "warning", "lm_head.weight")
    assert describe(without_head(source, tmp_path / "b", tie_word_embeddings=True)).problems == ()
