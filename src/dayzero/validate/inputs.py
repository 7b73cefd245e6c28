"""What the subject is asked: texts to score, prompts to answer. The same for every run of one release.

With a tokenizer in the release folder: the bundled texts, and sample prompts through the chat template where there is one.
Without: token ids drawn from a fixed seed, and the report says so. Ids which the config reserves (image placeholders, end
of sequence) are never drawn, since a model may treat them apart.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from dayzero.core.errors import DayZeroError
from dayzero.core.names import TOKENIZER_FILES
from dayzero.core.records import read_json
from dayzero.validate.subject import SubjectInfo

# Bundled texts and the share of the scored tokens each gets: mostly prose, long enough to cross chunks and windows.
TEXTS = {"prose": 4, "chinese": 1, "program": 1}
SAMPLE_PROMPTS = (
    "In one sentence, why is the sky blue?",
    "Write the first five prime numbers.",
    "A train leaves at nine and arrives at noon. How long is the journey?",
)
# Logits of the scored tokens are held twice in float32; larger vocabularies score fewer tokens.
MAX_LOGIT_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class InputOptions:
    """How much is asked. Defaults keep a model of 135M parameters under a minute on two cores."""

    scored_tokens: int = 384
    sample_tokens: int = 32
    concurrent_tokens: int = 16
    reuse_tokens: int = 8
    layer_tokens: int = 64
    num_concurrent: int = 8
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenText:
    """A name or a text for people, and its tokens."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """A text, how it is sent, and the tokens which the release's own tokenizer makes of it."""

    kind: Literal["text", "chat"]
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    texts: tuple[TokenText, ...]  # scored; the first is long
    samples: tuple[TokenText, ...]
    concurrent: tuple[TokenText, ...]  # of mixed lengths, sent at once
    reuse: tuple[TokenText, ...]  # around one and two blocks, each sent three times
    options: InputOptions
    source: str  # where the tokens come from, in words
    decode: Callable[[Sequence[int]], str]
    encodings: tuple[Encoding, ...] = ()
    not_encoded: str = ""  # which kinds of encodings there are none of, and why


