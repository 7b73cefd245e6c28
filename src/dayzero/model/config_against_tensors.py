"""A config and the names, dtypes and shapes in the headers in, what in them cannot be of one model out. No torch.

Two questions. Before there is a class (`config_against_tensors`): are the numberings of experts whole (and of an expert's
matrices), do two spellings of one key disagree where the files can tell, is one tensor of a kind in another 16-bit format
than its siblings. Where a class built from the config does not fit the files (`config_against_class`): which keys or layers
are behind it. One pass over the names, memory for their distinct forms. Not here: whether every parameter is there
(`model.reconcile`), values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from dayzero.core.model import ModelDescription, Parameter, Problem
from dayzero.core.storage import COMPANION, PACKED
from dayzero.model.config_keys import text_keys
from dayzero.model.headers import TensorEntry
from dayzero.model.keys.tables import CONCEPTS

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d{1,5})\.")
EXPERTS = ".experts."
# Parts of a name that say that a stack is not the text decoder's.
BESIDE = ("vision", "visual", "audio", "encoder", "mtp", "nextn", "image", "speech", "draft", "tower")
MOST_DIGITS = 5  # no model numbers its layers or experts higher: what does is no such number
MAX_LISTED = 8
SIXTEEN_BITS = {"float16", "bfloat16"}
MISFITS = {"wrong_shape", "missing_parameter", "extra_layer", "unexpected_tensor"}

# Errors of this kind: tensors that can be read and do not fit the config or each other.
SCHEMA_KINDS = frozenset({"missing_expert", "missing_layer", "config_experts", "config_layers", "config_sizes", "config_type"})


@dataclass(kw_only=True, slots=True)
class _Family:
    """Members of one numbering, `<head>.<number>.<tail>`: the numbers of each tail, and a tensor to name a file by."""

    head: str
    example: str
    tails: dict[str, set[int]] = field(default_factory=dict)

    @property
    def numbers(self) -> set[int]:
        return set().union(*self.tails.values())


def config_against_tensors(config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> list[Problem]:
    """What names and the config show by themselves. That a number in the config is wrong is not said: its class decides what
    it means (half of the experts may have no weights, one stored layer may run twice, another have none at all)."""
    experts = _experts(tensors)
    counts = _wrong_experts(text_keys(config), experts)
    return [
        *_expert_gaps(experts, tensors),
        *(problem for problem in counts if problem.kind == "config_spellings"),
        *_odd_dtypes(tensors),
    ]


def _layers(tensors: Mapping[str, TensorEntry]) -> dict[str, _Family]:
    """Stacks of layers by what stands before the number. A stack inside a layer is part of the layer."""
    found: dict[str, _Family] = {}
    first: dict[tuple[str, str], str] = {}
    search = LAYER.search
    for name in tensors:
        if (place := search(name)) is not None:
            first.setdefault((name[: place.start(1) - 1], place[1]), name)
    for (head, number), name in first.items():
        family = found.setdefault(head, _Family(head=head, example=name, tails={"": set()}))
        family.tails[""].add(int(number))
    return found


def _experts(tensors: Mapping[str, TensorEntry]) -> dict[str, _Family]:
    """Experts by what stands before the number."""
    found: dict[str, _Family] = {}
    for name in tensors:
        head, between, rest = name.partition(EXPERTS)
        if between:
            number, _, tail = rest.partition(".")
            if tail and number.isdecimal() and len(number) <= MOST_DIGITS:
                family = found.get(head) or found.setdefault(head, _Family(head=head + EXPERTS[:-1], example=name))
                numbers = family.tails.get(tail)
                if numbers is None:
                    numbers = family.tails[tail] = set()
                numbers.add(int(number))
    return {family.head: family for family in found.values()}


def _expert_gaps(experts: Mapping[str, _Family], tensors: Mapping[str, TensorEntry]) -> Iterable[Problem]:
    """Experts that are not there between others, and matrices that an expert lacks and the other experts of it have."""
    for family in experts.values():
        numbers = family.numbers
        file = tensors[family.example].file
        if (gaps := _gaps(numbers)) and (listed := _listed(gaps)):
            tails = sorted(tail for tail, those in family.tails.items() if 2 * len(those) >= len(numbers))
            names = [f"{family.head}.{number}.{tail}" for number in gaps[:1] for tail in tails]
            detail = f"{family.head} stores experts up to {max(numbers)} without {listed}: {', '.join(names[:4])} in no file"
            yield Problem(kind="missing_expert", severity="error", file=file, detail=detail,
                          tensor=names[0] if names else f"{family.head}.{gaps[0]}")  # fmt: skip
        for tail, those in family.tails.items():
            # Scales may be stored for some experts alone: modules are excepted from quantization one by one.
            if COMPANION.search(f".{tail}") or PACKED.search(f".{tail}") or 2 * len(those) <= len(numbers):
                continue
            absent = sorted(numbers - those)
            if absent and not _stored_otherwise(family, tail, absent[0]):
                first = f"{family.head}.{absent[0]}.{tail}"
                detail = f"{first} is in no file; {len(those)} other experts of {family.head} have theirs"
                detail += f" (nor have experts {_listed(absent[1:])})" if len(absent) > 1 else ""
                yield Problem(kind="missing_expert", severity="error", file=file, tensor=first, detail=detail)


def _stored_otherwise(family: _Family, tail: str, number: int) -> bool:
    """Whether the expert has this matrix in another form: packed, or not, where the others are not, or are."""
    stem = tail.removesuffix(".weight")
    return any(
        number in those and other != tail and not COMPANION.search(f".{other}") and other.split(".")[0] == stem.split(".")[0]
        for other, those in family.tails.items()
    )


def _layer_gaps(layers: Mapping[str, _Family], tensors: Mapping[str, TensorEntry]) -> Iterable[Problem]:
    for family in layers.values():
        if gaps := _gaps(family.numbers):
            detail = f"{family.head} stores layers up to {max(family.numbers)} without {_listed(gaps)}"
            yield Problem(kind="missing_layer", severity="error", file=tensors[family.example].file,
                          tensor=f"{family.head}.{gaps[0]}", detail=detail)  # fmt: skip


def _wrong_depth(
    config: Mapping[str, Any], keys: Mapping[str, Any], layers: Mapping[str, _Family], tensors: Mapping[str, TensorEntry]
) -> Iterable[Problem]:
    """The one stack of the text decoder against the number of layers, drafts that the config announces included."""
    stacks = [family for family in layers.values() if not any(word in family.head.lower() for word in BESIDE)]
    said, drafts = _number(keys, "depth"), _number(keys, "mtp") or _number(config, "mtp")
    if len(stacks) != 1 or said is None:
        return
    top = max(stacks[0].numbers)
    most = said[1] + (drafts[1] if drafts else 0)
    if said[1] <= top + 1 <= most:
        return
    beyond = f" and {drafts[0]} is {drafts[1]}" if drafts else ""
    detail = f"config.json: {said[0]} is {said[1]}{beyond}, and the files store layers up to {top} of {stacks[0].head}"
    first = min((name for name in tensors if name.startswith(f"{stacks[0].head}.{top}.")), default=None)
    yield Problem(kind="config_layers", severity="error", file="config.json", tensor=first, detail=detail)


def _wrong_experts(keys: Mapping[str, Any], experts: Mapping[str, _Family]) -> list[Problem]:
    """Every spelling of the number of experts against the highest number of each layer's."""
    tops = {family.head: max(family.numbers) for family in experts.values()
            if not any(word in family.head.lower() for word in BESIDE)}  # fmt: skip
    said = {key: keys[key] for key in CONCEPTS["experts"].spellings if type(keys.get(key)) is int and keys[key] > 0}
    wrong = {key: [head for head, top in tops.items() if top + 1 != value] for key, value in said.items()}
    problems = []
    for key, heads in wrong.items():
        if not heads:
            continue
        first, top, value = heads[0], tops[heads[0]], said[key]
        tail = min(experts[first].tails, key=lambda tail: tail not in experts[first].example)
        tensor = f"{first}.{value if top >= value else top + 1}.{tail}"
        detail = f"config.json: {key} is {value}, and {first} stores experts up to {top}: "
        detail += f"{tensor} is {'one too many' if top >= value else 'in no file'}"
        detail += f" (so in {len(heads) - 1} further layers)" if len(heads) > 1 else ""
        agrees = next((other for other, those in wrong.items() if not those), None)
        if agrees is not None:
            detail += f"; {agrees} is {said[agrees]}"
        kind, severity = ("config_experts", "error") if agrees is None else ("config_spellings", "warning")
        problems.append(Problem(kind=kind, severity=severity, file="config.json", tensor=tensor, detail=detail))  # type: ignore[arg-type]
    return problems


