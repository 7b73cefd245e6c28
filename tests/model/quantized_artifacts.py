"""Artifacts whose weights are stored in few bits, made of plain ones, and what their numbers are: for tests."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dayzero.core.artifact import ArtifactLayout, ArtifactQuantization, QuantizedParameter
from dayzero.core.records import read_record, write_record
from dayzero.model.describe import describe
from dayzero.weights.quantize.codes import decode, quantize
from dayzero.weights.quantize.encoding import pack
from dayzero.weights.quantize.policy import Policy
from tests.model.engine_builders import make_artifact


def make_quantized_artifact(
    checkpoint: Path, folder: Path, name: str, *, transposed=(), input_scale=None, overrides=()
) -> tuple[Path, dict[str, torch.Tensor]]:
    """The artifact, and the numbers that its quantized weights stand for, in float32 in the class's layout."""
    plain = make_artifact(checkpoint, folder)
    artifact = folder / f"{plain.name}-{name}"
    shutil.rmtree(artifact, ignore_errors=True)
    shutil.copytree(plain, artifact)
    model = describe(checkpoint)
    choices = Policy(preset=name, overrides=tuple(overrides)).choose(model.parameters)
    layout = read_record(ArtifactLayout, artifact / "layout.json")
    listed, numbers, sizes = [], {}, {}
    for file in layout.files[0]:
        tensors = {}
        with safe_open(artifact / file.file, framework="pt") as shard:
            for parameter in shard.keys():  # noqa: SIM118
                values, choice = shard.get_tensor(parameter), choices.get(parameter)
                turned = any(part in parameter for part in transposed)
                columns = values.shape[-2 if turned else -1] if values.dim() > 1 else 0
                width = choice.preset.block[1] if choice and choice.preset and choice.preset.block[0] == 1 else 0
                if choice is None or choice.preset is None or (width and columns % width):
                    tensors[parameter] = values
                    continue
                made, numbers[parameter] = parts_of(values.transpose(-1, -2) if turned else values, choice.preset)
                numbers[parameter] = numbers[parameter].transpose(-1, -2) if turned else numbers[parameter]
                tensors |= {f"{parameter}{suffix}": part for suffix, part in made.items()}
                listed.append(
                    QuantizedParameter(
                        name=parameter, preset=choice.preset.name, shape=tuple(values.shape), transposed=turned,
                        input_scale=input_scale if choice.preset.activations == "tensor" else None,
                    )
                )  # fmt: skip
                dtype = str(values.dtype).removeprefix("torch.")
        save_file(tensors, artifact / file.file)
        sizes[file.file] = (artifact / file.file).stat().st_size
    record = json.loads((artifact / "layout.json").read_text())
    for entry in record["files"][0]:
        entry["num_bytes"] = sizes[entry["file"]]
    record["quantization"] = name
    (artifact / "layout.json").write_text(json.dumps(record))
    quantization = ArtifactQuantization(preset=name, dtype=dtype, parameters=tuple(listed))
    write_record(quantization, artifact / "quantization.json")
    assert listed, "nothing was quantized"
    return artifact, numbers


def parts_of(values: torch.Tensor, one) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Stored parts of [..., rows, columns] by suffix of the name, and the numbers that they stand for."""
    matrices = values.reshape(-1, *values.shape[-2:])
    made = [quantize(matrix, one, values.dtype) for matrix in matrices]
    outer = values.shape[:-2]

    def stacked(parts):
        return torch.stack(parts).reshape(*outer, *parts[0].shape).contiguous()

    parts = {"_packed" if one.packed else "": stacked([pack(codes.codes, one) for codes in made])}
    parts["_scale"] = stacked([codes.scales for codes in made])
    if not one.symmetric:
        parts["_zero_point"] = stacked([codes.zeros for codes in made])
    return parts, stacked([decode(codes, one) for codes in made])
