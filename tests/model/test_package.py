"""Compiled layers give what the modules give, are found again on disk, and a layer that cannot be compiled stays a module."""

import pytest
import torch

from dayzero.ops.cpu import load
from dayzero.runtime import load as loading
from dayzero.runtime.package import PackagedLayer, share_regions
from tests.model.engine_builders import greedy, make_engine, make_prompts, run_requests, tokens_of

pytestmark = pytest.mark.skipif(not load().available, reason="no C++ compiler on this machine: layers run as modules there")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("packages")


@pytest.fixture
def packages(folder, monkeypatch):
    """An empty cache of compiled layers, in place of the user's."""
    place = folder / "layers"
    place.mkdir(exist_ok=True)
    monkeypatch.setattr(loading, "cache_folder", lambda kind: place)
    return place


def test_compiled_layers_answer_as_modules_do_and_are_compiled_once(tiny_checkpoint, folder, packages):
    checkpoint, prompts = tiny_checkpoint("llama", dtype="float32"), make_prompts([5, 30, 17])
    requests = {f"r{i}": (prompt, greedy(10, top_logprobs=0)) for i, prompt in enumerate(prompts)}
    plain = make_engine(checkpoint, folder, compile="off")
    want = run_requests(plain, requests, every=2)
    plain.close()
    first: dict[str, int] = {}
    for _ in range(2):
        engine = make_engine(checkpoint, folder, compile="on")
        assert all(isinstance(layer, PackagedLayer) for layer in engine.runner.model.layers), engine.info.tier_reasons
        assert engine.info.fallbacks == ()
        got = run_requests(engine, requests, every=2)
        for name, outputs in want.items():
            assert tokens_of(got[name]) == tokens_of(outputs)
            for mine, theirs in zip(got[name], outputs, strict=True):
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        layers = engine.runner.model.layers
        engine.close()
        assert not any(isinstance(layer, PackagedLayer) for layer in layers)
        files = {path.name: path.stat().st_mtime_ns for path in packages.glob("*.pt2")}
        assert len(files) == 1 and first in ({}, files)
        first = files


def test_what_a_compiler_cannot_do_leaves_the_module_and_a_reason(tiny_checkpoint, folder, packages, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no such machine")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", refuse)
    engine = make_engine(tiny_checkpoint("gemma3_text", dtype="float32"), folder, compile="on")
    assert not any(isinstance(layer, PackagedLayer) for layer in engine.runner.model.layers)
    assert any("not compiled: RuntimeError: no such machine" in reason for reason in engine.info.fallbacks)
    assert len(tokens_of(run_requests(engine, {"a": (make_prompts([9])[0], greedy(4))})["a"])) == 4
    engine.close()


def test_linears_of_one_input_become_one_operator():
    class Three(torch.nn.Module):
        def forward(self, x, a, b, c, site):
            op = torch.ops.dayzero.linear_at
            return op(x, a, None, site) + op(x, b, None, site), op(op(x, a, None, site), c, None, site)

    weights = [torch.randn(8, 8) for _ in range(3)]
    inputs = (torch.randn(1, 3, 8), *weights, torch.tensor([-1, -1]))
    exported = torch.export.export(Three(), inputs, strict=False)
    share_regions(exported.graph_module)
    targets = [str(node.target) for node in exported.graph.nodes if "dayzero" in str(node.target)]
    assert targets == ["dayzero.linears_at.default", "dayzero.linear_at.default"]
    for got, want in zip(exported.module()(*inputs), Three()(*inputs), strict=True):
        assert torch.equal(got, want)