def _odd_dtypes(tensors: Mapping[str, TensorEntry]) -> Iterable[Problem]:
    """The same bits mean other numbers in the other 16-bit format: a tensor in another one than other layers' is named."""
    if not {entry.dtype for entry in tensors.values()} >= SIXTEEN_BITS:
        return
    forms: dict[str, dict[str, list[str]]] = {}
    for name, entry in tensors.items():
        if entry.dtype in SIXTEEN_BITS:
            forms.setdefault(_form(name), {}).setdefault(entry.dtype, []).append(name)
    for form, by_dtype in forms.items():
        if len(by_dtype) == 2:
            (usual, many), (odd, few) = sorted(by_dtype.items(), key=lambda item: -len(item[1]))
            detail = f"{few[0]} is {odd}, and {len(many)} of {form} are {usual}"
            detail += f" (also {_listed(few[1:])})" if len(few) > 1 else ""
            yield Problem(kind="odd_dtype", severity="warning", file=tensors[few[0]].file, tensor=few[0], detail=detail)


def config_against_class(
    config: Mapping[str, Any], tensors: Mapping[str, TensorEntry], measured: ModelDescription
) -> list[Problem]:
    """Keys behind what does not fit: those that make the sizes for which the files hold others, and the type itself. An error
    for each, beside the errors of the single parameters."""
    misfits = [problem for problem in measured.problems if problem.kind in MISFITS and problem.severity == "error"]
    if not misfits or not measured.parameters:
        return []
    own = [one for one in measured.parameters if one.tied_to is None and not one.is_buffer]
    if 2 * sum(bool(one.sources) for one in own) < len(own):
        told = f"config.json: model_type is {config.get('model_type')!r}, and the {len(tensors)} stored tensors fill "
        told += f"{sum(bool(one.sources) for one in own)} of its {len(own)} parameters"
        return [Problem(kind="config_type", severity="error", file="config.json", detail=told)]
    keys, layers = text_keys(config), _layers(tensors)
    return [
        *_layer_gaps(layers, tensors),
        *_wrong_depth(config, keys, layers, tensors),
        *(problem for problem in _wrong_experts(keys, _experts(tensors)) if problem.kind == "config_experts"),
        *_wrong_sizes(config, tensors, measured, own),
    ]


