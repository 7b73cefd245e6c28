"""A subject (and a server) in, everything they answered out: arrays, tokens and digests that outlive them.

The subject can be closed afterwards, so that its weights and the reference's are never in memory together. Nothing is judged
here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dayzero.validate.inputs import Encoding, Inputs
from dayzero.validate.parameters import Digest, digests_of
from dayzero.validate.subject import Generator, ServerRefused, Subject, SubjectInfo, TextServer

NUM_REPEATS = 3  # the second finds blocks the first left, the third what the second did to them

Tokens = Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """What the server made of a text: token ids, or why it refused."""

    encoding: Encoding
    token_ids: tuple[int, ...] = ()
    refused: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Answers to `inputs`. `reuse[i]` are those to one prompt sent again and again; `encoded` is None without a server that
    tells them."""

    info: SubjectInfo
    inputs: Inputs
    scores: list[np.ndarray]
    layers: list[np.ndarray] | None
    samples: list[list[int]]
    concurrent: list[list[int]]
    reuse: list[list[list[int]]]
    served_samples: list[list[int]] | None
    served_concurrent: list[list[int]] | None
    parameters: dict[str, Digest] | None
    encoded: tuple[Encoded, ...] | None


def ask(subject: Subject, inputs: Inputs, served: Generator | None = None, *, parameters: bool = True) -> Asked:
    """Ask for everything that is judged. `parameters=False` leaves them out, where another pass has shown them."""
    options = inputs.options
    samples, concurrent = [s.token_ids for s in inputs.samples], [s.token_ids for s in inputs.concurrent]
    repeats = inputs.reuse if subject.info.prefix_reuse else ()
    return Asked(
        info=subject.info,
        inputs=inputs,
        samples=_one_by_one(subject, samples, options.sample_tokens),
        concurrent=_at_once(subject, concurrent, options.concurrent_tokens),
        reuse=[_one_by_one(subject, [r.token_ids] * NUM_REPEATS, options.reuse_tokens) for r in repeats],
        scores=[np.asarray(subject.score(text.token_ids)) for text in inputs.texts],
        layers=subject.layer_outputs(inputs.texts[0].token_ids[: options.layer_tokens]),
        served_samples=_one_by_one(served, samples, options.sample_tokens) if served else None,
        served_concurrent=_at_once(served, concurrent, options.concurrent_tokens) if served else None,
        parameters=digests_of(subject) if parameters else None,
        encoded=tuple(_encoded(served, encoding) for encoding in inputs.encodings) if isinstance(served, TextServer) else None,
    )


def _one_by_one(who: Generator, prompts: Sequence[Tokens], max_tokens: int) -> list[list[int]]:
    return [who.generate([list(prompt)], max_tokens)[0] for prompt in prompts]


def _at_once(who: Generator, prompts: Sequence[Tokens], max_tokens: int) -> list[list[int]]:
    return who.generate([list(prompt) for prompt in prompts], max_tokens)


def _encoded(server: TextServer, encoding: Encoding) -> Encoded:
    try:
        return Encoded(encoding=encoding, token_ids=tuple(server.prompt_ids(encoding.kind, encoding.text)))
    except ServerRefused as error:  # the check fails with it
        return Encoded(encoding=encoding, refused=f"{error.what} ({error.got})")
