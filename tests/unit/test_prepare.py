"""Presets before a release: sizes of an announced family, near what was asked, within what was announced, and plannable."""

import json
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_builders import make_target

from dayzero.core.errors import DayZeroError
from dayzero.core.records import from_dict
from dayzero.core.target import Workload
from dayzero.core.units import GIB
from dayzero.model.provisional import provisional
from dayzero.model.release import open_release
from dayzero.plan import PlanOptions, make_plan
from dayzero.plan.family import Family, Pattern, Scaler, load_family, parse_size
from dayzero.plan.prepare import parse_sizes, prepare, preset_files

pytestmark = pytest.mark.slow

EXPERT_MODEL = {
    "model_type": "announced", "architectures": ["AnnouncedForCausalLM"], "torch_dtype": "bfloat16", "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "vocab_size": 129280, "max_position_embeddings": 163840, "tie_word_embeddings": False,
}  # fmt: skip
DENSE_MODEL = {
    "model_type": "announced", "torch_dtype": "bfloat16", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip
WORKLOAD = Workload(context_tokens=32768, concurrency=16, input_tokens=2000, output_tokens=500)


@pytest.fixture
def describe(tmp_path):
    """What the command line gives: a configuration described from its keys."""

    def from_keys(config):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return provisional(open_release(path))

    return from_keys


def total(describe):
    return lambda config: describe(config).total_parameters


@pytest.mark.parametrize("size", [0.5e12, 1e12, 2e12, 4e12])
def test_a_size_is_met_within_five_percent_and_the_rules_hold(describe, size):
    scaled = Scaler(Family(name="f", config=EXPERT_MODEL), total(describe)).scaled(int(size))
    assert describe(scaled.config).total_parameters == scaled.parameters
    assert abs(scaled.parameters - size) <= 0.05 * size and not scaled.notes
    config = scaled.config
    assert config["n_routed_experts"] % 32 == 0 and config["n_routed_experts"] % config["n_group"] == 0
    assert config["moe_intermediate_size"] % 128 == 0 and config["num_attention_heads"] % 8 == 0
    assert config["hidden_size"] * 128 == 7168 * config["num_attention_heads"]  # a head keeps its share
    assert config["num_key_value_heads"] == config["num_attention_heads"]  # as many as heads: they grow together
    held = set(EXPERT_MODEL) - {"n_routed_experts", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads",
                                "hidden_size", "intermediate_size", "num_hidden_layers"}  # fmt: skip
    assert {key: config[key] for key in held} == {key: EXPERT_MODEL[key] for key in held}


def test_the_base_itself_is_the_size_of_the_base(describe):
    base = describe(EXPERT_MODEL).total_parameters
    scaled = Scaler(Family(name="f", config=EXPERT_MODEL), total(describe)).scaled(base)
    assert abs(scaled.parameters - base) < 0.01 * base


def test_a_model_without_experts_grows_in_depth_and_width(describe):
    scaled = Scaler(Family(name="f", config=DENSE_MODEL), total(describe)).scaled(int(0.4e12))
    assert abs(scaled.parameters - 0.4e12) < 0.05 * 0.4e12
    assert {"num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size"} == set(scaled.changed)
    assert scaled.config["num_key_value_heads"] == 8


def test_announced_ranges_and_held_keys_are_obeyed(describe):
    ranges = {"num_hidden_layers": (60, 80, 4), "n_routed_experts": (384, 512, 64)}
    family = Family(name="f", config=EXPERT_MODEL, ranges=ranges, held=("num_attention_heads",))
    scaler = Scaler(family, total(describe))
    for size in (1e12, 1.5e12, 2e12):
        config = scaler.scaled(int(size)).config
        assert 60 <= config["num_hidden_layers"] <= 80 and 384 <= config["n_routed_experts"] <= 512
        assert config["num_attention_heads"] == 128 and config["hidden_size"] == 7168


def test_a_size_out_of_the_announced_ranges_says_how_near_it_got(describe):
    ranges = {key: (EXPERT_MODEL[key],) * 2 + (None,) for key in ("num_hidden_layers", "n_routed_experts", "moe_intermediate_size")}
    scaled = Scaler(Family(name="f", config=EXPERT_MODEL, ranges=ranges, held=("num_attention_heads",)), total(describe)).scaled(int(4e12))
    assert scaled.changed == {} and scaled.parameters < 1e12
    assert "the nearest size within the family's ranges" in scaled.notes[0]


def test_lists_per_layer_are_continued(describe):
    layers = ["linear_attention"] * 3 + ["full_attention"]
    config = DENSE_MODEL | {"layer_types": layers * 20, "full_attention_interval": 4}
    scaler = Scaler(Family(name="f", config=config), lambda given: 10**9 * given["num_hidden_layers"])
    scaled = scaler.scaled(96 * 10**9)
    assert scaled.config["num_hidden_layers"] == 96 and scaled.config["layer_types"] == layers * 24
    assert config["layer_types"] == layers * 20  # the base is not written to


def test_a_depth_that_cannot_be_followed_is_held_and_said(describe):
    for more, told in (({"linear": {"full_attn_layers": [4, 8], "num_heads": 64}}, "lists layers by number"),
                       ({"hybrid_override_pattern": "M-M*" * 20}, "spells the layers as text"),
                       ({"kinds": [index % 7 if index < 40 else index % 11 for index in range(80)]}, "no repeating pattern")):  # fmt: skip
        scaled = Scaler(Family(name="f", config=DENSE_MODEL | more), lambda given: 10**7 * given["hidden_size"]).scaled(10**11)
        assert "num_hidden_layers" not in scaled.changed and told in scaled.notes[0]
        if "linear" in more:  # heads of another mixer that are as many follow the width
            assert scaled.config["linear"]["num_heads"] == scaled.config["num_attention_heads"]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.lists(st.integers(3, 4), max_size=3), st.integers(3, 9), st.integers(1, 40))
