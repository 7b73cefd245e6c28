"""NVIDIA GPUs and what presents itself as such: torch's own operators on `cuda`."""

from __future__ import annotations

import torch

from dayzero.core.errors import DayZeroError
from dayzero.devices.backend import Backend, Tables, accelerator_memory, require_reachable
from dayzero.ops.library import library_table


def create(device: str = "cuda") -> Backend:
    """Raises DayZeroError where this torch has no CUDA, no driver answers, or there is no such card."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        raise DayZeroError(
            f"the device {device!r} cannot be reached",
            got=f"torch {torch.__version__}, " + (f"built for {built}, but no card answers" if built else "built without CUDA"),
            want="a torch built with CUDA and a working driver",
            fix="install a CUDA build of torch and the driver, or choose another --device; `dayzero doctor` shows both",
        )
    require_reachable(device)
    properties = torch.cuda.get_device_properties(device)
    return Backend(
        name="cuda",
        device=device,
        dispatch_key="CUDA",
        make_tables=lambda: Tables(table=library_table()),
        memory=lambda: accelerator_memory(device),
        instruction_set=f"{properties.name} sm_{properties.major}{properties.minor}",
        collective="nccl",
    )
