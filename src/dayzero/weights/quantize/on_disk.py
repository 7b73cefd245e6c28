"""Quantized weights as an ordinary release: which stored tensors become parts, and the config that says so.

The parts are those of the compressed-tensors format, the settings come from that library's own classes, so that transformers,
vLLM and SGLang read them. The format knows matrices of linear layers, one per module: a tensor that holds several experts
stays plain, and that is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.model.headers import TensorEntry
from dayzero.weights.algebra import View
from dayzero.weights.quantize.policy import Choice
from dayzero.weights.quantize.presets import Preset

EXPERT = re.compile(r"\.experts\.\d+\.")


def choose_stored(
    views: Mapping[str, View], choices: Mapping[str, Choice], tensors: Mapping[str, TensorEntry]
) -> tuple[dict[str, Preset], dict[str, str]]:
    """Stored tensor -> preset, and stored tensor -> why it stays, of `tensors` (the checkpoint in plain numbers).

    A tensor takes the preset of the parameter that it fills; one that fills two which differ stays.
    """
    wanted: dict[str, set[str | None]] = {}
    presets: dict[str, Preset] = {}
    kept: dict[str, str] = {}
    for parameter, view in views.items():
        choice = choices.get(parameter)
        for source in {piece.source for piece in view.pieces}:
            chosen = choice.preset if choice is not None else None
            wanted.setdefault(source, set()).add(chosen.name if chosen else None)
            if chosen is not None:
                presets[source] = chosen
            elif choice is not None:
                kept[source] = choice.reason
    for source, names in wanted.items():
        entry = tensors.get(source)
        if source not in presets:
            continue
        why = None
        if len(names) > 1:
            why = "fills parameters that are stored differently"
        elif entry is None or len(entry.shape) != 2 or not source.endswith(".weight"):
            why = "no matrix of one linear layer: the compressed-tensors format has no form for it"
        elif entry is not None:
            why = presets[source].unfit(entry.shape[-1], on_disk=True)
        if why is not None:
            presets.pop(source)
            kept[source] = why
    _experts_alike(presets, kept)
    for source in tensors:
        if source not in presets:
            kept.setdefault(source, "fills no parameter that is quantized")
    return presets, kept


def _experts_alike(presets: dict[str, Preset], kept: dict[str, str]) -> None:
    """Experts of one layer are stored all alike, or not at all: readers stack them, and some fill what is stored otherwise
    with random numbers (transformers 5.24 does, with a line in a log)."""
    stacks: dict[str, list[str]] = {}
    for name in [*presets, *kept]:
        found = EXPERT.search(name)
        if found is not None:
            stacks.setdefault(name[: found.start()], []).append(name)
    for names in stacks.values():
        forms = {presets[name].name if name in presets else None for name in names}
        if len(forms) > 1:
            odd = next((name for name in names if name not in presets), names[0])
            for name in names:
                if presets.pop(name, None) is not None:
                    kept[name] = f"experts of a layer are stored alike, and {odd} cannot be stored so"


def quantization_config(presets: Mapping[str, Preset], tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """The `quantization_config` of a release that stores these tensors so. Raises DayZeroError without the library."""
    try:
        from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus
    except ImportError as error:
        raise DayZeroError("quantized releases are written with the compressed-tensors library", got=str(error),
                           want="compressed-tensors", fix="pip install 'dayzero[quantize]'") from error  # fmt: skip
    by_preset: dict[str, list[str]] = {}
    for name, one in presets.items():
        by_preset.setdefault(one.name, []).append(name.removesuffix(".weight"))
    used = {one.name: one for one in presets.values()}
    matrices = [name for name, entry in tensors.items() if name.endswith(".weight") and len(entry.shape) == 2]
    ignored = sorted(name.removesuffix(".weight") for name in matrices if name not in presets)
    main = max(by_preset, key=lambda name: len(by_preset[name]), default=None)
    groups = {}
    for number, (name, modules) in enumerate(sorted(by_preset.items(), key=lambda item: item[0] == main)):
        # All but the largest group name their modules; the largest takes the other linear layers.
        targets = ["Linear"] if name == main else modules
        groups[f"group_{number}"] = QuantizationScheme(targets=targets, format=used[name].form, **_arguments(used[name]))
    forms = {one.form for one in used.values()}
    made = QuantizationConfig(
        config_groups=groups, ignore=ignored, quantization_status=QuantizationStatus.COMPRESSED,
        format=forms.pop() if len(forms) == 1 else "mixed-precision",
    ).to_dict()  # fmt: skip
    return {"quant_method": "compressed-tensors", **_plain(made)}


def _arguments(one: Preset) -> dict[str, Any]:
    from compressed_tensors.quantization import QuantizationArgs

    height, width = one.block
    weights: dict[str, Any] = {"num_bits": one.bits, "type": one.number, "symmetric": one.symmetric, "dynamic": False}
    if height > 1:
        weights |= {"strategy": "block", "block_structure": [height, width]}
    else:
        weights |= {"strategy": "group", "group_size": width} if width else {"strategy": "channel"}
    if one.scale_dtype == "uint8":
        import torch

        weights |= {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
    inputs = None
    if one.activations is not None:
        inputs = QuantizationArgs(
            num_bits=8, type=one.number, symmetric=True, dynamic=one.activations != "tensor", strategy=one.activations,
            group_size=width if one.activations == "group" else None,
        )  # fmt: skip
    return {"weights": QuantizationArgs(**weights), "input_activations": inputs}


def _plain(value: Any) -> Any:
    """JSON's own types: the library leaves enumerations and dtypes in."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(getattr(value, "value", value))
