"""A forward of a model in, the tree of everything it called out: modules, functions with a meaning of their own, operators.

Attention and experts are met where transformers looks their functions up, and the functions that its kernel hub decorates
(scans, linear attention, short convolutions) where the modelling file names them; each is one region. Nothing is replaced:
what would have run runs. Only on meta experts return their shape at once. A recording holds on to every tensor it saw, so
that a tensor is known by its identity. It does not generalise anything: `unify` does.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import cache_utils, masking_utils
from transformers.configuration_utils import PreTrainedConfig
from transformers.integrations import hub_kernels
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dayzero.ops.graph.meta_results import MetaResults
from dayzero.ops.observe import called_from, value_answered

aten = torch.ops.aten
# What a region is. The inside of a `layer` is a graph of its own; functions are never opened.
RegionKind = Literal["module", "layer", "attention", "experts", "convolution", "state_space_scan", "linear_attention"]
# Where a tensor comes from, as steps from the arguments: ("i", 0) an item, ("k", name) a key, ("a", name) an attribute.
Path = tuple[tuple[str, Any], ...]
# What the cache calls, or what builds masks: the engine's business.
BOOKKEEPING = (cache_utils.__file__, masking_utils.__file__)
MAX_DEPTH = 7  # of objects inside arguments: a cache, its layers, their tensors


@dataclass(slots=True, eq=False)
class OpCall:
    """One library operator. `hidden`: called by the cache or to build a mask, which is the engine's business."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    hidden: bool


@dataclass(slots=True, eq=False)
class Region:
    """One call of a module or of a function. `externals`: what its arguments held before, by identity (layers and the root)."""

    kind: RegionKind
    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    children: list[OpCall | Region] = field(default_factory=list)
    out: Any = None
    externals: dict[int, tuple[Path, Any]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Recording:
    """One forward of `batch` sequences at `length` (of the formulas' variable)."""

    batch: int
    length: int
    root: Region
    layers: dict[int, list[Region]] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)


class _Active(threading.local):
    recorder: Recorder | None = None


_active = _Active()


