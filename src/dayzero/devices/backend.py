"""How a device is reached and what it offers: the back end behind a torch device string.

Goes in: a device string. Comes out: a `Backend`: names, memory figures, the table of kernels. `cpu` and `cuda` are built in,
vendors add theirs through the entry point group `dayzero.backends`, and any other device that torch reaches gets one with
torch's own operators alone. Not decided here: which kernel of the table is used (`ops.binding` tests them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from dayzero.core.errors import DayZeroError
from dayzero.devices.host import host_memory
from dayzero.ops.definitions import OPERATORS
from dayzero.ops.library import library_table
from dayzero.ops.registry import BACKENDS, Kernel, Registry, Table, checked_table

# Also in pyproject.toml; here so that an editable install with stale metadata still has them.
BUILT_IN = {"cpu": "dayzero.devices.cpu:create", "cuda": "dayzero.devices.cuda:create"}

# The collective back end of devices whose torch plugin brings its own; others use what torch names for them.
COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl", "xpu": "xccl", "musa": "mccl", "mlu": "cncl", "hpu": "hccl"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """The kernels of a device, best first, and what is to be told about how they came to be."""

    table: Table
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True, slots=True)
class Backend:
    """One device. `make_tables` is called at the first question about kernels: compiling them may take a minute.

    `reachable` False: torch can be asked what it has for the device, but nothing can be run.
    """

    name: str
    device: str
    dispatch_key: str
    make_tables: Callable[[], Tables]
    memory: Callable[[], DeviceMemory]
    instruction_set: str
    collective: str | None = None
    reachable: bool = True
    _tables: Tables | None = field(default=None, init=False)

    @property
    def tables(self) -> Tables:
        if self._tables is None:
            made = self.make_tables()
            checked_table(made.table, OPERATORS)
            self._tables = made
        return self._tables

    def kernels(self, operator: str) -> tuple[Kernel, ...]:
        """Kernels for an operator, best first; () where the table names none."""
        return self.tables.table.get(operator, ())

    @property
    def notes(self) -> tuple[str, ...]:
        return self.tables.notes


def joined(*tables: Mapping[str, tuple[Kernel, ...]]) -> Table:
    """Tables put behind one another: kernels of an earlier one are tried first."""
    return {name: tuple(k for table in tables for k in table.get(name, ())) for table in tables for name in table}


def backends() -> Registry[Backend]:
    """The back ends there are: built in, and of installed packages."""
    return Registry("back end", group=BACKENDS, built_in=BUILT_IN)


def open_backend(device: str) -> Backend:
    """The back end of a torch device string. Raises DayZeroError where it is none, or cannot be reached from here."""
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise DayZeroError(
            f"{device!r} is no torch device",
            got=str(error).partition("\n")[0][:200],
            want="a device string such as cpu, cuda or npu:0",
            fix="correct --device, or install the torch plugin that adds this device",
        ) from error
    registry = backends()
    if parsed.type in registry.names():
        return registry.create(parsed.type, device)
    return create_generic(device)


def create_generic(device: str) -> Backend:
    """A back end for any device torch reaches, with torch's own operators. Raises DayZeroError where it does not."""
    require_reachable(device)
    kind = torch.device(device).type
    return Backend(
        name=kind,
        device=device,
        dispatch_key=torch._C._dispatch_key_for_device(kind),
        make_tables=lambda: Tables(table=library_table()),
        memory=lambda: accelerator_memory(device),
        instruction_set=f"{kind} via torch {torch.__version__}",
        collective=COLLECTIVES.get(kind),
    )


def require_reachable(device: str) -> None:
    """Raises DayZeroError with torch's own reason where nothing can be put on the device and read back."""
    kind = torch.device(device).type
    try:
        answer = float(torch.ones(2, device=device).sum().cpu())
        if answer != 2.0:
            raise RuntimeError(f"1 + 1 came out as {answer}")
    except Exception as error:  # plugins raise many types; each means that the device cannot be used
        raise DayZeroError(
            f"the device {device!r} cannot be reached",
            got=" ".join(f"{type(error).__name__}: {error}".split())[:300],
            want=f"a torch that can use {kind}: its driver, and a torch build or plugin for it",
            fix=f"run `dayzero doctor --device {kind}`, or choose another --device",
        ) from error


def host_figures() -> DeviceMemory:
    found = host_memory()
    return DeviceMemory(total_bytes=found.total_bytes, available_bytes=found.available_bytes)


def accelerator_memory(device: str) -> DeviceMemory:
    """Total and free bytes. Raises DayZeroError where the plugin does not tell."""
    module = getattr(torch, torch.device(device).type, None)
    if module is None or not hasattr(module, "mem_get_info"):
        raise DayZeroError(
            f"the plugin of {device!r} does not tell its memory",
            got=f"torch.{torch.device(device).type} without mem_get_info",
            want="free and total bytes",
            fix="give usable_memory_bytes in the target file",
        )
    free, total = module.mem_get_info(device)
    return DeviceMemory(total_bytes=int(total), available_bytes=int(free))
