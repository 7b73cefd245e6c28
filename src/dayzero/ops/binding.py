"""One operator of a model and a device in, the kernel that will run it out, with the evidence and everything refused.

Kernels are tried in the order of the device's table; the first that agrees with its definition is taken. When none does,
the definition runs on the CPU, which is always right and always slow. A device that cannot be reached from here is only
asked what it has: then there is no evidence, and the reason says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dayzero.core.operators import Binding, Evidence
from dayzero.ops.cases import CASES, Case
from dayzero.ops.conformance import Device, Verdict, check, check_aten, check_module
from dayzero.ops.definitions import OPERATORS
from dayzero.ops.dispatch import Answer, ask, ask_all, called
from dayzero.ops.library import run_experts
from dayzero.ops.registry import Kernel, Unsupported

NOT_RUN = "asked, not run: the device cannot be reached from here"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """`refused`: kernels that gave wrong results or failed, each with its reason, whatever was chosen in the end."""

    binding: Binding
    kernel: str
    reason: str
    evidence: Evidence | None = None
    refused: tuple[str, ...] = ()


def bind(
    device: Device, operator: str, settings: Mapping[str, Any], sizes: Mapping[str, float], dtypes: Sequence[str]
) -> Choice:
    """The kernel for a catalogued operator with the settings and sizes of a site."""
    definition = OPERATORS[operator]
    cases = list(CASES[operator](dict(settings), sizes))
    # The case with the most to do stands for the site where only the dispatcher is asked.
    example = max(cases, key=lambda case: sum(arg.numel() for arg in case.args if isinstance(arg, torch.Tensor)))
    return _choose(
        device,
        device.kernels(operator),
        lambda kernel: check(device, definition, kernel, settings=settings, sizes=sizes, dtypes=dtypes),
        lambda kernel: _ask_kernel(device, kernel, example),
        fallback="the definition, on the CPU",
    )


def bind_experts(device: Device, module: nn.Module, cases: Sequence[Case], dtypes: Sequence[str]) -> Choice:
    """The kernel for a module of experts with its weights."""

    def asked(kernel: Kernel) -> tuple[Answer, str]:
        return _ask_kernel(device, kernel, Case(label="", args=(module, *cases[-1].args)))

    return _choose(
        device,
        device.kernels("experts"),
        lambda kernel: check_module(device, partial(run_experts, "eager"), kernel, module, cases, dtypes=dtypes),
        asked,
        fallback="the module, on the CPU",
    )


def bind_aten(device: Device, op: torch._ops.OpOverload, recorded: Sequence[Case], dtypes: Sequence[str]) -> Choice:
    """The kernel for a library operator: a replacement from the table, else the device's own."""
    name = op._schema.name
    own = Kernel(name=op.name(), call=op.overloadpacket, dtypes=("float64", "float32", "bfloat16", "float16"))
    example = recorded[0] if recorded else Case(label="", args=())

    def asked(kernel: Kernel) -> tuple[Answer, str]:
        if kernel is not own:
            return _ask_kernel(device, kernel, example)
        return ask_all(op, device.dispatch_key, example.args, example.settings) if recorded else (
            ask(op, device.dispatch_key), op.name()
        )  # fmt: skip

    return _choose(
        device,
        (*device.kernels(name), own),
        lambda kernel: check_aten(device, name, op.overloadpacket, kernel, recorded, dtypes=dtypes),
        asked,
        fallback=f"{op.name()}, on the CPU",
    )


def _choose(
    device: Device,
    kernels: Sequence[Kernel],
    checked: Callable[[Kernel], Verdict],
    asked: Callable[[Kernel], tuple[Answer, str]],
    *,
    fallback: str,
) -> Choice:
    refused: list[str] = []
    passed_over: list[str] = []
    has_fallback = torch._C._dispatch_has_backend_fallback(device.dispatch_key)
    for kernel in kernels:
        if not device.reachable:
            answer, part = asked(kernel)
            if answer in ("kernel", "composite"):
                return Choice(binding=kernel.binding, kernel=kernel.name, reason=NOT_RUN)
            if answer == "host":
                return Choice(binding="fallback", kernel=kernel.name, reason=f"{part} would run on the CPU; {NOT_RUN}")
            passed_over.append(f"{kernel.name}: {part} has no kernel for {device.dispatch_key}")
            continue
        verdict = checked(kernel)
        if verdict.refusal:
            (passed_over if verdict.declined else refused).append(f"{kernel.name}: {verdict.refusal}")
            continue
        why = "agrees with its definition" if verdict.evidence else "no case to compare"
        why = "; ".join([why, *(f"passed over {told}" for told in (*passed_over, *refused))])
        if has_fallback and (answered := asked(kernel))[0] == "host":
            return Choice(
                binding="fallback", kernel=kernel.name, evidence=verdict.evidence, refused=tuple(refused),
                reason=f"{answered[1]} has no kernel on the device and runs on the CPU; {why}",
            )  # fmt: skip
        return Choice(binding=kernel.binding, kernel=kernel.name, reason=why, evidence=verdict.evidence, refused=tuple(refused))
    told = "; ".join([*passed_over, *refused]) or "the device's table names no kernel"
    if not device.reachable:
        return Choice(binding="missing", kernel="", reason=f"{told}; {NOT_RUN}")
    reason = f"no kernel of the device may be used: {told}"
    return Choice(binding="fallback", kernel=fallback, reason=reason, refused=tuple(refused))


def _ask_kernel(device: Device, kernel: Kernel, example: Case) -> tuple[Answer, str]:
    """The worst answer among the library operators that a kernel calls for an example on the CPU."""
    if kernel.binding == "custom":
        return "none", kernel.name
    try:
        ops = called(lambda: kernel.call(*example.args, **example.settings))
    except Unsupported as declined:
        return "none", f"{kernel.name} ({declined})"
    order: list[Answer] = ["none", "host", "composite", "kernel"]
    answers = [(ask(op, device.dispatch_key), op.name()) for op in ops]
    return min(answers, key=lambda pair: order.index(pair[0]), default=("kernel", kernel.name))