def _wrong_sizes(
    config: Mapping[str, Any], tensors: Mapping[str, TensorEntry], measured: ModelDescription, own: Sequence[Parameter]
) -> Iterable[Problem]:
    """Sizes that all layers alike have otherwise; where some fit, the tensors that do not are damaged, not the config."""
    wrong = {problem.tensor for problem in measured.problems if problem.kind == "wrong_shape"}
    right = {_form(one.name) for one in own if one.name not in wrong}
    found: dict[tuple[int, int], list[str]] = {}
    for parameter in own:
        if parameter.name not in wrong or _form(parameter.name) in right or len(parameter.sources) != 1:
            continue
        entry = tensors.get(parameter.sources[0])
        if entry is not None and len(entry.shape) == len(parameter.shape):
            for wanted, got in set(zip(parameter.shape, entry.shape, strict=True)):
                if wanted != got:
                    found.setdefault((wanted, got), []).append(parameter.sources[0])
    made = _made_of(config, measured)
    for (wanted, got), names in found.items():
        if keys := made.get(wanted):
            detail = f"config.json: {' or '.join(dict.fromkeys(keys))} gives a size of {wanted}, and {len(names)} tensors"
            yield Problem(kind="config_sizes", severity="error", file="config.json", tensor=names[0],
                          detail=f"{detail} have {got} there, the first: {names[0]}")  # fmt: skip


def _form(name: str) -> str:
    """A name without its numbers: that of the same parameter in all layers."""
    return re.sub(r"\d+", "*", name)


def _made_of(config: Mapping[str, Any], measured: ModelDescription) -> dict[int, list[str]]:
    """Sizes of weights -> the keys, or products of two, that they come from."""
    keys = text_keys(config)
    made: dict[int, list[str]] = {}
    for name in ("hidden", "vocabulary", "dense_width", "expert_width", "experts"):
        for key in CONCEPTS[name].spellings:
            if isinstance(value := keys.get(key), int):
                made.setdefault(value, []).append(f"{key} = {value}")
    width = _number(keys, "head_dim") or ("the width of a head", measured.dimensions.head_dim or 0)
    for name in ("heads", "kv_heads"):
        if said := _number(keys, name):
            text = f"{said[0]} = {said[1]} x {width[0]} = {width[1]}"
            made.setdefault(said[1] * width[1], []).append(text)
    return made


def _number(keys: Mapping[str, Any], concept: str) -> tuple[str, int] | None:
    """The key that a config spells a concept with, and its number."""
    for key in CONCEPTS[concept].spellings:
        value = keys.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return key, value
    return None


def _gaps(numbers: set[int]) -> list[int]:
    """Numbers between 0 and the largest that are not there; no more of them than are worth telling."""
    top = max(numbers)
    if top + 1 == len(numbers):
        return []
    return list(islice((number for number in range(top) if number not in numbers), 4 * MAX_LISTED))


def _listed(items: Iterable[Any]) -> str:
    items = list(items)
    return ", ".join(map(str, items[:MAX_LISTED])) + (f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else "")
