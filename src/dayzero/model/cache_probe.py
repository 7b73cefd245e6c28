"""A model on the meta device in, what each decoder layer keeps between steps out, read off the cache object it fills.

The model is run at three lengths; the tensors found in the cache's layers, and how their sizes move with the length, give
the `CacheSpec`s. Layers that are alike (same signature) are run once and their output is reused, so a run costs as many
layers as there are kinds. Modules inside a layer that are handed the cache are its mixers. Everything here is
observation: no key of the config is read. What cannot be run is an error with its reason for the caller to report.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache

from dayzero.core.errors import one_line
from dayzero.core.model import CacheKind, CacheSpec
from dayzero.ops.observe import meta_nonzero, value_answered

# Multiples of every known compression ratio (up to 128), and one less than the longest: buffers of incomplete entries are
# then at their fullest. Small, because recurrent layers walk over tokens in Python.
LENGTHS = (256, 512, 511)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    """What one layer keeps, and the qualified names (inside the layer) of the modules that were given the cache."""

    specs: tuple[CacheSpec, ...]
    mixers: tuple[str, ...]
    sliding: bool = False


@dataclass(frozen=True, slots=True)
class _Seen:
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class _Run:
    """One forward: tensors by cache layer and name, windows and sliding flags by cache layer, mixers by decoder layer.

    `written`: the cache layers that a decoder layer changed; several where it runs more than once, or holds several mixers.
    """

    tensors: dict[int, dict[str, _Seen]] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)
    mixers: dict[int, list[str]] = field(default_factory=dict)
    written: dict[int, list[int]] = field(default_factory=dict)


def probe_caches(
    model: nn.Module, layers: Sequence[nn.Module], signatures: Sequence[Hashable], *, max_tokens: int | None = None
) -> list[LayerCache]:
    """One `LayerCache` per decoder layer. Raises RuntimeError with the reason when the model cannot be run on meta."""
    first_of = {signature: index for index, signature in reversed(list(enumerate(signatures)))}
    lengths = LENGTHS
    if max_tokens is not None and max_tokens < max(LENGTHS):
        lengths = (max_tokens // 2, max_tokens, max_tokens - 1)
    reasons: list[str] = []
    for extra in ({}, {"attention_mask": True}):
        try:
            runs, reuse = _runs(model, layers, signatures, first_of, lengths, extra, None)
            return [_layer_cache(layers, signatures, first_of, runs, lengths, index, reuse) for index in range(len(layers))]
        except Exception as error:
            reasons.append(one_line(error, 200))
            if asks_for_values(error):
                break
    # The forward asks for values, which tensors on meta do not have. Every question gets the same answer; where the other
    # answer leads to a cache too, it must be the same one.
    for answer in (True, False):
        try:
            runs, reuse = _runs(model, layers, signatures, first_of, lengths, {}, answer)
        except Exception as error:
            reasons.append(one_line(error, 200))
            continue
        try:
            others, _ = _runs(model, layers, signatures, first_of, lengths[:1], {}, not answer)
        except Exception as error:
            reasons.append(one_line(error, 200))
            others = runs[:1]
        if others[0].tensors == runs[0].tensors:
            return [_layer_cache(layers, signatures, first_of, runs, lengths, index, reuse) for index in range(len(layers))]
        reasons.append("the cache depends on values")
        break
    raise RuntimeError("; ".join(dict.fromkeys(reasons)))


def _runs(
    model: nn.Module,
    layers: Sequence[nn.Module],
    signatures: Sequence[Hashable],
    first_of: dict[Hashable, int],
    lengths: tuple[int, ...],
    extra: dict[str, bool],
    answer: bool | None,
) -> tuple[list[_Run], bool]:
    """A run at each length, each kind of layer once; where layers need each other's results (False), each layer."""
    for reuse in (True, False):
        try:
            return [
                _run(model, layers, signatures, first_of, length, reuse=reuse, extra=extra, answer=answer) for length in lengths
            ], reuse
        except Exception as error:
            if not reuse or len(first_of) == len(layers) or asks_for_values(error):
                raise
    raise AssertionError("unreachable")


def asks_for_values(error: Exception) -> bool:
    """Whether a forward failed because it branches on a tensor's value, which no change of arguments helps."""
    return "meta tensor" in str(error)


class _Answer(TorchDispatchMode):
    """Gives every question for a tensor's value the same answer."""

    def __init__(self, answer: bool) -> None:
        super().__init__()
        self.answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return value_answered(args[0], self.answer)
        return func(*args, **(kwargs or {}))


