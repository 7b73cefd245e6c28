"""T1: any architecture, many sequences, one trunk. All scheduled tokens of all sequences are laid end to end, [1, T].

    prologue  per sequence, with its own native cache: the model's own forward with its decoder layers stubbed, which
              records what each layer would be given (masks, rotary tables, relative distances)
    trunk     once for all tokens: everything that is token-wise (norms, projections, MLPs, experts, head)
    mixers    the outermost modules inside a layer that take the cache: per sequence, with its cache and its recorded
              arguments; side outputs (shared indices, shared keys) are carried per sequence

Which modules are mixers, which dimension of an argument is the token dimension and what a layer returns is learned at
load from two forwards of different length. No architecture is named. Instance `forward`s are wrapped (this tier only).
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from dayzero.core.step import StepBatch
from dayzero.runtime.native import attention_implementation, find_cache, is_cache, names_argument, position_arguments
from dayzero.runtime.runner import Launched, LoadedModel

_PROBE_LENGTHS = (5, 7)


class NotFlattenable(Exception):
    """The model does not have the shape this tier needs; the reason is the message. Caught by the proof."""


class _Stop(Exception):
    """Leaves a forward early once it has shown what was wanted."""


class _PerSequence(list[Any]):
    """A side output of a mixer: one value per sequence of the step."""


@dataclass(slots=True)
class _Segment:
    """One sequence's share of the flat token axis."""

    cache: Any
    first: int
    last: int
    recorded: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


Path = tuple[Any, ...]


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Tensors inside nested tuples, lists and dicts, with their paths."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)) and not isinstance(value, _PerSequence):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, (*path, name))


