"""Recordings of one region at several lengths in, one graph that holds for any length out.

Calls are matched one by one; a tensor is known by which call made it or by where it lay in the arguments, and every whole
number that moves with the length gets its formula. A module whose inside cannot be matched (a loop over tokens or experts,
a branch on values) becomes one node that calls the module itself: the smallest such module. It does not cost anything
(`cost`) and runs nothing (`rerun`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.core.formulas import Formula
from dayzero.ops.graph.fit import Fitter
from dayzero.ops.graph.nodes import (
    Block,
    CallNode,
    External,
    Items,
    Keyed,
    Literal,
    Made,
    Node,
    NotGeneral,
    Number,
    OpNode,
    RegionGraph,
    Sized,
    Value,
    Weight,
    flat,
)
from dayzero.ops.graph.record import OpCall, Path, Region
from dayzero.ops.observe import is_view

aten = torch.ops.aten
# What these return has a shape that depends on values, which on meta is only assumed.
ASKING = {aten.nonzero.default, aten.masked_select.default}
MADE_TENSOR = 64  # elements of a tensor written in the code, such as `torch.tensor([length])`, that are followed
# A parameter seen through these is still that parameter.
RELABELLING = {aten._to_copy, aten._unsafe_view, aten.clone}


@dataclass(slots=True)
class _Unifier:
    weights: Mapping[int, str]
    fitter: Fitter
    sizes: Sequence[tuple[int, int]]  # (batch, length) of each recording
    externals: Sequence[Mapping[int, tuple[Path, Any]]]
    made: list[dict[int, int]] = field(default_factory=list)
    journal: list[tuple[int, int, int | None]] = field(default_factory=list)
    weight_of: dict[int, str] = field(default_factory=dict)
    count: int = 0
    opaque: list[tuple[str, str]] = field(default_factory=list)

    def region(self, regions: Sequence[Region], *, top: bool = False) -> Node:
        """A block, or one node where the inside does not generalise."""
        first = regions[0]
        if any(one.kind != first.kind or one.name != first.name for one in regions):
            raise NotGeneral(f"{first.name or 'the model'} is not called each time")
        opens = top or first.kind == "module"
        args = kwargs = None
        inputs: tuple[Sized, ...] = ()
        try:
            args, kwargs = self.tree([one.args for one in regions]), self.tree([one.kwargs for one in regions])
            inputs = self._sized([(one.args, one.kwargs) for one in regions])
        except NotGeneral:
            if not opens:
                raise  # a module may still be opened; it cannot be called with arguments that cannot be told
        why = ""
        if opens:
            mark, count, opaque = len(self.journal), self.count, len(self.opaque)
            try:
                children = self._children(regions)
                return Block(first.name, inputs, self._sized([one.out for one in regions]), children)
            except NotGeneral as error:
                if top or args is None:
                    raise
                why = str(error)
                self._undo(mark)
                self.count = count
                del self.opaque[opaque:]
                self.opaque.append((first.name, why))
        outs = self._make([one.out for one in regions])
        results = self._sized([one.out for one in regions])
        return CallNode(first.kind, first.name, first.target, args, kwargs, outs, inputs, results, tuple(regions), why)

    def _children(self, regions: Sequence[Region]) -> tuple[Node, ...]:
        if any(isinstance(call, OpCall) and call.func in ASKING and call.out.is_meta for call in regions[0].children):
            raise NotGeneral(f"{self._called(regions)} picks by values")
        lists = [one.children for one in regions]
        if not _alike(lists):
            lists = [_with_reshapes(children) for children in lists]
        if not _alike(lists):
            raise NotGeneral(f"{self._called(regions)} calls a number of operators that depends on the length or on values")
        children: list[Node] = []
        for calls in zip(*lists, strict=True):
            if all(isinstance(call, OpCall) for call in calls):
                children.append(self._operator(_sliced(calls), regions))
            else:
                children.append(self.region(calls))
        return tuple(children)

    @staticmethod
    def _called(regions: Sequence[Region]) -> str:
        return regions[0].name or "the model"

    def _operator(self, calls: Sequence[OpCall], regions: Sequence[Region]) -> OpNode:
        first = calls[0]
        if any(call.func is not first.func for call in calls):
            raise NotGeneral(f"{self._called(regions)} calls {first.func} at one length, something else at another")
        args, kwargs = self.tree([call.args for call in calls]), self.tree([call.kwargs for call in calls])
        inputs = self._sized([(call.args, call.kwargs) for call in calls])
        outs = self._make([call.out for call in calls])
        results = self._sized([call.out for call in calls])
        if len(inputs) == 1 and inputs[0].weight and (is_view(first.func) or first.func.overloadpacket in RELABELLING):
            for index in outs:
                self.weight_of[index] = inputs[0].weight
        hidden = all(call.hidden for call in calls)
        return OpNode(first.func, args, kwargs, outs, inputs, results, hidden, tuple(calls))

    def tree(self, values: Sequence[Any]) -> Any:
        """What one argument is at any length."""
        first = values[0]
        if isinstance(first, Tensor):
            return self._tensor(values)
        if any(type(value) is not type(first) for value in values):
            raise NotGeneral(f"an argument is {first!r:.40} at one length and {values[-1]!r:.40} at another")
        if isinstance(first, bool) or first is None or isinstance(first, (str, torch.dtype, torch.device, torch.layout)):
            return self._same(values)
        if isinstance(first, int):
            return self._number(values)
        if isinstance(first, (list, tuple)):
            if len({len(value) for value in values}) > 1:
                raise NotGeneral("an argument is a list whose length is not always the same")
            return Items(type(first), tuple(self.tree(items) for items in zip(*values, strict=True)))
        if isinstance(first, dict) and not hasattr(first, "__dict__"):
            if any(list(value) != list(first) for value in values):
                raise NotGeneral("an argument is a dictionary whose keys are not always the same")
            return Keyed(dict, tuple((key, self.tree([value[key] for value in values])) for key in first))
        return self._object(values)

    def result(self, values: Sequence[Any]) -> Any:
        """As `tree`, but objects that are no tensors (a cache that the model made) are left out."""
        first = values[0]
        if isinstance(first, (list, tuple)):
            return Items(tuple, tuple(self.result(items) for items in zip(*values, strict=True)))
        if isinstance(first, dict):
            return Keyed(dict, tuple((key, self.result([value[key] for value in values])) for key in first))
        return self._tensor(values) if isinstance(first, Tensor) else Literal(None)

    def _same(self, values: Sequence[Any]) -> Literal:
        if any(value != values[0] for value in values):
            raise NotGeneral(f"an argument is {values[0]!r:.40} at one length and {values[-1]!r:.40} at another")
        return Literal(values[0])

    def _number(self, values: Sequence[int]) -> Literal | Number:
        if all(value == values[0] for value in values):
            return Literal(values[0])
        return Number(self._fit(values, "a whole number"))

    def _fit(self, values: Sequence[int], what: str) -> Formula:
        points = [(batch, length, value) for (batch, length), value in zip(self.sizes, values, strict=True)]
        found = self.fitter.fit(points)
        if found is None:
            listed = ", ".join(f"{value} at {batch}x{length}" for batch, length, value in points)
            raise NotGeneral(f"{what} follows no formula: {listed}")
        return found

    def _object(self, values: Sequence[Any]) -> Any:
        paths = [self.externals[i].get(id(value), (None,))[0] for i, value in enumerate(values)]
        if paths[0] is not None and all(path == paths[0] for path in paths):
            return External(paths[0])
        if all(value is values[0] for value in values):
            return Literal(values[0])
        if isinstance(values[0], dict):
            if any(list(value) != list(values[0]) for value in values):
                raise NotGeneral("an argument is a dictionary whose keys are not always the same")
            kind = type(values[0])
            return Keyed(kind, tuple((key, self.tree([value[key] for value in values])) for key in values[0]))
        if isinstance(values[0], slice):
            return Items(slice, tuple(self.tree([getattr(v, part) for v in values]) for part in ("start", "stop", "step")))
        if isinstance(values[0], float):
            return self._same(values)
        raise NotGeneral(f"an argument is a {type(values[0]).__name__} made anew at each length")

    def _tensor(self, values: Sequence[Any]) -> Any:
        if not all(isinstance(value, Tensor) for value in values):
            raise NotGeneral("an argument is a tensor at one length alone")
        made = [known.get(id(value)) for known, value in zip(self.made, values, strict=True)]
        if made[0] is not None and all(index == made[0] for index in made):
            return Value(made[0])
        if any(index is not None for index in made):
            raise NotGeneral("a tensor comes from different places at different lengths")
        paths = [held.get(id(value), (None,))[0] for held, value in zip(self.externals, values, strict=True)]
        if paths[0] is not None and all(path == paths[0] for path in paths):
            return External(paths[0])
        name = self.weights.get(id(values[0]))
        if name is not None and all(self.weights.get(id(value)) == name for value in values):
            return Weight(name)
        first = values[0]
        if all(value.shape == first.shape and value.dtype == first.dtype for value in values):
            # Written in the code, such as a fill value. On meta there is no value to compare, and nothing is run again.
            if first.is_meta or all(torch.equal(value, first) for value in values):
                return Literal(first)
            if 0 < first.numel() <= MADE_TENSOR and not first.is_floating_point() and first.dtype != torch.bool:
                listed = tuple(self._number(items) for items in zip(*(v.flatten().tolist() for v in values), strict=True))
                return Made(first.dtype, tuple(first.shape), listed)
        raise NotGeneral("a tensor was made out of sight")

    def _make(self, outs: Sequence[Any]) -> tuple[int, ...]:
        """New values for the tensors of a result."""
        leaves = [flat(out) for out in outs]
        if len({len(one) for one in leaves}) > 1:
            raise NotGeneral("a result has parts at one length that it has not at another")
        indices: list[int] = []
        for position, tensor in enumerate(leaves[0]):
            if not isinstance(tensor, Tensor):
                indices.append(-1)
                continue
            for number, one in enumerate(leaves):
                key = id(one[position])
                self.journal.append((number, key, self.made[number].get(key)))
                self.made[number][key] = self.count
            indices.append(self.count)
            self.count += 1
        return tuple(indices)

    def _undo(self, mark: int) -> None:
        while len(self.journal) > mark:
            number, key, before = self.journal.pop()
            if before is None:
                self.made[number].pop(key, None)
            else:
                self.made[number][key] = before

    def _sized(self, values: Sequence[Any]) -> tuple[Sized, ...]:
        leaves = [[leaf for leaf in flat(value) if isinstance(leaf, Tensor)] for value in values]
        if len({len(one) for one in leaves}) > 1:
            raise NotGeneral("a call has tensors at one length that it has not at another")
        sized = []
        for tensors in zip(*leaves, strict=True):
            one = tensors[0]
            shape = self._shape(tuple(tensor.shape for tensor in tensors))
            made = self.made[0].get(id(one))
            weight = self.weights.get(id(one)) if made is None else self.weight_of.get(made)
            sized.append(Sized(shape, one.element_size(), one.is_floating_point(), weight))
        return tuple(sized)

    def _shape(self, shapes: tuple[torch.Size, ...]) -> tuple[Formula, ...]:
        """The formulas of a tensor's sizes; the same ones come back again and again."""
        key = (tuple(self.sizes), shapes)
        if key not in self.fitter.shapes:
            if len({len(shape) for shape in shapes}) > 1:
                raise NotGeneral("a tensor has more dimensions at one length than at another")
            self.fitter.shapes[key] = tuple(self._fit(sizes, "a dimension") for sizes in zip(*shapes, strict=True))
        return self.fitter.shapes[key]


