"""Calls of library operators on meta tensors in, their results out: the same question is answered once.

On meta a call costs a third of a millisecond, most of it in Python, and gives nothing but shapes. A model asks for the same
ones in every layer and every turn of a loop. Only operators that neither write into an argument nor return a part of one are
remembered; everything else, and every call with a tensor that is not on meta, runs as it would.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
Form = tuple[torch.Size, tuple[int, ...], torch.dtype]


class MetaResults:
    """One instance per thing that is watched: what it remembers is forgotten with it."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Form] = {}

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func(*args, **kwargs)` returns."""
        if not _makes_new(func):
            return func(*args, **kwargs)
        key = _asked(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        form = self._known.get(key)
        if form is not None:
            return torch.empty_strided(form[0], form[1], dtype=form[2], device="meta")
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.is_meta and type(out) is Tensor:
            self._known[key] = (out.shape, out.stride(), out.dtype)
        return out


@cache
def _makes_new(func: Any) -> bool:
    """Whether the one result is a tensor of its own, and no argument is written into."""
    schema = func._schema
    returns = schema.returns
    return (
        len(returns) == 1
        and returns[0].alias_info is None
        and not any(one.alias_info is not None for one in schema.arguments)
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def _asked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """What decides the shape of the result; None where something does that cannot be compared."""
    said: list[Hashable] = [func]
    for value in args if not kwargs else (*args, *sorted(kwargs.items())):
        if not _say(value, said):
            return None
    return tuple(said)


def _say(value: Any, said: list[Hashable]) -> bool:
    if isinstance(value, Tensor):
        if not value.is_meta or type(value) not in (Tensor, torch.nn.Parameter):
            return False
        said.append((value.shape, value.stride(), value.dtype))
        return True
    if isinstance(value, (list, tuple)):
        said.append(len(value))
        return all(_say(item, said) for item in value)
    if value is None or isinstance(value, PLAIN):
        said.append((type(value), value))
        return True
    return False