def _arguments(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names that the forward gives them, whether they came by position or by keyword."""
    parameters = inspect.signature(forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return dict(zip(names, args, strict=False)) | kwargs


def _rebuild(template: Any, items: list[Any]) -> Any:
    return type(template)(*items) if hasattr(template, "_fields") else type(template)(items)


class FlatRunner:
    """Caches are the model's own, one per slot. `launch` is the only entry."""

    tier: Literal["T0", "T1", "T2"] = "T1"
    prefix_reuse = False

    def __init__(self, model: LoadedModel, *, whole_prompts: bool) -> None:
        self.model, self.whole_prompts = model, whole_prompts
        self._caches: dict[int, Any] = {}
        self._mode = "off"
        self._segments: list[_Segment] = []
        self._recording: _Segment | None = None
        self._turns: dict[str, int] = {}
        self._token_dims: dict[tuple[str, Path], tuple[int, ...]] = {}
        self._originals: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._keeps_rows = names_argument(model.module, "logits_to_keep")
        self._learn()

    @property
    def in_prologue(self) -> bool:
        """Whether layers are being stubbed right now: what they return then is not the model's."""
        return self._mode == "prologue"

    def launch(self, batch: StepBatch) -> Launched:
        for slot in batch.released_slots:
            self._caches.pop(slot, None)
        module, device = self.model.module, self.model.device
        tokens = torch.tensor([batch.tokens], device=device)
        positions = torch.tensor(batch.positions, device=device)
        self._segments = []
        for index, slot in enumerate(batch.slots):
            first, last = batch.query_offsets[index], batch.query_offsets[index + 1]
            if batch.context_lens[index] == last - first:
                self._caches[slot] = copy.deepcopy(self._empty)
            self._segments.append(_Segment(self._caches[slot], first, last))
            self._prologue(self._segments[-1], tokens[:, first:last], positions[first:last])
        rows = torch.tensor(batch.logit_rows, dtype=torch.long, device=device)
        keep = {"logits_to_keep": rows} if self._keeps_rows else {}
        self._turns = {}
        with self._as("trunk"):  # the model-level code may write into the cache it is given: it gets a scratch one
            arguments = position_arguments(module, positions) | keep | {self._key: copy.deepcopy(self._empty)}
            logits = module(input_ids=tokens, use_cache=True, **arguments).logits[0]
        return Launched(logits if self._keeps_rows else logits[rows])

    def close(self) -> None:
        """Give the module back as it was."""
        for module, forward in self._originals:
            module.forward = forward
            vars(module).pop("forward")
        self._originals.clear()
        self._caches.clear()

    @contextmanager
    def _as(self, mode: str) -> Iterator[None]:
        self._mode = mode
        try:
            yield
        finally:
            self._mode = "off"

    # Learning, at load.

    def _learn(self) -> None:
        module = self.model.module
        names = [f"{self.model.layers_name}.{index}" for index in range(len(self.model.layers))]
        seen = [self._watch(names, length) for length in _PROBE_LENGTHS]
        takers = seen[0].cache_takers
        mixers = [name for name in takers if not any(name.startswith(f"{outer}.") for outer in takers)]
        if not mixers:
            raise NotFlattenable("no module inside a decoder layer takes the cache")
        self._bindings = seen[0].bindings
        self._key, self._layer_calls, self._layer_outputs = seen[0].cache_key, seen[0].layer_calls, seen[0].layer_outputs
        for name in mixers:
            self._learn_token_dims(name, seen[0].shapes[name], seen[1].shapes[name])
        self._empty = self._empty_cache(mixers)
        self._layer_of = {name: next(layer for layer in names if name.startswith(f"{layer}.")) for name in mixers}
        for name in names:
            self._wrap(module.get_submodule(name), self._layer_forward, name)
        for name in mixers:
            self._wrap(module.get_submodule(name), self._mixer_forward, name)

    def _watch(self, names: list[str], length: int) -> "_Watched":
        """One uncontrolled forward, noting who takes the cache, whose arguments are the layer's, what layers return and
        the shapes at each module. Eager attention, so that every mask is there to be seen."""
        module, watched, handles = self.model.module, _Watched(), []

        def before_layer(name: str) -> Callable[..., None]:
            def hook(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                watched.layer_arguments[name] = _arguments(called.forward, args, kwargs)

            return hook

        def before(name: str, layer: str) -> Callable[..., None]:
            def hook(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if any(is_cache(value) for value in (*args, *kwargs.values())):
                    watched.note_mixer(name, _arguments(called.forward, args, kwargs), watched.layer_arguments[layer])

            return hook

        def after(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                if name in watched.shapes:
                    watched.shapes[name].update({("out", *path): tuple(leaf.shape) for path, leaf in _leaves(output)})
                if name in names:
                    watched.layer_calls += 1
                    watched.layer_outputs[name] = output if isinstance(output, torch.Tensor) else tuple(output)

            return hook

        for name in names:
            handles.append(module.get_submodule(name).register_forward_pre_hook(before_layer(name), with_kwargs=True))
            for inner, submodule in module.get_submodule(name).named_modules(prefix=name):
                if inner != name:
                    handles.append(submodule.register_forward_pre_hook(before(inner, name), with_kwargs=True))
                handles.append(submodule.register_forward_hook(after(inner)))
        ids = torch.arange(length, device=self.model.device)[None] % (self.model.vocab_size - 3) + 3
        try:
            with attention_implementation(module, "eager"):
                output = module(input_ids=ids, use_cache=True)
        finally:
            for handle in handles:
                handle.remove()
        cache = find_cache(output)
        if cache is None or not is_cache(cache[1]):
            raise NotFlattenable("the model returns no cache of the standard kind")
        watched.cache_key = cache[0]
        return watched

    def _learn_token_dims(self, name: str, short: dict[Path, tuple[int, ...]], long: dict[Path, tuple[int, ...]]) -> None:
        for path, shape in short.items():
            other = long.get(path, shape)
            dims = [dim for dim, (a, b) in enumerate(zip(shape, other, strict=False)) if (a, b) == _PROBE_LENGTHS]
            self._token_dims[name, path] = tuple(dims)

    def _empty_cache(self, mixers: list[str]) -> Any:
        """The model makes its own empty cache: its forward is left at the first mixer, before anything is written."""
        found: list[Any] = []

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(next(value for value in (*args, *kwargs.values()) if is_cache(value)))
            raise _Stop

        module = self.model.module
        handles = [module.get_submodule(name).register_forward_pre_hook(stop, with_kwargs=True) for name in mixers]
        try:
            module(input_ids=torch.tensor([[3]], device=self.model.device), use_cache=True)
        except _Stop:
            return found[0]
        finally:
            for handle in handles:
                handle.remove()
        raise NotFlattenable("no mixer was reached")

    def _wrap(self, module: nn.Module, method: Callable[..., Any], name: str) -> None:
        original = module.forward
        self._originals.append((module, original))

        def forward(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self._mode == "off" else method(name, original, args, kwargs)

        module.forward = forward

    # One step.

    def _prologue(self, segment: _Segment, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        self._recording, self._calls_left = segment, self._layer_calls
        with self._as("prologue"), suppress(_Stop):  # it stops at the last layer: what follows is the trunk's
            arguments = position_arguments(self.model.module, positions) | {self._key: segment.cache}
            self.model.module(input_ids=tokens, use_cache=True, **arguments)
        self._recording = None

    def _layer_forward(self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._mode == "trunk":
            self._turns[name] = self._turns.get(name, -1) + 1
            return original(*args, **kwargs)
        assert self._recording is not None
        self._recording.recorded.setdefault(name, []).append(_arguments(original, args, kwargs))
        self._calls_left -= 1
        if self._calls_left == 0:
            raise _Stop
        hidden = args[0] if args else kwargs["hidden_states"]
        sample = self._layer_outputs[name]
        return hidden if isinstance(sample, torch.Tensor) else (hidden, *(None for _ in sample[1:]))

    def _mixer_forward(self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._mode != "trunk":
            return original(*args, **kwargs)
        outputs = []
        for index, segment in enumerate(self._segments):
            fill = _Fill(self, name, index, segment)
            positional = [fill(value, (key,)) for key, value in zip(_arguments(original, args, {}), args, strict=True)]
            outputs.append(original(*positional, **{key: fill(value, (key,)) for key, value in kwargs.items()}))
        return self._join(name, outputs, ("out",))

    def _join(self, name: str, outputs: list[Any], path: Path) -> Any:
        """Put the sequences' outputs end to end. Only a mixer's main output is token-wise; the rest stays apart."""
        first = outputs[0]
        if isinstance(first, torch.Tensor):
            dims = self._token_dims.get((name, path), ())
            if len(dims) != 1:
                raise NotFlattenable(f"{name}: the output {tuple(first.shape)} has {len(dims)} token dimensions")
            return torch.cat(outputs, dims[0])
        if isinstance(first, (tuple, list)):
            joined = [self._join(name, [output[0] for output in outputs], (*path, 0))]
            for column in list(zip(*outputs, strict=True))[1:]:
                same = all(value is column[0] for value in column)  # None, or a parameter that is passed through
                joined.append(column[0] if same else _PerSequence(column))
            return _rebuild(first, joined)
        return first


@dataclass(slots=True)
class _Watched:
    """What one watched forward showed. `bindings`: (mixer, path of its argument) -> path of the layer's argument that is
    the very same object."""

    cache_takers: list[str] = field(default_factory=list)
    shapes: dict[str, dict[Path, tuple[int, ...]]] = field(default_factory=dict)
    bindings: dict[tuple[str, Path], Path] = field(default_factory=dict)
    layer_arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    layer_outputs: dict[str, Any] = field(default_factory=dict)
    layer_calls: int = 0
    cache_key: str = ""

    def note_mixer(self, name: str, arguments: dict[str, Any], layer_arguments: dict[str, Any]) -> None:
        if name not in self.cache_takers:
            self.cache_takers.append(name)
        shapes = {("in", *path): tuple(leaf.shape) for path, leaf in _leaves(arguments)}
        self.shapes.setdefault(name, {}).update(shapes)
        hidden = "hidden_states" if "hidden_states" in layer_arguments else next(iter(layer_arguments))
        owner = {id(item): path for path, item in _objects(layer_arguments) if path and path[0] != hidden}
        self.bindings.update({(name, path): owner[id(item)] for path, item in _objects(arguments) if id(item) in owner})


def _objects(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything with an identity of its own inside nested arguments: tensors, containers, other objects; no caches."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)) or is_cache(value):
        return
    if path:
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (tuple, list)) else ()
    for key, item in items:
        yield from _objects(item, (*path, key))


class _Fill:
    """Turns an argument of a mixer in the trunk into the one sequence's own: its cache, what its prologue recorded for
    the layer, or its rows of a tensor computed inside the layer."""

    def __init__(self, runner: FlatRunner, mixer: str, index: int, segment: _Segment) -> None:
        layer = runner._layer_of[mixer]
        self._recorded = segment.recorded[layer][runner._turns[layer]]
        self._runner, self._mixer, self._index, self._segment = runner, mixer, index, segment

    def __call__(self, value: Any, path: Path) -> Any:
        if is_cache(value):
            return self._segment.cache
        if isinstance(value, _PerSequence):
            return value[self._index]
        bound = self._runner._bindings.get((self._mixer, path))
        if bound is not None and bound[0] in self._recorded:
            own: Any = self._recorded
            for key in bound:
                own = None if own is None else own[key]
            return own
        if isinstance(value, torch.Tensor):
            for dim in self._runner._token_dims.get((self._mixer, ("in", *path)), ()):
                value = value.narrow(dim, self._segment.first, self._segment.last - self._segment.first)
            return value
        if isinstance(value, (tuple, list)):
            return _rebuild(value, [self(item, (*path, i)) for i, item in enumerate(value)])
        if isinstance(value, dict):
            return {name: self(item, (*path, name)) for name, item in value.items()}
        return value
