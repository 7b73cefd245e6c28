"""What an ordinary release folder is to hold: views by stored name, and where they read from. A release's, or an artifact's.

Of a release every tensor it has is written, whatever it is for: as it is stored, or in plain numbers of a dtype, or with the
matrices that a policy chooses in fewer bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dayzero.core.artifact import ArtifactQuantization, QuantizedParameter
from dayzero.core.model import Problem
from dayzero.model.headers import TensorEntry
from dayzero.model.provisional import model_dtype
from dayzero.weights.algebra import View
from dayzero.weights.changes import Changes
from dayzero.weights.decoding import Decoder
from dayzero.weights.forms.plain_config import plain_config
from dayzero.weights.loading import open_checkpoint
from dayzero.weights.places.stores import Source
from dayzero.weights.quantize.encoding import Quantized, ViewRows
from dayzero.weights.quantize.evidence import ErrorSums
from dayzero.weights.quantize.on_disk import choose_stored, quantization_config
from dayzero.weights.quantize.policy import Policy
from dayzero.weights.quantize.rewrite import Rewritten
from dayzero.weights.reading import ByteStore, SourceReader
from dayzero.weights.writing import MadeSource


@dataclass(kw_only=True, slots=True)
class Origin:
    """`views` by stored name, over `tensors` read through `store` and what `decoders` make of them. `config`: what config.json
    is to say; None: what it says."""

    store: ByteStore
    tensors: dict[str, TensorEntry]
    views: dict[str, View] = field(default_factory=dict)
    decoders: dict[str, Decoder] = field(default_factory=dict)
    settings: Path
    identity: str
    config: dict[str, Any] | None = None
    problems: list[Problem] = field(default_factory=list)
    is_release: bool = False
    dropped: dict[str, str] = field(default_factory=dict)  # stored tensor -> why it is not written
    quantized: QuantizedRelease | None = None

    @property
    def reader(self) -> SourceReader:
        return SourceReader(self.store, self.tensors, decoders=self.decoders)

    @property
    def errors(self) -> dict[str, ErrorSums]:
        """By stored name of codes, the sums of what their weight loses."""
        return self.quantized.rewritten.by_stored if self.quantized is not None else {}

    @property
    def made(self) -> dict[str, MadeSource]:
        return {
            name: MadeSource(operation=one.operation, sources=one.sources, shape=one.shape)
            for name, one in self.decoders.items()
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedRelease:
    """`record` is complete when everything was written."""

    policy: Policy
    dtype: str
    rewritten: Rewritten
    shapes: Mapping[str, tuple[int, ...]]
    kept: Mapping[str, str]
    facts: Mapping[str, str] = field(default_factory=dict)

    def record(self) -> ArtifactQuantization:
        weights = self.rewritten.weights.items()
        return ArtifactQuantization(
            preset=self.policy.preset, dtype=self.dtype, kept=dict(self.kept), calibration=dict(self.facts),
            parameters=tuple(
                QuantizedParameter(name=name, preset=one.preset.name, shape=self.shapes[name]) for name, one in weights
            ),
            errors=tuple(one.result() for one in self.rewritten.errors),
        )  # fmt: skip


def release_origin(source: Source, changes: Changes) -> Origin:
    """Raises DayZeroError for a release that is not sound, or not one that can be changed so."""
    release = source.release.require_weights()
    made = Origin(store=source.store, tensors=release.tensors, settings=source.settings, identity=release.source_hash,
                  is_release=True)  # fmt: skip
    made.problems += release.problems
    if changes.quantize is not None:
        return _quantized(source, made, changes.quantize, changes)
    if changes.dtype is None and source.given is None:
        made.views = {name: View.of(name, entry.shape, entry.dtype) for name, entry in release.tensors.items()}
        return made
    main = model_dtype(release)[0]
    dtype = changes.dtype or main
    decoded = source.decode(dtype, upcast_unscaled=changes.upcast_unscaled)
    _take(made, decoded.problems, decoded.dropped, decoded.decoders, source)
    for name, entry in decoded.tensors.items():
        view = View.of(name, entry.shape, entry.dtype)
        made.views[name] = view.cast(dtype) if entry.dtype == main else view
    if changes.dtype is not None or decoded.decoders:
        made.config = plain_config(release.config, dtype)
    return made


def _quantized(source: Source, made: Origin, policy: Policy, changes: Changes) -> Origin:
    release = source.release
    model = source.describe()
    decoded = source.decode(model.dtype, upcast_unscaled=changes.upcast_unscaled)
    checkpoint = open_checkpoint(release, model, source.store, decoded=decoded)
    _take(made, checkpoint.warnings, {}, checkpoint.decoders, source)
    made.dropped = {name: why for name, why in checkpoint.dropped.items() if name not in checkpoint.tensors}
    presets, kept = choose_stored(checkpoint.views, policy.choose(model.parameters), checkpoint.tensors)
    rows = ViewRows(SourceReader(source.store, release.tensors, decoders=checkpoint.decoders))
    rewritten = Rewritten()
    for name, entry in checkpoint.tensors.items():
        view = View.of(name, entry.shape, entry.dtype)
        if name not in presets:
            rewritten.views[name] = view
            continue
        sources = checkpoint.decoders[name].sources if name in checkpoint.decoders else (name,)
        codes = None if changes.given is None else changes.given.of_stored(name, checkpoint.views, checkpoint.transposed)
        weight = Quantized(name=name, view=view, preset=presets[name], sources=sources, codes=codes)
        rewritten.add(name, weight, rows, packed_zeros=True)
    made.views, made.decoders = rewritten.views, made.decoders | rewritten.decoders
    made.config = plain_config(release.config, model.dtype)
    made.config["quantization_config"] = quantization_config(presets, checkpoint.tensors)
    shapes = {name: entry.shape for name, entry in checkpoint.tensors.items()}
    made.quantized = QuantizedRelease(policy=policy, dtype=model.dtype, rewritten=rewritten, shapes=shapes, kept=kept,
                                      facts=changes.given.facts if changes.given is not None else {})  # fmt: skip
    return made


def _take(
    made: Origin, problems: tuple[Problem, ...], dropped: Mapping[str, str], decoders: Mapping[str, Decoder], source: Source
) -> None:
    from dayzero.model.release import damaged

    if errors := [problem for problem in problems if problem.severity == "error"]:
        raise damaged(errors, source.address)
    made.problems += problems
    made.dropped, made.decoders = dict(dropped), dict(decoders)
