"""Token ids to text, one token at a time, such that the pieces together are the decoding of the whole.

In: token ids in order. Out: the text each one completes, which may be empty. A character that is not complete yet is held
back; when the generation ends, what is left of one becomes a single U+FFFD. Stop strings and end tokens are not its
business.

How: the tokenizer decodes a sliding window (the tokens since the last place where text ended on a whole character, and
those of the stretch before it as left context), and what goes beyond the text already given is new. A truncated character
decodes to one U+FFFD at the very end (the Unicode standard's "maximal subpart" rule, which both Rust and Python follow),
so that only a last U+FFFD is ever in doubt. Byte tokens of SentencePiece vocabularies ("<0xE2>") are decoded here, because
their tokenizers turn a whole run of bytes, valid ones included, into U+FFFD when its end is missing.
"""

import codecs
from collections.abc import Iterable
from typing import Protocol

# A window that finds no place to slide (blank text, or text that is all U+FFFD) is cut at so many tokens, or a run of newlines
# would cost the square of its length. What is kept holds any unfinished character: those have at most 4 bytes, so 4 tokens.
MAX_WINDOW_TOKENS, KEPT_TOKENS = 64, 8

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Codec(Protocol):
    """What the detokeniser asks of a tokenizer; `text.TextCodec` is one."""

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Tokens of some plain text, to stand in front of a text that goes on from another."""

    def decode(self, ids: list[int]) -> str:
        """Text of visible tokens."""

    def is_hidden(self, token_id: int) -> bool:
        """Whether a token has no text: special tokens, and ids the tokenizer does not have."""

    def fallback_byte(self, token_id: int) -> int | None:
        """The byte a "<0x..>" token stands for."""


class Detokenizer:
    """State of one generated sequence. `continues`: the text goes on from a prompt, so that a leading space is kept where
    the tokenizer would drop it at the start of a text."""

    def __init__(self, codec: Codec, *, continues: bool) -> None:
        self._codec = codec
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._boundary = 0  # tokens of the window that are left context alone
        self._sent = 0  # characters of the window's text already given
        self._at_start = not continues
        if continues:
            self._take_context()

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        if self._codec.is_hidden(token_id):
            return ""
        byte = self._codec.fallback_byte(token_id)
        if byte is None:
            return self._end_bytes() + self._push_text(token_id)
        held = self._end_window()
        if self._at_start:
            self._at_start = False
            self._take_context()
            if byte < 0x80:  # a space may be one that is dropped at the start of a text
                return self._codec.decode([token_id])
        return held + self._bytes.decode(bytes([byte]))

    def push_all(self, token_ids: Iterable[int]) -> str:
        return "".join(self.push(token_id) for token_id in token_ids)

    def flush(self) -> str:
        """The end of the generation: what is left of an unfinished character, as one U+FFFD."""
        return self._end_bytes() + self._end_window()

    def _take_context(self) -> None:
        self._window = list(self._codec.context_ids)
        self._boundary = len(self._window)
        self._sent = len(self._codec.decode(self._window))

    def _push_text(self, token_id: int) -> str:
        self._at_start = False
        self._window.append(token_id)
        text = self._codec.decode(self._window)
        whole = len(text) - text.endswith(REPLACEMENT)
        new = text[self._sent : whole]
        self._sent = max(self._sent, whole)
        if not (whole == len(text) and self._slide()) and len(self._window) > MAX_WINDOW_TOKENS:
            self._cut(len(text) - self._sent)
        return new

    def _slide(self) -> bool:
        """Forget the old left context, once what came after it can serve as one: it must hold more than white space,
        because tokenizers drop a space at the start. Returns whether it can."""
        recent = self._window[self._boundary :]
        text = self._codec.decode(recent)
        if not text.strip():
            return False
        self._window, self._boundary, self._sent = recent, len(recent), len(text)
        return True

    def _cut(self, num_held: int) -> None:
        """Keep the last tokens only, behind some plain text as their context. A character the cut goes through turns into
        U+FFFD there and has been given already; the next one starts anew, so that what is held stays the same."""
        kept = self._window[-KEPT_TOKENS:]
        self._take_context()
        self._window += kept
        self._sent = len(self._codec.decode(self._window)) - num_held

    def _end_bytes(self) -> str:
        text = self._bytes.decode(b"", final=True)
        self._bytes.reset()
        return text

    def _end_window(self) -> str:
        """Give what the window still holds back, now that no byte will complete it."""
        text = self._codec.decode(self._window) if self._window else ""
        held, self._sent = text[self._sent :], max(self._sent, len(text))
        return held
