"""The config of a release in, the transformers config and class that define it out, or the reason why there are none.

transformers' own mapping of `model_type` decides. A type it does not know but whose `architectures` names one of its
classes is built with that class, and a problem says so. Code shipped with a release (`auto_map`) runs only when the user
allowed it and transformers knows neither. Quantization settings are left out: structure is that of the unquantized model.
"""

from __future__ import annotations

import copy
import dataclasses
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dayzero.core.errors import DayZeroError, one_line
from dayzero.core.model import Problem
from dayzero.model.classes import build_on_meta, causal_class
from dayzero.model.config_keys import attention_shape, respelled_rope
from dayzero.model.release import Release, read_object
from dayzero.model.remote.code import CodeReference, model_code
from dayzero.model.remote.sandbox import allowed_here

# Dropped before the config object is made: how weights are stored is not structure, and dtypes are read by config_dtype.
STORAGE_KEYS = ("quantization_config", "compression_config", "dtype", "torch_dtype", "auto_map")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """`config` as its class reads it; `remote_class` only for code of the release itself."""

    config: PreTrainedConfig
    problems: tuple[Problem, ...] = ()
    remote_class: type | None = None

    def build(self, dtype: torch.dtype) -> nn.Module:
        """An instance on the meta device. Raises DayZeroError when the class refuses the config."""
        try:
            if self.remote_class is None:
                return build_on_meta(self.config, dtype)
            with torch.device("meta"):
                return self.remote_class._from_config(self.config, dtype=dtype).eval()  # type: ignore[attr-defined]
        except DayZeroError:
            raise
        except Exception as error:
            raise DayZeroError(
                f"no model can be built from this config ({type(self.config).__name__})",
                got=one_line(error),
                want="values its class accepts",
                fix="compare config.json with the published one",
            ) from error


def resolve(release: Release, *, trust_remote_code: bool = False) -> Resolved | Problem:
    """The config and class of a release; a `Problem` saying what is unknown when no class can be had.

    Raises DayZeroError when the class exists and rejects the config's values.
    """
    data = clean_config(release.config)
    model_type = release.config.get("model_type")
    problems: list[Problem] = []
    config_class = _class_of_type(release.config)
    if config_class is None and trust_remote_code and release.config.get("auto_map"):
        return _remote(release)
    if config_class is None:
        config_class = _class_of_architecture(release.config)
        if config_class is None:
            return _unknown(release.config, model_type)
        problems.append(
            _warning(
                "model_type_unknown",
                f"transformers {transformers.__version__} has no model_type {model_type!r}; the "
                f"class named by `architectures` ({release.config['architectures'][0]}) is used",
            )
        )
        data["model_type"] = config_class.model_type
    elif release.config.get("auto_map") and not trust_remote_code:
        problems.append(
            _warning("remote_code_not_used", f"the release ships code for {model_type!r}; transformers' own class is used")
        )
    _check_heads(config_class, data)
    config = _instantiate(config_class, data)
    _allow_global_reads(config)
    problems += _flat_text_keys(config, data)
    if causal_class(config) is None:
        return Problem(
            kind="no_class",
            severity="warning",
            file="config.json",
            detail=f"transformers knows the config of {model_type!r} but has no class that generates text for it",
        )
    return Resolved(config=config, problems=tuple(problems))


def read_config(path: Path) -> PreTrainedConfig:
    """The config object of a config.json for running the model: as `resolve` chooses and spells it, with what it says about
    storage. Raises DayZeroError when no class knows it, or its class rejects it."""
    keys = read_object(path)
    config_class = _class_of_type(keys) or _class_of_architecture(keys)
    if config_class is None:
        unknown = _unknown(keys, keys.get("model_type"))
        raise DayZeroError(
            f"no class for {path}",
            got=unknown.detail,
            want="a model_type or class that transformers knows",
            fix="install a transformers that has it",
        )
    data = PreTrainedConfig._decode_special_floats(respelled_rope(keys))
    return _instantiate(config_class, {**data, "model_type": config_class.model_type})


def clean_config(config: dict[str, Any]) -> dict[str, Any]:
    """A copy without keys about storage and remote code, and with today's names of rope types, nested configs too."""
    # transformers writes floats that JSON lacks as {"__float__": "Infinity"}; only its own file reader undoes that.
    config = PreTrainedConfig._decode_special_floats(respelled_rope(config))
    cleaned = {key: copy.deepcopy(value) for key, value in config.items() if key not in STORAGE_KEYS}
    for key, value in cleaned.items():
        if key.endswith("_config") and isinstance(value, dict):
            cleaned[key] = clean_config(value)
    return cleaned


def _warning(kind: str, detail: str) -> Problem:
    return Problem(kind=kind, severity="warning", file="config.json", detail=detail)


def _unknown(config: dict[str, Any], model_type: object) -> Problem:
    architecture = (config.get("architectures") or ["none"])[0]
    shipped = model_code(config)
    code = "; it ships code of its own, without a class that generates text" if config.get("auto_map") else ""
    if shipped is not None:
        code = f"; it ships code of its own, which runs only with --trust-remote-code ({shipped[1]}, {shipped[0]})"
    return _warning(
        "unknown_model_type",
        f"transformers {transformers.__version__} knows neither model_type {model_type!r} nor the class "
        f"{architecture}{code}. Sizes below come from keys whose meaning is common: exact parameter names, layer "
        "structure, cache layout and checkpoint names are not known",
    )


def _class_of_type(config: dict[str, Any]) -> type[PreTrainedConfig] | None:
    model_type = config.get("model_type")
    return CONFIG_MAPPING[model_type] if isinstance(model_type, str) and model_type in CONFIG_MAPPING else None


