"""A finished calibration folder, opened: codes by parameter and rows, what each matrix cost, scales of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dayzero.calibrate.inputs import MatrixName
from dayzero.calibrate.layer_files import LayerCodes, finished_layer
from dayzero.calibrate.records import CalibrationRecord, LayerRecord, MatrixRecord
from dayzero.core.errors import DayZeroError
from dayzero.core.records import read_record
from dayzero.weights.quantize.codes import Codes
from dayzero.weights.quantize.presets import Preset

RECORD_FILE = "calibration.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibrated:
    """A finished folder. `transposed`: parameters kept as [..., input, output]; codes are of [output, input] matrices."""

    record: CalibrationRecord
    matrices: tuple[MatrixRecord, ...]
    transposed: frozenset[str]
    layer_codes: LayerCodes
    presets: Mapping[str, Preset]
    scaled: frozenset[str] = frozenset()  # parameters whose codes are of scaled rows or columns: not comparable by element
    unseen: tuple[str, ...] = ()  # parameters that no token's matrix product was seen to use: there are no codes of them

    def codes(self, parameter: str) -> Callable[[int, int], Codes] | None:
        """Codes of rows start to stop, counted over all matrices of the parameter; None where it was not calibrated."""
        count = self.layer_codes.matrices.get(parameter)
        if count is None:
            return None
        rows = len(self.layer_codes.read(MatrixName(parameter, 0), 0, None).codes)

        def read(start: int, stop: int) -> Codes:
            made = []
            while start < stop:
                index, first = divmod(start, rows)
                last = min(rows, first + stop - start)
                made.append(self.layer_codes.read(MatrixName(parameter, index), first, last))
                start += last - first
            if len(made) == 1:
                return made[0]
            zeros = [one.zeros for one in made if one.zeros is not None]
            return Codes(codes=torch.cat([one.codes for one in made]), scales=torch.cat([one.scales for one in made]),
                         zeros=torch.cat(zeros) if zeros else None)  # fmt: skip

        return read

    @property
    def plain(self) -> frozenset[str]:
        """Parameters that are not quantized and have other values than the release's: `layer_codes.read_plain` gives them, in
        the dtype of the plain weight. What is stored is the quantized model only with these."""
        return frozenset(self.layer_codes.plain)

    @property
    def input_scales(self) -> dict[str, float]:
        """Scale of a layer's input by parameter, for presets that want one: the largest input seen over the largest code."""
        scales: dict[str, float] = {}
        for one in self.matrices:
            preset = self.presets[one.parameter]
            if preset.activations == "tensor" and one.input_max > 0:
                scale = one.input_max / preset.code_range[1]
                scales[one.parameter] = max(scales.get(one.parameter, 0.0), scale)
        return scales

    @property
    def starved(self) -> list[MatrixRecord]:
        """Matrices that are data-free although they were to be calibrated."""
        return [one for one in self.matrices if one.method == "data-free" and self.record.settings.method != "data-free"]


def open_calibrated(folder: Path, presets: Mapping[str, Preset]) -> Calibrated:
    """Raises DayZeroError for a folder that is not finished, or made for other presets."""
    record = read_record(CalibrationRecord, folder / RECORD_FILE)
    wanted = {name: one.name for name, one in presets.items()}
    if wanted != record.presets:
        odd = sorted(set(wanted.items()) ^ set(record.presets.items()))
        raise DayZeroError(f"{folder} was calibrated for other presets", got=f"{len(odd)} differ: {odd[:3]}",
                           want="the same parameters and presets", fix="calibrate again")  # fmt: skip
    layers: list[LayerRecord] = []
    for station in record.layers:
        if not any(name.startswith(station + ".") for name in presets):
            continue
        found = finished_layer(folder, station, record.parts, record.fingerprint)
        if found is None:
            raise DayZeroError(f"{folder} is not finished", got=f"{station} is missing or broken", want="every layer",
                               fix="run the calibration again: finished layers are kept")  # fmt: skip
        layers += found
    return Calibrated(
        record=record, matrices=tuple(one for layer in layers for one in layer.matrices), presets=presets,
        transposed=frozenset(name for layer in layers for name in layer.transposed),
        layer_codes=LayerCodes(folder, layers, presets), scaled=frozenset(name for layer in layers for name in layer.scaled),
        unseen=tuple(sorted({name for layer in layers for name in layer.unseen})),
    )  # fmt: skip
