"""The structure facts against numbers worked out by hand, and against what the classes compute. Cases by their ids."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dayzero.core.errors import DayZeroError
from dayzero.core.structure import Positions, Routing, Structure
from dayzero.model.classes import find_layers
from dayzero.model.describe import describe
from dayzero.model.release import open_release
from dayzero.model.resolve import Resolved, resolve
from dayzero.model.shrink import build_shrunken
from dayzero.model.structure import read_structure
from dayzero.model.structure.feed_forward import Unit, fit_activation, measure_unit
from dayzero.model.structure.rotation import rotate
from dayzero.model.structure.routing import route
from dayzero.model.structure.watch import watch
from dayzero.model.structure.window import visible_keys
from tests.tiny.build import default_config, make_tiny_model

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
LAYER_KEYS = {"num_hidden_layers": 4, "first_k_dense_replace": 1}


def released(name: str, **changes: Any) -> dict[str, Any]:
    """A published config with some keys changed; a value of None takes the key out."""
    config = json.loads((CONFIGS / name / "config.json").read_text()) | changes
    return {key: value for key, value in config.items() if value is not None}


def structure_of(config: dict[str, Any], folder: Path) -> Structure:
    (folder / "config.json").write_text(json.dumps(config))
    described = describe(folder)
    resolved = resolve(open_release(folder))
    assert isinstance(resolved, Resolved)
    model = resolved.build(torch.bfloat16)
    small = build_shrunken(resolved.config, dtype=torch.float32, seed=0)
    return read_structure(model, config, described.layer_kinds, described.parameters, small=small)


@cache
def published(name: str, tmp: Path) -> Structure:
    folder = tmp / name
    folder.mkdir()
    layers = {"DeepSeek-V3": LAYER_KEYS, "gpt-oss-120b": {"num_hidden_layers": 2, "layer_types": None}}.get(name, {})
    return structure_of(released(name, **layers), folder)


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("structure")


def tiny(model_type: str, folder: Path, **changes: Any) -> Structure:
    """The structure of a tiny config, taken as the full-size one."""
    _, shrunk = build_shrunken(default_config(model_type), dtype=torch.float32, seed=0)
    config = {**shrunk.config.to_dict(), **changes}
    return structure_of({key: value for key, value in config.items() if value is not None}, folder)


def rotary(structure: Structure, module: str = ".self_attn") -> Positions:
    return next(item for item in structure.positions if item.module == module)


# NU-01: two separate uses of mscale.

V3_ROPE = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
MSCALES = [(40, 1.0, 1.0), (40, 0.707, 0.707), (32, 1.0, 1.0), (40, 1.0, 0.707), (40, None, None)]


def m(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def yarn(dims: int, theta: float, factor: float, original: int, fast: float = 32, slow: float = 1) -> list[float]:
    """YaRN (arXiv 2309.00071): frequencies that turn often stay, slow ones are divided, a ramp between."""

    def bound(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(bound(fast)), 0), min(math.ceil(bound(slow)), dims - 1)
    plain = [theta ** (-2 * i / dims) for i in range(dims // 2)]
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dims // 2)]
    return [f / factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]


@pytest.mark.parametrize(("factor", "mscale", "all_dim"), MSCALES)
def test_nu_01_latent_yarn_scales_cos_and_softmax_apart(factor, mscale, all_dim, tmp_path):
    given = {"mscale": mscale, "mscale_all_dim": all_dim} if mscale else {}
    config = released("DeepSeek-V3", **LAYER_KEYS, n_routed_experts=16, rope_scaling={**V3_ROPE, "factor": factor, **given})
    positions = rotary(structure_of(config, tmp_path))
    wanted_cos = m(factor, mscale) / m(factor, all_dim) if mscale else m(factor, 1.0)
    wanted_softmax = 192**-0.5 * (m(factor, all_dim) ** 2 if all_dim else 1.0)
    assert positions.attention_factor == pytest.approx(wanted_cos, abs=1e-7)
    assert positions.softmax_scale == pytest.approx(wanted_softmax, abs=1e-7)
    assert positions.inverse_frequencies == pytest.approx(yarn(64, 10000.0, factor, 4096), rel=1e-6)
    assert (positions.scaling, positions.factor, positions.theta) == ("yarn", factor, 10000.0)
    assert (positions.rotated_dims, positions.head_dims, positions.evidence) == (64, 192, "measured")


def test_nu_01_dense_yarn_multiplies_cos_and_leaves_softmax_alone(tmp):
    positions = rotary(published("gpt-oss-120b", tmp))
    assert positions.attention_factor == pytest.approx(m(32, 1.0), abs=1e-7)
    assert positions.softmax_scale == pytest.approx(64**-0.5, abs=1e-7)


# NU-07: a window of W is W keys.


def seen_keys(model_type: str, tokens: int, **overrides: Any) -> list[torch.Tensor]:
    model, _ = build_shrunken(default_config(model_type), dtype=torch.float32, seed=0, overrides=overrides)
    calls = watch(model, find_layers(model)[0], tokens=tokens).first.attention
    return [call.seen for call in calls if call.seen is not None]


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "gpt_oss", "cohere2", "olmo3"])
@pytest.mark.parametrize("window", [4, 1, 11, 20])
def test_nu_07_query_sees_itself_and_the_window_before_it(model_type, window):
    found = seen_keys(model_type, 11, sliding_window=window)
    distance = torch.arange(11)[:, None] - torch.arange(11)[None, :]
    windowed, causal = (distance >= 0) & (distance < window), distance >= 0
    assert all(torch.equal(seen, windowed) or torch.equal(seen, causal) for seen in found)
    assert any(torch.equal(seen, windowed) for seen in found)
    assert max(visible_keys(seen) for seen in found) == (window if window < 11 else 0)


def test_nu_07_no_window_means_every_key():
    assert [visible_keys(seen) for seen in seen_keys("mistral", 11, sliding_window=None)] == [0, 0]


@pytest.mark.parametrize(("name", "wanted"), [("gpt-oss-120b", {128, 0}), ("gemma-4-26B-A4B", {1024, 0})])
def test_nu_07_visible_tokens_of_published_models(name, wanted, tmp):
    assert set(published(name, tmp).visible_tokens.values()) == wanted


def test_nu_07_chunks_are_counted_to_their_end(tmp_path):
    visible = tiny("llama4_text", tmp_path).visible_tokens
    assert set(visible.values()) == {8, 0}, visible


def test_nu_07_an_indexer_limits_what_is_seen(tmp_path):
    structure = tiny("deepseek_v32", tmp_path, index_topk=4)
    assert set(structure.visible_tokens.values()) == {4}


# NU-08: how rotary dimensions are paired.


def test_nu_08_both_styles_by_hand():
    x, frequencies = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64), [1.0, 10000**-0.5]
    c, s, d, t = math.cos(1), math.sin(1), math.cos(0.01), math.sin(0.01)
    half = torch.tensor([c - 3 * s, 2 * d - 4 * t, 3 * c + s, 4 * d + 2 * t], dtype=torch.float64)
    interleaved = torch.tensor([c - 2 * s, 2 * c + s, 3 * d - 4 * t, 4 * d + 3 * t], dtype=torch.float64)
    torch.testing.assert_close(rotate(x, 1, frequencies, "half"), half, rtol=0, atol=1e-15)
    torch.testing.assert_close(rotate(x, 1, frequencies, "interleaved"), interleaved, rtol=0, atol=1e-15)
    eight = torch.arange(1.0, 9.0, dtype=torch.float64)
    assert torch.equal(rotate(eight, 1, frequencies, "half")[4:], eight[4:])


def test_nu_08_permuted_weights_and_the_other_style_score_alike():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 16, generator=generator, dtype=torch.float64)
    frequencies = [10000 ** (-i / 8) for i in range(8)]
    order = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
    one = rotate(q, 7, frequencies, "interleaved") @ rotate(k, 3, frequencies, "interleaved")
    other = rotate(q[order], 7, frequencies, "half") @ rotate(k[order], 3, frequencies, "half")
    assert float(one - other) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("model_type", "main", "indexer"),
    [
        ("llama", "half", None),
        ("gpt_oss", "half", None),
        ("qwen3", "half", None),
        ("hunyuan_v1_dense", "half", None),  # a norm follows the rotation
        ("cohere", "interleaved", None),
        ("glm4", "interleaved", None),
        ("llama4_text", "interleaved", None),  # complex numbers
        ("deepseek_v3", "interleaved", None),  # reorders while it rotates
        ("deepseek_v32", "interleaved", "half"),
        ("glm_moe_dsa", "interleaved", "interleaved"),
    ],
)
def test_nu_08_style_of_each_mixer_is_measured(model_type, main, indexer, tmp_path):
    extra = {"head_dim": 16} if model_type.startswith("hunyuan") else {}
    found = {item.module: item.style for item in tiny(model_type, tmp_path, **extra).positions if item.kind == "rotary"}
    assert found == {".self_attn": main} | ({".self_attn.indexer": indexer} if indexer else {})


@pytest.mark.parametrize(("model_type", "other"), [("llama", "interleaved"), ("cohere", "half"), ("glm4", "half")])
def test_nu_08_measured_facts_reproduce_the_scores_of_the_class(model_type, other, tmp_path):
    """q k from the projections' outputs through `rotate` with the measured facts equals what attention is given."""
    positions = rotary(tiny(model_type, tmp_path))
    model = make_tiny_model(model_type)
    layer = f"{find_layers(model)[0]}.0.self_attn"
    runs = watch(model, find_layers(model)[0])
    inverse = next(buffer for name, buffer in runs.model.named_buffers() if name.endswith("inv_freq")).tolist()
    assert 2 * len(inverse) == positions.rotated_dims
    query = runs.first.calls[f"{layer}.q_proj"].out[0].unflatten(-1, (-1, positions.head_dims))
    attended = runs.first.attention[0].query[0].double().transpose(0, 1)  # [tokens, heads, dims]

    def products(style: str) -> torch.Tensor:
        turned = [rotate(query[i], i, inverse, style, positions.attention_factor) for i in (3, 20)]
        return (turned[0] * turned[1]).sum(-1)

    wanted = (attended[3] * attended[20]).sum(-1)
    torch.testing.assert_close(products(positions.style), wanted, rtol=1e-4, atol=1e-4)
    assert float((products(other) - wanted).abs().max()) > 1e-2


