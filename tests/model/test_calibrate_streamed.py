"""One layer in memory gives the ordinary forward; what matrices are given is seen whatever way they are multiplied."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch

from dayzero.calibrate.inputs import InputWatch, MatrixName
from dayzero.calibrate.skeleton import Skeleton, build_skeleton
from dayzero.calibrate.streamed import StreamedRun, run_streamed, split_chunks
from dayzero.core.errors import DayZeroError
from tests.tiny.build import make_tiny_model

# Dense, sliding, scaled embeddings and soft caps, parallel blocks, fused and transposed projections, latent attention, experts
# as modules, stacked and transposed, gated delta and state-space hybrids, looped layers, compressed attention, a multimodal
# class, shared layers, one that has no stack of its own.
TYPES = ["llama", "gemma2", "gpt2", "phi3", "falcon", "deepseek_v3", "mixtral", "gpt_oss", "llama4_text", "jetmoe", "qwen3_next",
         "jamba", "bamba", "zamba2", "gemma4", "deepseek_v4", "kimi_linear", "hrm_text", "mamba"]  # fmt: skip


def tokens(count=5, length=24, seed=1):
    return torch.randint(3, 120, (count, length), generator=torch.Generator().manual_seed(seed))


def parameters(model):
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def eager(model):
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    with contextlib.suppress(ValueError):  # a class that has but one
        model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("model_type", TYPES)
def test_the_streamed_forward_is_the_forward(model_type, tmp_path):
    model = eager(make_tiny_model(model_type))
    stored, batch = parameters(model), tokens()
    with torch.no_grad():
        wanted = model(input_ids=batch, use_cache=False).logits
    skeleton = Skeleton(build_skeleton(model.config))
    skeleton.fill_resident(stored.__getitem__)
    filled, asked, found = [], [], {}

    def visit(station, calls):
        filled.append([name for name in skeleton.layers if any(not p.is_meta for p in skeleton.parameters_of(name).values())])
        return [call.run() for call in calls]

    def provide(name):
        asked.append(name)
        return stored[name]

    run_streamed(skeleton, provide, split_chunks(batch, 2), visit=visit, consume=found.__setitem__, spill=tmp_path)
    got = torch.cat([found[number] for number in range(3)])
    assert float((got - wanted).abs().max()) < 1e-4
    # Layers that share weights are filled together; others one at a time.
    shared = {id(p) for name in skeleton.layers for p in skeleton.parameters_of(name).values()}
    if len(shared) == sum(len(skeleton.parameters_of(name)) for name in skeleton.layers):
        assert {len(one) for one in filled} == {1}
    assert all(p.is_meta for name in skeleton.stations for p in skeleton.parameters_of(name).values()), "let go at the end"
    assert not list(tmp_path.iterdir()), "spilled outputs have no name"


def test_large_outputs_wait_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("dayzero.calibrate.streamed.SPILL_BYTES", 16)
    test_the_streamed_forward_is_the_forward("llama", tmp_path)


def test_an_error_in_a_layer_is_told_and_ends_every_thread():
    model = make_tiny_model("llama")
    stored = parameters(model)
    skeleton = Skeleton(build_skeleton(model.config))
    skeleton.fill_resident(stored.__getitem__)
    before = threading.active_count()

    def provide(name):
        if ".1." in name:
            raise DayZeroError("no such tensor", got=name)
        return stored[name]

    with pytest.raises(DayZeroError, match="no such tensor"):
        run_streamed(skeleton, provide, split_chunks(tokens(), 1))
    assert threading.active_count() == before
    # The skeleton can be used again.
    found = {}
    run_streamed(skeleton, stored.__getitem__, [tokens()], consume=found.__setitem__)
    assert found[0].isfinite().all()


def test_an_error_in_the_model_is_told():
    model = make_tiny_model("llama")
    skeleton = Skeleton(build_skeleton(model.config))
    skeleton.fill_resident(parameters(model).__getitem__)
    with pytest.raises(IndexError):
        run_streamed(skeleton, parameters(model).__getitem__, [torch.full((1, 4), 10**6)])


def test_weights_are_let_go():
    model = make_tiny_model("llama")
    stored = parameters(model)
    skeleton = Skeleton(build_skeleton(model.config))
    skeleton.fill_resident(stored.__getitem__)
    alive = []

    def provide(name):
        values = stored[name].detach().clone()
        alive.append(weakref.ref(values.untyped_storage()))
        return values

    with StreamedRun(skeleton, provide, [tokens()]) as run:
        run.start()
        while run.advance():
            pass
        gc.collect()
        # The head is not filled yet: nothing is.
        assert not any(one() is not None for one in alive) or all(p.is_meta for p in skeleton.module.model.layers.parameters())


# What is given to each kind of matrix, against hooks on the modules, or worked out by hand for experts.


def test_linear_modules_see_their_inputs():
    model = make_tiny_model("llama")
    layer, given = model.model.layers[0], {}
    names = {module: name for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)}
    for module in names:
        module.register_forward_hook(lambda module, args, out: given.__setitem__(names[module], args[0].flatten(0, -2)))
    watch = InputWatch(dict(layer.named_parameters()), wanted=lambda name: True)
    original = layer.forward

    def watched(*args, **kwargs):
        with watch:
            return original(*args, **kwargs)

    layer.forward = watched
    with torch.no_grad():
        model(input_ids=tokens(), use_cache=False)
    assert set(given) == {name.parameter.removesuffix(".weight") for name in watch.seen}
    for name, x in given.items():
        seen = watch.seen[MatrixName(f"{name}.weight")]
        torch.testing.assert_close(seen.products, x.T @ x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(seen.largest, x.abs().amax(0))
        assert seen.tokens == len(x) and not seen.transposed


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("way", ["linear", "mm", "bmm", "einsum", "rows", "reversed", "bias"])
def test_every_way_of_multiplying_is_seen(way, turned):
    torch.manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(3, 6, 4) if not turned else torch.randn(3, 4, 6), requires_grad=False)
    x = torch.randn(3, 5, 4)
    plain = stack if not turned else stack.transpose(1, 2)  # [3, output 6, input 4]
    watch = InputWatch({"w": stack}, wanted=lambda name: True)
    with watch:
        if way == "linear":
            made = torch.stack([torch.nn.functional.linear(x[i], plain[torch.tensor(i)]) for i in range(3)])
        elif way == "mm":
            made = torch.stack([x[i] @ plain[i].T for i in range(3)])
        elif way == "bmm":
            made = torch.bmm(x, plain.transpose(1, 2))
        elif way == "einsum":
            made = torch.einsum("eti,eoi->eto", x, plain)
        elif way == "rows":  # a fused projection whose halves are multiplied apart
            made = torch.stack([torch.cat([x[i] @ part.T for part in plain[i].split(3)], -1) for i in range(3)])
        elif way == "reversed":
            made = torch.stack([(plain[i] @ x[i].T).T for i in range(3)])
        else:
            made = torch.stack([torch.addmm(torch.zeros(6), x[i], plain[i].T) for i in range(3)])
    torch.testing.assert_close(made, torch.einsum("eti,eoi->eto", x, plain))
    assert not watch.doubts
    for index in range(3):
        seen = watch.seen[MatrixName("w", index)]
        assert seen.transposed == turned and seen.tokens == 5
        torch.testing.assert_close(seen.products, x[index].T @ x[index])


def test_a_part_of_the_input_dimension_is_a_doubt():
    weight = torch.nn.Parameter(torch.randn(6, 4), requires_grad=False)
    with InputWatch({"w": weight}) as watch:
        torch.randn(5, 2) @ weight[:, :2].T
    assert "part of its input dimension" in watch.doubts["w"] and not watch.seen
