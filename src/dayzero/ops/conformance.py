"""Whether a kernel computes what its operator defines: the gate every binding passes before the mapper may pick it.

Goes in: a device, an operator with the settings and sizes of a site (or a library operator with calls recorded from a
model), and a kernel. Comes out: a `Verdict`: evidence, and the reason where the kernel is refused. References are computed
on the CPU in float64, never on the device under test. Not measured here: speed.

The error of a case is the largest difference over the largest reference value; a NaN or infinity where the reference has
none, another shape or dtype, or an exception is an infinite error.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from dayzero.core.operators import Evidence
from dayzero.ops.cases import CASES, Case, aten_cases
from dayzero.ops.definitions import Operator
from dayzero.ops.registry import Kernel, Unsupported

# Frozen. Relative to the largest reference value. float32: sums of up to a few thousand products in another order (2**-24
# each, growing with the square root of their number) and fast exp. bfloat16 and float16: inputs are rounded before the
# comparison, so what is left is the rounding of the output (2**-9, 2**-12 of the value) and of two or three intermediate
# results; products must be accumulated in float32 to stay below. Integers and booleans must be equal.
LIMITS = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3, "complex64": 2e-5, "complex128": 1e-10}
METHOD = "largest difference to the float64 definition on the CPU, relative to its largest value"
MODULE_METHOD = "largest difference to the model's own module in float64 on the CPU, relative to its largest value"
ATEN_METHOD = "largest difference to the same operator in float64 on the CPU, relative to its largest value"

HUGE = 1e30  # no activation is; masks are

# (values, indices) of these: ties may be broken either way, so an index is right when it leads to the value.
INDEXING = {"aten::topk": 2, "aten::sort": 1, "aten::max": 1, "aten::min": 1}  # name -> position of `dim` in the arguments
# Their values are undefined: shape and dtype alone count.
UNDEFINED = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided")


class Device(Protocol):
    """What of a back end the kit and the mapper need. `dispatch_key` is its key in torch's dispatcher."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dispatch_key(self) -> str: ...
    @property
    def instruction_set(self) -> str: ...
    @property
    def reachable(self) -> bool: ...
    @property
    def notes(self) -> tuple[str, ...]: ...

    def kernels(self, operator: str) -> tuple[Kernel, ...]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`refusal` is "" when the kernel may be used. `declined`: it says itself that it was not made for this."""

    evidence: Evidence | None
    refusal: str = ""
    declined: bool = False


_verdicts: dict[tuple[Any, ...], Verdict] = {}  # a process tests each kernel on each domain once; kernels do not change


def check(
    device: Device,
    operator: Operator,
    kernel: Kernel,
    *,
    settings: Mapping[str, Any],
    sizes: Mapping[str, float],
    dtypes: Sequence[str],
) -> Verdict:
    """The kernel against the definition, over every case of the operator in each of `dtypes` that the kernel claims."""
    domain = (tuple(sorted(settings.items())), tuple(sorted(sizes.items())), tuple(dtypes))
    key = (device.name, device.device, operator.name, kernel.name, kernel.call, domain)
    if key not in _verdicts:
        _verdicts[key] = run_cases(
            device, CASES[operator.name](dict(settings), sizes), operator.define, kernel.call, dtypes=_claimed(kernel, dtypes)
        )
    return _verdicts[key]


def _claimed(kernel: Kernel, dtypes: Sequence[str]) -> list[str]:
    """The first dtype is the model's and must be claimed; further ones are tested where the kernel claims them."""
    return [dtypes[0], *(name for name in dtypes[1:] if name in kernel.dtypes)] if dtypes[0] in kernel.dtypes else []


def check_aten(
    device: Device, name: str, op: Callable[..., Any], kernel: Kernel, recorded: Iterable[Case], *, dtypes: Sequence[str]
) -> Verdict:
    """A library operator, or what replaces it, on calls recorded from a model and on the operator's declared domain.

    The recorded calls are in the model's dtype, `dtypes[0]`; what the model itself widened to float32 stays float32.
    Not cached: the recorded calls are the model's own.
    """
    native = getattr(torch, dtypes[0])
    domain = tree_map(lambda leaf: _narrow(leaf, native, torch.float64), [(c.args, c.settings) for c in aten_cases(name)])
    labels = [case.label for case in aten_cases(name)]
    made = [Case(label=label, args=args, settings=settings) for label, (args, settings) in zip(labels, domain, strict=True)]
    return run_cases(
        device,
        [*recorded, *made],
        op,
        kernel.call,
        dtypes=_claimed(kernel, dtypes),
        method=ATEN_METHOD,
        name=name,
        shape_only=name in UNDEFINED,
        native=native,
    )