def test_layers_without_positions_are_told_apart(tmp_path):
    kinds = {item.layer_kinds: item.kind for item in tiny("cohere2", tmp_path).positions}
    assert kinds == {("sliding+dense",): "rotary", ("full+dense",): "none"}


# NU-16: where gate and up lie in a fused matrix.


class Fused(nn.Module):
    """A feed-forward whose rows are ordered by `take`: it gives gate and up from all rows."""

    def __init__(self, take: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.up, self.down, self.take = nn.Linear(6, 8, bias=False), nn.Linear(4, 6, bias=False), take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.take(self.up(x))
        return self.down(nn.functional.silu(gate) * up)


TAKES = {
    ("concatenated", "silu"): lambda z: z.chunk(2, -1),
    ("concatenated", "silu, up before gate"): lambda z: z.chunk(2, -1)[::-1],
    ("interleaved", "silu"): lambda z: (z[..., 0::2], z[..., 1::2]),
    ("interleaved", "silu, up before gate"): lambda z: (z[..., 1::2], z[..., 0::2]),
}


def unit_of(take: Callable[..., Any]) -> Unit | str:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 6)
    return measure_unit(Fused(take).double(), x, (x,), 1.0)


@pytest.mark.parametrize(("layout", "activation"), TAKES)
def test_nu_16_a_swap_of_rows_is_visible(layout, activation):
    unit = unit_of(TAKES[layout, activation])
    assert isinstance(unit, Unit)
    assert (unit.layout, fit_activation([unit], ())) == (layout, activation)


