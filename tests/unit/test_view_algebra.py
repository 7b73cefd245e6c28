"""The view algebra against numpy: whatever moves elements is followed exactly, piece by piece."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.weights import algebra
from dayzero.weights.algebra import NotDataMovement, View, concatenate


def render(view: View, sources: dict[str, np.ndarray]) -> np.ndarray:
    """The tensor a view stands for; every element must be written exactly once."""
    out = np.full(view.shape, -1, dtype=np.int64)
    written = np.zeros(view.shape, dtype=np.int64)
    for piece in view.pieces:
        flat = sources[piece.source].reshape(-1)
        for index in np.ndindex(*(digit.size for digit in piece.digits)):
            place = list(piece.base)
            offset = piece.offset
            for at, digit in zip(index, piece.digits, strict=True):
                place[digit.dim] += at * digit.step
                offset += at * digit.stride
            out[tuple(place)] = flat[offset]
            written[tuple(place)] += 1
    assert (written == 1).all(), written
    return out


def assert_same(view: View, array: np.ndarray, sources: dict[str, np.ndarray]) -> None:
    assert view.shape == array.shape
    np.testing.assert_array_equal(render(view, sources), array)
    np.testing.assert_array_equal(render(view.coalesced(), sources), array)


def make_source(name: str, shape: tuple[int, ...], start: int = 0) -> tuple[View, np.ndarray]:
    return View.of(name, shape, "bfloat16"), np.arange(start, start + prod(shape)).reshape(shape)


def factorisations(number: int) -> st.SearchStrategy[list[int]]:
    """Shapes with `number` elements, ones included."""

    @st.composite
    def build(draw: st.DrawFn) -> list[int]:
        rest, shape = number, []
        while rest > 1 and len(shape) < 4:
            size = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
            shape.append(size)
            rest //= size
        shape.append(rest)
        return shape

    return build()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_chains_of_operations_equal_numpy(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)))
    sources: dict[str, np.ndarray] = {}
    view, array = make_source("a", shape)
    sources["a"] = array
    for step in range(data.draw(st.integers(1, 6))):
        kind = data.draw(st.sampled_from(["reshape", "permute", "slice", "cat", "stack", "shuffle"]))
        dim = data.draw(st.integers(0, array.ndim - 1))
        if kind == "reshape":
            new = data.draw(factorisations(array.size)) if array.size else [0]
            view, array = view.reshape(new), array.reshape(new)
        elif kind == "permute":
            order = data.draw(st.permutations(range(array.ndim)))
            view, array = view.permute(order), array.transpose(order)
        elif kind == "slice":
            start = data.draw(st.integers(0, array.shape[dim] - 1))
            stop = data.draw(st.integers(start + 1, array.shape[dim]))
            view = view.slice(dim, start, stop)
            array = array[(slice(None),) * dim + (slice(start, stop),)]
        elif kind == "cat" and array.size < 150:
            name = f"s{step}"
            other, numbers = make_source(name, array.shape, start=1000 * (step + 1))
            sources[name] = numbers
            view, array = concatenate([view, other], dim), np.concatenate([array, numbers], dim)
        elif kind == "stack" and array.size < 150:
            twice = view.reshape((1, *view.shape))
            view, array = concatenate([twice, twice], 0), np.stack([array, array])
        elif kind == "shuffle" and array.shape[dim] > 1:  # interleaved halves: a digit that is not the last
            cuts = [d for d in range(2, array.shape[dim] + 1) if array.shape[dim] % d == 0]
            parts = data.draw(st.sampled_from(cuts))
            wide = (*array.shape[:dim], parts, array.shape[dim] // parts, *array.shape[dim + 1 :])
            order = [*range(dim), dim + 1, dim, *range(dim + 2, len(wide))]
            flat = array.shape
            view = view.reshape(wide).permute(order).reshape(flat)
            array = array.reshape(wide).transpose(order).reshape(flat)
    assert_same(view, array, sources)


def test_box_of_a_stack_reads_only_the_experts_in_it() -> None:
    experts = [make_source(f"e{i}", (4, 6), 100 * i) for i in range(8)]
    merged = concatenate([view.reshape((1, 4, 6)) for view, _ in experts], 0)
    part = merged.box([(2, 4), (0, 4), (3, 6)])
    assert {piece.source for piece in part.pieces} == {"e2", "e3"}
    assert_same(part, np.stack([array for _, array in experts])[2:4, :, 3:6], {f"e{i}": a for i, (_, a) in enumerate(experts)})


def test_a_whole_tensor_stays_one_piece_through_reshapes() -> None:
    view, array = make_source("a", (64, 8, 16))
    moved = view.reshape((512, 16)).reshape((64, 128)).coalesced()
    assert len(moved.pieces) == 1
    assert_same(moved, array.reshape(64, 128), {"a": array})


def test_casts_are_kept_in_order() -> None:
    view, _ = make_source("a", (4, 4))
    chained = view.cast("float32").slice(0, 1, 3).cast("float16")
    assert chained.dtype == "float16"
    assert [piece.casts for piece in chained.pieces] == [("float32", "float16")]
    assert view.cast("bfloat16") is view


def test_empty_and_scalar_shapes() -> None:
    assert View.of("a", (0, 4), "int8").pieces == ()
    scalar = View.of("a", (), "int8")
    assert_same(scalar, np.array(0), {"a": np.array(0)})
    assert_same(scalar.reshape((1, 1)), np.zeros((1, 1), int), {"a": np.array(0)})


def test_too_many_pieces_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "MAX_PIECES", 8)
    view, _ = make_source("a", (2, 50))
    with pytest.raises(NotDataMovement):
        view.permute((1, 0)).reshape((4, 25)).permute((1, 0)).reshape((10, 10))
