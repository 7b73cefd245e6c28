"""A tensor that knows where its elements come from: transformers' own operations run on it and tell what they move.

`ViewTensor` wraps a `View`. torch's data-movement operators map views to views; a cast is recorded; every other operator
raises `NotDataMovement`, and the caller then runs the same operation on real tensors. No table of operations of our own:
whatever a conversion does with reshape, transpose, chunk, stack, cat, index lists and the like is followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from dayzero.weights.algebra import NotDataMovement, View, concatenate

aten = torch.ops.aten


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, {"float4_e2m1": "float4_e2m1fn_x2"}.get(name, name), None)
    if not isinstance(found, torch.dtype) or name == "float4_e2m1":  # packed in pairs: shapes mean something else
        raise NotDataMovement(f"torch has no dtype {name}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class ViewTensor(torch.Tensor):
    """Shape and dtype of a tensor without storage, plus the view it stands for. Always reported as contiguous."""

    view_of: View

    @staticmethod
    def __new__(cls, view: View) -> ViewTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, view.shape, dtype=torch_dtype(view.dtype), device=torch.device("cpu"))
        made.view_of = view
        return made

    def __init__(self, view: View) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # torch's would read elements
        return f"ViewTensor(shape={self.view_of.shape}, dtype={self.view_of.dtype}, pieces={len(self.view_of.pieces)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = RULES.get(func)
        if rule is None:
            raise NotDataMovement(f"{func} is not data movement")
        result = rule(*args, **(kwargs or {}))
        return [cls(view) for view in result] if isinstance(result, list) else cls(result)


def _dim(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def _reshape(x: ViewTensor, shape: Sequence[int]) -> View:
    sizes = [int(size) for size in shape]
    if -1 in sizes:
        known = prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = x.view_of.num_elements // known
    return x.view_of.reshape(sizes)


def _permute(x: ViewTensor, dims: Sequence[int]) -> View:
    return x.view_of.permute([_dim(dim, x.ndim) for dim in dims])


def _transpose(x: ViewTensor, dim0: int, dim1: int) -> View:
    order = list(range(x.ndim))
    first, second = _dim(dim0, x.ndim), _dim(dim1, x.ndim)
    order[first], order[second] = order[second], order[first]
    return x.view_of.permute(order)


def _t(x: ViewTensor) -> View:
    return _transpose(x, 0, 1) if x.ndim > 1 else x.view_of


def _slice(x: ViewTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> View:
    dim = _dim(dim, x.ndim)
    size = x.shape[dim]
    first, last, step = slice(start, end, step).indices(size)
    if step == 1:
        return x.view_of.slice(dim, first, max(first, last))
    return _take(x.view_of, dim, list(range(first, last, step)))


def _select(x: ViewTensor, dim: int, index: int) -> View:
    dim = _dim(dim, x.ndim)
    return _drop(x.view_of.slice(dim, _dim(index, x.shape[dim]), _dim(index, x.shape[dim]) + 1), dim)


def _drop(view: View, dim: int) -> View:
    return view.reshape(view.shape[:dim] + view.shape[dim + 1 :])


def _take(view: View, dim: int, indices: Sequence[int]) -> View:
    if not indices:
        return view.slice(dim, 0, 0)
    return concatenate([view.slice(dim, index, index + 1) for index in indices], dim)


def _split(x: ViewTensor, split_size: int, dim: int = 0) -> list[View]:
    dim = _dim(dim, x.ndim)
    size = x.shape[dim]
    return [x.view_of.slice(dim, at, min(at + split_size, size)) for at in range(0, size, split_size)]


def _split_sizes(x: ViewTensor, split_sizes: Sequence[int], dim: int = 0) -> list[View]:
    dim, start, parts = _dim(dim, x.ndim), 0, []
    for size in split_sizes:
        parts.append(x.view_of.slice(dim, start, start + size))
        start += size
    return parts


def _unbind(x: ViewTensor, dim: int = 0) -> list[View]:
    dim = _dim(dim, x.ndim)
    return [_drop(x.view_of.slice(dim, at, at + 1), dim) for at in range(x.shape[dim])]


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> View:
    if not all(isinstance(tensor, ViewTensor) for tensor in tensors):
        raise NotDataMovement("concatenation with a computed tensor")
    views = [tensor.view_of for tensor in tensors if isinstance(tensor, ViewTensor)]
    joined = torch_dtype(views[0].dtype)
    for view in views[1:]:
        joined = torch.promote_types(joined, torch_dtype(view.dtype))
    return concatenate([view.cast(dtype_name(joined)) for view in views], _dim(dim, tensors[0].ndim))


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> View:
    dim = _dim(dim, tensors[0].ndim + 1)
    return _cat([ViewTensor(_unsqueeze(tensor, dim)) for tensor in tensors], dim)


def _unsqueeze(x: ViewTensor, dim: int) -> View:
    dim = _dim(dim, x.ndim + 1)
    return x.view_of.reshape((*x.shape[:dim], 1, *x.shape[dim:]))


def _squeeze(x: ViewTensor, dim: int | Sequence[int] | None = None) -> View:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {_dim(one, x.ndim) for one in dims}
    return x.view_of.reshape([size for at, size in enumerate(x.shape) if at not in gone or size != 1])


def _index(x: ViewTensor, indices: Sequence[torch.Tensor | None]) -> View:
    view = x.view_of
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].ndim != 1 or isinstance(given[0][1], ViewTensor) or given[0][1].dtype == torch.bool:
        raise NotDataMovement("indexing with more than one list")
    dim, index = given[0]
    return _take(view, dim, [_dim(int(at), view.shape[dim]) for at in index])


def _index_select(x: ViewTensor, dim: int, index: torch.Tensor) -> View:
    return _index(x, [None] * _dim(dim, x.ndim) + [index])


def _to_copy(x: ViewTensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> View:
    if device is not None and torch.device(device).type != "cpu":
        raise NotDataMovement(f"a copy to {device}")
    return x.view_of if dtype is None else x.view_of.cast(dtype_name(dtype))


def _same(x: ViewTensor, **_: Any) -> View:
    return x.view_of


RULES: dict[Any, Callable[..., View | list[View]]] = {
    aten.view.default: _reshape, aten._unsafe_view.default: _reshape, aten.reshape.default: _reshape,
    aten.permute.default: _permute, aten.transpose.int: _transpose, aten.t.default: _t,
    aten.slice.Tensor: _slice, aten.select.int: _select,
    aten.split.Tensor: _split, aten.split_with_sizes.default: _split_sizes, aten.unbind.int: _unbind,
    aten.cat.default: _cat, aten.stack.default: _stack,
    aten.unsqueeze.default: _unsqueeze, aten.squeeze.default: _squeeze, aten.squeeze.dim: _squeeze, aten.squeeze.dims: _squeeze,
    aten.index.Tensor: _index, aten.index_select.default: _index_select,
    aten._to_copy.default: _to_copy, aten.clone.default: _same, aten.detach.default: _same, aten.alias.default: _same,
    aten.contiguous.default: _same, aten.lift_fresh.default: _same,
}  # fmt: skip