def test_nu_16_another_layout_is_refused():
    assert isinstance(unit_of(lambda z: (z[..., :4], z[..., 4:].flip(-1))), str)


@pytest.mark.parametrize(
    ("model_type", "experts"),
    [
        ("gpt_oss", ("interleaved", "gate * sigmoid(1.702 * gate) * (up + 1), gate at most 7, up within 7")),
        ("mixtral", ("concatenated", "silu")),
        ("nemotron_h", ("plain", "relu_squared")),
    ],
)
def test_nu_16_layouts_of_classes(model_type, experts, tmp_path):
    found = {item.module.rpartition(".")[2]: item for item in tiny(model_type, tmp_path).feed_forwards}
    assert (found["experts"].layout, found["experts"].activation, found["experts"].evidence) == (*experts, "measured")


# CF-02: the base that really decides.

BASE = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 160, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 500000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ],
)
def test_cf_02_theta_wherever_it_stands(keys, tmp_path):
    structure = structure_of(BASE | keys, tmp_path)
    positions = rotary(structure)
    assert positions.theta == 500000.0
    assert positions.inverse_frequencies[1] == pytest.approx(500000.0 ** (-2 / 16), rel=1e-6)
    assert not any("rope_theta" in note for note in structure.notes)


def test_cf_02_conflict_is_an_error_and_absence_is_said(tmp_path):
    keys = {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    with pytest.raises(DayZeroError, match="rope_theta is given twice"):
        structure_of(BASE | keys, tmp_path)
    structure = structure_of(BASE, tmp_path)
    assert "rope_theta is absent from the config: the class default 10000 decided" in structure.notes
    assert rotary(structure).inverse_frequencies[1] == pytest.approx(10000.0 ** (-2 / 16), rel=1e-6)


def test_cf_02_theta_by_layer_type(tmp_path):
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    structure = tiny("gemma3_text", tmp_path, rope_parameters=ropes)
    found = {item.layer_kinds[0].partition("+")[0]: item for item in structure.positions}
    for kind, theta in (("full", 1e6), ("sliding", 1e4)):
        assert found[kind].theta == theta
        assert found[kind].inverse_frequencies[1] == pytest.approx(theta ** (-2 / found[kind].head_dims), rel=1e-6)


# CF-07: normalisation of the chosen weights.

LOGITS = [1.0, 0.5, 0.0, -1.0]


@pytest.mark.parametrize(("model_type", "default"), [("qwen3_moe", False), ("mellum", True)])
@pytest.mark.parametrize("given", [True, False, None])
def test_cf_07_weights_with_and_without_normalisation(model_type, default, given, tmp_path):
    structure = tiny(model_type, tmp_path, norm_topk_prob=given, num_experts=4)
    routing = structure.routing[0]
    assert routing.normalised is (default if given is None else given)
    assert ("norm_topk_prob" in routing.default_keys) is (given is None)
    assert (routing.scoring, routing.bias, routing.evidence) == ("softmax", False, "measured")
    total = sum(map(math.exp, LOGITS))
    chosen = [math.exp(1.0) / total, math.exp(0.5) / total]
    wanted = [weight / sum(chosen) for weight in chosen] if routing.normalised else chosen
    indices, weights = route(routing, torch.tensor([LOGITS]))
    assert indices.tolist() == [[0, 1]] and weights[0].tolist() == pytest.approx(wanted, abs=1e-6)
    # And the class's own router, given these logits.
    config = default_config(model_type)
    if given is not None:
        config.norm_topk_prob = given
    model, _ = build_shrunken(config, dtype=torch.float32, seed=0, overrides={"num_experts": 4})
    router = next(module for name, module in model.named_modules() if name.endswith("mlp.gate"))
    with torch.no_grad():
        router.weight.zero_()[:, 0] = torch.tensor(LOGITS)
        one = torch.zeros(1, router.weight.shape[1])
        one[0, 0] = 1.0
        out = router(one)
    assert sorted(out[1].flatten().tolist(), reverse=True) == pytest.approx(wanted, abs=1e-6)


def test_cf_07_where_neither_a_class_nor_a_key_says_it_nothing_is_assumed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"model_type": "unheard_of", "num_experts": 4}))
    found = describe(tmp_path).structure.routing
    assert all((item.scoring, item.normalised, item.scaling) == (None, None, None) for item in found), found


