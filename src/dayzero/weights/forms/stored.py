"""A quantized release's headers and settings in, one `Decoder` for each tensor that is stored in another form out.

What a tensor is follows from its own name, dtype and companions; how its numbers are grouped from the rule that the settings
have for its module, so each group of a mixed release goes by its own. The two must agree. Every disagreement is listed, and
nothing is guessed: a block size, an order of packing or the meaning of a byte that is not declared is an error. Integers
and booleans without a scale stay what they are. Scales of activations and caches are no part of the weights: they are
dropped, and said. Not here: arithmetic (`rows`, `columns`), names of parameters (`mapping`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Parameter, Problem
from dayzero.core.storage import COMPANION, PACKED, Storage, name_form
from dayzero.model.headers import TensorEntry
from dayzero.model.release import Release
from dayzero.model.stored import assignment, storage_of
from dayzero.model.stored.quantization import Rule, quantization_settings, read_quantization
from dayzero.model.stored.scales import (
    FLOAT8,
    KV_SCALE,
    PACKED_DTYPES,
    logical_shapes,
    scale_of,
    storage_problems,
    weight_of,
)
from dayzero.weights.decoding import Decoder
from dayzero.weights.forms.readers import FormReader, names_of
from dayzero.weights.reading import ByteStore, LocalStore

ACTIVATION = re.compile(r"[._](?:input|output|activation)_(?:scale(?:_inv|_2|_ub)?|global_scale|zero_point|amax|offset)$")
CALIBRATION = re.compile(r"[._](?:weight_amax|weight_observer\.[a-z_]+)$")
EXPERT = re.compile(r"(?:^|\.)experts(?:\.|$)")
# Problems of one kind on names that differ in numbers alone are listed one by one up to this many.
MAX_LISTED = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """A checkpoint as it would be without quantization: `tensors` by the names a plain one would have, of which those in
    `decoders` are made from stored tensors. Scales and their like appear only as sources of decoders, or are `dropped`
    (stored tensor -> reason)."""

    tensors: dict[str, TensorEntry]
    decoders: dict[str, Decoder] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    dropped: dict[str, str] = field(default_factory=dict)


def is_quantized(release: Release) -> bool:
    """Whether anything is stored in another form than plain numbers, or the settings say so."""
    settings = quantization_settings(release.config, release.quantization_file)
    return settings is not None or bool(_coded(release.tensors))


def decode_stored(release: Release, dtype: str, *, upcast_unscaled: bool = False, store: ByteStore | None = None) -> Decoded:
    """The release in numbers of `dtype`; plain tensors keep theirs. No tensor is read here, but for stored shapes.

    upcast_unscaled: take the values of an FP8 weight without a scale as they are (a warning) instead of refusing it.
    store: where stored shapes are read from, the release's folder if not given.
    """
    settings = quantization_settings(release.config, release.quantization_file)
    coded = _coded(release.tensors)
    if not coded and settings is None:
        return Decoded(tensors=release.tensors)
    tensors = release.tensors
    metadata = {key: value for shard in release.shards.values() for key, value in shard.metadata.items()}
    found = _storage_problems(tensors, settings, coded, metadata, upcast_unscaled)
    if not coded:
        detail = "the settings say that weights are quantized, and all stored tensors are plain"
        found.append(Problem(kind="not_quantized", severity="warning", file="config.json", detail=detail))
    rules = _rules(release, coded)
    reader = FormReader(tensors=tensors, settings=settings, metadata=metadata, dtype=dtype,
                        shapes=_stored_shapes(release, store), upcast_unscaled=upcast_unscaled)  # fmt: skip
    wrong = {str(problem.tensor) for problem in found if problem.severity == "error"}
    decoders: dict[str, Decoder] = {}
    failed = set(wrong)
    for name in coded:
        rule, said = rules[name]
        found += [said] if said is not None else []
        logical = names_of(name)[1]
        if logical != name and logical in tensors:
            found.append(_error("stored_twice", name, tensors, f"{logical} is stored beside it: which one counts is not known"))
            failed.add(name)
            continue
        refused: DayZeroError | None = None
        try:
            if name not in wrong and scale_of(name, tensors) not in wrong:
                decoders[logical] = reader.decoder(name, rule)
                continue
        except DayZeroError as error:
            found.append(_error("stored_form", name, tensors, f"{error.what}: {error.got}; wanted {error.want}"))
            refused = error
        failed.add(name)
        # A place for the name, so that the mapping does not call it missing as well. It is never read: errors stop before.
        shapes = logical_shapes(tensors, [name], settings or {})
        if name in shapes:
            decoders[logical] = _refused(logical, shapes[name][0], dtype, name, refused)
    used = {source for decoder in decoders.values() for source in decoder.sources}
    dropped = _dropped(tensors, used) if settings is not None or coded else {}
    found += _drop_warnings(tensors, dropped)
    found += _plain_with_scale(tensors, set(coded), settings, dropped)
    out = used | dropped.keys() | failed | set(coded)
    kept = {name: entry for name, entry in tensors.items() if name not in out and weight_of(name, tensors) not in failed}
    made = {name: decoder.entry(tensors[decoder.sources[0]]) for name, decoder in decoders.items()}
    return Decoded(tensors=kept | made, decoders=decoders, problems=tuple(_shortened(found)), dropped=dropped)


def _coded(tensors: Mapping[str, TensorEntry]) -> tuple[str, ...]:
    """Stored weights that are codes and no numbers: FP8, packed ones, and bytes that have a scale."""
    found = []
    for name, entry in tensors.items():
        if COMPANION.search(name) is not None and (entry.dtype not in FLOAT8 or weight_of(name, tensors) is not None):
            continue
        packed = PACKED.search(name) is not None and entry.dtype in PACKED_DTYPES
        bytes_of_codes = entry.dtype in ("int8", "uint8", "float4_e2m1") and (name.endswith(".weight") or EXPERT.search(name))
        if entry.dtype in FLOAT8 or packed or (bytes_of_codes and scale_of(name, tensors) is not None):
            found.append(name)
    return tuple(found)


def _storage_problems(
    tensors: Mapping[str, TensorEntry], settings: Mapping[str, Any] | None, coded: Iterable[str], metadata: Mapping[str, str],
    upcast_unscaled: bool,
) -> list[Problem]:  # fmt: skip
    """What headers and settings show by themselves, less what is asked of each tensor with its own rule later."""
    coded = set(coded)
    kept = []
    for problem in storage_problems(tensors, settings, metadata=metadata):
        name = str(problem.tensor)
        if problem.kind == "packing_order" or (problem.kind == "scale_meaning" and weight_of(name, tensors) not in coded):
            continue
        if problem.kind == "scale_missing" and tensors[name].dtype in FLOAT8:
            if upcast_unscaled:
                detail = f"{name} {tensors[name].dtype} has no scale in any file: its values are taken as they are, as asked"
                problem = replace(problem, severity="warning", kind="upcast_unscaled", detail=detail)
            else:
                problem = replace(problem, detail=f"{problem.detail} (--assume-unscaled takes its values as they are)")
        kept.append(problem)
    return kept


def _rules(release: Release, coded: Iterable[str]) -> dict[str, tuple[Rule | Storage | None, Problem | None]]:
    """What the settings say of each coded tensor's module: its storage, or the rule without one, or nothing.

    A module that the settings except and that is stored in codes all the same goes by the one format there is; that is said.
    """
    quantization = read_quantization(release.config, release.quantization_file)
    if quantization is None:
        return dict.fromkeys(coded, (None, None))
    every = [*(quantization.listed or {}).values(), *quantization.rules]
    unknown = {rule.name: rule for rule in every if rule.storage is None}
    storages = list(dict.fromkeys(rule.storage for rule in every if rule.storage is not None))
    parameters = []
    for name in coded:
        role = "expert" if EXPERT.search(name) else "other"
        shape = release.tensors[name].shape
        parameters.append(Parameter(name=names_of(name)[1], shape=shape if len(shape) > 1 else (1, *shape), dtype="bfloat16",
                                    role=role))  # type: ignore[arg-type]  # fmt: skip
    beside = release.quantization_file
    assigned = storage_of(release.config, parameters, beside=beside)
    left = [parameter for parameter in parameters if assigned[parameter.name] is None]
    groups = assignment(release.config, left, beside=beside)
    made: dict[str, tuple[Rule | Storage | None, Problem | None]] = {}
    for name, parameter in zip(coded, parameters, strict=True):
        storage = assigned[parameter.name]
        if storage is not None:
            made[name] = storage, None
        elif groups[parameter.name] in unknown:
            made[name] = unknown[groups[parameter.name]], None
        elif len(storages) == 1 and not unknown:
            detail = (
                f"{name} is stored quantized, which the settings except: it is read as {storages[0].scheme}, like the others"
            )
            said = Problem(kind="quantized_exception", severity="warning", tensor=name, file=release.tensors[name].file,
                           detail=detail)  # fmt: skip
            made[name] = storages[0], said
        else:
            made[name] = None if storages else next(iter(unknown.values()), None), None
    return made


def _stored_shapes(release: Release, store: ByteStore | None) -> dict[str, tuple[int, int]]:
    """The two integers of every `weight_shape`, by its name, in the order of the files."""
    wanted = [
        (entry.file, entry.begin, name, entry)
        for name, entry in release.tensors.items()
        if name.endswith("weight_shape") and entry.shape == (2,) and entry.dtype in ("int64", "int32")
    ]
    source = store or LocalStore(release.folder)
    found = {}
    try:
        for _, _, name, entry in sorted(wanted, key=lambda one: one[:2]):
            raw = bytearray(entry.num_bytes)
            source.read_into(entry.file, entry.begin, memoryview(raw))
            size = entry.num_bytes // 2
            first, second = (int.from_bytes(raw[at : at + size], "little", signed=True) for at in (0, size))
            found[name] = first, second
    finally:
        if store is None:
            source.close()
    return found


def _refused(logical: str, shape: tuple[int, ...], dtype: str, name: str, error: DayZeroError | None) -> Decoder:
    def decode(*_: Any) -> Any:
        raise error or DayZeroError(
            f"{name} cannot be read", got="an error that is listed", want="a sound tensor", fix="see it"
        )

    return Decoder(name=logical, shape=shape, dtype=dtype, sources=(name,), operation="refused", decode=decode)


def _dropped(tensors: Mapping[str, TensorEntry], used: set[str]) -> dict[str, str]:
    reasons = (
        (KV_SCALE, "a scale of the cache, not part of the weights"),
        (ACTIVATION, "a scale of activations, not part of the weights"),
        (CALIBRATION, "a figure of the calibration, not part of the weights"),
    )
    return {
        name: reason for name in tensors if name not in used for pattern, reason in reasons if pattern.search(name)
    }  # fmt: skip


def _drop_warnings(tensors: Mapping[str, TensorEntry], dropped: Mapping[str, str]) -> list[Problem]:
    """One for each form of name: there may be one such scale for every expert."""
    forms: dict[tuple[str, str], list[str]] = {}
    for name, reason in dropped.items():
        forms.setdefault((name_form(name), reason), []).append(name)
    made = []
    for (form, reason), names in forms.items():
        shown, count = (form, f" ({len(names)} tensors)") if len(names) > 1 else (names[0], "")
        detail = f"{shown} is kept out: {reason}{count}"
        made.append(Problem(kind="kept_out", severity="warning", file=tensors[names[0]].file, tensor=shown, detail=detail))
    return made


def _plain_with_scale(
    tensors: Mapping[str, TensorEntry], coded: set[str], settings: Mapping[str, Any] | None, dropped: dict[str, str]
) -> list[Problem]:
    """Plain numbers with a scale beside them. Where the settings say that they were not compressed the scales only repeat how
    they were rounded; else it is not known whether they were applied."""
    if settings is None:
        return []
    uncompressed = str(settings.get("quantization_status") or "compressed").lower() not in ("compressed", "none")
    found = []
    for name, entry in tensors.items():
        owner = weight_of(name, tensors)
        if owner is None or owner in coded or not re.search(r"\.weight_(?:scale(?:_inv|_2)?|global_scale|zero_point)$", name):
            continue
        if name in dropped or not tensors[owner].dtype.startswith(("float", "bfloat")):
            continue
        if uncompressed:
            dropped[name] = f"{owner} is stored as plain numbers (quantization_status {settings['quantization_status']})"
            continue
        plain = f"{owner}, which is plain {tensors[owner].dtype}"
        detail = f"{name} {entry.dtype} {list(entry.shape)} is beside {plain}: whether it was applied is not declared"
        found.append(Problem(kind="scale_of_plain", severity="error", file=entry.file, tensor=name, detail=detail))
    return found


def _error(kind: str, name: str, tensors: Mapping[str, TensorEntry], detail: str) -> Problem:
    entry = tensors[name]
    text = f"{name} {entry.dtype} {list(entry.shape)}: {detail}"
    return Problem(kind=kind, severity="error", file=entry.file, tensor=name, detail=text)


def _shortened(found: list[Problem]) -> list[Problem]:
    """Problems one by one or, where a kind has many on one form of name, the first with how many there are."""
    forms: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in found:
        forms.setdefault((problem.kind, problem.severity, name_form(str(problem.tensor))), []).append(problem)
    made = []
    for (_, _, form), alike in forms.items():
        if len(alike) <= MAX_LISTED:
            made += alike
        else:
            text = f"{form}: {len(alike)} tensors, the first: {alike[0].detail}"
            made.append(replace(alike[0], tensor=form, detail=text))
    return made
