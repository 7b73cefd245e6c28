"""A release's own quantization settings in, storage rules out: which modules are stored how, in bytes.

Read are `quantization_config` or `compression_config` (at the top or in the text config) and, where the config has neither,
the settings file that some tools write beside it (`stated_settings`). Formats: block, channel and tensor FP8; MXFP4, MXFP8 and
NVFP4; the groups of compressed-tensors; the algorithms of ModelOpt, mixed precision included; GPTQ and AWQ. A method that is
none of these, or has sizes that no format has, is a rule without storage, and said so. Not done here: looking at parameters
(`model.stored`) or tensors (`model.scales`), and telling what is doubtful (`model.stored.doubts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dayzero.core.storage import Storage

if TYPE_CHECKING:
    from dayzero.model.release import Release

SETTINGS_KEYS = ("quantization_config", "compression_config")
BESIDE = "hf_quant_config.json"  # where ModelOpt writes its settings; often the only place
IGNORE_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "ignored_modules")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What modules named by `targets` are stored as; "Linear" names them all. `storage` None: nothing known to price it."""

    name: str
    storage: Storage | None
    targets: tuple[str, ...] = ("Linear",)
    experts_only: bool = False
    unknown: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """`listed`: modules that the settings list one by one, each with its rule; the first rule of `rules` that fits decides
    for the others. `ignored` holds for `rules` alone. `text_only`: settings inside a text config say nothing of towers."""

    method: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    listed: Mapping[str, Rule] | None = None
    notes: tuple[str, ...] = ()
    text_only: bool = False