class Recorder(TorchDispatchMode):
    """`layers`: the decoder layers; `opened`: those whose inside is recorded. `answer`: to questions for values on meta."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], opened: Sequence[int], answer: bool) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.layer_of = {layer: index for index, layer in reversed(list(enumerate(layers)))}
        self.opened, self.answer = frozenset(opened), answer
        self.stack: list[Region] = []
        self.shut = 0
        self.recording: Recording | None = None
        self.made: dict[int, tuple[Path, Any]] = {}
        self.shapes = MetaResults()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return value_answered(args[0], self.answer)
        out = self.shapes.result(func, args, kwargs)
        if self.stack and not self.shut:
            self.stack[-1].children.append(OpCall(func, args, kwargs, out, called_from(*BOOKKEEPING)))
        return out

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = self.layer_of.get(module)
        region = Region("module" if index is None else "layer", self.names[module], module, args, dict(kwargs))
        if not self.stack:
            self.recording = Recording(0, 0, region)
            held_externals(args, kwargs, region.externals)
            self.made = region.externals
        elif index is not None:
            assert self.recording is not None
            self.recording.calls[index] = self.recording.calls.get(index, 0) + 1
            self._keep_made(args, kwargs)
            if index in self.opened:
                held_externals(args, kwargs, region.externals)
                self.recording.layers.setdefault(index, []).append(region)
        if self.stack and not self.shut:
            self.stack[-1].children.append(region)
        self.stack.append(region)
        self.shut += index is not None and index not in self.opened

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        region = self.stack.pop()
        region.out = out
        index = self.layer_of.get(module)
        self.shut -= index is not None and index not in self.opened

    def _keep_made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Caches that the model itself made are known by their order."""
        for value in (*args, *kwargs.values()):
            if is_held(value) and id(value) not in self.made:
                number = sum(path[0][0] == "made" for path, _ in self.made.values() if path)
                self.made[id(value)] = ((("made", number),), value)

    def forget(self) -> None:
        """After a forward that raised: its modules were never left."""
        self.stack, self.shut, self.recording = [], 0, None

    def copied(self, copy: Callable[..., Tensor], tensor: Tensor, memo: Any) -> Tensor:
        """A cache copied by the model's own code: no operator of the model."""
        self.shut += 1
        try:
            return copy(tensor, memo)
        finally:
            self.shut -= 1

    def function(self, kind: RegionKind, called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `called` as a region."""
        if not self.stack or self.shut or self.stack[-1].kind not in ("module", "layer"):
            return called(*args, **kwargs)
        region = Region(kind, self.stack[-1].name, called, args, dict(kwargs))
        self.stack[-1].children.append(region)
        self.stack.append(region)
        try:
            region.out = called(*args, **kwargs)
        finally:
            self.stack.pop()
        return region.out


def is_held(value: object) -> bool:
    """Whether an argument is an object whose tensors outlive the call, such as a cache."""
    module = type(value).__module__
    return (
        not isinstance(value, (Tensor, nn.Module, PreTrainedConfig, str, type, torch.dtype))
        and hasattr(value, "__dict__")
        and not callable(value)
        and (module.startswith("transformers") or "Cache" in type(value).__name__)
    )


def held_externals(args: tuple[Any, ...], kwargs: dict[str, Any], found: dict[int, tuple[Path, Any]]) -> None:
    """Every tensor and object in the arguments, with the way to it."""
    _walk(args, (("k", "args"),), found, 0)
    _walk(kwargs, (("k", "kwargs"),), found, 0)


def _walk(value: Any, path: Path, found: dict[int, tuple[Path, Any]], depth: int) -> None:
    if depth > MAX_DEPTH or isinstance(value, (str, int, float, bool, type(None), torch.dtype, torch.device)):
        return
    if isinstance(value, Tensor):
        found.setdefault(id(value), (path, value))
    elif isinstance(value, dict):
        for key, item in value.items():
            _walk(item, (*path, ("k", key)), found, depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _walk(item, (*path, ("i", index)), found, depth + 1)
    elif is_held(value):
        if id(value) in found:
            return
        found[id(value)] = (path, value)
        for name, item in vars(value).items():
            _walk(item, (*path, ("a", name)), found, depth + 1)


@contextlib.contextmanager
def recording(model: nn.Module, layers: Sequence[nn.Module], opened: Sequence[int], *, answer: bool) -> Iterator[Recorder]:
    """While active, each forward of `model` in this thread leaves its tree in `recorder.recording`."""
    recorder = Recorder(model, layers, opened, answer)
    shut = [f"{recorder.names[layer]}." for index, layer in enumerate(layers) if index not in recorder.opened]
    handles: list[Any] = []
    before = _active.recorder
    try:
        for module, name in recorder.names.items():
            # Inside of layers that are not opened nothing is watched.
            if not name.startswith(tuple(shut)):
                handles.append(module.register_forward_pre_hook(recorder.enter, with_kwargs=True))
                handles.append(module.register_forward_hook(recorder.leave, with_kwargs=True))
        with _functions(model), _experts_skipped(model):
            _active.recorder = recorder
            yield recorder
    finally:
        _active.recorder = before
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _functions(model: nn.Module) -> Iterator[None]:
    """Puts ourselves between a model and the functions with a meaning of their own; other threads see no difference."""
    files = {type(module).__module__ for module in model.modules()}
    swapped: list[tuple[Any, str, Any]] = []
    interfaces: list[Any] = []
    try:
        met: tuple[tuple[Any, RegionKind], ...] = ((ALL_ATTENTION_FUNCTIONS, "attention"), (ALL_EXPERTS_FUNCTIONS, "experts"))
        for interface, kind in met:
            if "get_interface" not in vars(interface):
                interface.get_interface = functools.partial(_looked_up, kind, interface.get_interface)
                interfaces.append(interface)
        for file in files:
            for name, value in list(vars(sys.modules[file]).items()):
                kernel = hub_kernel(value)
                if kernel:
                    swapped.append((sys.modules[file], name, value))
                    setattr(sys.modules[file], name, _recorded(kernel_kind(kernel), value))
        swapped.append((Tensor, "__deepcopy__", Tensor.__deepcopy__))
        setattr(Tensor, "__deepcopy__", _recorded_copy(Tensor.__deepcopy__))  # noqa: B010 - a method of a built-in class
        yield
    finally:
        for holder, name, value in reversed(swapped):
            setattr(holder, name, value)
        for interface in interfaces:
            del interface.get_interface


@contextlib.contextmanager
def _experts_skipped(model: nn.Module) -> Iterator[None]:
    """On meta a module that holds stacked matrices and is told which to use returns its shape at once: it would loop over
    all of them, each with all tokens, because no value says which are used."""
    skipped: list[nn.Module] = []

    def shape_alone(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return torch.empty_like(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))

    def wrap(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            recorder = _active.recorder
            if recorder and len(tensors) > 1 and any(not value.is_floating_point() for value in tensors[1:]):
                return recorder.function("experts", shape_alone, (module, *args), kwargs)
            return original(*args, **kwargs)

        return forward

    try:
        for module in model.modules():
            if any(one.dim() == 3 and one.is_meta for one in module.parameters(recurse=False)):
                module.forward = wrap(module, module.forward)
                skipped.append(module)
        yield
    finally:
        for module in skipped:
            module.__dict__.pop("forward", None)


def _looked_up(kind: RegionKind, look_up: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    return _recorded(kind, look_up(*args, **kwargs))


def _recorded(kind: RegionKind, called: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = _active.recorder
        return called(*args, **kwargs) if recorder is None else recorder.function(kind, called, args, kwargs)

    return call


def _recorded_copy(copy: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(copy)
    def call(tensor: Tensor, memo: Any) -> Tensor:
        recorder = _active.recorder
        return copy(tensor, memo) if recorder is None else recorder.copied(copy, tensor, memo)

    return call


def hub_kernel(value: object) -> str | None:
    """The kernel hub's name of a function that transformers decorates, else None."""
    code = getattr(value, "__code__", None)
    if code is None or code.co_filename != hub_kernels.__file__ or not hasattr(value, "__wrapped__"):
        return None
    cells = dict(zip(code.co_freevars, value.__closure__ or (), strict=True))  # type: ignore[attr-defined]
    name = cells["func_name"].cell_contents if "func_name" in cells else None
    return name if isinstance(name, str) else None


def kernel_kind(name: str) -> RegionKind:
    """What a kernel of the hub is for, by the words in its name."""
    if name.startswith("causal_conv"):
        return "convolution"
    return "state_space_scan" if "scan" in name or "state" in name or "inner" in name else "linear_attention"


def kernel_limits(model: nn.Module) -> set[int]:
    """Whole numbers among the defaults of the hub functions that a model's files name: chunk sizes."""
    found: set[int] = set()
    for file in {type(module).__module__ for module in model.modules()}:
        for value in vars(sys.modules[file]).values():
            if hub_kernel(value):
                defaults = (item.default for item in inspect.signature(value).parameters.values())
                found |= {item for item in defaults if isinstance(item, int) and not isinstance(item, bool) and item > 1}
    return found
