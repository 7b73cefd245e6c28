"""The config of a quantized release in, that of the same release in plain numbers out. Nothing else of it changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dayzero.model.stored.quantization import BESIDE, SETTINGS_KEYS

DTYPE_KEYS = ("dtype", "torch_dtype")
# Settings files beside the config that describe stored codes: of no use, and misleading, beside plain numbers.
QUANTIZATION_FILES = (BESIDE, "quantize_config.json", "quant_config.json", "recipe.yaml")
DROPPED_KEYS = (*SETTINGS_KEYS, "expert_dtype")


def plain_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """`config` without quantization settings, wherever they stand, and with `dtype` as its dtype.

    Nested dtypes that repeat the release's own follow it; others (a tower kept in float32) stay. The files named in
    `QUANTIZATION_FILES` must not be copied beside the result.
    """
    before = next((config[key] for key in DTYPE_KEYS if isinstance(config.get(key), str)), None)
    made = _cleaned(config, {before} - {None}, dtype)
    if not any(key in made for key in DTYPE_KEYS):
        made["dtype"] = dtype
    for key in DTYPE_KEYS:
        if key in made:
            made[key] = dtype
    return made


def _cleaned(part: Mapping[str, Any], replaced: set[Any], dtype: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in part.items():
        if key in DROPPED_KEYS:
            continue
        if key in DTYPE_KEYS and isinstance(value, str) and (value in replaced or "float8" in value):
            made[key] = dtype
        else:
            made[key] = _cleaned(value, replaced, dtype) if isinstance(value, Mapping) else value
    return made
