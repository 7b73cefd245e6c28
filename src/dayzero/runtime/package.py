"""Compiled decoder layers for T2: one AOTInductor package per kind of layer, with the weights as inputs.

transformers' modules cost hundreds of microseconds of Python and dispatch a layer, whatever the kernels. A package of the
layer's own exported graph costs a few dozen. Attention and linears stay opaque operators with a handle into the engine's
state, so one package serves all layers of its kind, any number of tokens, and any engine. Packages are cached on disk.

Every layer is compared with the module it replaces before it is used; where export, compilation or the comparison fails,
the module stays and the reason is kept. Needs a C++ compiler; without one nothing is replaced.
"""

import hashlib
import operator
import os
import platform
import tempfile
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dayzero.core.step import StepBatch
from dayzero.model.classes import layer_kind_signatures
from dayzero.ops.cpu import build as cpu_kernels
from dayzero.runtime.paged import PagedRunner
from dayzero.runtime.quantized import QuantizedStack

# Two token counts from which the dimensions that grow with the step are learned. No model has sizes like these.
_PROBE_TOKENS = (11, 13)
_MAX_TOKENS = 1 << 20
# Error of a compiled layer over the size of its output: fused arithmetic keeps more precision than eager, no less.
_LIMIT = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """How many layers run compiled, and in words why the others do not."""

    layers: int
    packages: int
    seconds: float
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Call:
    """How the model called one layer: the leaves of its arguments, and what came back."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    output: Any


class PackagedLayer(nn.Module):
    """Stands where a decoder layer stood. Attributes it does not have are the layer's own."""

    _run: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    _weights: list[torch.Tensor]
    _rebuild: Callable[[list[torch.Tensor]], Any]
    _num_args: int
    _names: tuple[str, ...]
    _places: list[tuple[int | str, int | None]]
    replaced: nn.Module

    def __init__(
        self,
        layer: nn.Module,
        run: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        call: _Call,
        weights: list[torch.Tensor],
    ) -> None:
        super().__init__()
        self.replaced = layer
        self._run, self._weights = run, weights
        args, kwargs = pytree.tree_unflatten(list(range(len(call.leaves))), call.spec)
        self._num_args, self._names = len(args), tuple(kwargs)
        tensors = {place for place, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor)}
        # Where the tensors are: (argument, item of it or None for the argument itself), looked up once.
        self._places = [
            (key, item)
            for key, value in [*enumerate(args), *kwargs.items()]
            for item, place in (enumerate(value) if isinstance(value, (tuple, list)) else [(None, value)])
            if place in tensors
        ]
        if len(self._places) != len(tensors):
            raise NotCompilable("a layer is given tensors inside nested containers")
        if isinstance(call.output, torch.Tensor):
            self._rebuild = lambda outputs: outputs[0]
        else:
            kept = [isinstance(item, torch.Tensor) for item in call.output]
            self._rebuild = lambda outputs: _interleave(outputs, kept)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("replaced"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert (len(args), tuple(kwargs)) == (self._num_args, self._names), (
            "the model calls its layers in another way than at load"
        )
        inputs = []
        for key, item in self._places:
            value = args[key] if isinstance(key, int) else kwargs[key]
            inputs.append(value if item is None else value[item])
        return self._rebuild(self._run(inputs + self._weights))


def _interleave(outputs: list[torch.Tensor], kept: list[bool]) -> tuple[torch.Tensor | None, ...]:
    rest = iter(outputs)
    return tuple(next(rest) if keep else None for keep in kept)


def _is_leaf(value: Any) -> bool:
    return value is None or not isinstance(value, (tuple, list, dict))


@torch.no_grad()
def compile_layers(runner: PagedRunner, cache_folder: Path, log: Callable[[str], None] = lambda text: None) -> Compiled:
    """Replace the decoder layers of a T2 runner by compiled ones, kind by kind. The runner must be idle."""
    started = time.perf_counter()
    layers, model = runner.model.layers, runner.model
    calls = [record_calls(runner, count) for count in _PROBE_TOKENS]
    kinds: dict[Hashable, list[int]] = {}
    for index, signature in enumerate(layer_kind_signatures(model.module, model.module.config)):
        kinds.setdefault((signature, _shape_signature(layers[index], calls[0][index])), []).append(index)
    notes, replaced, packages = [], 0, 0
    for members in kinds.values():
        first = members[0]
        if any(isinstance(one, QuantizedStack) for one in layers[first].modules()):
            why = "their experts are stored in few bits, and which of them run is known at run time alone"
            notes.append(f"{len(members)} layers like layer {first} are not compiled: {why}")
            continue
        log(f"compiling {len(members)} layers like layer {first}")
        try:
            run = _build(layers[first], calls[0][first], calls[1][first], cache_folder)
            packaged = [PackagedLayer(layers[i], run, calls[0][i], _weights(layers[i])) for i in members]
            errors = [_compare(runner, layer, calls[0][i]) for i, layer in zip(members, packaged, strict=True)]
        except Exception as error:  # whatever a compiler says of an untried layer: it runs as it is, and the report says so
            text = " ".join(str(error).split())[:200]
            notes.append(f"{len(members)} layers like layer {first} are not compiled: {type(error).__name__}: {text}")
            continue
        packages += 1
        for index, layer, off in zip(members, packaged, errors, strict=True):
            if off > _LIMIT[model.dtype]:
                notes.append(f"layer {index} is not compiled: it differs from the module by {off:.2g} of its size")
                continue
            layers[index] = layer
            replaced += 1
    return Compiled(layers=replaced, packages=packages, seconds=time.perf_counter() - started, notes=tuple(notes))


def restore_layers(runner: PagedRunner) -> None:
    """Put the modules back."""
    layers = runner.model.layers
    for index, layer in enumerate(layers):
        if isinstance(layer, PackagedLayer):
            layers[index] = layer.replaced


def record_calls(runner: PagedRunner, num_tokens: int) -> list[_Call]:
    """One step of a made-up prompt, noting how each layer is called. It uses the first blocks, which are free at load."""
    calls: list[_Call | None] = [None] * len(runner.model.layers)

    def note(index: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if calls[index] is not None:
                raise NotCompilable("a layer is called several times in one forward")
            leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_leaf)
            calls[index] = _Call(leaves, spec, output)

        return hook

    handles = [layer.register_forward_hook(note(i), with_kwargs=True) for i, layer in enumerate(runner.model.layers)]
    try:
        runner.launch(_probe_batch(runner, num_tokens))
    finally:
        for handle in handles:
            handle.remove()
    missing = [index for index, call in enumerate(calls) if call is None]
    if missing:
        raise NotCompilable(f"layers {missing} are not called")
    return [call for call in calls if call is not None]


class NotCompilable(Exception):
    """The model's layers cannot be compiled apart; the reason is the message."""


def _probe_batch(runner: PagedRunner, num_tokens: int) -> StepBatch:
    vocab_size = runner.model.vocab_size
    blocks = tuple(range(-(-num_tokens // runner.block_tokens)))
    return StepBatch(
        step=0,
        tokens=tuple((7 * index + 3) % vocab_size for index in range(num_tokens)),
        positions=tuple(range(num_tokens)),
        query_offsets=(0, num_tokens),
        context_lens=(num_tokens,),
        slots=(0,),
        block_tables=(blocks,),
        logit_rows=(num_tokens - 1,),
        num_decode=0,
    )


def _weights(layer: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach() for _, tensor in (*layer.named_parameters(), *layer.named_buffers())]


def _shape_signature(layer: nn.Module, call: _Call) -> Hashable:
    """What else must agree for one package to serve two layers: sizes, dtypes, numbers among the arguments, settings."""
    tensors = tuple((name, tuple(t.shape), str(t.dtype)) for name, t in (*layer.named_parameters(), *layer.named_buffers()))
    leaves = tuple((tuple(x.shape), str(x.dtype)) if isinstance(x, torch.Tensor) else _constant(x) for x in call.leaves)
    numbers = tuple(
        (name, key, value)
        for name, module in layer.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, (int, float)) and not key.startswith("_") and key not in ("layer_idx", "layer_id", "training")
    )
    return tensors, leaves, numbers


def _constant(value: Any) -> Hashable:
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def _build(
    layer: nn.Module, call: _Call, longer: _Call, cache_folder: Path
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Export one layer with its weights as inputs, compile it (or find it compiled), load it."""
    names = [name for name, _ in (*layer.named_parameters(), *layer.named_buffers())]
    inputs = [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
    grown = [leaf for leaf in longer.leaves if isinstance(leaf, torch.Tensor)]
    tokens = torch.export.Dim("tokens", min=1, max=_MAX_TOKENS)
    dims = tuple(
        {dim: tokens for dim, sizes in enumerate(zip(a.shape, b.shape, strict=True)) if sizes == _PROBE_TOKENS}
        for a, b in zip(inputs, grown, strict=True)
    )
    module = _LayerFunction(layer, names, call, len(inputs))
    exported = torch.export.export(
        module, (*inputs, *_weights(layer)), dynamic_shapes=((*dims, *({} for _ in names)),), strict=False
    )
    share_regions(exported.graph_module)
    key = hashlib.sha256("\n".join([exported.graph_module.code, _input_kinds(exported), _machine()]).encode()).hexdigest()[:32]
    path = cache_folder / f"{key}.pt2"
    if not path.exists():
        cache_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder) as folder:
            made = torch._inductor.aoti_compile_and_package(exported, package_path=str(Path(folder) / "layer.pt2"))
            os.replace(made, path)
    package = torch._inductor.aoti_load_package(str(path))
    return package.loader.boxed_run


def share_regions(module: Any) -> None:
    """Make linears of one input one operator: q, k and v, gate and up. Each parallel region costs as much as reading a small
    weight, and the results are the same bits."""
    plain, quantized = torch.ops.dayzero.linear_at.default, torch.ops.dayzero.quantized_linear_at.default
    groups: dict[Any, list[Any]] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is plain:
            groups.setdefault((node.args[0], node.args[1].meta["val"].dtype), []).append(node)
        elif node.op == "call_function" and node.target is quantized and node.args[5] is None:
            groups.setdefault((node.args[0], node.args[7:]), []).append(node)
    for nodes in groups.values():
        if len(nodes) < 2:
            continue
        # Weights are inputs of the graph, in the order of its nodes: they are there from the start.
        first = nodes[0]
        columns = [list(column) for column in zip(*(node.args for node in nodes), strict=True)]
        if first.target is plain:
            target, args = torch.ops.dayzero.linears_at.default, (first.args[0], columns[1], columns[2], first.args[3])
        else:
            target = torch.ops.dayzero.quantized_linears_at.default
            args = (first.args[0], *columns[1:5], first.args[6], *first.args[7:])
        with module.graph.inserting_before(first):
            joined = module.graph.call_function(target, args)
            joined.meta["val"] = [node.meta["val"] for node in nodes]
            parts = [module.graph.call_function(operator.getitem, (joined, index)) for index in range(len(nodes))]
        for node, part in zip(nodes, parts, strict=True):
            part.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(part)
            module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()


class _LayerFunction(nn.Module):
    """A layer as a function of its tensor arguments and its weights."""

    _layer: nn.Module
    _names: list[str]
    _call: _Call
    _num_inputs: int

    def __init__(self, layer: nn.Module, names: list[str], call: _Call, num_inputs: int) -> None:
        super().__init__()
        self.__dict__.update(_layer=layer, _names=names, _call=call, _num_inputs=num_inputs)

    def forward(self, *tensors: torch.Tensor) -> Any:
        inputs, weights = iter(tensors[: self._num_inputs]), tensors[self._num_inputs :]
        leaves = [next(inputs) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._call.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._call.spec)
        named = dict(zip(self._names, weights, strict=True))
        output = torch.func.functional_call(self._layer, named, args, kwargs)
        return output if isinstance(output, torch.Tensor) else tuple(x for x in output if isinstance(x, torch.Tensor))


def _compare(runner: PagedRunner, packaged: PackagedLayer, call: _Call) -> float:
    """Error of the packaged layer against the recorded output, over the output's size."""
    runner.state.begin_step(_probe_batch(runner, _PROBE_TOKENS[0]))
    args, kwargs = pytree.tree_unflatten(call.leaves, call.spec)
    got, want = packaged(*args, **kwargs), call.output
    got, want = (x if isinstance(x, torch.Tensor) else x[0] for x in (got, want))
    difference = (got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-12)
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")


def _input_kinds(exported: Any) -> str:
    """Shape, stride and dtype of every input: generated code has them built in, its source text does not show them."""
    values = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"]
    return repr([(tuple(map(str, v.shape)), tuple(map(str, v.stride())), str(v.dtype)) for v in values])


def _machine() -> str:
    """What compiled code depends on beside its source: torch, threads, our operators and the processor's instructions."""
    flags = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
    kernels = cpu_kernels.load().path
    place = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {flags}"
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, kernels {kernels and kernels.name}, {place}"
