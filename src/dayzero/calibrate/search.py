"""Sensitivities and a bound in, the precision of each role at the smallest size that meets the bound out.

Each role is quantized alone to each preset, once, and the divergence on a small held-out text is its sensitivity. Divergences
of different roles are taken to add up; with that every combination is priced without running it, exactly, role by role over
the combinations that nothing beats. The choice is then measured, and where the sum was too hopeful the search goes on with a
bound that allows for it. So a search costs a run per role and preset, not one per combination.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import torch

from dayzero.calibrate.calibrated import Calibrated
from dayzero.calibrate.effect import Effect, measure_sums
from dayzero.calibrate.skeleton import Provider, Skeleton
from dayzero.calibrate.variants import quantized_provider
from dayzero.core.errors import DayZeroError
from dayzero.core.records import STRICT
from dayzero.weights.quantize.presets import WORD_BITS, Preset

PLAIN = "none"
# Models that run side by side while sensitivities are measured: one layer of each is in memory.
TOGETHER = 4
TRIES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """`kl`: mean divergence per token with this role alone in this preset. `num_bytes`: what the role then takes."""

    __pydantic_config__ = STRICT
    role: str
    preset: str
    num_bytes: int
    kl: float
    effect: Effect | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """A preset for each role. `measured`: the whole model's effect, where it was run."""

    __pydantic_config__ = STRICT
    presets: dict[str, str]
    num_bytes: int
    predicted_kl: float
    measured: Effect | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class QualitySearch:
    """`chosen`: the smallest that was measured to meet the bound. `frontier`: combinations that nothing beats in both size and
    predicted divergence, smallest first."""

    SCHEMA: ClassVar[str] = "dayzero.quality-search/1"
    __pydantic_config__ = STRICT
    max_kl: float
    chosen: Combination
    frontier: tuple[Combination, ...]
    tried: tuple[Combination, ...]
    sensitivities: tuple[Sensitivity, ...]


@dataclass(kw_only=True, slots=True)
class Subject:
    """`skeletons` makes an empty skeleton for each model that runs; `roles`: role -> its parameters' names and shapes;
    `calibrated`: preset -> a calibration of all roles with it, where there is one."""

    skeletons: Callable[[], Skeleton]
    provider: Provider
    roles: Mapping[str, Mapping[str, tuple[int, ...]]]
    scale_dtype: Callable[[str], torch.dtype]
    transposed: frozenset[str]
    chunks: Sequence[torch.Tensor]
    calibrated: Mapping[str, Calibrated]

    def variant(self, presets: Mapping[str, Preset]) -> Provider:
        """Roles in these presets; others plain."""
        made = self.provider
        for role, one in presets.items():
            made = quantized_provider(made, dict.fromkeys(self.roles[role], one), self.scale_dtype, transposed=self.transposed,
                                      calibrated=self.calibrated.get(one.name))  # fmt: skip
        return made

    def effects(self, variants: Sequence[Mapping[str, Preset]]) -> list[Effect]:
        made: list[Effect] = []
        for start in range(0, len(variants), TOGETHER):
            pairs = [(self.skeletons(), self.variant(one)) for one in variants[start : start + TOGETHER]]
            made += [sums.effect() for sums in measure_sums(self.skeletons(), self.provider, pairs, self.chunks)]
        return made

    def num_bytes(self, role: str, preset: Preset | None) -> int:
        return sum(
            stored_bytes(shape, preset, self.scale_dtype(name), turned=name in self.transposed)
            for name, shape in self.roles[role].items()
        )


def measure_sensitivities(subject: Subject, presets: Mapping[str, Preset]) -> list[Sensitivity]:
    """Every role alone in every preset, and plain."""
    cases = [(role, one) for role in subject.roles for one in presets.values()]
    effects = subject.effects([{role: one} for role, one in cases])
    made = [Sensitivity(role=role, preset=PLAIN, num_bytes=subject.num_bytes(role, None), kl=0.0) for role in subject.roles]
    return made + [
        Sensitivity(role=role, preset=one.name, num_bytes=subject.num_bytes(role, one), kl=effect.kl.value, effect=effect)
        for (role, one), effect in zip(cases, effects, strict=True)
    ]


