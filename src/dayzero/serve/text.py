"""A release's tokenizer as the server uses it: text to ids, ids to text, and the bytes of single tokens.

In: the release's tokenizer folder. Out: `TextCodec`. A `tokenizer.json` is loaded without importing torch; other kinds of
tokenizer go through transformers' AutoTokenizer. Decoding never "cleans up" spaces and never shows special tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.names import TOKENIZER_FILES

PLAIN_TEXT = "a"  # any text without a space; see `context_ids`


class TextCodec:
    """Wraps a transformers tokenizer. Encoding may run in a thread; the rest is cheap."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.chat_template: str | None = _chat_template(tokenizer)
        self.special_tokens: dict[str, str] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()
                                               if isinstance(token, str)}  # fmt: skip
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._known = frozenset(vocabulary.values())
        self._special = frozenset(tokenizer.all_special_ids) | frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        self._pieces = {token_id: piece for piece, token_id in vocabulary.items()}
        self._byte_of_char = _byte_of_char() if _is_byte_level(tokenizer) else None
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self._fallback = {} if self._byte_of_char else _fallback_bytes(vocabulary)
        self.context_ids = tuple(tokenizer.encode(PLAIN_TEXT, add_special_tokens=False))

    @classmethod
    def load(cls, folder: Path) -> "TextCodec":
        """Raises DayZeroError when the folder holds no tokenizer that transformers can load."""
        if not folder.is_dir():
            raise DayZeroError("the tokenizer folder does not exist", got=folder, want="a folder with tokenizer files",
                               fix="name the release's folder")  # fmt: skip
        try:
            return cls(_load_tokenizer(folder))
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise DayZeroError("the tokenizer cannot be loaded", got=f"{type(error).__name__}: {error}"[:500],
                               want=f"tokenizer files in {folder} that transformers reads",
                               fix="correct the folder, or serve without a tokenizer (token ids only)") from error  # fmt: skip

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of visible tokens (see `is_hidden`)."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def decode_visible(self, ids: Sequence[int]) -> str:
        """Text of any ids: special tokens and ids the tokenizer does not have are left out."""
        return self.decode([token_id for token_id in ids if not self.is_hidden(token_id)])

    def is_hidden(self, token_id: int) -> bool:
        return token_id in self._special or token_id not in self._known

    def fallback_byte(self, token_id: int) -> int | None:
        return self._fallback.get(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        """What one token adds inside a text; None for an id the tokenizer does not have. Special tokens give their name.

        Exact for byte-level and byte-fallback tokenizers; for others the token's text in UTF-8.
        """
        if token_id in self._fallback:
            return bytes([self._fallback[token_id]])
        piece = self._pieces.get(token_id)
        if piece is None:
            return None
        if token_id in self._special:
            return piece.encode("utf-8", "replace")
        spelling = self._byte_of_char
        if spelling is not None and token_id not in self._added and all(char in spelling for char in piece):
            return bytes(spelling[char] for char in piece)
        context = list(self.context_ids)
        return self.decode([*context, token_id])[len(self.decode(context)) :].encode("utf-8", "replace")


def _load_tokenizer(folder: Path) -> Any:
    """Never through code of the release: that would run in this process."""
    if (folder / "tokenizer.json").is_file() and not _has_own_code(folder):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES) and not _has_own_code(folder):
        # Some classes of transformers would make an empty vocabulary of nothing.
        raise DayZeroError("the folder holds no tokenizer", got=folder, want=f"one of {', '.join(TOKENIZER_FILES)}",
                           fix="correct the folder, or serve without a tokenizer (token ids only)")  # fmt: skip
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _has_own_code(folder: Path) -> bool:
    """Whether the release brings a tokenizer class of its own."""
    path = folder / "tokenizer_config.json"
    return path.is_file() and "AutoTokenizer" in json.loads(path.read_text(encoding="utf-8")).get("auto_map", {})


def _chat_template(tokenizer: Any) -> str | None:
    """The default one where a release brings several."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) and template else None


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether tokens are spelled in the 256 printable characters that stand for bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return any(part.get("type") == "ByteLevel" for part in [decoder, *decoder.get("decoders", [])])


def _fallback_bytes(vocabulary: dict[str, int]) -> dict[int, int]:
    """Token id -> byte, where the vocabulary has all of "<0x00>" to "<0xFF>"."""
    ids = [vocabulary.get(f"<0x{byte:02X}>") for byte in range(256)]
    return {} if None in ids else {token_id: byte for byte, token_id in enumerate(ids) if token_id is not None}


def _byte_of_char() -> dict[str, int]:
    """The table byte-level vocabularies are spelled in: printable Latin-1 stands for itself, the 68 others for the
    characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
