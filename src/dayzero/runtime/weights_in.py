"""An Artifact's shards into a transformers module. Names match one to one: conversion has done the renaming.

Nothing is initialised at random: a parameter or stored buffer that no shard holds is an error, never a leftover. What an
artifact stores in parts (`quantization.json`) is loaded as parts.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.initialization import no_init_weights

from dayzero.core.artifact import ArtifactLayout, ArtifactQuantization
from dayzero.core.errors import DayZeroError
from dayzero.core.records import read_record
from dayzero.model.classes import build_model, find_layers, text_config
from dayzero.model.resolve import read_config
from dayzero.runtime.host_memory import move_parameters
from dayzero.runtime.quantized import place_parts
from dayzero.runtime.runner import LoadedModel


def open_artifact(folder: Path) -> ArtifactLayout:
    """The layout of a published artifact. Raises DayZeroError where there is none, or where a file has another size."""
    layout = read_record(ArtifactLayout, folder / "layout.json")
    for files in (*layout.files, layout.release_files):
        for file in files:
            path = folder / file.file
            size = path.stat().st_size if path.exists() else None
            if size != file.num_bytes:
                raise DayZeroError(
                    f"{path} is not what the artifact lists",
                    got=f"{size} bytes",
                    want=f"{file.num_bytes} bytes",
                    fix="run `dayzero convert --verify` on the artifact, then convert again",
                )
    return layout


def read_quantization(folder: Path) -> ArtifactQuantization | None:
    """What the artifact stores in fewer bits; None where it stores plain weights alone."""
    path = folder / "quantization.json"
    return read_record(ArtifactQuantization, path) if path.exists() else None


def release_config(folder: Path) -> PreTrainedConfig:
    """The release's configuration, as transformers understands it, from the copy inside the artifact."""
    config = read_config(folder / "release" / "config.json")
    own = (folder / "quantization.json").exists()  # what the release itself was stored in is gone then
    for part in (config, text_config(config)):
        if own and hasattr(part, "quantization_config"):
            del part.quantization_config
        if getattr(part, "quantization_config", None):
            raise DayZeroError(
                "the artifact's plain weights have a config that says they are quantized",
                got=str(part.quantization_config)[:200],
                want="weights in float32, float16 or bfloat16, or parts that quantization.json lists",
                fix="convert again with --quantize, or convert the unquantized release",
            )
    return config


def load_module(folder: Path, *, dtype: torch.dtype, device: torch.device, compiled: bool = False) -> LoadedModel:
    """Build the model on the host, fill it from rank 0's shards and move it to the device. `compiled`: whether quantized
    weights may use the compiled kernels.

    Raises DayZeroError when the artifact is for several ranks, or does not hold every parameter.
    """
    layout = open_artifact(folder)
    if layout.layout.num_devices != 1:
        raise DayZeroError(
            "this engine runs one rank",
            got=f"an artifact for {layout.layout.num_devices} ranks",
            want="an artifact for one",
            fix="convert with --tp 1 --pp 1, or hand the plan to another engine",
        )
    config = release_config(folder)
    with no_init_weights():
        module = build_model(config, dtype)
    quantization = read_quantization(folder)
    parts = place_parts(module, quantization, dtype, compiled=compiled) if quantization is not None else {}
    _keep_wide(module, dtype)
    move_parameters(module)
    _fill(module, folder, [file.file for file in layout.files[0]], parts)
    module.requires_grad_(False)
    module = module.to(device)
    name, _ = find_layers(module)
    return LoadedModel(module, name, text_config(config).vocab_size, device, dtype)


def _keep_wide(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters that the class wants in float32 whatever the dtype (routers, some norms), as `from_pretrained` does."""
    plan = module._get_dtype_plan(dtype)
    for name, parameter in module.named_parameters():
        wide = next((wide for part, wide in plan.items() if f".{part}." in f".{name}."), None)
        if wide is not None:
            parameter.data = parameter.data.to(wide)


def _fill(module: nn.Module, folder: Path, files: list[str], parts: dict[str, torch.Tensor]) -> None:
    """`parts`: room for the stored parts of quantized weights, by the names of the shards."""
    state = module.state_dict(keep_vars=True)
    filled = set()
    for file in files:
        with safe_open(folder / file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                if name not in state and name not in parts:
                    raise DayZeroError(
                        f"{file} holds a tensor the model does not have",
                        got=name,
                        want="parameters of the class",
                        fix="convert again with this version of dayzero",
                    )
                _copy(parts[name] if name in parts else state[name], shard.get_tensor(name), name, part=name in parts)
                filled.add(name)
    module.tie_weights()
    pointers = {tensor.data_ptr() for name, tensor in module.state_dict().items() if name in filled}
    missing = [name for name in parts if name not in filled] + [
        name
        for name, tensor in module.state_dict().items()
        if name not in filled and tensor.numel() and tensor.data_ptr() not in pointers
    ]
    if missing:
        raise DayZeroError(
            "the artifact does not fill the model",
            got=json.dumps(missing[:20]),
            want="every parameter",
            fix="convert again; if it repeats, the release is incomplete",
        )


def _copy(into: torch.Tensor, stored: torch.Tensor, name: str, *, part: bool = False) -> None:
    if tuple(into.shape) != tuple(stored.shape):
        raise DayZeroError(f"{name} has another shape", got=tuple(stored.shape), want=tuple(into.shape), fix="convert again")
    if part and stored.dtype != into.dtype:
        raise DayZeroError(f"{name} is stored in another dtype", got=stored.dtype, want=into.dtype, fix="convert again")
    if not part and (stored.dtype.itemsize == 1 or (into.is_floating_point() and not stored.is_floating_point())):
        raise DayZeroError(
            f"{name} is stored quantized",
            got=stored.dtype,
            want="a floating point dtype of 2 bytes or more",
            fix="convert again with this version of dayzero",
        )
    with torch.no_grad():
        into.copy_(stored)