def check_module(
    device: Device,
    define: Callable[..., Any],
    kernel: Kernel,
    module: nn.Module,
    cases: Sequence[Case],
    *,
    dtypes: Sequence[str],
) -> Verdict:
    """A kernel that computes a whole module, `call(module, *tensors)`, against `define` with a float64 copy on the CPU.

    Weights are rounded to each dtype first, as inputs are. The first verdict that refuses is returned, else the worst.
    """
    verdicts = []
    for dtype in _claimed(kernel, dtypes):
        served = copy.deepcopy(module).to(getattr(torch, dtype))
        reference, placed = copy.deepcopy(served).to(torch.float64), served.to(device.device)
        verdict = run_cases(
            device, cases, partial(define, reference), partial(kernel.call, placed), dtypes=[dtype], method=MODULE_METHOD
        )
        if verdict.refusal or verdict.evidence is None:
            return verdict
        verdicts.append(verdict.evidence)
    if not verdicts:
        return run_cases(device, (), define, kernel.call, dtypes=())
    worst = max(verdicts, key=lambda evidence: evidence.worst_error / evidence.limit)
    return Verdict(evidence=replace(worst, cases=sum(evidence.cases for evidence in verdicts)))


def run_cases(
    device: Device,
    cases: Iterable[Case],
    define: Callable[..., Any],
    call: Callable[..., Any],
    *,
    dtypes: Sequence[str],
    method: str = METHOD,
    name: str = "",
    shape_only: bool = False,
    native: torch.dtype = torch.float64,
) -> Verdict:
    """Worst error over cases and dtypes, as a multiple of each dtype's limit; the evidence names that worst one.

    `native`: the dtype of tensors in the cases that follow the dtype under test; others keep theirs.
    """
    if not dtypes:
        return Verdict(evidence=None, refusal="it does not claim the model's dtype", declined=True)
    count, worst, limit, where, refusal = 0, -1.0, LIMITS[dtypes[0]], "", ""
    listed = list(cases)
    for dtype, case in itertools.product(dtypes, listed):
        count += 1
        with torch.no_grad():
            try:
                error = _case_error(device, case, define, call, dtype, name, shape_only, native)
                told = f"error {error:.3g}"
            except Unsupported as declined:
                return Verdict(evidence=None, refusal=str(declined), declined=True)
            except Exception as failure:  # whatever a kernel raises, it is not usable here, and the map says why
                error, told = math.inf, " ".join(f"{type(failure).__name__}: {failure}".split())[:200]
        if not error / LIMITS[dtype] <= worst / limit or worst < 0:
            worst, limit, where = error, LIMITS[dtype], f"{dtype}, {case.label}"
        if not error <= LIMITS[dtype] and not refusal:
            refusal = f"{told} where {LIMITS[dtype]:g} is allowed ({dtype}, {case.label})"
    if not count:
        return Verdict(evidence=None, refusal="")
    finite = worst if math.isfinite(worst) else 1e308  # records are JSON, which has no infinity
    said = f"{method}; {count} cases in {', '.join(dtypes)}; worst: {where}"
    return Verdict(evidence=Evidence(cases=count, worst_error=finite, limit=limit, method=said), refusal=refusal)


def _case_error(
    device: Device,
    case: Case,
    define: Callable[..., Any],
    call: Callable[..., Any],
    dtype: str,
    name: str,
    shape_only: bool,
    native: torch.dtype,
) -> float:
    served = getattr(torch, dtype)
    rounded = tree_map(lambda leaf: _narrow(leaf, served, native), (case.args, case.settings))
    wide_args, wide_settings = tree_map(_widen, rounded)
    args, settings = tree_map(lambda leaf: _place(leaf, device.device), rounded)
    want, got = define(*wide_args, **wide_settings), call(*args, **settings)
    # Operators that write into their arguments are compared by what they wrote.
    wants, gots = tree_flatten((want, wide_args))[0], tree_flatten((got, args))[0]
    if len(wants) != len(gots):
        return math.inf
    if name in INDEXING and isinstance(want, (tuple, list)) and len(want) == 2:
        dim = case.args[INDEXING[name]] if len(case.args) > INDEXING[name] else case.settings.get("dim", -1)
        return max(_error(want[0], got[0]), _index_error(wide_args[0], want, got, dim))
    return max((_error(one, other, shape_only) for one, other in zip(wants, gots, strict=True)), default=0.0)


