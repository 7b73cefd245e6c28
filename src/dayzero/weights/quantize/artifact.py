"""An open checkpoint and a policy in, the checkpoint as an artifact stores it in fewer bits out, and what is told of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dayzero.core.artifact import ArtifactQuantization, QuantizedParameter
from dayzero.core.model import ModelDescription
from dayzero.weights.loading import CheckpointSource
from dayzero.weights.quantize.encoding import ViewRows
from dayzero.weights.quantize.given import GivenCodes
from dayzero.weights.quantize.policy import Choice, Policy
from dayzero.weights.quantize.presets import preset
from dayzero.weights.quantize.rewrite import Rewritten, quantized_model
from dayzero.weights.writing import MadeSource


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedCheckpoint:
    """`model` and `checkpoint` have stored parts for parameters; `record` is complete when everything was written."""

    model: ModelDescription
    checkpoint: CheckpointSource
    rewritten: Rewritten
    choices: Mapping[str, Choice]
    plain: ModelDescription
    preset: str = ""
    given: GivenCodes | None = None

    def record(self) -> ArtifactQuantization:
        shapes = {one.name: one.shape for one in self.plain.parameters}
        scales = self.given.input_scales if self.given is not None else {}
        return ArtifactQuantization(
            preset=self.preset,
            dtype=self.plain.dtype,
            parameters=tuple(
                QuantizedParameter(name=name, preset=one.preset.name, shape=shapes[name],
                                   transposed=name in self.checkpoint.transposed, input_scale=scales.get(name))
                for name, one in self.rewritten.weights.items()
            ),
            kept={name: one.reason for name, one in self.choices.items() if one.preset is None}
            | self.rewritten.kept,
            errors=tuple(one.result() for one in self.rewritten.errors),
            calibration=dict(self.given.facts) if self.given is not None else {},
        )  # fmt: skip


def quantize_checkpoint(
    checkpoint: CheckpointSource, model: ModelDescription, policy: Policy, *, given: GivenCodes | None = None
) -> QuantizedCheckpoint:
    """Raises DayZeroError for a rule that speaks of nothing."""
    return replace(quantize_chosen(checkpoint, model, policy.choose(model.parameters), given=given), preset=policy.preset)


def recorded_choices(record: ArtifactQuantization, model: ModelDescription) -> dict[str, Choice]:
    """The choices that an artifact of this model was made by."""
    chosen = {one.name: preset(one.preset) for one in record.parameters}
    return {one.name: Choice(preset=chosen.get(one.name), reason="recorded") for one in model.parameters}


def quantize_chosen(
    checkpoint: CheckpointSource, model: ModelDescription, choices: Mapping[str, Choice], *, given: GivenCodes | None = None
) -> QuantizedCheckpoint:
    """As `quantize_checkpoint`, parameter by parameter."""
    sources = {name: stored_behind(checkpoint, name) for name in checkpoint.views}
    made_model, made = quantized_model(
        model, checkpoint.views, choices, ViewRows(checkpoint.reader()), sources=sources, transposed=checkpoint.transposed,
        codes=given.codes if given is not None else {},
    )  # fmt: skip
    origins = {
        name: MadeSource(operation=one.operation, sources=one.sources, shape=one.shape) for name, one in made.decoders.items()
    }
    changed = replace(
        checkpoint, views=made.views, decoders=checkpoint.decoders | made.decoders, made=checkpoint.made | origins
    )
    return QuantizedCheckpoint(model=made_model, checkpoint=changed, rewritten=made, choices=choices, plain=model, given=given)


def stored_behind(checkpoint: CheckpointSource, parameter: str) -> tuple[str, ...]:
    """The stored tensors that a parameter's elements come from."""
    found: dict[str, None] = {}
    for piece in checkpoint.views[parameter].pieces:
        made = checkpoint.made.get(piece.source)
        found.update(dict.fromkeys(made.sources if made is not None else (piece.source,)))
    return tuple(found)
