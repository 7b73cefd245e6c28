"""Plan presets for an announced architecture, before its release: a range of sizes, each described, planned and written down.

Goes in: a `Family`, a target, sizes, and how to describe a configuration from its keys (a callable, since planning knows no
model code). Comes out: `Preset`s and their YAML: the layout as plan options that can be given on the day, its reasons, how much
the real model may differ before the layout no longer holds, and what to check first. Deliberately not done: guessing what the
release will look like beyond the family's rules; every preset says what it assumed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Layout, Plan
from dayzero.core.records import STRICT, record_json
from dayzero.core.target import Target, Workload
from dayzero.core.units import format_bytes, format_count
from dayzero.plan.family import Family, Scaled, Scaler, parse_size
from dayzero.plan.options import PlanOptions
from dayzero.plan.planner import make_plan

Describe = Callable[[Mapping[str, Any]], ModelDescription]

DEFAULT_SIZES = tuple(round(size * 1e12) for size in (0.5, 0.75, 1, 1.5, 2, 3, 4))


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One size. `options` are plan options to give on the day (`--preset FILE`); empty where nothing could be planned."""

    SCHEMA: ClassVar[str] = "dayzero.preset/1"
    __pydantic_config__ = STRICT

    name: str
    family: str
    target: str
    wanted_parameters: int
    parameters: int
    active_parameters: int
    weights_dtype: str
    feasible: bool
    devices: int
    options: dict[str, Any]
    figures: dict[str, Any]
    changed: dict[str, tuple[int, int]]  # key -> base, here
    reasons: tuple[str, ...]
    tune: tuple[str, ...]
    assumed: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)


def parse_sizes(text: str) -> tuple[int, ...]:
    """`0.5T,1T,2T` -> those; `0.5T-4T` -> both and the usual ones between."""
    low, dash, high = text.partition("-")
    if dash:
        ends = parse_size(low), parse_size(high)
        return tuple(sorted({*ends, *(size for size in DEFAULT_SIZES if ends[0] < size < ends[1])}))
    return tuple(parse_size(part) for part in text.split(","))


def prepare(
    family: Family,
    target: Target,
    sizes: Sequence[int] = (),
    *,
    describe: Describe,
    workload: Workload | None = None,
    options: PlanOptions | None = None,
) -> tuple[Preset, ...]:
    """A preset per size and per weights dtype of the family (the configuration's own where none is announced).

    A size that cannot be planned is a preset that says why. Raises DayZeroError for a family that cannot be scaled.
    """
    scaler = Scaler(family, lambda config: describe(config).total_parameters)
    dtypes: tuple[str | None, ...] = family.weights_dtypes or (None,)
    made = []
    for size in sizes or family.sizes or DEFAULT_SIZES:
        scaled = scaler.scaled(size)
        model = describe(scaled.config)
        for dtype in dtypes:
            asked = options or PlanOptions()
            asked = replace(asked, weights_dtype=dtype) if dtype else asked
            made.append(_preset(family, target, size, scaled, model, workload or Workload(), asked))
    return tuple(made)


def _preset(
    family: Family, target: Target, size: int, scaled: Scaled, model: ModelDescription, workload: Workload, asked: PlanOptions
) -> Preset:
    name = f"{family.name}-{format_count(size)}" + (f"-{asked.weights_dtype}" if asked.weights_dtype else "")
    model = replace(model, name=name)
    common: dict[str, Any] = {
        "name": name, "family": family.name, "target": target.id, "wanted_parameters": size, "parameters": scaled.parameters,
        "active_parameters": model.active_parameters, "changed": scaled.changed, "config": scaled.config,
        "assumed": (*scaled.notes, *_assumed(model, family)),
    }  # fmt: skip
    try:
        plan = make_plan(model, target, workload, asked)
    except DayZeroError as error:
        told = f"{error.what}: got {error.got}, wanted {error.want}"
        return Preset(**common, feasible=False, devices=0, weights_dtype=asked.weights_dtype or model.dtype, options={},
                      figures={}, reasons=(told,), tune=(error.fix,))  # fmt: skip
    return Preset(**common, feasible=plan.feasible, devices=plan.devices, weights_dtype=plan.weights_dtype,
                  options=plan_options(plan, asked), figures=_figures(plan, model), reasons=plan.reasons,
                  tune=tune_on_the_day(plan, model))  # fmt: skip


