"""Prompts that share nothing, so that a prefix cache cannot flatter a measurement. Seeded: the same seed, the same prompts.

Token-id prompts have an exact length and need no tokenizer. Their ids come from the middle four fifths of the vocabulary,
because special tokens sit at its ends. Text prompts (for servers that take no ids) have an approximate length; what the
server counted is what is reported.
"""

import random

Prompt = list[int] | str

_WORDS = """
    river stone window garden letter market winter summer bridge engine paper silver mountain forest island harbour
    teacher doctor farmer writer number colour music travel machine answer question morning evening morning village city
    light water fire earth wind cloud storm field road train ship house door table chair book story voice silence
""".split()  # noqa: SIM905


class Prompts:
    """A source of distinct prompts. Not shared between threads without a lock: draw them before the clock starts."""

    def __init__(self, *, vocab_size: int | None, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._seen: set[tuple[int, ...]] = set()

    def draw(self, num_tokens: int) -> Prompt:
        """A prompt whose first tokens no earlier one has (as far as the vocabulary is large enough to allow it)."""
        if self._vocab_size is None:
            words = [str(self._random.randrange(10**6)), *self._random.choices(_WORDS, k=max(1, num_tokens - 2))]
            return " ".join(words)
        low, high = self._vocab_size // 10, max(self._vocab_size // 10 + 1, self._vocab_size * 9 // 10)
        for _ in range(64):
            ids = self._random.choices(range(low, high), k=num_tokens)
            head = tuple(ids[:4])
            if head not in self._seen:
                break
        self._seen.add(head)
        return ids


def completion(model: str, prompt: Prompt, *, max_tokens: int, **options: object) -> dict[str, object]:
    """The body of a `/v1/completions` request."""
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens} | options
