"""What torch's dispatcher answers about a library operator on a device, without running it.

Goes in: an operator overload and a dispatch key. Comes out: whether the device has a kernel, whether the operator is taken
apart into others, would run on the CPU through the device's fallback, or cannot run at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Answer = Literal["kernel", "composite", "host", "none"]


def ask(op: torch._ops.OpOverload, dispatch_key: str) -> Answer:
    """`composite`: torch takes it apart before any device is asked, so ask about its parts. `host`: the CPU would run it."""
    name = op.name()
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key):
        return "kernel"
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return "composite"
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutogradNonFunctional"):
        # Generated code that only allocates the result: the work is done by the variant that writes into it.
        out = _out_variant(op)
        return ask(out, dispatch_key) if out is not None else "kernel"
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutograd"):
        return "kernel"  # runs on the device by calling others, which the dispatcher does not list
    if torch._C._dispatch_has_backend_fallback(dispatch_key):
        return "host"
    return "none"


def _out_variant(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload with the same inputs that writes into tensors it is given."""
    inputs = [(one.name, str(one.type)) for one in op._schema.arguments]
    base = op._schema.name.partition("::")[2].rstrip("_")  # the in-place form shares the variant of its functional form
    packets = [op.overloadpacket, *([getattr(torch.ops.aten, base)] if hasattr(torch.ops.aten, base) else [])]
    for other in (getattr(packet, overload) for packet in packets for overload in packet.overloads()):
        written = [one for one in other._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        kept = [(one.name, str(one.type)) for one in other._schema.arguments if one not in written]
        if written and all(one.is_out for one in written) and kept == inputs:
            return other
    return None


class _Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[torch._ops.OpOverload] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def called(function: Callable[[], Any]) -> list[torch._ops.OpOverload]:
    """The distinct library operators that a function calls."""
    listener = _Listener()
    with torch.no_grad(), listener:
        function()
    return list(dict.fromkeys(listener.ops))


def ask_all(op: torch._ops.OpOverload, dispatch_key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Answer, str]:
    """As `ask`, composite ones answered by the worst of their parts; the second value names the part that decided."""
    answer = ask(op, dispatch_key)
    if answer != "composite":
        return answer, op.name()
    order: list[Answer] = ["none", "host", "composite", "kernel"]
    parts = [part for part in called(lambda: op.decompose(*args, **kwargs)) if part is not op]
    answers = [(ask(part, dispatch_key), part.name()) for part in parts]
    return min(answers, key=lambda pair: order.index(pair[0]), default=("kernel", op.name()))