def _run(
    model: nn.Module,
    layers: Sequence[nn.Module],
    signatures: Sequence[Hashable],
    first_of: dict[Hashable, int],
    length: int,
    *,
    reuse: bool,
    extra: dict[str, bool],
    answer: bool | None,
) -> _Run:
    run = _Run()
    answering = nullcontext() if answer is None else _Answer(answer)
    with (
        _reused_layers(layers, signatures, first_of, reuse, run),
        _watched(layers, run),
        meta_nonzero(),
        answering,
        torch.no_grad(),
    ):
        tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
        arguments = {name: torch.ones(1, length, dtype=torch.long, device="meta") for name in extra}
        output = model(input_ids=tokens, use_cache=True, **arguments)
    values = output.values() if hasattr(output, "values") else output
    cache = next((value for value in values if is_cache(value)), None)
    if cache is None:
        raise RuntimeError("the forward returned no cache")
    _read_cache(cache, len(layers), run)
    return run


def is_cache(value: object) -> bool:
    """Whether `value` is a cache object of transformers or of a model's own making."""
    return isinstance(value, Cache) or (not isinstance(value, (torch.Tensor, str, type)) and "Cache" in type(value).__name__)


@contextmanager
def _reused_layers(
    layers: Sequence[nn.Module],
    signatures: Sequence[Hashable],
    first_of: dict[Hashable, int],
    reuse: bool,
    run: _Run | None = None,
) -> Iterator[None]:
    """While active, a layer whose like was already run returns the same (meta) output instead of running.

    run: gets the cache layers that each layer wrote.
    """
    outputs: dict[Hashable, Any] = {}
    called: set[int] = set()

    def wrap(index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if reuse and index in called:
                raise RuntimeError("layers run more than once")  # each time on a cache of its own: all must be seen
            called.add(index)
            if reuse and first_of[signatures[index]] != index and signatures[index] in outputs:
                return outputs[signatures[index]]
            cache = next((value for value in (*args, *kwargs.values()) if is_cache(value)), None)
            before = _fingerprints(cache)
            outputs[signatures[index]] = original(*args, **kwargs)
            if run is not None:
                changed = [number for number, print_ in _fingerprints(cache).items() if before.get(number) != print_]
                known = run.written.setdefault(index, [])
                known += [number for number in changed if number not in known]
            return outputs[signatures[index]]

        return forward

    wrapped = list(dict.fromkeys(layers))
    for index, layer in enumerate(layers):
        if layers.index(layer) == index:  # some models list one module several times
            layer.forward = wrap(index, layer.forward)
    try:
        yield
    finally:
        for layer in wrapped:
            layer.__dict__.pop("forward", None)


def _fingerprints(cache: Any) -> dict[int, tuple[Any, ...]]:
    """Per cache layer, what changes when something is written into it: which tensors it holds, and their versions."""
    return {
        number: tuple((name, id(value), value._version, tuple(value.shape)) for name, value in _tensors(vars(layer)))
        for number, layer in enumerate(getattr(cache, "layers", None) or ())
    }


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _tensors(item, f"{name}.{place}")


@contextmanager
def _watched(layers: Sequence[nn.Module], run: _Run) -> Iterator[None]:
    """While active, modules inside a layer that are handed a cache are noted."""
    handles = []

    def watch(index: int, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if any(is_cache(value) for value in (*args, *kwargs.values())) and name not in run.mixers.setdefault(index, []):
                run.mixers[index].append(name)

        return hook

    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if name:
                handles.append(module.register_forward_pre_hook(watch(index, name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _read_cache(cache: Any, num_layers: int, run: _Run) -> None:
    for index, layer in enumerate(getattr(cache, "layers", None) or ()):
        held: set[int] = set()  # keys that are the values too are one tensor
        for name, value in vars(layer).items():
            if id(value) not in held:
                _walk(name, value, run.tensors.setdefault(index, {}))
            held.add(id(value))
        window = getattr(layer, "sliding_window", None)
        if isinstance(window, int) and not isinstance(window, bool) and window > 0:
            run.windows[index] = window
    # Caches of a model's own making may keep lists beside (or instead of) `layers`, one entry per layer.
    for name, value in vars(cache).items():
        if name == "layers":
            continue
        entries = (
            value if isinstance(value, (list, tuple)) else [value.get(i) for i in range(num_layers)] if _by_layer(value) else []
        )
        if len(entries) == num_layers or (entries and len(entries) <= num_layers):
            for index, entry in enumerate(entries):
                _walk(name, entry, run.tensors.setdefault(index, {}))
        elif isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[0] == num_layers:
            for index in range(num_layers):
                _walk(name, value[index], run.tensors.setdefault(index, {}))


def _by_layer(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(key, int) for key in value)


def _walk(name: str, value: object, found: dict[str, _Seen]) -> None:
    if isinstance(value, torch.Tensor):
        # Scalars and integer tensors are bookkeeping (window sizes, positions), not state an engine allocates.
        if value.dim() > 1 and value.is_floating_point():
            found[name] = _Seen(tuple(value.shape), str(value.dtype).removeprefix("torch."))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _walk(f"{name}.{index}", item, found)
    elif isinstance(value, dict):
        for key, item in value.items():
            _walk(f"{name}.{key}", item, found)


def _layer_cache(
    layers: Sequence[nn.Module],
    signatures: Sequence[Hashable],
    first_of: dict[Hashable, int],
    runs: list[_Run],
    lengths: tuple[int, ...],
    index: int,
    reuse: bool,
) -> LayerCache:
    source = first_of[signatures[index]] if reuse else index
    mixers = _outermost(runs[0].mixers.get(source, []))
    numbers = runs[0].written.get(source) or _cache_indices(layers[source], mixers, source)
    if index == len(layers) - 1:
        # Other stacks beside the layers keep caches too: they are counted here, so that the whole is right.
        accounted = {number for written in runs[0].written.values() for number in written}
        numbers = [*numbers, *(number for number in runs[0].tensors if number >= len(layers) and number not in accounted)]
    specs: list[CacheSpec] = []
    for number in numbers:
        names = dict.fromkeys(name for run in runs for name in run.tensors.get(number, {}))
        window = runs[-1].windows.get(number)
        for name in names:
            seen = [run.tensors.get(number, {}).get(name) for run in runs]
            label = name if len(numbers) == 1 else f"{numbers.index(number)}.{name}"
            if spec := _spec(label, name, seen, lengths, window):
                specs.append(spec)
    return LayerCache(specs=tuple(specs), mixers=mixers, sliding=any(number in runs[-1].windows for number in numbers))


def _outermost(names: list[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not any(name.startswith(other + ".") for other in names if other != name))


def _cache_indices(layer: nn.Module, mixers: tuple[str, ...], index: int) -> list[int]:
    """Which entries of the cache a layer writes: the `layer_idx` of its mixers (one layer may hold several), else its own."""
    found = []
    for name in mixers:
        for module in layer.get_submodule(name).modules():
            number = getattr(module, "layer_idx", None)
            if isinstance(number, int) and number not in found:
                found.append(number)
    return found or [index]


def _spec(label: str, name: str, seen: list[_Seen | None], lengths: tuple[int, ...], window: int | None) -> CacheSpec | None:
    """One tensor's law: growing per token, kept to a window, growing per several tokens, or constant."""
    short, long = seen[0], seen[1]
    if short is None or long is None:
        return None
    elements = [prod(item.shape) if item else 0 for item in seen]
    if not any(elements):
        return None
    heads = long.shape[1] if len(long.shape) == 4 else 0
    keyed = name.rpartition(".")[2] in ("keys", "values") or name in ("keys", "values")
    if keyed and window is not None:
        tokens = long.shape[-2]
        assert elements[1] % tokens == 0 and tokens <= window, (name, long.shape, window)
        return CacheSpec(
            kind="sliding",
            name=label,
            dtype=long.dtype,
            elements_per_token=elements[1] // tokens,
            window_tokens=window,
            heads=heads,
        )
    grown, tokens = elements[1] - elements[0], lengths[1] - lengths[0]
    if grown > 0:
        # The dimension that grows counts entries; several tokens may share one.
        dim = next(dim for dim, (a, b) in enumerate(zip(short.shape, long.shape, strict=True)) if a != b)
        entries = long.shape[dim] - short.shape[dim]
        assert tokens % entries == 0 and elements[1] % long.shape[dim] == 0, (name, short.shape, long.shape)
        kind: CacheKind = "full" if keyed else _named_kind(name, "full" if tokens == entries else "compressed")
        return CacheSpec(
            kind=kind,
            name=label,
            dtype=long.dtype,
            elements_per_token=elements[1] // long.shape[dim],
            # A prefix that every sequence has, whatever its length.
            elements_per_sequence=max(0, elements[1] - grown * lengths[1] // tokens) if tokens == entries else 0,
            tokens_per_entry=tokens // entries,
            heads=heads,
        )
    constant = next(item for item in seen if item and prod(item.shape) == max(elements))
    heads = constant.shape[1] if len(constant.shape) == 4 else 0
    return CacheSpec(
        kind=_named_kind(name, "state"), name=label, dtype=long.dtype, elements_per_sequence=max(elements), heads=heads
    )


def _named_kind(name: str, otherwise: CacheKind) -> CacheKind:
    """Words that transformers' cache layers use for their tensors; anything else is named by how it grows."""
    if "indexer" in name or "idx" in name.split("_") or "index" in name.split("_"):
        return "indexer"
    if "conv" in name:
        return "convolution"
    if any(word in name for word in ("compress", "overlap", "buffer")):
        return "compressed"
    return otherwise