def settings_parts(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every value under a key that quantization is written in, with its place, the one that counts first."""
    nested = config.get("text_config")
    parts = [("", config), *([("text_config.", nested)] if isinstance(nested, Mapping) else [])]
    return [(prefix + key, part[key]) for prefix, part in parts for key in SETTINGS_KEYS if part.get(key)]


def stated_settings(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> list[tuple[str, Mapping[str, Any]]]:
    """(place, settings) of all that are stated; the first one is read, the others must not say something else."""
    found = [(place, value) for place, value in settings_parts(config) if isinstance(value, Mapping)]
    inner = (beside or {}).get("quantization")
    if isinstance(inner, Mapping) and inner:
        found.append((BESIDE, {"quant_method": "modelopt", **inner}))
    return found


def quantization_settings(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """The settings as given. `beside`: the content of the file `BESIDE`, used where the config has none."""
    return next((settings for _, settings in stated_settings(config, beside)), None)


def read_quantization(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Quantization | None:
    """The rules of a release; None when it says nothing of quantization."""
    stated = stated_settings(config, beside)
    return read_settings(*stated[0], config) if stated else None


def read_settings(place: str, settings: Mapping[str, Any], config: Mapping[str, Any]) -> Quantization:
    """The rules that these settings alone give, found at `place` (as in `stated_settings`)."""
    method = str(settings.get("quant_method") or ("modelopt" if settings.get("quant_algo") else "unknown")).lower()
    ignored = tuple(str(item) for key in IGNORE_KEYS for item in settings.get(key) or () if isinstance(item, str))
    dtype = "float16" if "float16" in str(_either(config, "dtype", "torch_dtype")).replace("bfloat16", "") else "bfloat16"
    listed = settings.get("quantized_layers")
    if isinstance(listed, Mapping) and listed:
        return _listed(settings, method, listed, ignored, config, dtype)
    if method in ("fp8", "fbgemm_fp8", "finegrained_fp8"):
        rules, notes = _fp8(settings, config)
    elif method == "mxfp4":
        rules, notes = [Rule(name="mxfp4", storage=MXFP4, experts_only=True)], []
    elif method in ("compressed-tensors", "compressed_tensors"):
        rules, notes = _groups(settings, dtype)
    elif method.startswith("modelopt"):
        rules, notes = _modelopt(settings, dtype)
    elif method in ("gptq", "awq"):
        rules, notes = _gptq_or_awq(settings, method)
        ignored += tuple(f"re:{key[2:]}" for key in settings.get("dynamic") or {} if str(key).startswith("-:"))
    else:
        rules, notes = [_unknown(method, f"quantization method {method!r}")], []
    nested = place.startswith("text_config.")
    return Quantization(method=method, rules=tuple(rules), ignored=ignored, notes=tuple(notes), text_only=nested)


def _either(config: Mapping[str, Any], *keys: str) -> Any:
    nested = config.get("text_config")
    parts = [config, *([nested] if isinstance(nested, Mapping) else [])]
    return next((part[key] for part in parts for key in keys if part.get(key) is not None), None)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _unknown(name: str, what: str) -> Rule:
    return Rule(name=name, storage=None, unknown=f"{what} is not known: its bytes cannot be told from the config")


# FP4 codes two to a byte, and an exponent byte for every 32 of them.
MXFP4 = Storage(scheme="mxfp4", bits=4, block=(1, 32), scale_dtype="uint8")
MXFP8 = Storage(scheme="mxfp8", bits=8, block=(1, 32), scale_dtype="uint8")
# One FP8 scale for every 16 codes and two float32 for a matrix: of the weight and, with FP4 activations, of the input.
NVFP4 = Storage(scheme="nvfp4", bits=4, block=(1, 16), scale_dtype="float8_e4m3fn", activations="nvfp4 dynamic", matrix_bytes=8)
# Weight and input scale, one float32 each.
FP8_TENSOR = Storage(
    scheme="fp8", bits=8, block=(0, 0), scale_dtype="float32", activations="fp8 static per tensor", matrix_bytes=4
)


def _fp8(settings: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[list[Rule], list[str]]:
    size = settings.get("weight_block_size")
    static = str(settings.get("activation_scheme", "dynamic")) == "static"
    experts = str(settings.get("expert_dtype") or _either(config, "expert_dtype") or "").lower()
    notes = []
    storage: Storage | None
    if isinstance(size, Sequence) and not isinstance(size, str) and len(size) == 2 and all(map(_is_size, size)):
        # FP4 experts come with scales as exponent bytes everywhere; a power-of-two scale alone is still stored as float32.
        scale = "float8_e8m0fnu" if experts in ("fp4", "mxfp4") else "float32"
        kind = f"fp8 {'static' if static else f'dynamic, 1x{size[1]}'}"
        storage = Storage(
            scheme="fp8-block", bits=8, block=(int(size[0]), int(size[1])), scale_dtype=scale, activations=kind,
            matrix_bytes=4 * static,
        )  # fmt: skip
    elif settings.get("quant_method") == "fbgemm_fp8":
        storage = Storage(
            scheme="fp8-channel", bits=8, block=(1, 0), scale_dtype="float32", activations="fp8 dynamic per token"
        )
    elif size is not None:  # never another size than the one stated
        storage = None
    else:
        storage = FP8_TENSOR if static else replace(FP8_TENSOR, activations="fp8 dynamic", matrix_bytes=0)
        if "weight_block_size" not in settings and not static:
            notes.append("no weight_block_size: one scale per matrix is assumed")
    rules = [Rule(name="fp8", storage=storage) if storage else _unknown("fp8", f"weight_block_size {size!r}")]
    if experts in ("fp4", "mxfp4"):
        stored = replace(MXFP4, scale_dtype="float8_e8m0fnu", activations=storage.activations if storage else None)
        rules.insert(0, Rule(name="experts", storage=stored, experts_only=True))
    elif experts and experts not in ("fp8", "float8", "float8_e4m3fn"):
        rules.insert(0, replace(_unknown("experts", f"expert_dtype {experts!r}"), experts_only=True))
    return rules, notes


def _groups(settings: Mapping[str, Any], dtype: str) -> tuple[list[Rule], list[str]]:
    groups = settings.get("config_groups")
    rules = []
    for name, group in groups.items() if isinstance(groups, Mapping) else []:
        if isinstance(group, Mapping):
            targets = tuple(str(item) for item in group.get("targets") or ("Linear",))
            weights = group.get("weights")
            if not isinstance(weights, Mapping):
                continue  # a group of activations alone changes nothing that is stored
            form = str(group.get("format") or settings.get("format") or "")
            storage = _group_storage(weights, group.get("input_activations"), form, dtype)
            rule = Rule(name=str(name), storage=storage, targets=targets)
            rules.append(rule if storage else replace(_unknown(str(name), f"format {form!r} of {weights}"), targets=targets))
    notes = [] if rules else ["compressed-tensors settings without config_groups: nothing is said to be quantized"]
    return rules, notes


def _group_storage(weights: Mapping[str, Any], inputs: Any, form: str, dtype: str) -> Storage | None:
    """The storage of one group of compressed-tensors; None for a combination that is not known."""
    bits, kind = weights.get("num_bits"), str(weights.get("type", "int"))
    group = weights.get("group_size")
    size = group if _is_size(group) else None
    if size is None and group not in (None, -1):  # -1: one group, the whole row
        return None
    strategy = str(weights.get("strategy") or ("group" if size else "tensor" if group is None else "channel"))
    active = _activations(inputs)
    zero = int(bits) if weights.get("symmetric") is False and isinstance(bits, int) else 0
    if kind == "float" and bits == 4:
        if "mxfp4" in form or size == 32:
            return replace(MXFP4, activations=active)
        if "nvfp4" in form or size == 16:
            return replace(NVFP4, activations=active, matrix_bytes=8 if active else 4)
        return None
    if strategy == "block" and kind == "float" and bits == 8:
        block = _block(weights.get("block_structure"))
        return Storage(scheme="fp8-block", bits=8, block=block, scale_dtype=dtype, activations=active) if block else None
    block = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size or 0)}.get(strategy)
    if block is None or (strategy == "group" and size is None):
        return None
    if kind == "float" and bits == 8:
        if size == 32:
            return replace(MXFP8, activations=active)
        name = {"tensor": "fp8", "channel": "fp8-channel"}.get(strategy, f"fp8-g{size}")
        return Storage(scheme=name, bits=8, block=block, scale_dtype=dtype, activations=active)
    if kind == "int" and bits in (4, 8):
        suffix = f"-g{size}" if size else f"-{strategy}"
        if form in ("pack-quantized", ""):
            # Codes fill words of 32 bits; the logical shape is stored too, as two 64-bit integers.
            word = 32 // int(bits)
            order = 4 * (str(weights.get("actorder") or "") in ("group", "True", "true"))
            return Storage(
                scheme=f"int{bits}{suffix}", bits=int(bits), block=block, scale_dtype=dtype, activations=active,
                word_columns=word, zero_bits=zero, column_bytes=order, matrix_bytes=16,
            )  # fmt: skip
        if form in ("int-quantized", "naive-quantized"):
            scheme = "w8a8" if bits == 8 and active else f"int{bits}{suffix}"
            # Four-bit codes in these formats take a byte each.
            return Storage(scheme=scheme, bits=8, block=block, scale_dtype=dtype, activations=active, zero_bits=2 * zero)
    return None


def _activations(inputs: Any) -> str | None:
    if not isinstance(inputs, Mapping):
        return None
    name = f"{inputs.get('type', 'int')}{inputs.get('num_bits', '?')}"
    when = {True: "dynamic", False: "static"}.get(inputs.get("dynamic"), str(inputs.get("dynamic")))  # type: ignore[arg-type]
    return " ".join(part for part in (name, when, str(inputs.get("strategy") or "")) if part)


def _block(value: Any) -> tuple[int, int] | None:
    parts = value.lower().split("x") if isinstance(value, str) else value
    if isinstance(parts, Sequence) and len(parts) == 2 and all(str(item).strip().isdigit() for item in parts):
        rows, columns = int(parts[0]), int(parts[1])
        return (rows, columns) if rows and columns else None  # 0 would be taken for a whole dimension
    return None


def _algorithm(name: str, group: Any, dtype: str) -> Storage | None:
    """The storage of one of ModelOpt's algorithms."""
    size = group if _is_size(group) else None
    smooth = 2  # bytes: the factor of each input column that smoothing leaves beside the weight
    grouped = size or 128
    awq = Storage(scheme=f"int4-g{grouped}", bits=4, block=(1, grouped), scale_dtype=dtype, column_bytes=smooth)
    table: dict[str, Storage] = {
        "FP8": FP8_TENSOR,
        "FP8_PER_CHANNEL_PER_TOKEN": Storage(
            scheme="fp8-channel", bits=8, block=(1, 0), scale_dtype="float32", activations="fp8 dynamic per token"
        ),
        "FP8_PB_WO": Storage(scheme="fp8-block", bits=8, block=(128, 128), scale_dtype="float32"),
        "NVFP4": NVFP4,
        "NVFP4_AWQ": replace(NVFP4, column_bytes=smooth),
        "W4A16_NVFP4": replace(NVFP4, activations=None, matrix_bytes=4),
        "W4A8_NVFP4_FP8": replace(NVFP4, activations="fp8 static per tensor"),
        "MXFP4": MXFP4,
        "W4A16_MXFP4": MXFP4,
        "W4A8_MXFP4_FP8": replace(MXFP4, activations="fp8 static per tensor", matrix_bytes=4),
        "MXFP8": MXFP8,
        "W4A16_AWQ": awq,
        "W4A8_AWQ": awq,
        "W8A8_SQ_PER_CHANNEL": Storage(
            scheme="w8a8", bits=8, block=(1, 0), scale_dtype="float32", activations="int8 static", column_bytes=smooth
        ),
        "W8A16": Storage(scheme="int8", bits=8, block=(1, 0), scale_dtype=dtype),
    }  # fmt: skip
    found = table.get(name.upper())
    if found is not None and (found.scheme == "nvfp4" or found is awq):
        if size is None and group is not None:
            return None  # a group size that no format has
        found = replace(found, block=(1, size or found.block[1]))
    return found


def _algorithm_named(name: str, group: Any) -> str:
    return f"algorithm {name!r}" + ("" if group is None else f" with group size {group!r}")


def _modelopt(settings: Mapping[str, Any], dtype: str) -> tuple[list[Rule], list[str]]:
    name, group = str(settings.get("quant_algo") or ""), settings.get("group_size")
    storage = _algorithm(name, group, dtype)
    if storage is None:
        return [_unknown(name or "modelopt", _algorithm_named(name, group))], []
    return [Rule(name=name.lower(), storage=storage)], []


def _listed(
    settings: Mapping[str, Any],
    method: str,
    listed: Mapping[str, Any],
    ignored: tuple[str, ...],
    config: Mapping[str, Any],
    dtype: str,
) -> Quantization:
    """Settings that list modules. Where the method is FP8 itself, modules that are not listed keep that method's storage."""
    made: dict[str, Rule] = {}
    by_algorithm: dict[tuple[str, Any], Rule] = {}
    for module, entry in listed.items():
        name = str(entry.get("quant_algo")) if isinstance(entry, Mapping) else str(entry)
        group = entry.get("group_size") if isinstance(entry, Mapping) else None
        if (name, group) not in by_algorithm:
            storage = _algorithm(name, group, dtype)
            rule = Rule(name=name.lower(), storage=storage) if storage else _unknown(name, _algorithm_named(name, group))
            by_algorithm[name, group] = replace(rule, targets=())
        made[str(module)] = by_algorithm[name, group]
    base, notes = _fp8(settings, config) if method == "fp8" else ([], [])
    return Quantization(
        method=method,
        rules=tuple(base),
        # The list excludes from what was done last, which the listed modules are; the base keeps its own exceptions.
        ignored=() if base else ignored,
        listed=made,
        notes=tuple(notes),
    )


def _gptq_or_awq(settings: Mapping[str, Any], method: str) -> tuple[list[Rule], list[str]]:
    bits, group = settings.get("bits", settings.get("w_bit")), settings.get("group_size", settings.get("q_group_size"))
    if bits not in (2, 4, 8) or not (_is_size(group) or group == -1):
        return [_unknown(method, f"{method} with {bits} bits and group size {group}")], []
    size = int(group) if _is_size(group) else 0
    storage = Storage(
        scheme=f"int{bits}-g{size}" if size else f"int{bits}-channel", bits=int(bits), block=(1, size), scale_dtype="float16",
        word_columns=32 // int(bits), zero_bits=int(bits), column_bytes=4 if method == "gptq" else 0,
    )  # fmt: skip
    targets = settings.get("modules_in_block_to_quantize")
    flat = [item for part in targets for item in (part if isinstance(part, list) else [part])] if targets else ["Linear"]
    rules = [Rule(name=method, storage=storage, targets=tuple(str(item) for item in flat))]
    if settings.get("lm_head") is True:
        rules.append(Rule(name=method, storage=storage, targets=("lm_head",)))
    for pattern, change in (settings.get("dynamic") or {}).items():
        if not str(pattern).startswith("-:") and isinstance(change, Mapping):
            own, _ = _gptq_or_awq({**{key: settings.get(key) for key in ("bits", "group_size")}, **change}, method)
            rules.insert(0, replace(own[0], name=f"{method}:{pattern}", targets=(f"re:{str(pattern).removeprefix('+:')}",)))
    return rules, []


def settings_beside(release: Release) -> Mapping[str, Any] | None:
    """The content of the settings file that some tools write beside the config."""
    return release.quantization_file