def search_quality(
    subject: Subject, presets: Mapping[str, Preset], sensitivities: Sequence[Sensitivity], *, max_kl: float
) -> QualitySearch:
    """The smallest combination whose measured divergence is at most `max_kl`. Raises DayZeroError when plain weights are all
    that meets it within a few tries."""
    frontier = best_combinations(sensitivities)
    bound = max_kl
    tried: dict[tuple[tuple[str, str], ...], Combination] = {}
    for _ in range(TRIES):
        found = next((one for one in frontier if one.predicted_kl <= bound and _key(one) not in tried), None)
        if found is None:
            break
        wanted = {role: presets[name] for role, name in found.presets.items() if name != PLAIN}
        if not wanted:
            break
        effect = subject.effects([wanted])[0]
        measured = replace(found, measured=effect)
        tried[_key(found)] = measured
        if effect.kl.value <= max_kl:
            break
        # As much as the sum fell short here it is taken to fall short everywhere.
        bound = min(bound, found.predicted_kl) * max_kl / effect.kl.value
    good = [one for one in tried.values() if one.measured is not None and one.measured.kl.value <= max_kl]
    if not good:
        raise DayZeroError("no precision was found that meets the bound",
                           got=", ".join(f"{one.measured.kl.value:.2g}" for one in tried.values() if one.measured) or "none",
                           want=f"KL of at most {max_kl:g}", fix="raise the bound, or keep plain weights")  # fmt: skip
    drawn = tuple(tried.get(_key(one), one) for one in frontier)
    return QualitySearch(max_kl=max_kl, chosen=min(good, key=lambda one: one.num_bytes), frontier=drawn,
                         tried=tuple(tried.values()), sensitivities=tuple(sensitivities))  # fmt: skip


def _key(one: Combination) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(one.presets.items()))


def best_combinations(sensitivities: Sequence[Sensitivity]) -> list[Combination]:
    """All combinations that no other beats in both size and summed divergence, smallest first. Exact: what is beaten in some
    of the roles is beaten with any choice of the others."""
    roles: dict[str, list[Sensitivity]] = {}
    for one in sensitivities:
        roles.setdefault(one.role, []).append(one)
    front = [Combination(presets={}, num_bytes=0, predicted_kl=0.0)]
    for role, choices in roles.items():
        grown = [
            Combination(presets=one.presets | {role: choice.preset}, num_bytes=one.num_bytes + choice.num_bytes,
                        predicted_kl=one.predicted_kl + max(choice.kl, 0.0))
            for one in front for choice in choices
        ]  # fmt: skip
        front, least = [], float("inf")
        for made in sorted(grown, key=lambda one: (one.num_bytes, one.predicted_kl)):
            if made.predicted_kl < least:
                front.append(made)
                least = made.predicted_kl
    return front


def stored_bytes(shape: tuple[int, ...], preset: Preset | None, dtype: torch.dtype, *, turned: bool = False) -> int:
    """Bytes of a parameter [..., output, input] (`turned`: [..., input, output]) in a preset's stored form."""
    if preset is None:
        return prod(shape) * dtype.itemsize
    rows, columns = (shape[-1], shape[-2]) if turned else shape[-2:]
    height, width = preset.block
    blocks = -(-rows // (height or rows)) * -(-columns // (width or columns))
    words = rows * -(-columns // preset.word_columns)
    code_bytes = words * (WORD_BITS // 8 if preset.form == "pack-quantized" else 1)
    scale_bytes = blocks * (1 if preset.scale_dtype == "uint8" else dtype.itemsize)
    return prod(shape[:-2]) * (code_bytes + scale_bytes + (0 if preset.symmetric else blocks))