def load_inputs(
    folder: Path, info: SubjectInfo, *, prompts: Sequence[str] = SAMPLE_PROMPTS, options: InputOptions | None = None
) -> Inputs:
    """Inputs for the release in `folder`, cut to what the subject can hold. Raises DayZeroError where its tokenizer cannot
    be loaded or names tokens which the model has no row for."""
    options = options or InputOptions()
    room = min(info.context_tokens, info.capacity_tokens)
    if room < 2 * options.sample_tokens:
        raise DayZeroError("the subject holds too few tokens to be validated", got=f"{room} tokens a request",
                           want=f"at least {2 * options.sample_tokens}", fix="give the cache more memory")  # fmt: skip
    budget = max(8, min(options.scored_tokens, MAX_LOGIT_BYTES // (4 * info.vocab_size)))
    shares = {name: max(4, min(room, budget * share // sum(TEXTS.values()))) for name, share in TEXTS.items()}
    prompt_room = room - options.sample_tokens
    rng = random.Random(options.seed)
    tokenizer = _load_tokenizer(folder)
    if tokenizer is None:
        pool = sorted(set(range(info.vocab_size)) - set(_reserved_ids(folder)))
        texts = tuple(TokenText(text=f"random {name}", token_ids=_drawn(rng, pool, size)) for name, size in shares.items())
        samples = tuple(TokenText(text="", token_ids=_drawn(rng, pool, 12 + 7 * i)) for i in range(len(prompts)))
        source, decode = f"random token ids, seed {options.seed} (the release has no tokenizer)", _ids_as_text
        encodings: list[Encoding] = []
        not_encoded = "the release has no tokenizer"
    else:
        encoded = {name: _encode(tokenizer, bundled_text(name)) for name in TEXTS}
        pool = [token for token in encoded["prose"] if token not in set(tokenizer.all_special_ids)]
        texts = tuple(TokenText(text=name, token_ids=tuple(encoded[name][:size])) for name, size in shares.items())
        encodings, not_encoded = _encodings(tokenizer, prompts)
        chats = [encoding for encoding in encodings if encoding.kind == "chat"]
        samples = tuple(TokenText(text=e.text, token_ids=e.token_ids) for e in chats or encodings)
        how = "through the chat template" if chats else f"as plain text ({not_encoded})"
        source, decode = f"bundled texts; sample prompts {how}", tokenizer.decode
    top = max(token for text in (*texts, *samples) for token in text.token_ids)
    if top >= info.vocab_size:
        raise DayZeroError("the tokenizer names tokens the model has no row for", got=f"token id {top}",
                           want=f"less than {info.vocab_size}", fix="use the tokenizer of this release")  # fmt: skip
    block = info.block_tokens or 16
    reuse_sizes = (block, 2 * block, 2 * block - 1, 2 * block + 1)
    samples = tuple(TokenText(text=s.text or _ids_as_text(s.token_ids), token_ids=s.token_ids[-prompt_room:]) for s in samples)
    return Inputs(
        texts=texts,
        samples=samples,
        concurrent=_random_prompts(rng, pool, _mixed_sizes(options.num_concurrent, block, prompt_room)),
        reuse=_random_prompts(rng, pool, [max(2, min(size, prompt_room)) for size in reuse_sizes]),
        options=options,
        source=source,
        decode=decode,
        encodings=tuple(e for e in encodings if len(e.token_ids) < room),  # a server refuses longer ones
        not_encoded=not_encoded,
    )


def for_float32(inputs: Inputs) -> Inputs:
    """What a float32 pass beside the served one is asked: the first text, every prompt, and two of those sent again. A part of
    `inputs`, so that the reference need not run twice; its limits are absolute, and need no large sample."""
    return replace(inputs, texts=inputs.texts[:1], reuse=(inputs.reuse[0], inputs.reuse[-1]))


def bundled_text(name: str) -> str:
    return (files("dayzero.validate") / "text" / f"{name}.txt").read_text(encoding="utf-8")


def _mixed_sizes(count: int, block: int, room: int) -> list[int]:
    """One token, both sides of a block, and longer ones: what joins a batch at different times."""
    sizes = (1, block - 1, block, block + 1, 2 * block, 5, 3 * block + 7, 5 * block + 2)
    return [max(1, min(sizes[i % len(sizes)] + i // len(sizes), room)) for i in range(count)]


def _random_prompts(rng: random.Random, pool: Sequence[int], sizes: Sequence[int]) -> tuple[TokenText, ...]:
    """Prompts that share no prefix with anything else, so that the first answer is really computed."""
    drawn = [_drawn(rng, pool, size) for size in sizes]
    return tuple(TokenText(text=f"{len(ids)} random tokens", token_ids=ids) for ids in drawn)


def _drawn(rng: random.Random, pool: Sequence[int], size: int) -> tuple[int, ...]:
    return tuple(rng.choice(pool) for _ in range(size))


def _ids_as_text(token_ids: Sequence[int]) -> str:
    return " ".join(str(token) for token in token_ids)


def _load_tokenizer(folder: Path) -> Any:
    """The release's tokenizer, or None where it has none."""
    if not any((folder / name).exists() for name in TOKENIZER_FILES) and not any(folder.glob("*.tiktoken")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, json.JSONDecodeError) as error:
        raise DayZeroError(f"the tokenizer in {folder} cannot be loaded", got=f"{type(error).__name__}: {error}"[:500],
                           want="what AutoTokenizer.from_pretrained reads", fix="repair the release folder, or remove its "
                           "tokenizer to validate on token ids") from error  # fmt: skip


def _encode(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text)["input_ids"]]


def _encodings(tokenizer: Any, prompts: Sequence[str]) -> tuple[list[Encoding], str]:
    """As plain text, and through the chat template where the release has one that takes a lone user message."""
    from jinja2 import TemplateError

    plain = [Encoding(kind="text", text=prompt, token_ids=tuple(_encode(tokenizer, prompt))) for prompt in prompts]
    if not getattr(tokenizer, "chat_template", None):
        return plain, "the release has no chat template"
    chats = []
    for prompt in prompts:
        message = {"role": "user", "content": prompt}
        try:
            found = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=True, return_dict=True)
        except TemplateError as error:
            return plain, f"the chat template refused a lone user message: {error}"
        chats.append(Encoding(kind="chat", text=prompt, token_ids=tuple(int(token) for token in found["input_ids"])))
    return [*plain, *chats], ""


def _reserved_ids(folder: Path) -> Iterator[int]:
    """Every id under a key like `eos_token_id` or `image_token_index`, at any depth of config.json."""
    path = folder / "config.json"
    pending: list[Any] = [read_json(path)] if path.exists() else []
    while pending:
        for key, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif "token_id" in key or "token_index" in key:
                yield from (v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