# Routing of whole classes: what the definition gives is what the experts were given.

ROUTINGS = {
    "deepseek_v3": Routing(scoring="sigmoid", groups=2, groups_per_token=1, bias=True, scaling=2.5, normalised=True),
    "minimax_m2": Routing(scoring="sigmoid", bias=True, scaling=1.0, normalised=True),
    "mixtral": Routing(scoring="softmax", bias=False, scaling=1.0, normalised=True),
    "gpt_oss": Routing(scoring="softmax", bias=False, scaling=1.0, normalised=True),
    "deepseek_v4": Routing(scoring="sqrtsoftplus", bias=True, scaling=1.5, normalised=True),
    "kolibri1": Routing(scoring="sigmoid", bias=True, scaling=1.0, normalised=False),
}


@pytest.mark.parametrize("model_type", ROUTINGS)
def test_routing_of_classes_is_measured(model_type, tmp_path):
    found = tiny(model_type, tmp_path).routing[-1]
    wanted = replace(
        ROUTINGS[model_type], layer_kinds=found.layer_kinds, experts_per_token=2, default_keys=found.default_keys,
        evidence="measured",
    )  # fmt: skip
    assert found == wanted


def test_published_structure_in_full_sizes(tmp):
    structure = published("DeepSeek-V3", tmp)
    assert structure.routing == (
        Routing(
            layer_kinds=("latent+moe",), scoring="sigmoid", experts_per_token=8, groups=8, groups_per_token=4, bias=True,
            scaling=2.5, normalised=True, evidence="measured",
        ),
    )  # fmt: skip
    norm = structure.norms[0]
    assert (norm.kind, norm.eps, norm.weight_offset) == ("rms_norm", 1e-6, 0.0)
    assert {".input_layernorm", ".self_attn.kv_a_layernorm", "model.norm"} <= set(norm.modules)
    assert structure.visible_tokens == {"latent+dense": 0, "latent+moe": 0} and structure.notes == ()


