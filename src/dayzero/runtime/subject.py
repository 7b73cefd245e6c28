"""The validator's view of an in-process engine: teacher-forced logits, greedy answers, layer outputs, parameters.

Everything goes through the engine's own runner and scheduler, chunk by chunk and token by token, as a request would.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from dayzero.core.generation import EngineInfo, GenerationRequest, SamplingParams
from dayzero.core.step import StepBatch
from dayzero.runtime.engine import Engine
from dayzero.runtime.proof import replay
from dayzero.runtime.runner import Launched, LoadedModel, Runner

# Tokens that `score` decodes one by one after the prefill chunks: enough to cross a block of 16.
DECODED_TAIL = 24


class EngineSubject:
    """Needs the engine idle: it uses the runner's slots and blocks directly, and clears the prefix cache before and
    after."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._runner: Runner = engine.runner
        self._requests = 0

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def _model(self) -> LoadedModel:
        return self._runner.model  # type: ignore[attr-defined]

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        return self._replay(self._runner, token_ids).numpy()

    def _replay(self, runner: Runner, token_ids: Sequence[int]) -> torch.Tensor:
        assert not self.engine.has_work(), "the engine must be idle"
        self.engine.reset_prefix_cache()
        tokens = list(token_ids)
        return replay(
            runner, [tokens], self._steps(len(tokens)), block_tokens=self.info.block_tokens, num_blocks=self.info.num_blocks
        )[0]

    def _steps(self, num_tokens: int) -> list[list[tuple[int, int]]]:
        prompt = max(1, num_tokens - DECODED_TAIL)
        chunk = prompt if self._runner.whole_prompts else self.engine.scheduler.limits.chunk_tokens or prompt
        counts = [min(chunk, prompt - start) for start in range(0, prompt, chunk)] + [1] * (num_tokens - prompt)
        return [[(0, count)] for count in counts]

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        names = []
        for prompt in prompts:
            self._requests += 1
            names.append(f"subject-{self._requests}")
            sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            self.engine.add(GenerationRequest(id=names[-1], prompt_token_ids=tuple(prompt), sampling=sampling))
        answers: dict[str, list[int]] = {name: [] for name in names}
        while self.engine.has_work():
            for output in self.engine.step():
                if output.token_id is not None:
                    answers[output.request_id].append(output.token_id)
        return [answers[name] for name in names]

    @torch.no_grad()
    def layer_outputs(self, token_ids: Sequence[int]) -> list[np.ndarray] | None:
        """Outputs of each decoder layer, [n, hidden], gathered over the steps of `score` (of a layer that runs several times
        in a step the last). None where a layer does not return one row per token of the step."""
        watch = _LayerWatch(self._runner, self._model)
        with watch:
            self._replay(watch, token_ids)
        layers = [torch.cat([rows[-count:] for rows, count in parts]) for parts in watch.outputs()]
        return [rows.numpy() for rows in layers] if all(len(rows) == len(token_ids) for rows in layers) else None

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, parameter in self._model.module.named_parameters():
            yield name.replace(".replaced.", "."), parameter.detach().float().cpu().numpy()


class _LayerWatch:
    """A runner that notes what every layer returned in each step."""

    def __init__(self, runner: Runner, model: LoadedModel) -> None:
        self._runner, self._layers = runner, list(model.layers)
        self.tier, self.whole_prompts, self.prefix_reuse = runner.tier, runner.whole_prompts, runner.prefix_reuse
        self._steps: list[tuple[int, dict[int, torch.Tensor]]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> "_LayerWatch":
        self._handles = [layer.register_forward_hook(self._note(index)) for index, layer in enumerate(self._layers)]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def launch(self, batch: StepBatch) -> Launched:
        self._steps.append((len(batch.tokens), {}))
        return self._runner.launch(batch)

    def close(self) -> None:
        self._runner.close()

    def outputs(self) -> list[list[tuple[torch.Tensor, int]]]:
        """Per layer, per step: the rows returned and how many tokens the step had (a recomputing runner returns more)."""
        return [[(rows[index], count) for count, rows in self._steps if index in rows] for index in range(len(self._layers))]

    def _note(self, index: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not getattr(self._runner, "in_prologue", False):
                rows = output if isinstance(output, torch.Tensor) else output[0]
                self._steps[-1][1][index] = rows[0].detach().float().cpu().flatten(1)

        return hook
