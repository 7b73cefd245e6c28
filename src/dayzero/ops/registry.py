"""Names to things: kernels that may serve an operator, tables of them per device, and creators found by entry point.

A vendor's package adds a device by declaring an entry point in the group `dayzero.backends` whose function returns a back
end; the back end's table binds operators to kernels, best first. Nobody edits this package for that. Vendor packages are
imported inside the creator only, so asking which back ends exist imports nothing. No torch here.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from dayzero.core.errors import DayZeroError
from dayzero.core.operators import Binding

T = TypeVar("T")

BACKENDS = "dayzero.backends"
FLOAT_DTYPES = ("float32", "bfloat16", "float16")


class Unsupported(Exception):
    """A kernel declines a call it was not made for; the reason ends up in the operator map."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One way to compute an operator on a device. `call` takes what the operator's definition takes, tensors on the device.

    `binding` is what the map says when this kernel is chosen. `dtypes` is the domain it claims: it is tested on all of it
    that matters for a model, and not used outside. It may raise `Unsupported` with a reason.
    """

    name: str
    call: Callable[..., Any]
    binding: Binding = "library"
    dtypes: tuple[str, ...] = FLOAT_DTYPES


Table = Mapping[str, tuple[Kernel, ...]]  # operator name -> kernels, best first; `aten::<op>` replaces a library operator


def checked_table(table: Table, operators: Iterable[str]) -> Table:
    """The table as it is. Raises DayZeroError on an operator nobody defines and on two kernels of one name for one operator."""
    known = sorted(operators)
    for operator, kernels in table.items():
        if operator not in known and not operator.startswith("aten::"):
            raise unknown("operator", operator, known)
        names = [kernel.name for kernel in kernels]
        for name in names:
            if names.count(name) > 1:
                raise duplicate(f"kernel for {operator}", name)
    return table


class Registry(Generic[T]):
    """Creators by name: those given here, those added, and those that installed packages declare under `group`."""

    def __init__(self, what: str, *, group: str | None = None, built_in: Mapping[str, str] | None = None) -> None:
        self.what, self._group = what, group
        self._built_in = dict(built_in or {})  # name -> "module:attribute"; there even when package metadata is stale
        self._creators: dict[str, Callable[..., T]] = {}

    def add(self, name: str, creator: Callable[..., T]) -> None:
        """Raises DayZeroError when the name is taken."""
        if name in self.names():
            raise duplicate(self.what, name)
        self._creators[name] = creator

    def names(self) -> list[str]:
        return sorted({*self._creators, *self._references()})

    def create(self, name: str, *args: Any, **kwargs: Any) -> T:
        """Raises DayZeroError on an unknown name, listing those that exist, and where a creator cannot be imported."""
        if name in self._creators:
            return self._creators[name](*args, **kwargs)
        references = self._references()
        if name not in references:
            raise unknown(self.what, name, self.names())
        module, _, attribute = references[name].partition(":")
        try:
            creator = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise DayZeroError(
                f"{self.what} {name!r} cannot be loaded",
                got=f"{type(error).__name__}: {error}",
                want=f"{references[name]}, as its package declares",
                fix="reinstall the package that provides it",
            ) from error
        return creator(*args, **kwargs)

    def _references(self) -> dict[str, str]:
        found = dict(self._built_in)
        for point in self._declared():
            if found.setdefault(point.name, point.value) != point.value:
                raise duplicate(self.what, point.name, f"{found[point.name]} and {point.value}")
        return found

    def _declared(self) -> Iterable[EntryPoint]:
        return entry_points(group=self._group) if self._group else ()


def duplicate(what: str, name: str, where: str = "") -> DayZeroError:
    return DayZeroError(
        f"two of the same {what}: {name!r}",
        got=where or f"{name!r} twice",
        want="each name once",
        fix="rename one of them, or uninstall one of the packages that provide it",
    )


def unknown(what: str, name: str, known: Iterable[str]) -> DayZeroError:
    return DayZeroError(
        f"unknown {what} {name!r}", got=name, want=f"one of: {', '.join(known)}", fix="correct the name, or install its package"
    )
