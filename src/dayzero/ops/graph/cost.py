"""A generalised graph in, its `OperatorNode`s out: what each node is, and its floating-point operations and bytes as formulas.

Matrix products, convolutions, attention and experts count their products alone; every other operator one operation for each
element it makes, as `definitions` has it for norms (5) and activations (4). Bytes are those read and written by the node;
a module that was not opened counts what was called inside it. Views are free, and so is what the cache does for itself and
building masks: both are the engine's. Alike nodes are one `OperatorNode`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from dayzero.core.formulas import ZERO, Formula, product, total
from dayzero.core.model import OperatorNode
from dayzero.ops.graph.nodes import Block, CallNode, NotGeneral, OpNode, RegionGraph, Sized
from dayzero.ops.graph.record import OpCall, Region
from dayzero.ops.observe import MOVING, UNTOUCHED, aten_cost, is_view

aten = torch.ops.aten
LOOKUPS = {aten.index, aten.index_select, aten.gather, aten.embedding}
ACTIVATIONS = {
    aten.silu, aten.gelu, aten.relu, aten.relu_, aten.sigmoid, aten.tanh, aten.softplus, aten.hardtanh, aten.leaky_relu,
    aten.elu,
}  # fmt: skip
NAMED = {
    aten.embedding: "embedding", aten.convolution: "convolution", aten.native_layer_norm: "layer_norm",
    aten._softmax: "softmax", aten._log_softmax: "softmax",
}  # fmt: skip
MAX_NORM_OPERATORS = 24


@dataclass(frozen=True, slots=True)
class NodeCost:
    """One node. `products`: the part of `flops` that torch's own counter counts."""

    name: str
    kind: str
    flops: Formula
    products: Formula
    bytes: Formula


def node_costs(graph: RegionGraph) -> list[NodeCost]:
    """Every node that does work, in the order they run. Raises NotGeneral where a cost follows no formula."""
    return list(_walk(graph.body, graph))


def operator_nodes(costs: Sequence[NodeCost], inside: str, times: Fraction = Fraction(1)) -> tuple[OperatorNode, ...]:
    """Alike nodes added up; `inside` is the layer's name, left out of theirs. `times`: how often a layer runs in a pass."""
    groups: dict[tuple[str, str, str], list[NodeCost]] = {}
    for cost in costs:
        alike = ("", "") if "::" in cost.kind else (str(cost.flops), str(cost.bytes))
        groups.setdefault((cost.kind, *alike), []).append(cost)
    prefix = f"{inside}." if inside else ""
    return tuple(
        OperatorNode(
            name=group[0].name.removeprefix(prefix) if group[0].name != inside else "",
            kind=kind,
            count=max(round(len(group) * times), 1),
            flops=str(total(one.flops for one in group) * times),
            bytes=str(total(one.bytes for one in group) * times),
        )
        for (kind, _, _), group in groups.items()
    )


def _walk(node: OpNode | CallNode | Block, graph: RegionGraph, site: str = "") -> Iterator[NodeCost]:
    if isinstance(node, Block):
        if fused := _fused(node):
            yield fused
            return
        for child in node.children:
            yield from _walk(child, graph, node.name)
    elif isinstance(node, OpNode):
        if cost := _operator(node, site):
            yield cost
    elif node.kind != "layer":
        yield _call(node, graph)


def _elements(sized: Sized) -> Formula:
    return _volume(sized.shape)


@lru_cache(maxsize=4096)
def _volume(shape: tuple[Formula, ...]) -> Formula:
    return product(shape)


def _moved(tensors: Sequence[Sized]) -> Formula:
    return total(_elements(one) * one.item_bytes for one in tensors)