def _alike(lists: Sequence[Sequence[OpCall | Region]]) -> bool:
    """Whether the same things were called in the same order."""
    if len({len(children) for children in lists}) > 1:
        return False
    for calls in zip(*lists, strict=True):
        called = {call.func if isinstance(call, OpCall) else (call.kind, call.name) for call in calls}
        if len(called) > 1 and called != {aten.slice.Tensor, aten.alias.default}:
            return False
    return True


def _with_reshapes(children: Sequence[OpCall | Region]) -> list[OpCall | Region]:
    """The calls with views, and copies that are only there to be viewed, as the reshapes they are: which of the two a
    reshape becomes depends on how a tensor lies in memory, and that on its sizes."""
    found: list[OpCall | Region] = []
    for call in children:
        if isinstance(call, OpCall) and call.func is aten._unsafe_view.default and found:
            last = found[-1]
            if isinstance(last, OpCall) and last.func is aten.clone.default and last.out is call.args[0]:
                found[-1] = _reshape(last.args[0], call)
                continue
        if isinstance(call, OpCall) and call.func in (aten.view.default, aten._unsafe_view.default):
            call = _reshape(call.args[0], call)
        found.append(call)
    return found


def _reshape(tensor: Tensor, call: OpCall) -> OpCall:
    """With the sizes that came out: where -1 is written depends on the path taken."""
    return OpCall(aten.reshape.default, (tensor, list(call.out.shape)), {}, call.out, call.hidden)


