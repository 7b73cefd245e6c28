"""Descriptions against what is really there: tiny checkpoints of every required type, and full-size configs on meta."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Parameter
from dayzero.core.plan import Layout
from dayzero.core.sharding import box_elements, rank_boxes
from dayzero.model.classes import build_model
from dayzero.model.describe import describe
from dayzero.model.provisional import provisional
from dayzero.model.release import INDEX, open_release
from dayzero.model.resolve import Resolved, read_config, resolve
from tests.tiny.overrides import REQUIRED_TYPES

CONFIGS = Path(__file__).parents[1] / "data" / "configs"

# Full-size releases: total and active parameters as counted on meta from the published configs (active with embedding and
# head), cache bytes per token beyond every window, constant bytes per sequence, kinds of layers. The cache figures follow
# from the architectures: 61 layers x (512 + 64) x 2 bytes for latent attention, and so on.
FULL_SIZE: dict[str, tuple[int, int, int, int, dict[str, int]]] = {
    "DeepSeek-V3": (671026404352, 37552282624, 70272, 0, {"latent+dense": 3, "latent+moe": 58}),
    "Kimi-K2-Instruct": (1026408209408, 32861477888, 70272, 0, {"latent+dense": 1, "latent+moe": 60}),
    "gpt-oss-120b": (116829156672, 5711982912, 18 * 2 * 8 * 64 * 2, 18 * 2 * 8 * 64 * 2 * 128,
                     {"sliding+moe": 18, "full+moe": 18}),
    "Qwen3-Next-80B-A3B-Thinking": (79674391296, 3874929408, 12 * 2 * 2 * 256 * 2, 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4),
                                    {"linear+moe": 36, "full+moe": 12}),
    "gemma-4-26B-A4B": (25805933872, 4395322672, 20480, 209715200, {"sliding+moe": 25, "full+moe": 5}),
    "Meta-Llama-3.1-8B": (8030261248, 8030261248, 131072, 0, {"full+dense": 32}),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31577937344, 3580073408, 6 * 2 * 2 * 128 * 2,
                                            23 * (6144 * 4 * 2 + 64 * 64 * 128 * 4),
                                            {"ssm+none": 23, "none+moe": 23, "full+none": 6}),
}  # fmt: skip


@cache
def full_size(name: str) -> ModelDescription:
    return describe(CONFIGS / name)


def cache_bytes(description: ModelDescription) -> tuple[int, int]:
    """(bytes per token beyond every window, constant bytes per sequence) of all layers."""
    long, step = 1 << 22, 1 << 12
    at = [sum(spec.bytes_for(tokens) * len(kind.layers) for kind in description.layer_kinds for spec in kind.cache)
          for tokens in (long, long + step)]  # fmt: skip
    slope = (at[1] - at[0]) // step
    return slope, at[0] - slope * long


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_configs_are_counted_exactly(name: str) -> None:
    total, active, per_token, per_sequence, kinds = FULL_SIZE[name]
    found = full_size(name)
    assert found.total_parameters == total
    assert abs(found.active_parameters / active - 1) < 0.02
    assert cache_bytes(found) == (per_token, per_sequence)
    assert {kind.name: len(kind.layers) for kind in found.layer_kinds} == kinds
    assert not found.provisional and not found.has_weights
    assert [problem for problem in found.problems if problem.severity == "error"] == []
    assert not any("missing" in problem.kind for problem in found.problems)
    assert all(item.sources for item in found.parameters if item.tied_to is None)
    unknown_roles = [item.name for item in found.parameters if item.role == "other" and item.num_elements > 1 << 16]
    assert unknown_roles == []


def test_a_type_known_only_by_its_architecture_says_so() -> None:
    assert "model_type_unknown" in [problem.kind for problem in full_size("Kimi-K2-Instruct").problems]


def test_a_type_nobody_knows_is_estimated_and_provisional() -> None:
    found = full_size("Kimi-K3")
    assert found.provisional and found.parameters == ()
    assert abs(found.total_parameters / 2779479459840 - 1) < 0.01
    assert abs(found.active_parameters / 105359001600 - 1) < 0.02
    assert {kind.mixer: len(kind.layers) for kind in found.layer_kinds if kind.feed_forward == "moe"} == {
        "linear": 68,
        "latent": 24,
    }
    unknown = next(problem for problem in found.problems if problem.kind == "unknown_model_type")
    assert "kimi_k3" in unknown.detail and "--trust-remote-code" in unknown.detail
    assert "text_config.attn_res_block_size" in found.unconsumed_keys and "text_config.hidden_size" in found.consumed_keys


def test_names_sources_and_shard_rules_of_a_latent_mixture() -> None:
    by_name = {item.name: item for item in full_size("DeepSeek-V3").parameters}
    experts = by_name["model.layers.3.mlp.experts.gate_up_proj"]
    assert experts.sources == tuple(f"model.layers.3.mlp.experts.*.{word}_proj.weight" for word in ("gate", "up"))
    assert (experts.role, experts.layer, experts.shape) == ("expert", 3, (256, 4096, 7168))
    assert experts.shard.expert_dim == 0 and experts.shard.segments == (2048, 2048) and experts.shard.proof == "tp_plan"
    cut = {word: by_name[f"model.layers.0.self_attn.{word}.weight"].shard for word in
           ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}  # fmt: skip
    assert [(rule.tensor_dim, rule.units) for rule in cut.values()] == [
        (None, ()),
        (0, (128,)),
        (None, ()),
        (0, (128,)),
        (1, (128,)),
    ]
    assert all(rule.proof == "role" for rule in cut.values()), "the class's plan leaves attention out"
    assert all(spec.heads == 0 for kind in full_size("DeepSeek-V3").layer_kinds for spec in kind.cache)
    assert by_name["model.layers.3.mlp.gate.e_score_correction_bias"].is_buffer


def test_interleaved_gate_and_up_are_cut_in_pairs_and_kv_heads_may_repeat() -> None:
    by_name = {item.name: item for item in full_size("gpt-oss-120b").parameters}
    fused = by_name["model.layers.0.mlp.experts.gate_up_proj"]
    assert (fused.shape, fused.shard.tensor_dim, fused.shard.units) == ((128, 2880, 5760), 2, (2880,))
    assert by_name["model.layers.0.mlp.experts.down_proj"].shard.tensor_dim == 1
    keys = by_name["model.layers.0.self_attn.k_proj.weight"].shard
    assert keys.replicable and keys.units == (8,)
    assert by_name["model.layers.0.self_attn.sinks"].role == "attention_sink"
    assert by_name["model.layers.0.self_attn.sinks"].shard.units == (64,)


def test_towers_are_listed_and_counted() -> None:
    found = full_size("gemma-4-26B-A4B")
    assert found.towers and all(item.layer is None for item in found.parameters if item.role == "tower")
    assert sum(item.num_elements for item in found.parameters if item.role == "tower" and not item.is_buffer) > 1e8


@pytest.mark.parametrize("name", ["DeepSeek-V3", "gpt-oss-120b", "Meta-Llama-3.1-8B", "Qwen3-Next-80B-A3B-Thinking"])
@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(tp=8), Layout(tp=16), Layout(dp=4, tp=2, ep=8), Layout(dp=8, tp=4, ep=16)]
)
def test_every_layout_stores_every_element(name: str, layout: Layout) -> None:
    """Over all ranks, what is cut is stored once, what is replicated everywhere, and nothing is lost."""
    found = full_size(name)
    wanted = {kind.layers[0] for kind in found.layer_kinds}
    for item in found.parameters:
        if item.layer is not None and item.layer not in wanted:
            continue
        parts = [rank_boxes(item, layout, layout.coordinates(rank)) for rank in range(layout.num_devices)]
        stored = sum(box_elements(part) for part in parts)
        assert stored >= item.num_elements and stored % item.num_elements == 0, (item.name, layout, stored)
        if item.role == "expert" and item.shard.tensor_dim is not None:
            assert stored == item.num_elements, (item.name, layout)


def test_a_large_config_takes_seconds_and_little_memory() -> None:
    code = (
        "import re, time; start = time.process_time(); from pathlib import Path; "
        "from dayzero.model.describe import describe; "
        f"describe(Path({str(CONFIGS / 'DeepSeek-V3')!r})); "
        # not ru_maxrss: it starts from what the parent had when it forked
        "print(time.process_time() - start, re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, kilobytes = out.stdout.split()
    assert out.stderr == "" and float(seconds) < 30 and int(kilobytes) < 1_000_000, out.stdout  # 30: any machine, any load


# Tiny checkpoints: everything against the real tensors.


def real_model(folder: Path) -> Any:
    resolved = resolve(open_release(folder))
    assert isinstance(resolved, Resolved)
    return build_model(resolved.config, torch.float32)


def assert_cache_as_allocated(found: ModelDescription, model: Any) -> None:
    """Bytes that the real cache holds after two prompts equal those of the specs."""
    for length in (24, 40):
        with torch.no_grad():
            output = model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=True)
        caches = [value for value in output.values() if hasattr(value, "layers")]
        real = sum(tensor.numel() for layer in caches[0].layers for tensor in _tensors(vars(layer)))
        said = sum(_elements(spec, length) * len(kind.layers) for kind in found.layer_kinds for spec in kind.cache)
        assert said == real, (found.model_type, length, said, real)


def _elements(spec: Any, length: int) -> int:
    # transformers keeps one token less than the window between steps; the engine allocates the window.
    kept = length if spec.window_tokens is None else min(length, spec.window_tokens - 1)
    return kept // spec.tokens_per_entry * spec.elements_per_token + spec.elements_per_sequence


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.dim() > 1 and value.is_floating_point() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


@pytest.mark.parametrize("model_type", REQUIRED_TYPES)
def test_required_types_are_described_as_they_are(model_type: str, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(model_type)
    found = describe(folder)
    release = open_release(folder)
    assert [problem for problem in found.problems if problem.severity == "error"] == [], found.problems
    assert not found.provisional and found.has_weights and found.checkpoint_bytes == release.checkpoint_bytes
    model = real_model(folder)
    assert found.total_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert 0 < found.active_parameters <= found.total_parameters
    names = set(dict(model.named_parameters(remove_duplicate=False))) | set(model.state_dict())
    assert {item.name for item in found.parameters} == names
    # Every tensor of the checkpoint feeds a parameter, and every parameter that is not a tied copy is fed.
    assert_all_sources(found, set(release.tensors))
    assert_cache_as_allocated(found, model)
    assert found.stop_token_ids == (1,)
    assert {kind.mixer for kind in found.layer_kinds} != {"none"}


def assert_all_sources(found: ModelDescription, stored: set[str]) -> None:
    unfed = [item.name for item in found.parameters if not item.sources and item.tied_to is None]
    assert unfed == []
    claimed = {form for item in found.parameters for form in item.sources}
    loose = [name for name in stored if name not in claimed and not any(matches(form, name) for form in claimed if "*" in form)]
    assert loose == []


def matches(form: str, name: str) -> bool:
    parts, wanted = name.split("."), form.split(".")
    return len(parts) == len(wanted) and all(want in ("*", part) for part, want in zip(parts, wanted, strict=True))


# Checkpoints that do not fit their model.


def edit_checkpoint(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite each shard's header with names changed by `change(tensors)`; data stay. The index is dropped for simplicity."""
    (folder / INDEX).unlink(missing_ok=True)
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def copied(folder: Path, place: Path) -> Path:
    return Path(shutil.copytree(folder, place / folder.name))


def rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        for name in [name for name in header if old in name]:
            header[name.replace(old, new)] = header.pop(name)

    return change


def kinds_of(folder: Path) -> dict[str, list[str | None]]:
    found: dict[str, list[str | None]] = {}
    for problem in describe(folder).problems:
        found.setdefault(problem.kind, []).append(problem.tensor)
    return found


def test_missing_and_unexpected_tensors_are_all_listed(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied(tiny_checkpoint("qwen3"), tmp_path)
    edit_checkpoint(folder, rename("0.self_attn.q_proj.weight", "0.self_attn.wq.weight"))
    found = kinds_of(folder)
    assert found["missing_parameter"] == ["model.layers.0.self_attn.q_proj.weight"]
    assert found["unexpected_tensor"] == ["model.layers.0.self_attn.wq.weight"]


def test_wrong_shapes_and_missing_experts_show_in_headers(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied(tiny_checkpoint("qwen3_moe"), tmp_path)

    def change(header: dict[str, Any]) -> None:
        for name, entry in header.items():
            if name == "model.layers.0.self_attn.q_proj.weight":
                entry["shape"] = entry["shape"][::-1] if entry["shape"][0] != entry["shape"][1] else [1, entry["shape"][0] ** 2]
        rename("layers.1.mlp.experts.3.gate_proj", "layers.1.mlp.lost.gate_proj")(header)

    edit_checkpoint(folder, change)
    found = kinds_of(folder)
    assert set(found["wrong_shape"]) == {"model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.experts.gate_up_proj"}
    assert found["unexpected_tensor"] == ["model.layers.1.mlp.lost.gate_proj.weight"]


def test_scales_belong_to_their_weights_only_where_quantization_is_declared(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copied(tiny_checkpoint("qwen3_moe"), tmp_path)
    edit_checkpoint(folder, rename("1.self_attn.q_norm.weight", "1.mlp.experts.5.up_proj.weight_scale_inv"))
    scale = "model.layers.1.mlp.experts.5.up_proj.weight_scale_inv"
    assert kinds_of(folder)["unexpected_tensor"] == [scale]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    found = describe(folder)
    assert "unexpected_tensor" not in {problem.kind for problem in found.problems}
    experts = next(item for item in found.parameters if item.name == "model.layers.1.mlp.experts.gate_up_proj")
    assert any(form.endswith("weight_scale_inv") for form in experts.sources) and found.quantization == {"method": "fp8"}


def test_ck_14_layers_past_the_stack_are_drafts_only_when_announced(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copied(tiny_checkpoint("deepseek_v3"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    config["num_hidden_layers"] = last
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    found = describe(folder)
    assert [problem for problem in found.problems if problem.severity == "error"] == []
    assert found.mtp_parameters > 0 and found.dimensions.num_mtp_layers == 1
    assert found.total_parameters + found.mtp_parameters == describe(
        tiny_checkpoint("deepseek_v3")
    ).total_parameters + num_buffers(folder, last)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    extra = [problem for problem in describe(folder).problems if problem.kind == "extra_layer"]
    assert extra and all(problem.severity == "error" and f"layers.{last}." in str(problem.tensor) for problem in extra)


def num_buffers(folder: Path, layer: int) -> int:
    """Elements of the layer's stored buffers: part of the checkpoint, not of the parameter count."""
    release = open_release(folder)
    return sum(
        entry.num_elements
        for name, entry in release.tensors.items()
        if f"layers.{layer}." in name and "correction_bias" in name
    )


def test_ck_09_a_head_that_is_not_stored_must_be_tied(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    tied = describe(tiny_checkpoint("gemma3_text"))
    head = next(item for item in tied.parameters if item.role == "head")
    assert head.tied_to == next(item.name for item in tied.parameters if item.role == "embedding")
    folder = copied(tiny_checkpoint("qwen3"), tmp_path)
    edit_checkpoint(folder, rename("lm_head.weight", "mtp.copy.weight"))
    assert kinds_of(folder)["missing_parameter"] == ["lm_head.weight"]


# Configs that are not right.


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    config = json.loads((CONFIGS / name / "config.json").read_text())
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in (config | changes).items() if value is not ...}))
    return path


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"num_attention_heads": 40, "hidden_size": 4090, "num_key_value_heads": 8}, "head_dim"),
    ],
)
def test_cf_04_impossible_heads_name_their_key(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(DayZeroError) as raised:
        describe(write_config(tmp_path, "Meta-Llama-3.1-8B", **changes))
    assert key in raised.value.what


def test_cf_04_an_explicit_head_dim_decides_the_cache(tmp_path: Path) -> None:
    found = describe(write_config(tmp_path, "Meta-Llama-3.1-8B", head_dim=64))
    assert cache_bytes(found)[0] == 32 * 2 * 8 * 64 * 2 and found.dimensions.head_dim == 64
    keys = next(item for item in found.parameters if item.name.endswith("0.self_attn.k_proj.weight"))
    assert keys.shape == (8 * 64, 4096)
    full = describe(write_config(tmp_path, "Meta-Llama-3.1-8B", num_key_value_heads=...))
    assert cache_bytes(full)[0] == 32 * 2 * 32 * 128 * 2


def test_cf_01_a_contradiction_in_position_scaling_stops_the_description(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "rope_type": "linear", "factor": 2.0}
    with pytest.raises(DayZeroError, match="contradict"):
        describe(write_config(tmp_path, "Meta-Llama-3.1-8B", rope_scaling=scaling))


@pytest.mark.parametrize(("old", "new"), [("su", "longrope"), ("mrope", "default")])
def test_cf_01_an_old_name_of_a_scaling_type_is_the_same_model(tmp_path: Path, old: str, new: str) -> None:
    """The class itself does not know the old names: it fails on them. Described, and as the engine and reference build it."""
    rest = {"mrope_section": [8, 28, 28]} if old == "mrope" else {
        "short_factor": [1.5] * 64, "long_factor": [4.0] * 64, "original_max_position_embeddings": 8192, "factor": 16.0}  # fmt: skip
    frequencies = []
    for name, key in ((old, "type"), (new, "rope_type")):
        folder = tmp_path / key
        folder.mkdir()
        path = write_config(folder, "Meta-Llama-3.1-8B", rope_scaling={key: name, **rest})
        assert describe(path).rope["all"]["rope_type"] == new
        config = read_config((path if path.is_dir() else path.parent) / "config.json")
        config.num_hidden_layers, config.vocab_size, config.intermediate_size = 1, 64, 64
        frequencies.append(build_model(config, torch.float32).model.rotary_emb.inv_freq)
    assert torch.equal(*frequencies)


def test_keys_that_nobody_reads_are_listed(tmp_path: Path) -> None:
    found = describe(write_config(tmp_path, "Meta-Llama-3.1-8B", attention_twist=3, rope_theta=5e5, torch_dtype="auto"))
    assert found.unconsumed_keys == ("attention_twist",)
    assert {"hidden_size", "rope_theta", "rope_scaling"} <= set(found.consumed_keys)
    assert found.rope["all"]["rope_theta"] == 5e5


@pytest.mark.parametrize(
    "changes", [{"hidden_size": "wide"}, {"num_hidden_layers": -1}, {"hidden_act": "none such"}, {"vocab_size": None}]
)
def test_values_that_the_class_refuses_are_user_errors(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(DayZeroError):
        describe(write_config(tmp_path, "Meta-Llama-3.1-8B", **changes))


def test_a_config_that_says_too_little_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "never_heard_of"}')
    with pytest.raises(DayZeroError, match="says too little"):
        describe(tmp_path)


def test_remote_code_is_not_run_unless_allowed(tmp_path: Path) -> None:
    path = write_config(tmp_path, "Meta-Llama-3.1-8B", model_type="new_thing", architectures=["NewThingForCausalLM"],
                        auto_map={"AutoConfig": "code.NewConfig", "AutoModelForCausalLM": "code.NewModel"})  # fmt: skip
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    found = describe(path.parent)
    assert found.provisional and not (tmp_path / "ran").exists()
    assert found.total_parameters == pytest.approx(8030261248, rel=0.001)


def test_descriptions_travel_as_records(tmp_path: Path) -> None:
    from dayzero.core.records import read_record, write_record

    found = replace(full_size("Meta-Llama-3.1-8B"), name="x")
    write_record(found, tmp_path / "1_model.json")
    again = read_record(ModelDescription, tmp_path / "1_model.json")
    assert again == found and isinstance(again.parameters[0], Parameter)


# CF-05: what the config says (... removes the key), the dtype that is used, and words of the doubt that is told.
DTYPES = [
    ({"torch_dtype": "float16", "dtype": ...}, "float16", ""),
    ({"torch_dtype": ..., "dtype": "bfloat16"}, "bfloat16", ""),
    ({"torch_dtype": "float16", "dtype": "bfloat16"}, "bfloat16", "the first is used"),
    ({"torch_dtype": ..., "dtype": ...}, "bfloat16", "no dtype in the config"),
    ({"torch_dtype": "auto", "dtype": ...}, "bfloat16", "no dtype in the config"),
    ({"torch_dtype": "floaty", "dtype": ...}, "bfloat16", "no known dtype"),
]


@pytest.mark.parametrize(("changes", "dtype", "told"), DTYPES)
def test_cf_05_the_dtype_has_an_order_of_sources_and_doubts_are_told(
    tmp_path: Path, changes: dict[str, Any], dtype: str, told: str
) -> None:
    found = describe(write_config(tmp_path, "Meta-Llama-3.1-8B", **changes))
    doubts = [problem.detail for problem in found.problems if problem.kind == "dtype"]
    assert found.dtype == dtype and (any(told in doubt for doubt in doubts) if told else doubts == [])
    assert cache_bytes(found)[0] == 131072  # planned bytes use the resolved dtype, and both have two bytes


def test_cf_05_the_checkpoint_decides_where_the_config_is_silent(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "m")
    keys = json.loads((folder / "config.json").read_text())
    for said, doubt in ((None, "most of the checkpoint"), ("float32", "most of the checkpoint is stored in bfloat16")):
        keys.pop("dtype", None)
        (folder / "config.json").write_text(json.dumps(keys if said is None else keys | {"dtype": said}))
        found = describe(folder)
        assert found.dtype == (said or "bfloat16")
        assert any(doubt in problem.detail for problem in found.problems if problem.kind == "dtype")


def test_cf_10_a_tokenizer_larger_than_the_embedding_is_an_error_here(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "m")
    sound = describe(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    largest = max([*tokenizer["model"]["vocab"].values(), *(entry["id"] for entry in tokenizer["added_tokens"])])
    assert sound.tokenizer_tokens == largest + 1 <= sound.dimensions.vocab_size
    added = dict(tokenizer["added_tokens"][0], id=sound.dimensions.vocab_size + 1, content="<beyond>")
    tokenizer["added_tokens"].append(added)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    problem = next(problem for problem in describe(folder).problems if problem.kind == "tokenizer_larger")
    assert problem.severity == "error" and str(added["id"]) in problem.detail


def test_keys_that_the_class_overrules_are_told_with_both_answers(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "DeepSeek-V3", moe_layer_freq=2, scoring_func="softmax")
    found = describe(folder, operators=True)
    told = {item.detail.partition(" ")[0]: item.detail for item in found.problems if item.kind == "key_overruled"}
    assert set(told) == {"moe_layer_freq", "scoring_func"}
    assert "says softmax" in told["scoring_func"] and "does sigmoid" in told["scoring_func"]
    assert "dense in 32 layers" in told["moe_layer_freq"] and "dense in 3 layers (0-2)" in told["moe_layer_freq"]


@pytest.mark.parametrize("name", FULL_SIZE)
def test_keys_that_agree_with_the_class_are_not_told(name: str) -> None:
    assert [item for item in full_size(name).problems if item.kind in ("key_overruled", "keys_not_compared")] == []


def test_a_first_answer_that_fails_breaks_no_description(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(*_: object) -> ModelDescription:
        raise ValueError("no second opinion")

    monkeypatch.setattr("dayzero.model.contradictions.provisional", failing)
    found = describe(write_config(tmp_path, "Meta-Llama-3.1-8B", flux_gate=3))
    assert found.total_parameters == 8030261248
    assert ["no second opinion" in item.detail for item in found.problems if item.kind == "keys_not_compared"] == [True]


@pytest.mark.parametrize(
    "changes",
    [{"rope_theta": 0}, {"rms_norm_eps": float("nan")}, {"text_config": "hi"}, {"architectures": "LlamaForCausalLM"},
     {"num_nextn_predict_layers": 1_000_000}],
    ids=str,
)  # fmt: skip
def test_both_answers_refuse_what_no_model_can_have(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder, (key,) = write_config(tmp_path, "Meta-Llama-3.1-8B", **changes), changes
    for answer in (describe, lambda place: provisional(open_release(place))):
        with pytest.raises(DayZeroError, match=f"{key} is not usable"):
            answer(folder)


def test_a_class_named_that_is_not_the_types_is_told_in_both_answers(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "Meta-Llama-3.1-8B", architectures=["FooForCausalLM"])
    for found in (describe(folder), provisional(open_release(folder))):
        told = [item.detail for item in found.problems if item.kind == "architecture"]
        assert len(told) == 1 and "FooForCausalLM" in told[0] and "'llama'" in told[0]
    assert not [item for item in full_size("Meta-Llama-3.1-8B").problems if item.kind == "architecture"]
