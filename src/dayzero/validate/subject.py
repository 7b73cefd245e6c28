"""What the validator needs of whatever it judges: any engine, in process or behind HTTP, also another vendor's.

A subject answers in token ids and float32 arrays. Nothing here runs anything; the engine's own adapter lives beside the
engine, `http_subject` speaks to a server.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from dayzero.core.errors import DayZeroError


class SubjectInfo(Protocol):
    """The facts that choose limits and inputs. `core.generation.EngineInfo` has them all.

    `dtype` is the one the subject computes in, `block_tokens` the block of its prefix cache. A subject may also have
    `batch_invariant`: the same request gives the same tokens whatever else runs (see `is_batch_invariant`).
    """

    @property
    def model(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def sampled_tokens(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def capacity_tokens(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def prefix_reuse(self) -> bool: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...


def is_batch_invariant(info: SubjectInfo) -> bool:
    """Whether the subject promises the same bits for the same request; one which says nothing promises nothing."""
    return bool(getattr(info, "batch_invariant", False))


class Generator(Protocol):
    """Something that continues prompts."""

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy continuations of exactly `max_tokens` tokens each (a stop token does not end them). All prompts are in
        flight at once; one prompt is a request alone."""
        ...


class Subject(Generator, Protocol):
    """An engine whose numbers can be looked at."""

    @property
    def info(self) -> SubjectInfo: ...

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """Teacher-forced logits, float32 [n, vocab]: row i is what follows token i. Through the engine's own path: prefill
        in chunks, then decode of single tokens for the tail."""
        ...

    def layer_outputs(self, token_ids: Sequence[int]) -> list[np.ndarray] | None:
        """The output of each decoder layer, float32 [n, hidden] (further dimensions flattened into the last); None where the
        engine cannot show it."""
        ...


@runtime_checkable
class HasParameters(Protocol):
    """Optional: a subject which can show its parameters as it computes with them."""

    def parameters(self) -> Iterable[tuple[str, np.ndarray]]:
        """(name in the unsharded class, values widened to float32), each parameter once; tied ones may be left out."""
        ...


class ServerRefused(DayZeroError):
    """The server answered, but not with what was asked for."""


@runtime_checkable
class TextServer(Protocol):
    """Optional: a server which tells the token ids it made of a text."""

    def prompt_ids(self, kind: Literal["text", "chat"], text: str) -> list[int]:
        """Of a plain prompt, or of a chat with one user message. Raises ServerRefused."""
        ...


class ReferenceTooLarge(DayZeroError):
    """The reference does not fit into memory: nothing is shown then, but nothing is wrong either."""


class Reference(Protocol):
    """What the subject is compared with. `validate.reference.ReleaseReference` is transformers in float32."""

    @property
    def dtype(self) -> str: ...
    @property
    def description(self) -> str: ...

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Uncached forward over the whole sequence, float32 (or float64) [n, vocab]."""
        ...

    def layer_outputs(self, token_ids: Sequence[int]) -> list[np.ndarray] | None: ...

    def generate(self, token_ids: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int] = ()) -> list[int]:
        """Greedy, an uncached forward for each token, ending with a stop token."""
        ...

    def parameters(self) -> Iterable[tuple[str, np.ndarray]]: ...

    def at(self, dtype: str) -> "Reference":
        """The same reference at another dtype."""
        ...

    def release(self) -> None:
        """Give the memory back; the next call loads again."""
        ...