def _operator(node: OpNode, site: str) -> NodeCost | None:
    packet = node.func.overloadpacket
    if node.hidden or is_view(node.func) or packet is aten.reshape or not node.results or packet in UNTOUCHED:
        return None
    written = _moved(node.results)
    moved = written * 2 if packet in LOOKUPS else written + _moved(node.inputs)
    if (products := _products(node)) is not None:
        weighted = any(one.weight for one in node.inputs)
        kind = "convolution" if packet is aten.convolution else "linear" if weighted else "matmul"
        return NodeCost(site, kind, products, products, moved)
    kind = NAMED.get(packet) or ("activation" if packet in ACTIVATIONS else node.func.name())
    if packet in MOVING or packet is aten.embedding:
        return NodeCost(site, kind, ZERO, ZERO, moved)
    per_element = {"activation": 4, "softmax": 5, "layer_norm": 5}.get(kind, 1)
    flops = total(_elements(one) for one in node.results[:1] if one.is_float) * per_element
    return NodeCost(site, kind, flops, ZERO, moved)


def _products(node: OpNode) -> Formula | None:
    """Multiplications and additions of a matrix product or convolution, None for anything else."""
    packet, result = node.func.overloadpacket, node.results[0]
    shapes = [one.shape for one in node.inputs]
    if packet in (aten.mm, aten.bmm):
        return _elements(result) * shapes[0][-1] * 2
    if packet in (aten.addmm, aten.baddbmm):
        return _elements(result) * shapes[1][-1] * 2
    if packet in (aten.mv, aten.dot, aten.addmv):  # torch's counter leaves these out
        return None
    if packet is aten.convolution:
        transposed = bool(node.raw[0].args[6])
        batch_and_space = product([shapes[0][0], *(shapes[0] if transposed else result.shape)[2:]])
        return batch_and_space * product(shapes[1]) * 2
    if packet in flop_registry:
        raise NotGeneral(f"no formula for {node.func.name()}")
    return None


def _call(node: CallNode, graph: RegionGraph) -> NodeCost:
    moved = _moved(node.inputs) + _moved(node.results)
    if node.kind == "attention":
        query, key, value = node.inputs[:3]
        rows, keys = product(query.shape[:-1]), key.shape[-2]
        pairs = rows * keys * (query.shape[-1] + value.shape[-1]) * 2
        return NodeCost(node.name, "attention", pairs, pairs, _moved((query, key, value)) + _moved(node.results[:1]))
    if node.kind == "experts":
        told = _experts(node, node.raw[0].args[0])
        if told is None:
            raise NotGeneral(f"{node.name} holds experts, but is not told which to use")
        return told
    holder = node.raw[0].target
    inside = [_counted(region) for region in node.raw]
    if node.kind == "module" and _holds_experts(holder):
        told = _experts(node, holder)
        counted = [one["products"] for one in inside]
        if told is not None and _covers(told.products, counted, graph):
            return told
    if (products := _fitted(node, graph, inside, "products")) is None:
        raise NotGeneral(_unfitted(node, graph, inside, "products"))
    flops = _fitted(node, graph, inside, "flops")
    inner = _fitted(node, graph, inside, "bytes")
    # What is left of a module that loops over what it was routed: its matrix products, and what it is given and holds.
    if flops is None and products.terms:
        flops = products
    if flops is None:
        raise NotGeneral(_unfitted(node, graph, inside, "flops"))
    if node.kind != "module":
        return NodeCost(node.name, node.kind, flops, products, moved)
    if inner is None:
        inner = moved + Formula.number(sum(one.numel() * one.element_size() for one in holder.parameters()))
    return NodeCost(node.name, "experts" if _holds_experts(holder) else "module", flops, products, inner)


def _holds_experts(module: nn.Module) -> bool:
    """Whether a module's own matrices are stacked."""
    return any(one.dim() == 3 for one in module.parameters(recurse=False))


def _covers(formula: Formula, counted: Sequence[int], graph: RegionGraph) -> bool:
    """Whether a formula says no less than was counted."""
    prefill = graph.fitter.variable == "T"
    told = (formula.value(B=batch, T=length if prefill else 1, C=length) for batch, length in graph.lengths)
    return all(number <= limit for number, limit in zip(counted, told, strict=True))