def plan_options(plan: Plan, asked: PlanOptions) -> dict[str, Any]:
    """The chosen layout as plan options: what fixes it, and what was asked for beside."""
    layout = plan.layout
    chosen: dict[str, Any] = {"devices": plan.devices, "tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep,
                              "cp": layout.cp_devices, "dcp": layout.cp_in_tp, "sp": layout.sp, "context": plan.context_tokens,
                              "concurrency": plan.concurrency, "memory_fraction": plan.memory_fraction}  # fmt: skip
    given = {key: value for key, value in record_json(asked).items() if value != record_json(PlanOptions())[key]}
    return given | chosen


def _figures(plan: Plan, model: ModelDescription) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "weights_bytes_per_device": plan.weights_bytes_per_device,
        "cache_bytes_per_token_per_device": plan.cache_bytes_per_token_per_device,
        "admissible_tokens": plan.admissible_tokens,
        "release_bytes": model.checkpoint_bytes,
        "spare_bytes_per_device": spare_bytes(plan),
    }
    for name, estimate in (("prefill_s", plan.prefill), ("decode_s", plan.decode)):
        if estimate is not None:
            figures[name] = [estimate.low_s, estimate.high_s]
    return figures


def spare_bytes(plan: Plan) -> int:
    """What the fullest rank has left beside everything the plan asks for; negative where it is short."""
    return min((rank.budget_bytes - rank.total() for rank in plan.ledger), default=0)


def tune_on_the_day(plan: Plan, model: ModelDescription) -> tuple[str, ...]:
    """What to compare with the real configuration first, and how far it may be off before this layout no longer holds."""
    layout, dims, spare = plan.layout, model.dimensions, spare_bytes(plan)
    lines = []
    if plan.weights_bytes_per_device:
        share = spare / plan.weights_bytes_per_device
        lines.append(
            f"weights may be {share:.0%} larger per card ({format_bytes(spare)} is spare on the fullest rank); beyond that "
            "give --devices the next count of the reasons, or a smaller --weights-dtype"
            if spare >= 0
            else f"short by {format_bytes(-spare)} per card: take one of the changes in the reasons"
        )
    lines += _divisors(layout, model)
    lines.append(f"positions: {plan.context_tokens} tokens were planned; the release may state fewer or more (--context)")
    if any("unverified" in line for line in plan.rests_on):
        lines.append("figures of the card are unverified: `dayzero targets measure` on one, and give that file as --target")
    if plan.decode is not None:
        lines.append(
            f"a decode step was predicted at {plan.decode.low_s * 1e3:.3g} to {plan.decode.high_s * 1e3:.3g} ms: the first "
            "bench narrows it for every later plan on this target"
        )
    if dims.num_mtp_layers:
        lines.append(f"{dims.num_mtp_layers} draft layers are not in the weights above unless the engine loads them")
    return tuple(lines)


def _divisors(layout: Layout, model: ModelDescription) -> list[str]:
    """The numbers of the real configuration that this layout divides."""
    dims, lines = model.dimensions, []
    if layout.tp > 1 and dims.num_attention_heads:
        lines.append(f"attention heads: {dims.num_attention_heads} were assumed, tp={layout.tp} must divide them")
        keys = dims.num_key_value_heads or 0
        if 0 < keys < dims.num_attention_heads and keys % layout.tp:
            lines.append(f"key/value heads: {keys} were assumed, fewer than tp={layout.tp}: each is held more than once")
    if layout.ep > 1:
        lines.append(f"experts: {dims.num_experts} were assumed, ep={layout.ep} must divide them")
    if layout.expert_tp > 1 and dims.num_experts:
        lines.append(f"width of an expert: {layout.expert_tp} ranks share one, in whole quantization blocks")
    if layout.pp > 1:
        lines.append(f"layers: {dims.num_layers} were assumed in {layout.pp} stages; the cut is made anew for the real depth")
    return lines


def _assumed(model: ModelDescription, family: Family) -> tuple[str, ...]:
    found = [problem.detail for problem in model.problems if problem.severity == "warning"]
    if not model.quantization and not family.weights_dtypes:
        found.append(f"the release is taken to be stored in {model.dtype}: name others as weights_dtypes in the family file")
    return tuple(dict.fromkeys(found))


def preset_files(presets: Sequence[Preset]) -> dict[str, str]:
    """File name -> YAML. The first lines say in words what the file is for."""
    import yaml

    files = {}
    for preset in presets:
        head = (f"# {preset.name} on {preset.target}: {format_count(preset.parameters)} parameters, "
                f"{format_count(preset.active_parameters)} active, {preset.weights_dtype}, "
                + (f"{preset.devices} cards\n" if preset.feasible else "does not fit\n")
                + "# A plan made before the release, to be tuned on the day: see `tune`, then `assumed`.\n")  # fmt: skip
        files[f"{preset.name}.yaml"] = head + yaml.safe_dump(record_json(preset), sort_keys=False, width=120)
    return files