def _class_of_architecture(config: dict[str, Any]) -> type[PreTrainedConfig] | None:
    for name in config.get("architectures") or ():
        found = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
        config_class = getattr(found, "config_class", None)
        if config_class is not None and config_class.model_type in CONFIG_MAPPING:
            return config_class
    return None


def _instantiate(config_class: type[PreTrainedConfig], data: dict[str, Any]) -> PreTrainedConfig:
    try:
        return config_class.from_dict(copy.deepcopy(data))
    except Exception as error:  # transformers validates with many exception types; all of them are about the user's file
        raise DayZeroError(
            f"config.json is not valid for model_type {data.get('model_type')!r}",
            got=one_line(error),
            want=f"values {config_class.__name__} accepts",
            fix="correct config.json, or compare it with the published one",
        ) from error


def _check_heads(config_class: type[PreTrainedConfig], data: dict[str, Any]) -> None:
    """Heads that cannot be are errors that name their key here; in the class they would be a division by zero, or worse.

    Only for plain attention: latent attention and classes with head sizes of their own follow other rules.
    """
    name = next((key for key in ("text_config", "llm_config") if isinstance(data.get(key), dict)), None)
    keys = data[name] if name else data
    text_class = config_class.sub_configs.get(name, config_class) if name else config_class
    if not (isinstance(text_class, type) and dataclasses.is_dataclass(text_class)):
        return
    defaults = {field.name: field.default for field in dataclasses.fields(text_class)}
    own_sizes = any(field.endswith("head_dim") and field != "head_dim" for field in defaults)
    plain = {"num_attention_heads", "hidden_size"} <= set(defaults) and "kv_lora_rank" not in defaults and not own_sizes
    values = {
        key: keys.get(key, defaults.get(key))
        for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    }
    if plain and "num_attention_heads" in keys and not any(isinstance(value, (list, tuple, dict)) for value in values.values()):
        # A class that declares no head_dim derives it by a rule of its own, which is then the truth.
        default = defaults.get("head_dim") if "head_dim" in defaults else 1
        attention_shape(values, default_head_dim=default if isinstance(default, int) else None)


def _allow_global_reads(config: PreTrainedConfig) -> None:
    """Configs whose layers differ refuse reads of their global values unless told that the reader knows."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None and getattr(part, "is_heterogeneous", False):
            part.allow_global_per_layer_attribute_access = True


def _flat_text_keys(config: PreTrainedConfig, data: dict[str, Any]) -> list[Problem]:
    """Some converted configs of multimodal models carry the text model's keys at the top, where their class ignores them.

    What the class reads is what would run, so its reading stands; but the difference must be seen.
    """
    text = config.get_text_config(decoder=True)
    name = next((key for key in config.sub_configs if getattr(config, key, None) is text), None)
    if text is config or name is None or name in data:
        return []
    own = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map)
    declared = {field.name for field in dataclasses.fields(text)} | set(text.attribute_map)
    ignored = sorted(key for key, value in data.items() if key in declared - own and getattr(text, key, None) != value)
    if not ignored:
        return []
    said = ", ".join(f"{key} = {data[key]!r:.40} (read: {getattr(text, key, None)!r:.40})" for key in ignored)
    return [
        _warning(
            "flat_text_keys",
            f"{type(config).__name__} reads the text model from {name}, which is absent, and ignores these keys "
            f"at the top: {said}. Sizes below are the class's defaults",
        )
    ]


def remote_class(release: Release) -> tuple[CodeReference, CodeReference] | None:
    """The config class and the model class of the release's own that describing it needs; None where transformers has one."""
    model_type = release.config.get("model_type")
    return None if isinstance(model_type, str) and model_type in CONFIG_MAPPING else model_code(release.config)


def _remote(release: Release) -> Resolved | Problem:
    """The release's own classes. Their code runs in this process, which must therefore be the confined one."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    references = remote_class(release)
    if references is None:
        return _unknown(release.config, release.config.get("model_type"))
    if not allowed_here():
        raise DayZeroError(
            f"{release.name} needs code of its own, which runs only to describe the model",
            got=str(references[1]),
            want="a class in transformers",
            fix="use a transformers that has the class; inspecting and planning work with --trust-remote-code",
        )
    try:
        config_class, found = (
            get_class_from_dynamic_module(f"{reference.file.removesuffix('.py')}.{reference.class_name}", release.folder)
            for reference in references
        )
        made = config_class.from_dict(clean_config(release.config))
    except DayZeroError:
        raise
    except Exception as error:
        raise failure_of_code(release, error) from error
    return Resolved(config=made, remote_class=found)


def failure_of_code(release: Release, error: BaseException) -> DayZeroError:
    """What went wrong in the release's own code, and in which line of which file of it."""
    places = [
        f"{Path(frame.filename).name} line {frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "transformers_modules" in Path(frame.filename).parts
    ]
    if isinstance(error, SyntaxError) and error.filename:
        places.append(f"{Path(error.filename).name} line {error.lineno}")
    references = remote_class(release)
    place = places[-1] if places else " and ".join(dict.fromkeys(one.file for one in references or ()))
    written_for = release.config.get("transformers_version", "an unknown version")
    return DayZeroError(
        "the release's own code cannot be used",
        got=f"{place}: {one_line(error)}",
        want=f"code that runs with transformers {transformers.__version__} on the meta device",
        fix=f"read {place}; it was made for transformers {written_for}: use that one, or one that has the class itself",
    )
