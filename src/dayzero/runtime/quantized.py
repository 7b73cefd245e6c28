"""Modules that compute with weights as an artifact stores them: codes, scales and zero points, never a plain copy that stays.

`QuantizedLinear` stands where a linear layer stood, `QuantizedStack` where a class keeps the matrices of many experts as one
parameter. Both look like what they stand for to whoever reads them: a `weight`, or an indexed expert, is made when it is
read. In: a module of the class without values, and what `quantization.json` says. Not here: reading files (`weights_in`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dayzero.core.artifact import ArtifactQuantization, QuantizedParameter
from dayzero.core.errors import DayZeroError
from dayzero.ops.quantized import Form, dequantized, rounded_activations
from dayzero.runtime.host_memory import HugePages, aligned_bytes
from dayzero.weights.algebra import View
from dayzero.weights.quantize.encoding import Quantized
from dayzero.weights.quantize.presets import Preset, preset
from dayzero.weights.symbolic import torch_dtype

IMPLEMENTATION = "dayzero_quantized"
COMPILED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COMPILED_STEP = 32  # groups that the compiled kernels take are multiples of this
NO_ENGINE = (-1, -1)
StepLinear = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]


def form_of(one: Preset) -> Form:
    code = {"pack-quantized": "unsigned8" if one.bits == 8 else "nibble", "int-quantized": "signed8",
            "float-quantized": "fp8", "mxfp4-pack-quantized": "fp4"}[one.form]  # fmt: skip
    activations = "none" if one.activations is None else "int8" if one.number == "int" else "fp8"
    return Form(code=code, block_rows=one.block[0], block_columns=one.block[1], activations=activations)  # type: ignore[arg-type]


class QuantizedWeight(nn.Module):
    """The parts of a weight [..., R, C] as buffers, and products with its matrices. `dtype`: of the numbers it stands for."""

    def _set_parts(self, one: QuantizedParameter, parts: dict[str, Tensor], dtype: torch.dtype, *, compiled: bool) -> None:
        chosen = preset(one.preset)
        self.preset_name, self.form, self.number_dtype = one.preset, form_of(chosen), dtype
        self.transposed, self.matrix_shape = one.transposed, tuple(one.shape)
        # As numbers of the module, so that a compiled layer serves others of the same form alone.
        self.code, self.block_rows, self.block_columns, self.rounding = self.form.numbers
        columns = one.shape[-2] if one.transposed else one.shape[-1]
        self.columns = columns
        self.compiled = compiled and self.form.block_columns % COMPILED_STEP == 0
        self._step_linear: StepLinear | None = None
        self.register_buffer("codes", parts["codes"], persistent=False)
        self.register_buffer("scales", parts["scale"], persistent=False)
        self.register_buffer("zeros", parts.get("zero_point"), persistent=False)
        given = None if one.input_scale is None else torch.tensor([one.input_scale], dtype=torch.float32)
        if chosen.activations == "tensor" and given is None:
            raise DayZeroError(
                f"{one.name} is stored without the scale of its inputs",
                got=one.preset,
                want="input_scale in quantization.json",
                fix="calibrate, or choose a preset without -static",
            )
        self.register_buffer("input_scale", given if chosen.activations == "tensor" else None, persistent=False)
        self.register_buffer("site", torch.tensor(NO_ENGINE), persistent=False)

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    input_scale: Tensor | None
    site: Tensor

    @property
    def num_elements(self) -> int:
        return int(torch.Size(self.matrix_shape).numel())

    @property
    def part_bytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.zeros) if part is not None)

    def attach(self, site: Tensor | None, step_linear: StepLinear | None = None) -> None:
        """Rows belong to an engine's steps from now on; None: to nobody's."""
        self.site = torch.tensor(NO_ENGINE, device=self.site.device) if site is None else site
        self._step_linear = step_linear

    def _parts(self, which: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        if which is None:
            return self.codes, self.scales, self.zeros
        return self.codes[which], self.scales[which], None if self.zeros is None else self.zeros[which]

    def plain(self, which: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers of one matrix, or of all, in the class's layout."""
        parts = self._parts(which)
        dtype = dtype or self.number_dtype
        if self.compiled and parts[0].dim() == 2 and parts[0].device.type == "cpu" and dtype in COMPILED_DTYPES:
            made = torch.ops.dayzero.dequantized(*parts, self.columns, self.code, self.block_rows, self.block_columns, dtype)
        else:
            made = dequantized(*parts, form=self.form, columns=self.columns, dtype=dtype)
        return made.transpose(-1, -2) if self.transposed else made

    def product(self, x: Tensor, bias: Tensor | None, which: int | None = None) -> Tensor:
        """x [..., C] -> [..., R] with one matrix: its parts where there is a kernel for them, else its numbers."""
        if self.compiled and x.device.type == "cpu" and x.dtype in COMPILED_DTYPES:
            parts = self._parts(which)
            settings = (self.code, self.block_rows, self.block_columns, self.rounding)
            return torch.ops.dayzero.quantized_linear_at(x, *parts, bias, self.input_scale, self.site, *settings)
        x = rounded_activations(x, self.form.activations, self.input_scale)
        weight = self.plain(which, x.dtype)
        weight = weight.t() if self.transposed else weight
        return F.linear(x, weight, bias) if self._step_linear is None else self._step_linear(x, weight, bias, self.site)


