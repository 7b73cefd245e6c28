"""Release -> artifact -> proof -> Hugging Face folder -> the same tensors bit for bit, for one type and many layouts.

Used by the sample in tests/model and by the whole sweep in benchmarks. An outcome is "exact", "illegal" with the constraint
that forbids the layout, or "failed" with what went wrong.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Layout
from dayzero.core.sharding import EXPERT_ROLES
from dayzero.weights.convert import convert
from dayzero.weights.placement import owned_parameters
from dayzero.weights.proof.verify import prove
from dayzero.weights.to_hf import export

DEGREES = [(tp, ep, pp) for tp in (1, 2, 4) for ep in (1, 2, 4) for pp in (1, 2)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    layout: str
    state: str  # "exact", "illegal", "failed"
    detail: str = ""


def has_experts(model: ModelDescription) -> bool:
    return any(parameter.role in EXPERT_ROLES and parameter.shard.expert_dim is not None for parameter in model.parameters)


def layout_of(model: ModelDescription, tp: int, ep: int, pp: int) -> Layout | str:
    """The layout of these degrees with the fewest devices, or why there is none."""
    if ep > 1 and not has_experts(model):
        return "no experts to spread"
    layers = model.dimensions.num_layers
    if pp > layers:
        return f"{layers} layers for {pp} stages"
    stages = () if pp == 1 else ((0, layers - layers // 2), (layers - layers // 2, layers))
    layout = Layout(tp=tp, ep=ep, dp=max(1, ep // tp), pp=pp, stages=stages)
    try:
        for rank in range(layout.num_devices):
            owned_parameters(model, layout, rank)
    except DayZeroError as error:
        return f"{error.what}: {error.got}"
    return layout


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def round_trips(
    source: Path, model: ModelDescription, work: Path, degrees: list[tuple[int, int, int]] = DEGREES
) -> Iterator[Outcome]:
    """One outcome for each of the degrees. `work` is emptied after each."""
    original = tensors_of(source)
    for tp, ep, pp in degrees:
        name, layout = f"tp{tp} ep{ep} pp{pp}", layout_of(model, tp, ep, pp)
        if isinstance(layout, str):
            yield Outcome(layout=name, state="illegal", detail=layout)
            continue
        try:
            wrong = difference(source, model, layout, work, original)
        except Exception as error:  # whatever stops a type is its result in the table
            wrong = f"{type(error).__name__}: {' '.join(str(error).split())}"
        shutil.rmtree(work, ignore_errors=True)
        yield Outcome(layout=name, state="failed" if wrong else "exact", detail=wrong)


def difference(source: Path, model: ModelDescription, layout: Layout, work: Path, original: dict[str, torch.Tensor]) -> str:
    """What is not the same after the round trip, "" where everything is."""
    work.mkdir(parents=True, exist_ok=True)
    report = convert(source, model, layout, work / "artifact", workers=1)
    shown = prove(work / "artifact", source)
    if shown.problems:
        return "; ".join(problem.detail for problem in shown.problems[:3])
    if len(shown.proved) != 4 or shown.not_proved:
        return f"not proved: {shown}"
    export(work / "artifact", work / "back", workers=1)
    back = tensors_of(work / "back")
    wanted = {name: tensor for name, tensor in original.items() if name not in report.ledger.dropped}
    if back.keys() != wanted.keys():
        return f"names differ: {sorted(back.keys() ^ wanted.keys())[:4]}"
    unlike = [name for name in wanted if back[name].dtype != wanted[name].dtype or not same_bits(back[name], wanted[name])]
    return f"bits differ: {unlike[:4]}" if unlike else ""


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(
        first.contiguous().reshape(-1).view(torch.uint8), second.contiguous().reshape(-1).view(torch.uint8)
    )