def _narrow(leaf: Any, served: torch.dtype, native: torch.dtype) -> Any:
    """A copy in which the dtype that is served takes the place of `native`, in tensors and in explicit requests for it."""
    if isinstance(leaf, Tensor):
        leaf = leaf.clone()
        return _rounded(leaf, served) if leaf.dtype == native else leaf
    if isinstance(leaf, float) and math.isfinite(leaf):
        largest = torch.finfo(served).max  # "minus the largest number" of a float64 model is that of the served dtype
        return min(max(leaf, -largest), largest)
    return served if leaf is native else leaf


def _rounded(tensor: Tensor, served: torch.dtype) -> Tensor:
    if tensor.dtype == served:
        return tensor
    bounds, wide = torch.finfo(served), tensor.to(torch.float64)
    return torch.where(wide.isfinite(), wide.clamp(bounds.min, bounds.max), wide).to(served)


def _widen(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        wide = torch.complex128 if leaf.is_complex() else torch.float64 if leaf.is_floating_point() else leaf.dtype
        return leaf.to(wide, copy=True)
    if isinstance(leaf, torch.dtype) and leaf.is_floating_point:
        return torch.float64
    return leaf


def _place(leaf: Any, device: str) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(device)
    return torch.device(device) if isinstance(leaf, torch.device) else leaf


def _error(want: Any, got: Any, shape_only: bool = False) -> float:
    """Relative to the largest reference value; 0 or infinity for anything exact."""
    if not isinstance(want, Tensor):
        if isinstance(want, float) and isinstance(got, float):
            return abs(want - got) / max(abs(want), 1e-30) if want != got else 0.0
        return 0.0 if isinstance(want, (torch.dtype, torch.device)) or want == got else math.inf
    if not isinstance(got, Tensor) or got.shape != want.shape or got.is_floating_point() != want.is_floating_point():
        return math.inf
    if shape_only or not want.numel():
        return 0.0
    got = got.detach().to("cpu")
    if not (want.is_floating_point() or want.is_complex()):
        return 0.0 if got.dtype == want.dtype and torch.equal(got, want) else math.inf
    limit = min(HUGE, torch.finfo(got.dtype).max / 2)
    got = got.to(want.dtype)
    # Infinities, NaN and masks of "the largest number" would drown the rest: they are compared by themselves.
    special = ~(want.abs() < limit)
    if special.any():
        one, other = got[special], want[special]
        # Two masks added up exceed the dtype, though not float64: infinity of that sign is then the right answer.
        over = one.isinf() & (one.sign() == other.sign()) if not one.is_complex() else torch.zeros_like(one, dtype=torch.bool)
        near = over | (one.isnan() & other.isnan()) | ((one - other).abs() <= 0.01 * other.abs())
        if not near.all():
            return math.inf
    difference = (got - want)[~special].abs()
    if not difference.numel():
        return 0.0
    worst = float(difference.max())
    return worst / max(float(want[~special].abs().max()), 1e-6) if math.isfinite(worst) else math.inf


def _index_error(x: Tensor, want: Any, got: Any, dim: int) -> float:
    """0 when the indices are in range, distinct along `dim` and lead to the reference's values, any order among ties."""
    if not isinstance(got[1], Tensor) or got[1].shape != want[1].shape:
        return math.inf
    if not want[1].numel():
        return 0.0
    index, values = got[1].to("cpu"), want[0]
    if int(index.min()) < 0 or int(index.max()) >= x.shape[dim]:
        return math.inf
    ordered = index.sort(dim).values
    if index.dim() == x.dim() and (ordered.diff(dim=dim) == 0).any():
        return math.inf
    reached = x.gather(dim, index) if index.dim() == x.dim() else x.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    return _error(values.sort(dim).values, reached.sort(dim).values) if index.dim() == x.dim() else _error(values, reached)