def _experts(node: CallNode, module: nn.Module) -> NodeCost | None:
    """Each row passes the experts it is routed to; of the weights no more are read than rows * experts a row, nor than there
    are. Routes to experts that compute nothing are counted too: how many there are depends on values."""
    hidden = node.inputs[0]
    index = next((one for one in node.inputs[1:] if not one.is_float), None)
    if index is None:
        return None
    parameters = list(module.parameters())
    # Each stack is divided by its own length: experts that compute nothing may have a place in one stack and not in another.
    experts = max(one.shape[0] for one in parameters if one.dim() == 3)
    matrices = sum(one.numel() // one.shape[0] for one in parameters if one.dim() == 3)
    weight_bytes = sum(one.numel() // one.shape[0] * one.element_size() for one in parameters if one.dim() > 1)
    rows = product(index.shape)
    products = rows * matrices * 2
    read = Formula.atom(f"min({rows}, {experts})") * weight_bytes
    return NodeCost(node.name, "experts", products, products, read + _moved((hidden,)) + _moved(node.results))


def _counted(region: Region) -> dict[str, int]:
    """What was called inside a call that is not opened."""
    counts = {"flops": 0, "products": 0, "bytes": 0}
    for child in region.children:
        if isinstance(child, Region) and child.kind == "layer":
            continue  # a graph of its own
        if isinstance(child, Region):
            for name, number in _counted(child).items():
                counts[name] += number
        elif not child.hidden:
            _count(child, counts)
    return counts


def _count(call: OpCall, counts: dict[str, int]) -> None:
    cost = aten_cost(call.func, call.args, call.kwargs, call.out)
    counts["flops"] += int(cost.flops)
    counts["bytes"] += int(cost.bytes)
    if call.func.overloadpacket in flop_registry:
        counts["products"] += int(cost.flops)


def _fitted(node: CallNode, graph: RegionGraph, inside: Sequence[dict[str, int]], what: str) -> Formula | None:
    points = [(batch, length, one[what]) for (batch, length), one in zip(graph.lengths, inside, strict=True)]
    return graph.fitter.fit(points, products=True)


def _unfitted(node: CallNode, graph: RegionGraph, inside: Sequence[dict[str, int]], what: str) -> str:
    listed = ", ".join(f"{one[what]} at {b}x{n}" for (b, n), one in zip(graph.lengths, inside, strict=True))
    return f"{what} of {node.name} ({node.kind}) follow no formula: {listed}" + (f"; {node.why}" if node.why else "")


def _fused(block: Block) -> NodeCost | None:
    """A module without modules that is one norm or one activation by what it calls."""
    work = [one for one in block.children if not isinstance(one, OpNode) or not is_view(one.func)]
    if not work or len(block.results) != 1 or len(work) > MAX_NORM_OPERATORS or not block.inputs:
        return None
    if not all(isinstance(one, OpNode) and not one.hidden for one in work):
        return None
    operators: list[OpNode] = [one for one in work if isinstance(one, OpNode)]
    called = [one.func.overloadpacket for one in operators]
    if any(packet in flop_registry for packet in called):
        return None
    weights = {one.weight: one for node in operators for one in node.inputs if one.weight}
    result = block.results[0]
    moved = _moved(block.inputs) + _moved(block.results) + _moved(list(weights.values()))
    if kind := _norm(called):
        return NodeCost(block.name, kind, _elements(result) * 5, ZERO, moved)
    pointwise = all(torch.Tag.pointwise in node.func.tags or node.func.overloadpacket in MOVING for node in operators)
    same = len(block.inputs) == 1 and not weights and block.inputs[0].shape == result.shape
    if pointwise and same and any(packet in ACTIVATIONS or packet in (aten.pow, aten.clamp) for packet in called):
        return NodeCost(block.name, "activation", _elements(result) * 4, ZERO, moved)
    return None


def _norm(called: Sequence[Callable[..., object]]) -> str | None:
    if aten.native_layer_norm in called or aten.var in called or aten.var_mean in called:
        return "layer_norm"
    rooted = any(packet in called for packet in (aten.rsqrt, aten.sqrt, aten.pow))
    means = called.count(aten.mean)
    if rooted and means:
        return "rms_norm" if means == 1 else "layer_norm"
    if aten.linalg_vector_norm in called or (aten.rsqrt in called and aten.sum in called):
        return "l2_norm"
    return None
