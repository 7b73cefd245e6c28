"""Weights, a choice of presets and token sequences in; a folder of calibrated codes out, layer by layer.

The inputs of a layer's matrices are gathered with the layer's own weights, on what the layers before it give once they are
quantized; then its matrices are rounded, and what the quantized layer gives goes on to the next. One layer is in memory, with
sums for as many of its matrices as `statistics_bytes` has room for.

A run that was interrupted goes on: layers that are finished are only run, never rounded again. Several processes over one
shared folder each round their share of every layer's matrices (`part` of `parts`) and wait for the others' at its end; each
runs all sequences, so that what comes out is bit for bit what one process makes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from dayzero.calibrate.awq import absorb
from dayzero.calibrate.calibrated import RECORD_FILE
from dayzero.calibrate.gptq import Rounded, round_matrix
from dayzero.calibrate.inputs import InputWatch, LayerInputs, MatrixName, Seen, matrices_of
from dayzero.calibrate.layer_files import FOLDER, LayerCodes, finished_layer, publish_layer, record_path, write_matrices
from dayzero.calibrate.records import CalibrationRecord, LayerRecord, MatrixRecord, Settings
from dayzero.calibrate.skeleton import Provider, Skeleton
from dayzero.calibrate.streamed import Call, run_streamed
from dayzero.core.errors import DayZeroError
from dayzero.core.records import read_record, to_dict, write_record
from dayzero.weights.quantize.codes import Codes, decode, quantize
from dayzero.weights.quantize.presets import Preset

WAIT_S = 24 * 3600  # for another process's share of a layer
POLL_S = 0.2

Log = Callable[[str], None]


@dataclass(kw_only=True, slots=True)
class Calibration:
    """What is to be calibrated. `presets`: parameter -> preset; `scale_dtype`: what a parameter's scales are stored in, the
    dtype of its plain weight. `identity`: whatever else decides the result (hash of the source), for the fingerprint."""

    skeleton: Skeleton
    provider: Provider
    presets: Mapping[str, Preset]
    scale_dtype: Callable[[str], torch.dtype]
    chunks: Sequence[torch.Tensor]  # token ids [sequences, T]
    folder: Path
    settings: Settings = field(default_factory=Settings)
    data: Mapping[str, str] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    part: int = 0
    parts: int = 1
    log: Log = lambda text: None
    wait_s: float = WAIT_S

    @property
    def fingerprint(self) -> str:
        tokens = hashlib.sha256(b"".join(chunk.numpy().tobytes() for chunk in self.chunks)).hexdigest()
        shapes = [list(chunk.shape) for chunk in self.chunks]
        parts = {"settings": to_dict(self.settings), "presets": {name: one.name for name, one in sorted(self.presets.items())},
                 "identity": dict(self.identity), "tokens": tokens, "chunks": shapes}  # fmt: skip
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def calibrate_layers(what: Calibration) -> CalibrationRecord:
    """Fill `what.folder`. Raises DayZeroError where it holds another calibration, or another process does not answer."""
    if not 0 <= what.part < what.parts:
        raise DayZeroError("no such part", got=f"{what.part} of {what.parts}", want=f"0 to {what.parts - 1}",
                           fix="give each process a part of its own")  # fmt: skip
    run = _Run(what)
    record = CalibrationRecord(
        fingerprint=run.fingerprint, settings=what.settings, presets={name: one.name for name, one in what.presets.items()},
        data=dict(what.data), layers=tuple(what.skeleton.layers), parts=what.parts,
    )  # fmt: skip
    path = what.folder / RECORD_FILE
    if path.is_file() and (there := read_record(CalibrationRecord, path)).fingerprint != run.fingerprint:
        raise DayZeroError(f"{what.folder} holds another calibration", got=there.fingerprint[:12], want=run.fingerprint[:12],
                           fix="choose another folder, or remove it")  # fmt: skip
    (what.folder / FOLDER).mkdir(parents=True, exist_ok=True)
    write_record(record, path)
    what.skeleton.fill_resident(what.provider)
    run_streamed(what.skeleton, what.provider, what.chunks, visit=run.visit, spill=what.folder)
    return record


class _Run:
    def __init__(self, what: Calibration) -> None:
        self.what, self.fingerprint = what, what.fingerprint
        self._visited: set[str] = set()

    def visit(self, station: str, calls: Sequence[Call]) -> list[Any]:
        what = self.what
        parameters = what.skeleton.parameters_of(station)
        targets = {name: one for name, one in parameters.items() if name in what.presets}
        if targets:
            records = finished_layer(what.folder, station, what.parts, self.fingerprint)
            if records is None:
                self._calibrate(station, calls)
                records = self._all_parts(station)
            self._put_quantized(targets, records)
        return [call.run() for call in calls]

    def _calibrate(self, station: str, calls: Sequence[Call]) -> None:
        """Round this process's share of the layer's matrices and publish them."""
        what, started = self.what, time.monotonic()
        changed, notes = self._absorb(station, calls[0]) if what.settings.absorb else ({}, [])
        targets = {name: one for name, one in what.skeleton.parameters_of(station).items() if name in what.presets}
        plain = {name: values.to(what.scale_dtype(name)) for name, values in changed.items() if name not in targets}
        if finished := record_path(what.folder, station, what.part, what.parts):
            finished.unlink(missing_ok=True)  # of a file that is gone or broken
        reached, transposed = self._orientations(calls, targets)
        unseen = tuple(sorted(set(targets) - reached))
        shapes = {name: tuple(one.shape) for name, one in targets.items() if name in reached}
        every = [one for name, shape in shapes.items() for one in matrices_of(name, shape)]
        columns = {one: shapes[one.parameter][-2 if one.parameter in transposed else -1] for one in every}
        mine = _share(every, columns, shapes, what.part, what.parts)
        passes = _passes(mine, columns, what.settings.statistics_bytes)
        codes: dict[MatrixName, Codes] = {}
        records: list[MatrixRecord] = []
        for wanted in passes:
            inputs = LayerInputs()
            for call in calls:
                with InputWatch(targets, wanted=set(wanted).__contains__) as watch:
                    repeatable(call).run()
                inputs.add(watch)
            for name in wanted:
                made, record = self._round(name, targets[name.parameter], inputs, name.parameter in transposed, columns[name])
                codes[name] = made
                records.append(record)
                if (seen := inputs.seen.get(name)) is not None:
                    seen.products = None
        path = record_path(what.folder, station, what.part, what.parts).with_suffix(".safetensors")
        checksum = write_matrices(path, codes, what.presets, plain)
        publish_layer(
            what.folder,
            LayerRecord(station=station, fingerprint=self.fingerprint, file=path.name, checksum=checksum, part=what.part,
                        parts=what.parts, matrices=tuple(records), transposed=tuple(sorted(transposed)), unseen=unseen,
                        plain=tuple(sorted(plain)), scaled=tuple(sorted(set(changed) - set(plain))), notes=tuple(notes),
                        passes=len(passes), seconds=round(time.monotonic() - started, 3)),
        )  # fmt: skip
        starved = [f"{one.parameter}[{one.index}]" for one in records if one.method == "data-free"]
        told = f", data-free: {', '.join(starved[:8])}{' ...' if len(starved) > 8 else ''}" if starved else ""
        what.log(f"{station}: {len(records)} matrices in {time.monotonic() - started:.1f} s{told}")

    def _absorb(self, station: str, call: Call) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Move scales of inputs into what makes them, seen on one chunk; the layer then holds the new values."""
        skeleton, presets = self.what.skeleton, self.what.presets
        parameters = skeleton.parameters_of(station)
        if shared := [name for name in parameters if skeleton.is_shared(name)]:
            return {}, [f"no scales are moved: {shared[0]} is used by other layers too"]
        with InputWatch(parameters) as watch:
            repeatable(call).run()
        changed, notes = absorb(parameters, watch.seen, presets, self.what.scale_dtype, lambda: repeatable(call).run())
        for name, values in changed.items():
            skeleton.put(name, values)
        return changed, notes

    def _orientations(self, calls: Sequence[Call], targets: Mapping[str, torch.Tensor]) -> tuple[set[str], set[str]]:
        """Parameters that are multiplied by at all, and those of them that are kept as [..., input, output]. Most often one
        chunk shows all of them."""
        reached: set[str] = set()
        transposed: set[str] = set()
        for call in calls:
            if reached == set(targets):
                break
            with InputWatch(targets) as watch:
                repeatable(call).run()
            reached |= {name.parameter for name in watch.seen}
            transposed |= {name.parameter for name, one in watch.seen.items() if one.transposed}
        return reached, transposed

    def _round(
        self, name: MatrixName, values: torch.Tensor, inputs: LayerInputs, transposed: bool, columns: int
    ) -> tuple[Codes, MatrixRecord]:
        what, preset = self.what, self.what.presets[name.parameter]
        weight = matrix(values, name.index, transposed)
        dtype, settings = what.scale_dtype(name.parameter), what.settings
        seen = inputs.seen.get(name)
        tokens = round(seen.tokens) if seen is not None else 0
        reason = _why_data_free(seen, tokens, inputs.doubts.get(name.parameter), settings)
        largest = float(seen.largest.max()) if seen is not None else 0.0
        if reason or seen is None or seen.products is None or settings.method == "data-free":
            record = MatrixRecord(parameter=name.parameter, index=name.index, preset=preset.name, method="data-free",
                                  tokens=tokens, columns=columns, input_max=largest, reason=reason)  # fmt: skip
            return quantize(weight, preset, dtype), record
        made: Rounded = round_matrix(weight, seen.products, preset, dtype, search_scales=settings.search_scales,
                                     feedback=settings.method == "gptq", damping=settings.damping)  # fmt: skip
        notes = [*made.notes] + ([f"{made.dead_columns} columns had no input"] if made.dead_columns else [])
        if settings.method == "gptq" and tokens < columns:
            notes.append(f"fewer tokens than its {columns} columns: the damping decides much")
        record = MatrixRecord(
            parameter=name.parameter, index=name.index, preset=preset.name, method=settings.method, tokens=tokens,
            columns=columns, loss=made.loss, data_free_loss=made.data_free_loss, input_max=largest, reason="; ".join(notes),
        )  # fmt: skip
        return made.codes, record

    def _all_parts(self, station: str) -> list[LayerRecord]:
        what, until = self.what, time.monotonic() + self.what.wait_s
        while (records := finished_layer(what.folder, station, what.parts, self.fingerprint)) is None:
            if time.monotonic() > until:
                raise DayZeroError(f"another process has not finished its share of {station}", got=f"{what.wait_s:g} s waited",
                                   want=f"{what.parts} parts in {what.folder / FOLDER}",
                                   fix="start the missing parts again: finished layers are kept")  # fmt: skip
            time.sleep(POLL_S)
        return records

    def _put_quantized(self, targets: Mapping[str, torch.Tensor], records: Sequence[LayerRecord]) -> None:
        codes = LayerCodes(self.what.folder, records, self.what.presets)
        transposed = {name for record in records for name in record.transposed}
        for name in codes.plain:
            self.what.skeleton.put(name, codes.read_plain(name).float())
        for name, values in targets.items():
            if name not in codes.matrices:
                continue
            with torch.no_grad():
                made = values.clone()
                for index in range(codes.matrices[name]):
                    decoded = decode(codes.read(MatrixName(name, index)), self.what.presets[name], self.what.scale_dtype(name))
                    matrix(made, index, name in transposed).copy_(decoded)
            self.what.skeleton.put(name, made)


