"""What was asked of subjects in, the reference on the same tokens out. Two passes share what is equal in both."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dayzero.core.errors import DayZeroError
from dayzero.validate.answers import Path, agreement, malformed, path_of
from dayzero.validate.ask import Asked, Tokens
from dayzero.validate.subject import Reference


@dataclass(frozen=True, kw_only=True, slots=True)
class Referred:
    """The reference on one pass's tokens. Paths are None for answers which are malformed."""

    logits: list[np.ndarray]
    layers: list[np.ndarray] | None
    samples: list[Path | None]
    concurrent: list[Path | None]
    reuse: list[Path | None]


class Referee:
    """Runs the reference, each question once."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._logits: dict[tuple[int, ...], np.ndarray] = {}
        self._layers: dict[tuple[int, ...], list[np.ndarray] | None] = {}
        self._paths: dict[tuple[tuple[int, ...], tuple[int, ...]], Path] = {}
        self._num_tokens: int | None = None  # ids that can be answered

    def refer(self, asked: Asked) -> Referred:
        inputs, options = asked.inputs, asked.inputs.options
        self._num_tokens = asked.info.sampled_tokens
        start = inputs.texts[0].token_ids[: options.layer_tokens]
        firsts = [answers[0] for answers in asked.reuse]
        return Referred(
            logits=[self._text(text.token_ids) for text in inputs.texts],
            layers=None if asked.layers is None else self._layer_outputs(start),
            samples=self._judge(asked, [s.token_ids for s in inputs.samples], asked.samples, options.sample_tokens),
            concurrent=self._judge(
                asked, [s.token_ids for s in inputs.concurrent], asked.concurrent, options.concurrent_tokens
            ),
            reuse=self._judge(asked, [s.token_ids for s in inputs.reuse[: len(firsts)]], firsts, options.reuse_tokens),
        )

    def answer(self, prompt: Tokens, paths: Sequence[Path | None], max_tokens: int, stops: Tokens) -> list[int]:
        """The reference's own greedy answer. The part that an answer shares with it needs no second computation."""
        shared = [list(path.token_ids[: agreement(path, 0.0).same]) for path in paths if path is not None]
        start = max(shared, key=len, default=[])
        if len(start) == max_tokens or any(token in stops for token in start):
            return start
        tokens = [*prompt, *start]
        while len(tokens) < len(prompt) + max_tokens and not (len(tokens) > len(prompt) and tokens[-1] in stops):
            tokens.append(int(self._answerable(self._reference.logits(tokens))[-1].argmax()))
        return tokens[len(prompt) :]

    def _answerable(self, logits: np.ndarray) -> np.ndarray:
        """Without padding of the vocabulary, which no answer can hold."""
        return logits[..., : self._num_tokens]

    def _judge(self, asked: Asked, prompts: Sequence[Tokens], answers: Sequence[Tokens], max_tokens: int) -> list[Path | None]:
        return [
            None if malformed(answer, asked.info.sampled_tokens, max_tokens) else self._path(tuple(prompt), tuple(answer))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def _path(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Path:
        key = (prompt, answer)
        if key not in self._paths:
            self._paths[key] = path_of(
                self._answerable(trusted(self._reference.logits([*prompt, *answer]))), len(prompt), answer
            )
        return self._paths[key]

    def _text(self, token_ids: Tokens) -> np.ndarray:
        key = tuple(token_ids)
        if key not in self._logits:
            self._logits[key] = trusted(self._reference.logits(key))
        return self._logits[key]

    def _layer_outputs(self, token_ids: Tokens) -> list[np.ndarray] | None:
        key = tuple(token_ids)
        if key not in self._layers:
            self._layers[key] = self._reference.layer_outputs(key)
        return self._layers[key]


def trusted(logits: np.ndarray) -> np.ndarray:
    """NU-17: NaN in the reference is an error of the test itself."""
    if np.isnan(logits).any():
        row, token = np.argwhere(np.isnan(logits))[0]
        raise DayZeroError("the reference itself computes NaN, so nothing can be compared with it",
                           got=f"NaN at position {row}, token {token}", want="finite logits",
                           fix="try a float64 reference; if it stays, the release's weights are broken")  # fmt: skip
    return logits