def test_towers_say_what_they_take_and_where_they_feed_in(tmp):
    structure = published("gemma-4-26B-A4B", tmp)
    (tower,) = structure.towers
    assert (tower.name, tower.kind) == ("model.vision_tower", "vision")
    assert tower.parameters > 5e8 and "image_token_id 258880" in tower.feeds_into


def test_norms_with_a_weight_offset(tmp_path):
    assert {(item.kind, item.weight_offset) for item in tiny("gemma2", tmp_path).norms} == {("rms_norm", 1.0)}


def test_a_model_that_cannot_be_followed_gets_notes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    described, resolved = describe(tmp_path), resolve(open_release(tmp_path))
    assert isinstance(resolved, Resolved)
    model, small = resolved.build(torch.bfloat16), build_shrunken(resolved.config, dtype=torch.float32, seed=0)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("of another kind")

    find_layers(small[0])[1][0].forward = fail
    structure = read_structure(model, BASE, described.layer_kinds, described.parameters, small=small)
    assert any("of another kind" in note for note in structure.notes)
    without = read_structure(model, BASE, described.layer_kinds, described.parameters, small=None)
    assert without.positions[0].inverse_frequencies[0] == 1.0 and without.positions[0].style is None


def test_a_key_the_router_does_not_act_on_is_said(tmp_path):
    """Here the scaling is applied after the experts are summed: who reads the key alone would apply it twice or never."""
    notes = tiny("beam", tmp_path).notes
    assert any("a key says scaling 2.5, the router multiplies by 1" in note for note in notes), notes


def test_choices_that_show_no_scoring_are_not_called_measured(tmp_path):
    structure = tiny("hunyuan_v1_moe", tmp_path)
    assert structure.routing[0].evidence != "measured" and structure.routing[0].scoring is None
    assert any("shows no scoring" in note for note in structure.notes)