def matrix(values: torch.Tensor, index: int, transposed: bool) -> torch.Tensor:
    """One matrix [output, input] of a parameter, as a view."""
    one = values.reshape(-1, *values.shape[-2:])[index]
    return one.T if transposed else one


def repeatable(call: Call) -> Call:
    """The call with arguments of its own: a layer that writes into what it is given may be run again."""
    return Call(call.chunk, call.station, call.forward, _copied(call.args), _copied(call.kwargs))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_copied(item) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_copied(item) for item in value)
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return value


def _why_data_free(seen: Seen | None, tokens: int, doubt: str | None, settings: Settings) -> str:
    """The reason why a matrix has no inputs to calibrate with; "" when it has."""
    if doubt is not None:
        return doubt
    if seen is None:
        return "no token reached it"
    if tokens < settings.min_tokens:
        return f"{tokens} tokens reached it, fewer than {settings.min_tokens}"
    return ""


def _share(
    matrices: Sequence[MatrixName], columns: Mapping[MatrixName, int], shapes: Mapping[str, tuple[int, ...]], part: int,
    parts: int,
) -> list[MatrixName]:  # fmt: skip
    """The matrices of one of the processes: the costliest first, each to whom has least."""
    loads, chosen = [0.0] * parts, []
    costs = {one: columns[one] ** 2 * (columns[one] + prod(shapes[one.parameter][-2:]) / columns[one]) for one in matrices}
    for one in sorted(matrices, key=lambda name: (-costs[name], name)):
        least = loads.index(min(loads))
        loads[least] += costs[one]
        if least == part:
            chosen.append(one)
    return sorted(chosen)


def _passes(matrices: Sequence[MatrixName], columns: Mapping[MatrixName, int], room: int) -> list[list[MatrixName]]:
    """The matrices in groups whose sums have room; one that has not alone is a group of its own."""
    groups: list[list[MatrixName]] = [[]]
    used = 0
    for one in matrices:
        size = 4 * columns[one] ** 2
        if groups[-1] and used + size > room:
            groups.append([])
            used = 0
        groups[-1].append(one)
        used += size
    return groups
