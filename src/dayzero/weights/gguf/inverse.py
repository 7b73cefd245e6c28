"""A model's parameters in, the tensors a GGUF holds instead out: their names, shapes, and which rows of which parameter.

Names are those that transformers reads the format by, and what it does to a tensor on reading is undone: its own processing is
run on numbered stand-ins (`rows`) of every shape that the tensor could have in the file, and the first one of which all
rows reach the parameter once is inverted. Where rows are not only moved, whole tensors are numbered, for elements that move
(a transposition), or for a number that is added. Anything else has no inverse here, and is refused by the parameter's name.
Not here: reading and quantizing (`encoding`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from dayzero.core.errors import one_line
from dayzero.weights.gguf.rows import Moved, process, trace

SUFFIXES = (".weight", ".bias")
MAX_RANK = 4  # the format's


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """One tensor of the file. Row i is row `rows[i]` of the parameter seen as [prod(shape[:-1]), shape[-1]] (None: row i);
    with `whole`, its elements move, and `elements` says where to. `added`: what reading adds to every number."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    rows: np.ndarray | None = None
    step: int = 1  # runs of as many rows are made of as many
    whole: bool = False
    added: float = 0.0


class Inverter:
    """transformers' processing of one kind of file, run backwards. `names`: its own map from the file's names."""

    def __init__(self, processor: Any, names: Mapping[str, str]) -> None:
        self._processor, self._names = processor, names

    def outgoing(self, parameters: Mapping[str, tuple[int, ...]]) -> tuple[list[Outgoing], dict[str, str]]:
        """The file's tensors for parameters of these shapes, and the parameters that have none, with the reason."""
        keys: dict[str, list[str]] = {}
        for stored, target in self._names.items():
            keys.setdefault(target, []).append(stored)
        made: list[Outgoing] = []
        lost: dict[str, str] = {}
        for parameter, shape in parameters.items():
            found = self._invert(parameter, shape, keys[parameter]) if parameter in keys else "the format has no name for it"
            if isinstance(found, str):
                lost[parameter] = found
            else:
                made += found
        return made, lost

    def elements(self, one: Outgoing, shape: tuple[int, ...]) -> np.ndarray:
        """For a `whole` tensor: which element of its parameter (of `shape`) each of its elements is."""
        found = self._elements(one.parameter, {one.name: one.shape})
        assert isinstance(found, np.ndarray) and len(found) == prod(shape), (one, found)
        return found

    def _invert(self, parameter: str, shape: tuple[int, ...], keys: list[str]) -> list[Outgoing] | str:
        reasons: dict[str, None] = {}
        named = [key if key.endswith(SUFFIXES) else key + ".weight" for key in keys]
        for names in (named, keys) if named != keys else (keys,):
            for stored in _shapes_in_file(shape, len(keys)):
                try:
                    found = self._attempt(parameter, shape, names, stored)
                except Exception as error:  # transformers' code, on a shape that may not be one of its: the next is tried
                    found = f"transformers' processing fails: {type(error).__name__}: {one_line(error)}"
                if not isinstance(found, str):
                    return found
                reasons[found] = None
        return "; ".join(reasons)

    def _attempt(
        self, parameter: str, shape: tuple[int, ...], names: list[str], stored: tuple[int, ...]
    ) -> list[Outgoing] | str:
        shapes = dict.fromkeys(names, stored)
        made, lost = trace(self._processor, self._names, shapes)
        if lost:
            return next(iter(lost.values()))
        one = made.get(parameter)
        if one is None or len(made) > 1 or set(one.sources) != set(names):
            return f"{' and '.join(names)} would fill {', '.join(made) or 'nothing'}"
        if one.how.shape != shape or one.incomplete:
            return f"{' and '.join(names)} of shape {list(stored)} would not make shape {list(shape)}"
        if isinstance(one.how, Moved):
            return _rows_back(parameter, one.how, one.sources, stored)
        if len(names) > 1:
            return f"it is made of whole tensors: {one.how.reason}"
        found = self._elements(parameter, shapes)
        if isinstance(found, str):
            return found
        added = 0.0 if isinstance(found, np.ndarray) else found
        return [Outgoing(name=names[0], shape=stored, parameter=parameter, whole=not added, added=added)]

    def _elements(self, parameter: str, shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray | float | str:
        """Of one tensor that is processed whole: the parameter's element that each of its own becomes, or the number that is
        added to each in its place, or why neither."""
        ((name, shape),) = shapes.items()
        count = prod(shape)

        def made_of(values: np.ndarray) -> np.ndarray:
            made = process(self._processor, self._names, [(name, values.reshape(shape))])[parameter]
            return np.asarray(made, dtype=np.float64).reshape(-1)

        places = np.arange(count, dtype=np.float64)
        signed = np.linspace(-3.0, 5.0, count)  # what only moves or adds does so to any number, also below zero
        numbers, again = made_of(places), made_of(signed)
        if len(numbers) == count and np.array_equal(np.sort(numbers), places):
            moved = numbers.astype(np.int64)
            back = np.empty(count, dtype=np.int64)
            back[moved] = np.arange(count)
            return back if np.array_equal(again, signed[moved]) else "reading changes numbers in a way that cannot be undone"
        added = float(made_of(np.zeros(count))[0])
        if np.isfinite(added) and np.array_equal(numbers, places + added) and np.array_equal(again, signed + added):
            return added
        return "reading computes it in a way that cannot be undone"


def read_rows(one: Outgoing, start: int, stop: int) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """What to read for rows start to stop of a tensor: runs of the parameter's rows (first, last + 1), which of each run are
    taken, and where in the result they go."""
    if one.rows is None:
        yield start, stop, np.arange(stop - start), np.arange(stop - start)
        return
    wanted = one.rows[start:stop]
    order = np.argsort(wanted, kind="stable")
    for places in np.split(order, np.nonzero(np.diff(wanted[order]) > 1)[0] + 1):
        first, last = int(wanted[places[0]]), int(wanted[places[-1]])
        yield first, last + 1, wanted[places] - first, places


def _rows_back(parameter: str, how: Moved, sources: tuple[str, ...], stored: tuple[int, ...]) -> list[Outgoing] | str:
    """Each source's rows, by the parameter's: every one must be used, and once."""
    rows = prod(stored[:-1])
    source, row = how.rows_between(0, how.rows)
    if how.rows != rows * len(sources):
        return f"{how.rows} rows would be made of {rows * len(sources)}"
    made = []
    for at, name in enumerate(sources):
        mine = np.nonzero(source == at)[0]
        if len(mine) != rows or not np.array_equal(np.sort(row[mine]), np.arange(rows)):
            return f"not every row of {name} would be used once"
        back = np.empty(rows, dtype=np.int64)
        back[row[mine]] = mine
        still = len(sources) == 1 and np.array_equal(back, np.arange(rows))
        made.append(Outgoing(name=name, shape=stored, parameter=parameter, rows=None if still else back,
                             step=how.step if not still else 1))  # fmt: skip
    return made


def _shapes_in_file(shape: tuple[int, ...], parts: int) -> Iterable[tuple[int, ...]]:
    """Shapes that a parameter's tensors may have in the file: its own, without dimensions of one, turned around; where
    several tensors make one parameter, equal parts of it along any dimension."""
    if parts > 1:
        found = [
            (*shape[:dim], size // parts, *shape[dim + 1 :])
            for dim, size in reversed(list(enumerate(shape[:-1])))
            if size % parts == 0
        ]
        found += [shape[1:]] if shape and shape[0] == parts else []
    else:
        found = [shape, tuple(size for size in shape if size != 1), tuple(reversed(shape))]
    return [one for one in dict.fromkeys(found) if 1 <= len(one) <= MAX_RANK]
