"""What every runner is: it turns a `StepBatch` into logits and keeps the caches of the sequences in its slots.

Three kinds, each proven against the one below at load (`runtime.proof`): T0 `native.py` runs one sequence at a time,
T1 `flat.py` shares everything that is token-wise, T2 `paged.py` batches the mixers too.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from dayzero.core.step import StepBatch


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way. `result()` gives float32 logits [len(logit_rows), vocab] on the CPU."""

    logits: torch.Tensor

    def result(self) -> torch.Tensor:
        return self.logits.float().cpu()


class Runner(Protocol):
    tier: Literal["T0", "T1", "T2"]
    whole_prompts: bool  # prompts must run in one piece
    prefix_reuse: bool

    def launch(self, batch: StepBatch) -> Launched:
        """Run one step. Caches of the batch's slots advance; `released_slots` are dropped first."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class LoadedModel:
    """A transformers module with its weights in place, and where to find things in it."""

    module: nn.Module
    layers_name: str
    vocab_size: int
    device: torch.device
    dtype: torch.dtype

    @property
    def layers(self) -> nn.ModuleList:
        layers = self.module.get_submodule(self.layers_name)
        assert isinstance(layers, nn.ModuleList)
        return layers