class QuantizedLinear(QuantizedWeight, nn.Linear):
    """A linear layer. `weight` is made anew whenever it is read."""

    def __init__(
        self, linear: nn.Linear, one: QuantizedParameter, parts: dict[str, Tensor], dtype: torch.dtype, *, compiled: bool
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)
        self._set_parts(one, parts, dtype, compiled=compiled)

    @property
    def weight(self) -> Tensor:
        return self.plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


class QuantizedStack(QuantizedWeight):
    """Matrices of experts, [E, ...]. Indexing gives one expert's; any other use as a tensor makes all of them plain for that
    moment, and `whole_uses` counts how often."""

    def __init__(self, one: QuantizedParameter, parts: dict[str, Tensor], dtype: torch.dtype, *, compiled: bool) -> None:
        super().__init__()
        self._set_parts(one, parts, dtype, compiled=compiled)
        self.whole_uses = 0

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.matrix_shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.number_dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, Tensor) and index.dim() == 0:
            index = int(index)
        if isinstance(index, (int, slice, Tensor, list)):
            return self.plain(index)
        return self.plain(index[0])[index[1:]] if isinstance(index[0], int) else self._whole()[index]

    def _whole(self) -> Tensor:
        self.whole_uses += 1
        return torch.stack([self.plain(index) for index in range(len(self))])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or not hasattr(Tensor, name):
                raise
            return getattr(self._whole(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def whole(leaf: Any) -> Any:
            return leaf._whole() if isinstance(leaf, QuantizedStack) else leaf

        return func(*tree_map(whole, args), **tree_map(whole, kwargs or {}))


def _experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function behind transformers' experts interface: as its grouped product, one expert's matrices at a time."""
    top_k, (num_tokens, width) = top_k_index.size(-1), hidden_states.shape
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    rows = hidden_states[order // top_k]
    first = "gate_up_proj" if module.has_gate else "up_proj"
    counts = torch.bincount(experts, minlength=module.num_experts)[: module.num_experts].tolist()
    done, begin = [], 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        x = _expert_product(module, first, expert, rows[begin : begin + count])
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        done.append(_expert_product(module, "down_proj", expert, x))
        begin += count
    if begin < len(rows):  # what names no expert counts for nothing
        done.append(rows.new_zeros(len(rows) - begin, width))
    out = torch.cat(done) if done else torch.zeros_like(rows)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    out = out * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return out[back].view(num_tokens, top_k, width).sum(dim=1).to(hidden_states.dtype)


def _expert_product(module: Any, name: str, expert: int, x: Tensor) -> Tensor:
    weight, bias = getattr(module, name), getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    if isinstance(weight, QuantizedStack):
        return weight.product(x, bias, expert)
    return F.linear(x, weight[expert].t() if module.is_transposed else weight[expert], bias)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)  # once per process


def place_parts(
    module: nn.Module, quantization: ArtifactQuantization, dtype: torch.dtype, *, compiled: bool
) -> dict[str, Tensor]:
    """Put quantized modules where the artifact has parts; returns stored name -> the buffer to be filled, in huge pages.

    Raises DayZeroError for a parameter that the class does not have, or keeps in another shape.
    """
    stored: list[tuple[QuantizedParameter, Quantized, dict[str, tuple[tuple[int, ...], torch.dtype]]]] = []
    for one in quantization.parameters:
        found = _parameter(module, one.name)
        if found is None or tuple(found.shape) != tuple(one.shape):
            raise DayZeroError(
                "the artifact stores parts of a parameter that the class does not have",
                got=f"{one.name} {list(one.shape)}",
                want="parameters of the class" if found is None else f"shape {list(found.shape)}",
                fix="convert again with this version of dayzero",
            )
        shape = (*one.shape[:-2], one.shape[-1], one.shape[-2]) if one.transposed else one.shape
        weight = Quantized(
            name=one.name, view=View.of(one.name, shape, quantization.dtype), preset=preset(one.preset), sources=()
        )
        parts = {part: (size, torch_dtype(kind)) for part, (size, kind) in weight.stored_parts(packed_zeros=False).items()}
        stored.append((one, weight, parts))
    pages = HugePages(
        sum(aligned_bytes(torch.Size(size).numel() * kind.itemsize) for _, _, parts in stored for size, kind in parts.values())
    )
    targets: dict[str, Tensor] = {}
    for one, weight, parts in stored:
        made = {part: pages.empty(size, kind) for part, (size, kind) in parts.items()}
        targets |= {weight.stored_name(part): tensor for part, tensor in made.items()}
        owner, _, leaf = one.name.rpartition(".")
        parent = module.get_submodule(owner)
        if made["codes"].dtype == torch.float8_e4m3fn:
            made["codes"] = made["codes"].view(torch.uint8)
        if isinstance(parent, nn.Linear) and leaf == "weight" and len(one.shape) == 2:
            above, _, name = owner.rpartition(".")
            setattr(module.get_submodule(above), name, QuantizedLinear(parent, one, made, dtype, compiled=compiled))
            continue
        del parent._parameters[leaf]
        setattr(parent, leaf, QuantizedStack(one, made, dtype, compiled=compiled))
        if hasattr(parent, "is_transposed") and hasattr(parent, "_apply_gate"):
            parent.config._experts_implementation_internal = IMPLEMENTATION
    return targets


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    owner, _, leaf = name.rpartition(".")
    try:
        return module.get_submodule(owner)._parameters.get(leaf)
    except AttributeError:
        return None


def quantized_modules(module: nn.Module) -> Iterator[QuantizedWeight]:
    return (one for one in module.modules() if isinstance(one, QuantizedWeight))


@dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    """What of a model's weights is in memory, in bytes."""

    presets: tuple[str, ...]
    num_quantized: int
    quantized_elements: int
    quantized_bytes: int
    plain_bytes: int
    whole_stacks: int  # stacks that a class's own code uses whole, which is plain for a moment, inputs unrounded

    @property
    def text(self) -> str:
        """In words, for the report."""
        total = self.quantized_bytes + self.plain_bytes
        bits = 8 * self.quantized_bytes / self.quantized_elements
        kinds, whole = ", ".join(self.presets), f"; {self.whole_stacks} stacks of experts are made plain at every use"
        return (
            f"{self.num_quantized} weights stay in {kinds}: {self.quantized_bytes / 1e6:.1f} MB, {bits:.2f} bits a number, of "
            f"{total / 1e6:.1f} MB of weights in memory{whole if self.whole_stacks else ''}"
        )


def resident(module: nn.Module) -> Resident:
    """`presets` is empty for a plain model."""
    held = list(quantized_modules(module))
    plain = {tensor.data_ptr(): tensor.nbytes for tensor in module.parameters()}
    stacks = [one for one in held if isinstance(one, QuantizedStack)]
    return Resident(
        presets=tuple(sorted({one.preset_name for one in held})),
        num_quantized=len(held),
        quantized_elements=sum(one.num_elements for one in held),
        quantized_bytes=sum(one.part_bytes for one in held),
        plain_bytes=sum(plain.values()),
        whole_stacks=sum(one.whole_uses > 0 for one in stacks),
    )
