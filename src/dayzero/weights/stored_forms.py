"""A quantized release's headers and settings in, one `Decoder` for each tensor that is stored in another form out."""

from __future__ import annotations

from dataclasses import dataclass, field

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.model.headers import TensorEntry
from dayzero.model.release import Release
from dayzero.model.stored.quantization import quantization_settings
from dayzero.weights.decoding import Decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """A checkpoint as it would be without quantization: `tensors` by the names a plain one would have, of which those in
    `decoders` are made from stored tensors. Scales and their like appear only as sources of decoders."""

    tensors: dict[str, TensorEntry]
    decoders: dict[str, Decoder] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def decode_stored(release: Release, dtype: str) -> Decoded:
    """The release in numbers of `dtype`; plain tensors keep theirs. No tensor is read here, but for stored shapes.

    Raises DayZeroError where the settings name a form whose meaning is not known.
    """
    settings = quantization_settings(release.config, release.quantization_file)
    if settings is not None:
        raise DayZeroError(f"{release.name} is stored quantized", got=str(settings)[:200], want="a release in bf16, fp16 or fp32",
                           fix="quantized releases cannot be converted by this version")  # fmt: skip
    return Decoded(tensors=release.tensors)
