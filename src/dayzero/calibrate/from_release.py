"""A release folder in, what calibration and measuring run on out: an empty instance, its weights by name, and the texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dayzero.calibrate.calibrated import Calibrated, open_calibrated
from dayzero.calibrate.effect import Effect, measure_effect
from dayzero.calibrate.records import Settings
from dayzero.calibrate.run import Calibration, Log, calibrate_layers
from dayzero.calibrate.skeleton import Provider, Skeleton, build_skeleton
from dayzero.calibrate.streamed import split_chunks
from dayzero.calibrate.text import Sequences, read_sequences, release_encoder
from dayzero.calibrate.variants import quantized_provider
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.model.classes import text_config
from dayzero.model.release import Release
from dayzero.model.resolve import Resolved, resolve
from dayzero.weights.copying import BlockCopier
from dayzero.weights.loading import CheckpointSource, open_checkpoint
from dayzero.weights.quantize.policy import Policy
from dayzero.weights.quantize.presets import Preset
from dayzero.weights.symbolic import torch_dtype

SEQUENCE_TOKENS = 512
CALIBRATION_SEQUENCES, HELD_OUT_SEQUENCES = 128, 32
CHUNK_SEQUENCES = 8


@dataclass(kw_only=True, slots=True)
class Opened:
    """`provider` reads a parameter each time it is asked; `dtype_of` is the dtype of its plain weight."""

    release: Release
    config: object
    source: CheckpointSource
    provider: Provider

    def skeleton(self) -> Skeleton:
        return Skeleton(build_skeleton(self.config))

    def dtype_of(self, name: str) -> torch.dtype:
        return torch_dtype(self.source.views[name].dtype)


def open_weights(release: Release, model: ModelDescription) -> Opened:
    """Raises DayZeroError as `open_checkpoint` does."""
    resolved = resolve(release)
    if not isinstance(resolved, Resolved):
        raise DayZeroError(f"{release.name} cannot be calibrated", got=resolved.detail, want="a class to run",
                           fix="install a transformers that has it")  # fmt: skip
    source = open_checkpoint(release, model)
    reader = source.reader()

    def provide(name: str) -> torch.Tensor:
        view = source.views[name]
        data = bytearray()
        for _, block in BlockCopier(reader).blocks(view):
            data += block
        return torch.frombuffer(data, dtype=torch_dtype(view.dtype)).reshape(view.shape)

    return Opened(release=release, config=resolved.config, source=source, provider=provide)


def release_sequences(
    opened: Opened, path: Path | None, *, length: int = SEQUENCE_TOKENS, calibration: int = CALIBRATION_SEQUENCES,
    held_out: int = HELD_OUT_SEQUENCES,
) -> Sequences:  # fmt: skip
    """Text through the release's own tokenizer and template; `path` None: the bundled text."""
    vocab = int(text_config(opened.config).vocab_size)
    encoder = release_encoder(opened.release.folder, vocab_size=vocab)
    return read_sequences(path, encoder, length=length, calibration=calibration, held_out=held_out)


def calibrate(
    release: Release, model: ModelDescription, policy: Policy, data: Path | None, folder: Path, *,
    settings: Settings | None = None, sequences: Sequences | None = None, part: int = 0, parts: int = 1,
    log: Log = lambda text: None,
) -> Calibrated:  # fmt: skip
    """Calibrate what the policy quantizes, into `folder` (or go on there). `sequences` instead of `data`, where they are made
    already."""
    opened = open_weights(release, model)
    sequences = sequences or release_sequences(opened, data)
    presets = chosen_presets(policy, model, opened)
    what = Calibration(
        skeleton=opened.skeleton(), provider=opened.provider, presets=presets, scale_dtype=opened.dtype_of,
        chunks=split_chunks(torch.tensor(sequences.calibration), CHUNK_SEQUENCES), folder=folder,
        settings=settings or Settings(), data=sequences.record(), identity={"source": release.source_hash}, part=part,
        parts=parts, log=log,
    )  # fmt: skip
    calibrate_layers(what)
    return open_calibrated(folder, presets)


def chosen_presets(policy: Policy, model: ModelDescription, opened: Opened) -> dict[str, Preset]:
    """Parameters that the policy quantizes and the checkpoint fills."""
    choices = policy.choose(model.parameters)
    return {name: one.preset for name, one in choices.items() if one.preset is not None and name in opened.source.views}


def release_effect(
    opened: Opened, presets: Mapping[str, Preset], sequences: Sequences, *, calibrated: Calibrated | None = None,
    transposed: frozenset[str] = frozenset(), skeleton: Callable[[], Skeleton] | None = None, seed: int = 0,
) -> Effect:  # fmt: skip
    """What these presets (with calibrated codes where there are some) do to the model on the held-out text."""
    make = skeleton or opened.skeleton
    quantized = quantized_provider(opened.provider, presets, opened.dtype_of, transposed=transposed, calibrated=calibrated)
    chunks = split_chunks(torch.tensor(sequences.held_out), CHUNK_SEQUENCES // 4)
    return measure_effect((make(), make()), opened.provider, quantized, chunks, seed=seed)
