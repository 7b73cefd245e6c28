"""What becomes of a release's numbers on their way: asked for by the user, part of what an artifact is named by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dayzero.core.records import to_dict
from dayzero.weights.quantize.given import GivenCodes
from dayzero.weights.quantize.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """`dtype`: what tensors of the release's main dtype become. `upcast_unscaled`: FP8 weights without a scale are taken as
    they are. `allow_pickle`: pickle checkpoints are read, by ranges. `accept_values`: what the values say against a checkpoint
    is told and no reason to stop. Stored codes become plain numbers in any case; `quantize` makes codes of them again, `given`
    are those that calibration chose."""

    dtype: str | None = None
    quantize: Policy | None = None
    upcast_unscaled: bool = False
    allow_pickle: bool = False
    accept_values: bool = False
    given: GivenCodes | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the bytes of the result; nothing that is not asked for appears."""
        made: dict[str, Any] = {}
        if self.dtype is not None:
            made["dtype"] = self.dtype
        if self.quantize is not None:
            made["quantization"] = to_dict(self.quantize)
        if self.given is not None:
            made["calibration"] = dict(self.given.facts)
        if self.upcast_unscaled:
            made["upcast_unscaled"] = True
        return made


NO_CHANGES = Changes()
