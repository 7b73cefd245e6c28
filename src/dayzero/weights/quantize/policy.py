"""Which parameters are quantized to what, by what they are for. No torch.

Matrices of attention, of dense and expert layers and of the linear parts of recurrent mixers are; everything that steers
(routers, their corrections, indexers, sinks), scales (norms), convolves or holds a state's constants stays in its own dtype,
and so do embeddings, the head, towers and draft layers. `keep` and `overrides` change that by role or by name.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Parameter
from dayzero.core.records import STRICT
from dayzero.weights.quantize.presets import Preset, preset

QUANTIZED_ROLES = frozenset({"attention", "mlp", "expert", "shared_expert", "ssm"})
# Roles whose parameters can be matrices of linear modules, and may be quantized when asked for by role or name.
POSSIBLE_ROLES = QUANTIZED_ROLES | {"head", "router", "indexer", "mtp", "tower", "projector", "other"}
FLOATS = frozenset({"float32", "float16", "bfloat16"})
# What a state-space mixer keeps beside its projections is no matrix of a linear layer, whatever its shape.
STATE_CONSTANT = re.compile(r"(^|\.)(A_log|A|D|dt_bias|dt_proj|x_proj|conv1d|time_[a-z_]+)(\.|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """`preset` None: stays as it is, and `reason` says why."""

    preset: Preset | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """`keep`: roles, names or patterns that stay high. `overrides`: the same to a preset's name, or "none". The most special
    rule wins: a name before a role, an override before `keep`."""

    __pydantic_config__ = STRICT
    preset: str
    keep: tuple[str, ...] = ()
    overrides: tuple[tuple[str, str], ...] = ()

    def choose(self, parameters: Iterable[Parameter]) -> dict[str, Choice]:
        """A choice for each parameter. Raises DayZeroError for an unknown preset, or a pattern that nothing matches."""
        main = preset(self.preset)
        wanted = {pattern: None if name == "none" else preset(name) for pattern, name in self.overrides}
        parameters = list(parameters)
        unmatched = {*self.keep, *wanted} - {
            pattern for pattern in (*self.keep, *wanted) for one in parameters if matches(pattern, one)
        }
        if unmatched:
            raise DayZeroError("a rule of the quantization speaks of no parameter", got=", ".join(sorted(unmatched)),
                               want="a role, or a name or pattern of a parameter",
                               fix="see the names and roles with `dayzero inspect --json`")  # fmt: skip
        return {one.name: self._choice(one, main, wanted) for one in parameters}

    def _choice(self, one: Parameter, main: Preset, wanted: Mapping[str, Preset | None]) -> Choice:
        if (why := not_a_matrix(one)) is not None:
            return Choice(preset=None, reason=why)
        for pattern in sorted(wanted, key=lambda text: text == one.role):  # names before roles
            if matches(pattern, one):
                return Choice(preset=wanted[pattern], reason=f"asked for: {pattern}")
        for pattern in self.keep:
            if matches(pattern, one):
                return Choice(preset=None, reason=f"kept: {pattern}")
        if one.role not in QUANTIZED_ROLES:
            return Choice(preset=None, reason=f"role {one.role} stays high")
        return Choice(preset=main, reason=f"role {one.role}")


def matches(pattern: str, one: Parameter) -> bool:
    """Whether a rule speaks of a parameter: its role, its name, a glob of its name, or `re:` and an expression."""
    if pattern.startswith("re:"):
        return re.search(pattern[3:], one.name) is not None
    return pattern in (one.role, one.name) or fnmatch.fnmatchcase(one.name, pattern)


def not_a_matrix(one: Parameter) -> str | None:
    """Why this can not be quantized whatever is asked for; None when it can."""
    leaf = one.name.rpartition(".")[2]
    if one.is_buffer or one.dtype not in FLOATS:
        return "no floating weight"
    if one.tied_to is not None:
        return f"shares {one.tied_to}"
    if len(one.shape) < 2 or min(one.shape[-2:]) < 2:
        return "no matrix"
    if one.role not in POSSIBLE_ROLES:
        return f"role {one.role} stays high"
    if one.role == "ssm" and STATE_CONSTANT.search(one.name):
        return "a constant of the state"
    if one.role == "expert":
        return "a bias" if "bias" in leaf else None
    return None if leaf == "weight" and len(one.shape) == 2 else "no weight of a linear layer"


def presets_used(choices: Mapping[str, Choice]) -> Sequence[Preset]:
    return list({one.preset.name: one.preset for one in choices.values() if one.preset is not None}.values())