def _sliced(calls: Sequence[Any]) -> Sequence[Any]:
    """A slice that takes everything becomes an alias at that length: back to the slice."""
    if len({call.func for call in calls}) == 1:
        return calls
    pattern = next(call for call in calls if call.func is aten.slice.Tensor)
    dim = pattern.args[1] if len(pattern.args) > 1 else 0
    return [
        OpCall(pattern.func, (call.args[0], dim, *_whole(pattern, call.args[0].shape[dim])), {}, call.out, call.hidden)
        if call.func is aten.alias.default
        else call
        for call in calls
    ]


def _whole(pattern: OpCall, size: int) -> tuple[int, ...]:
    """Start and end of a slice that takes everything, written as the other lengths write theirs."""
    return (0, size)[: len(pattern.args) - 2]


def held_weights(model: nn.Module) -> dict[int, str]:
    """Every tensor that a module holds (parameters, buffers and plain attributes), by identity."""
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        held: dict[str, Any] = {**module._parameters, **module._buffers}
        held |= {key: value for key, value in vars(module).items() if isinstance(value, Tensor)}
        for key, value in held.items():
            if value is not None:
                found.setdefault(id(value), f"{name}.{key}" if name else key)
    return found


def unify(
    regions: Sequence[Region], sizes: Sequence[tuple[int, int]], weights: Mapping[int, str], fitter: Fitter
) -> RegionGraph:
    """One graph of a layer's (or the model's) recordings. Raises NotGeneral with the reason where there is none."""
    unifier = _Unifier(weights, fitter, sizes, [region.externals for region in regions], [{} for _ in regions])
    body = unifier.region(regions, top=True)
    assert isinstance(body, Block)
    out = unifier.result([region.out for region in regions])
    return RegionGraph(body, out, fitter, tuple(sizes), tuple(unifier.opaque))


def generalised(
    regions: Sequence[Region], sizes: Sequence[tuple[int, int]], weights: Mapping[int, str], fitter: Fitter
) -> RegionGraph:
    """As `unify`; where fewer modules stay shut without the shortest length (below a window much is skipped), without it."""
    failure: NotGeneral | None = None
    best: RegionGraph | None = None
    lengths = sorted({length for _, length in sizes})
    for shortest in lengths[:3] if len(lengths) > 6 else lengths[:1]:
        kept = [index for index, (_, length) in enumerate(sizes) if length >= shortest]
        try:
            found = unify([regions[i] for i in kept], [sizes[i] for i in kept], weights, fitter)
        except NotGeneral as error:
            failure = failure or error
            continue
        if best is None or len(found.opaque) < len(best.opaque):
            best = replace(found, shortest=shortest if shortest > lengths[0] else 0)
        if not best.opaque:
            break
    if best is None:
        assert failure is not None
        raise failure
    return best