def test_a_pattern_keeps_its_start_and_its_rhythm(repeated, first, times, number):
    values = [*first, *repeated * times]
    pattern = Pattern.read(values, len(values))
    assert pattern is not None and pattern.of(len(values)) == values
    assert len(pattern.of(number)) == number
    longer = pattern.of(len(values) + 2 * pattern.period)
    assert longer[: len(first)] == first and sorted(set(longer)) == sorted(set(values))


def test_a_preset_plans_the_same_layout_on_the_day(describe):
    presets = prepare(Family(name="next", config=EXPERT_MODEL), make_target(memory_bytes=141 * GIB), [700 * 10**9],
                      describe=describe, workload=WORKLOAD)  # fmt: skip
    (preset,) = presets
    assert preset.feasible and preset.name == "next-700B" and preset.devices == preset.options["devices"]
    options = from_dict(PlanOptions, preset.options)
    again = make_plan(replace(describe(preset.config), name=preset.name), make_target(memory_bytes=141 * GIB), WORKLOAD, options)
    layout = again.layout
    assert again.feasible
    assert (layout.tp, layout.pp, layout.dp, layout.ep, layout.cp_devices, layout.cp_in_tp) == tuple(
        preset.options[axis] for axis in ("tp", "pp", "dp", "ep", "cp", "dcp"))  # fmt: skip
    assert again.weights_bytes_per_device == preset.figures["weights_bytes_per_device"]


