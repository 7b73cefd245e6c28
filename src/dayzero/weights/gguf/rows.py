"""transformers' processing of GGUF tensors in, where each row of a processed tensor comes from out; found by running it.

The processor is transformers' own code per architecture and is not imitated: it is run on small stand-ins of the tensors whose
numbers say which row and column they are. What comes back tells whether rows were only moved (kept in place, permuted within
heads, joined from two tensors), and then rows are decoded one by one. Whatever else a processor does, it does to the whole
tensors when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

# A stand-in has this many columns instead of its own; what happens to rows must not depend on that.
COLUMN_COUNTS = (2, 3)
SOURCE_BIT, ROW_BIT = 34, 2  # a number is source << 34 | row << 2 | column: exact in float64 up to 2**19 sources


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Rows of a tensor of `shape`: run `i` begins at row `first[i]` and holds rows of source `source[i]` from `row[i]` on."""

    shape: tuple[int, ...]
    first: np.ndarray
    source: np.ndarray
    row: np.ndarray

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    def is_whole(self, source_rows: int) -> bool:
        """Whether it is its one source, row by row."""
        return len(self.first) == 1 and self.row[0] == 0 and self.rows == source_rows

    def rows_between(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and source row of each of these rows."""
        wanted = np.arange(start, stop)
        run = np.searchsorted(self.first, wanted, side="right") - 1
        return self.source[run], self.row[run] + wanted - self.first[run]

    @property
    def step(self) -> int:
        """The smallest number of rows that are always made of as many: the rows of a head, where rows move within heads."""
        if len(set(self.source.tolist())) > 1:
            return 1
        _, row = self.rows_between(0, self.rows)
        closed = np.maximum.accumulate(row) == np.arange(self.rows)
        return next((int(at) + 1 for at in np.nonzero(closed)[0] if closed[at :: at + 1].all()), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """A tensor that is made of whole sources by the processor, and why."""

    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """One tensor of the model: of which stored ones (by name), and how. `incomplete`: rows that no stored one fills."""

    sources: tuple[str, ...]
    how: Moved | Changed
    incomplete: int = 0


def process(processor: Any, names: Mapping[str, str], tensors: Iterable[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What transformers makes of stored tensors, by the model's names: the loop of its loader, with its own processor."""
    parsed: dict[str, Any] = {"config": processor.config, "tensors": {}}
    with np.errstate(all="ignore"):  # stand-ins are no weights
        for name, weights in tensors:
            result = processor.process(weights=weights, name=name, tensor_key_mapping=names, parsed_parameters=parsed)
            if result.name in names:
                parsed["tensors"][names[result.name]] = result.weights
    return {name: np.asarray(made) for name, made in parsed["tensors"].items()}


def trace(
    processor: Any, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Made], dict[str, str]]:
    """What becomes of stored tensors of these shapes, by the model's names; and those that become nothing, with the reason."""
    made_of: dict[str, list[str]] = {}
    lost: dict[str, str] = {}
    for name, shape in shapes.items():
        targets, reason = _targets(processor, names, name, shape)
        for target in targets:
            made_of.setdefault(target, []).append(name)
        if not targets:
            lost[name] = reason
    made = {
        target: _how(processor, names, target, {one: shapes[one] for one in sources}) for target, sources in made_of.items()
    }
    return made, lost


def _targets(processor: Any, names: Mapping[str, str], name: str, shape: tuple[int, ...]) -> tuple[Sequence[str], str]:
    try:
        return tuple(
            process(processor, names, [(name, _stand_in(0, shape, COLUMN_COUNTS[0]))])
        ), "transformers has no name for it"
    except Exception:  # what it needs may be the full shape; a reason that stays is returned
        try:
            return tuple(process(processor, names, [(name, _hollow(shape))])), "transformers has no name for it"
        except Exception as error:
            return (), f"transformers' processing fails: {type(error).__name__}: {error}"


