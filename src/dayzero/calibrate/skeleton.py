"""A config in, the class's instance out: buffers as the class computes them, parameters on the meta device until wanted.

Parameters are put in place by name from a provider and taken out again; which module uses which parameter (shared and tied
ones too) is found by identity. Nothing is initialised at random, nothing is read from a disk here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.initialization import no_init_weights

from dayzero.core.errors import DayZeroError
from dayzero.model.classes import SIDE_STACKS, build_model, find_layers

# The values of a parameter by its qualified name, in any floating dtype. Called when a layer's turn comes, and again when it
# is visited again: what it gives is used once and let go.
Provider = Callable[[str], torch.Tensor]


def build_skeleton(config: PreTrainedConfig, *, attention: str = "eager") -> nn.Module:
    """An instance in evaluation mode that computes in float32 with eager attention and eager experts: their definitions."""
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    with no_init_weights(), _parameters_on_meta():
        module = build_model(config, torch.float32)
    module.tie_weights()
    if module._can_set_experts_implementation():
        module.set_experts_implementation("eager")
    return module.requires_grad_(False)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter that a module registers goes to the meta device at once; buffers stay where they are made."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.detach().to("meta", torch.float32), requires_grad=False)
        original(module, name, parameter)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = original


class Skeleton:
    """A module whose parameters come and go. `stations`: the modules that are filled one at a time, by qualified name: layers
    and the head. `embedding` is filled until the first of them is through."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._meta: dict[int, nn.Parameter] = {}
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        self.name_of: dict[int, str] = {}
        for path, part in module.named_modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    self._meta[id(parameter)] = parameter
                    self._places.setdefault(id(parameter), []).append((part, name))
                    self.name_of.setdefault(id(parameter), f"{path}.{name}" if path else name)
        self._filled: dict[int, int] = {}  # how many of those that want it filled
        self.layers = _layers(module)
        self.stations = dict(self.layers)
        self.embedding, self.head = (self._end(end) for end in (module.get_input_embeddings(), module.get_output_embeddings()))
        if self.head is not None:
            self.stations[self.head] = module.get_submodule(self.head)
        ends = {self.embedding: module.get_submodule(self.embedding)} if self.embedding is not None else {}
        self._keys = {path: self._parameters_of(part) for path, part in (self.stations | ends).items()}
        in_stations = {key for keys in self._keys.values() for key in keys}
        self._resident = [key for key, name in self.name_of.items() if key not in in_stations and not _aside(name, self.layers)]

    def _end(self, end: nn.Module | None) -> str | None:
        """The path of an embedding or head that no layer holds."""
        path = next((path for path, part in self.module.named_modules() if part is end), None)
        return None if path is None or any(path.startswith(f"{one}.") for one in self.layers) else path

    def parameters_of(self, station: str) -> dict[str, nn.Parameter]:
        """Name -> parameter as it now is."""
        return {self.name_of[key]: self._now(key) for key in self._keys[station]}

    def fill_resident(self, provider: Provider) -> None:
        """Everything outside the stations, for as long as the skeleton lives."""
        self._fill(self._resident, provider)
        stored = {name for name, _ in self.module.named_buffers()} & set(self.module.state_dict())
        for name in stored:
            path, _, leaf = name.rpartition(".")
            if not _aside(name, self.layers) and (value := _optional(provider, name)) is not None:
                buffer = self.module.get_submodule(path)._buffers[leaf]
                assert buffer is not None
                buffer.copy_(value.to(buffer.dtype))

    def fill(self, station: str, provider: Provider) -> None:
        """All of it or, where the provider fails, nothing."""
        done: list[int] = []
        try:
            for key in self._keys[station]:
                self._fill([key], provider)
                done.append(key)
        except BaseException:
            self._empty(done)
            raise

    def empty(self, station: str) -> None:
        self._empty(self._keys[station])

    def _empty(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._filled[key] -= 1
            if not self._filled[key]:
                self._place(key, self._meta[key])

    def is_shared(self, name: str) -> bool:
        """Whether more than one station uses a parameter."""
        return sum(any(self.name_of[key] == name for key in keys) for keys in self._keys.values()) > 1

    def put(self, name: str, values: torch.Tensor) -> None:
        """Other values for a parameter that is filled. What the provider gave is its own and stays as it is."""
        key = next(key for key, one in self.name_of.items() if one == name)
        assert self._filled.get(key), name
        self._place(key, nn.Parameter(values, requires_grad=False))

    def _fill(self, keys: Iterable[int], provider: Provider) -> None:
        for key in keys:
            if self._filled.get(key):
                self._filled[key] += 1
                continue
            meta, name = self._meta[key], self.name_of[key]
            value = provider(name)
            if tuple(value.shape) != tuple(meta.shape):
                raise DayZeroError(f"{name} has another shape", got=tuple(value.shape), want=tuple(meta.shape),
                                   fix="give the weights of this model")  # fmt: skip
            self._place(key, nn.Parameter(value.detach().to(torch.float32), requires_grad=False))
            self._filled[key] = 1

    def _place(self, key: int, parameter: nn.Parameter) -> None:
        for module, name in self._places[key]:
            module._parameters[name] = parameter

    def _now(self, key: int) -> nn.Parameter:
        module, name = self._places[key][0]
        parameter = module._parameters[name]
        assert parameter is not None, name
        return parameter

    def _parameters_of(self, part: nn.Module) -> list[int]:
        return list({id(one): None for one in part.parameters()})


def _layers(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that take turns: every layer of every stack that is not another medium's; the base model as a whole where
    there is no stack."""
    try:
        main, _ = find_layers(module)
    except DayZeroError:
        base = str(module.base_model_prefix)
        return {base: module.get_submodule(base)}
    lists = [name for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part)]
    outermost = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    stacks = [main] + [name for name in outermost if name != main and not SIDE_STACKS.search(name)]
    return {
        f"{stack}.{index}": layer
        for stack in stacks
        for index, layer in enumerate(module.get_submodule(stack))
        if stack == main or (stack.rpartition(".")[2] == main.rpartition(".")[2] and any(True for _ in layer.parameters()))
    }


def _aside(name: str, layers: Mapping[str, nn.Module]) -> bool:
    """Whether a parameter is of a stack beside the text decoder, which text does not reach."""
    ours = {part for path in layers for part in path.split(".")}
    return any(SIDE_STACKS.search(part) for part in name.split(".")[:-1] if part not in ours)


def _optional(provider: Provider, name: str) -> torch.Tensor | None:
    """A stored buffer: a checkpoint without it leaves the class's own."""
    try:
        return provider(name)
    except KeyError:
        return None