def test_presets_say_what_to_tune_and_what_was_assumed(describe):
    family = Family(name="next", config=EXPERT_MODEL, weights_dtypes=("fp8", "int4"))
    presets = prepare(family, make_target(memory_bytes=141 * GIB, unverified=("card.memory_bytes",)), [10**12], describe=describe,
                      workload=WORKLOAD)  # fmt: skip
    assert [preset.name for preset in presets] == ["next-1T-fp8", "next-1T-int4"]
    assert presets[1].figures["weights_bytes_per_device"] * presets[1].devices < (
        presets[0].figures["weights_bytes_per_device"] * presets[0].devices)  # fmt: skip
    for preset in presets:
        assert preset.reasons and any("larger per card" in line for line in preset.tune)
        assert any("unverified" in line for line in preset.tune)
        if preset.options["ep"] > 1:
            assert any(line.startswith("experts: ") for line in preset.tune)
        assert any("not known" in line for line in preset.assumed)
    files = preset_files(presets)
    assert set(files) == {"next-1T-fp8.yaml", "next-1T-int4.yaml"}
    read = yaml.safe_load(files["next-1T-fp8.yaml"])
    assert read["schema"] == "dayzero.preset/1" and read["options"]["weights_dtype"] == "fp8"
    from_dict(PlanOptions, read["options"])


def test_a_size_that_fits_nowhere_is_a_preset_that_says_so(describe):
    (preset,) = prepare(Family(name="next", config=EXPERT_MODEL), make_target(memory_bytes=8 * GIB), [10**12], describe=describe,
                        workload=WORKLOAD, options=PlanOptions(devices=8))  # fmt: skip
    assert not preset.feasible and "does not fit" in preset_files([preset])["next-1T.yaml"]
    assert any("short by" in line for line in (*preset.reasons, *preset.tune))
    (refused,) = prepare(Family(name="next", config=EXPERT_MODEL), make_target(), [10**12], describe=describe, workload=WORKLOAD,
                         options=PlanOptions(devices=8, tp=3))  # fmt: skip
    assert not refused.feasible and refused.reasons and refused.options == {}


def test_sizes_are_read_as_people_write_them():
    assert parse_size("0.5T") == 5 * 10**11 and parse_size("671B") == 671 * 10**9 and parse_size("1_000_000") == 10**6
    assert parse_sizes("0.5T, 4T") == (5 * 10**11, 4 * 10**12)
    between = parse_sizes("0.5T-4T")
    assert between[0] == 5 * 10**11 and between[-1] == 4 * 10**12 and len(between) == 7
    assert parse_sizes("1.2T-1.4T") == (1_200_000_000_000, 1_400_000_000_000)
    for wrong in ("", "big", "0T", "nanT", "-1T"):
        with pytest.raises(DayZeroError, match="size that cannot be read"):
            parse_size(wrong)


def test_family_files(tmp_path):
    base = tmp_path / "config.json"
    base.write_text(json.dumps(EXPERT_MODEL))
    assert load_family(base) == Family(name=tmp_path.name, config=EXPERT_MODEL)
    file = tmp_path / "next.yaml"
    file.write_text("base: config.json\nname: next\nranges:\n  n_routed_experts: [256, 512, 64]\n  vocab_size: 160000\nheld: [hidden_size]\n"
                    "sizes: [1T, 2T]\nweights_dtypes: [fp8]\n")  # fmt: skip
    family = load_family(file)
    assert family.ranges == {"n_routed_experts": (256, 512, 64), "vocab_size": (160000, 160000, None)}
    assert family.sizes == (10**12, 2 * 10**12) and family.held == ("hidden_size",) and family.config == EXPERT_MODEL
    for text, told in (("base: config.json\nrange: {}\n", "unknown keys"), ("- 1\n", "is no family"),
                       ("base: config.json\nranges: {n_routed_experts: [5, 2]}\n", "ranges: n_routed_experts")):  # fmt: skip
        file.write_text(text)
        with pytest.raises(DayZeroError, match=told):
            load_family(file)
    with pytest.raises(DayZeroError, match="no family file"):
        load_family(tmp_path / "absent.yaml")
    with pytest.raises(DayZeroError, match="keys its configuration does not have"):
        Scaler(Family(name="f", config=EXPERT_MODEL, held=("num_expert",)), lambda config: 1)
    with pytest.raises(DayZeroError, match="does not say its sizes"):
        Scaler(Family(name="f", config={"hidden_size": 8}), lambda config: 1)