def _how(processor: Any, names: Mapping[str, str], target: str, shapes: Mapping[str, tuple[int, ...]]) -> Made:
    sources = tuple(shapes)
    found = [_moved(processor, names, target, shapes, columns) for columns in COLUMN_COUNTS]
    first, second = found[0], found[1]
    reason = next((one for one in found if isinstance(one, str)), "what it moves depends on the number of columns")
    if (
        not (isinstance(first, str) or isinstance(second, str))
        and first[0] == second[0]
        and np.array_equal(first[1], second[1])
    ):
        reason = "it moves elements of a vector"
        outer, code = first
        columns = next(iter(shapes.values()))[-1]
        flat = all(len(shape) == 1 for shape in shapes.values())
        source, row = (code >> SOURCE_BIT) - 1, (code & ((1 << SOURCE_BIT) - 1)) >> ROW_BIT
        incomplete = int((code == 0).sum())
        starts = np.concatenate([[0], np.nonzero((np.diff(source) != 0) | (np.diff(row) != 1))[0] + 1])
        if not flat and all(shape[-1] == columns for shape in shapes.values()):
            moved = Moved(shape=(*outer, columns), first=starts, source=source[starts], row=row[starts])
            return Made(sources=sources, how=moved, incomplete=incomplete)
        if flat and len(sources) == 1 and len(starts) == 1 and row[0] == 0 and len(row) == columns and not incomplete:
            # A vector kept as it is, perhaps with dimensions of size one added: one row.
            zero = np.zeros(1, dtype=np.int64)
            if outer and outer[-1] == columns:
                return Made(sources=sources, how=Moved(shape=outer, first=zero, source=zero, row=zero))
    shape = process(processor, names, [(one, _hollow(full)) for one, full in shapes.items()])[target].shape
    return Made(sources=sources, how=Changed(shape=tuple(shape), reason=reason))


def _moved(
    processor: Any, names: Mapping[str, str], target: str, shapes: Mapping[str, tuple[int, ...]], columns: int
) -> tuple[tuple[int, ...], np.ndarray] | str:
    """(shape without columns, code of each row) where rows were only moved; 0 is the code of a row that nothing fills.
    Else why not."""
    flat = all(len(shape) == 1 for shape in shapes.values())
    try:
        made = process(
            processor, names, [(one, _stand_in(at, shape, columns)) for at, (one, shape) in enumerate(shapes.items())]
        )
    except Exception as error:  # whatever its code raises: then it is run on whole tensors
        return f"it needs the full shape ({type(error).__name__}: {error})"
    values = made[target]
    if values.dtype != np.float64 or (not flat and (values.ndim < 2 or values.shape[-1] != columns)):
        return f"it gives shape {list(values.shape)}"
    rows = values.reshape(-1, 1 if flat else columns)
    code = np.abs(rows)
    if not np.isfinite(rows).all() or (code != np.floor(code)).any() or code.max(initial=0) >= 2.0**53:
        return "it computes new values, or moves elements across rows"
    code = code.astype(np.int64)
    column = np.arange(rows.shape[1])
    filled = code[:, :1] != 0
    expected = np.where(filled, code[:, :1] + column, 0)
    row = (code & ((1 << SOURCE_BIT) - 1)) >> ROW_BIT
    signs = np.where((row + column) % 2, -1.0, 1.0)
    if (code != expected).any() or (code[:, 0] & ((1 << ROW_BIT) - 1)).any() or (code * signs != rows).any():
        return "it computes new values, or moves elements across rows"
    return (values.shape if flat else values.shape[:-1]), code[:, 0]


def _stand_in(source: int, shape: tuple[int, ...], columns: int) -> np.ndarray:
    """Numbers that say where they are, of a tensor with fewer columns; elements of a vector count as rows."""
    count, width = (shape[0], 1) if len(shape) == 1 else (prod(shape[:-1]), columns)
    row, column = np.arange(count, dtype=np.int64)[:, None], np.arange(width, dtype=np.int64)
    code = ((source + 1) << SOURCE_BIT) + (row << ROW_BIT) + column
    signed = np.where((row + column) % 2, -code, code).astype(np.float64)
    return signed.reshape(shape if len(shape) == 1 else (*shape[:-1], columns))


def _hollow(shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of the full shape that takes no memory."""
    return np.broadcast_to(np.float32(1), shape)
