"""A file of text in, token sequences of equal length for calibration and, apart from them, for measuring out. No torch.

The file is JSONL, one document a line: {"text": "..."}, {"messages": [{"role": ..., "content": ...}, ...]} (through the
tokenizer's chat template), or {"tokens": [ids]} for a model without a tokenizer. Any other file is plain text, cut into
documents at blank lines. A document's own hash says which part it belongs to, so that the parts share no document and stay
the same when others are added. Documents are laid end to end in the order of their hashes and cut to length: no padding.

The default, `data/default.txt`, is documentation of Python's standard library (PSF licence, `data/LICENSE.txt`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError

DEFAULT_TEXT = Path(__file__).parent / "data" / "default.txt"
DEFAULT_LICENCE = "PSF-2.0: docstrings of Python 3.11's standard library"
# Plain text is cut at blank lines into documents of at least this many characters.
DOCUMENT_CHARACTERS = 1500
HELD_OUT_SHARE = 0.2
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model")

Encode = Callable[[str], Sequence[int]]
Render = Callable[[list[dict[str, Any]]], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """`render` turns messages into text, where the tokenizer has a chat template. `separator` stands between documents."""

    encode: Encode
    render: Render | None = None
    separator: tuple[int, ...] = ()
    name: str = "tokenizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """`calibration` and `held_out` are lists of `length` token ids each. `sha256` is the file's."""

    calibration: list[list[int]]
    held_out: list[list[int]]
    length: int
    sha256: str
    source: str
    licence: str | None
    encoder: str

    def record(self) -> dict[str, str]:
        """For the artifact."""
        return {
            "data": self.source, "data_sha256": self.sha256, "encoder": self.encoder, "sequence_tokens": str(self.length),
            "calibration_tokens": str(len(self.calibration) * self.length),
            "held_out_tokens": str(len(self.held_out) * self.length),
        } | ({"data_licence": self.licence} if self.licence else {})  # fmt: skip


def read_sequences(
    path: Path | None, encoder: Encoder, *, length: int, calibration: int, held_out: int, share: float = HELD_OUT_SHARE
) -> Sequences:
    """At most `calibration` and `held_out` sequences of `length` tokens. `path` None: the default text.

    Raises DayZeroError where the file is not of the form, or too short for one sequence of each part."""
    file = DEFAULT_TEXT if path is None else Path(path)
    raw = _read(file)
    parts: tuple[list[tuple[str, list[int]]], list[tuple[str, list[int]]]] = ([], [])
    for document in _documents(raw, file):
        key = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        held = int(key[:8], 16) < share * 16**8
        parts[held].append((key, _tokens(document, encoder, file)))
    packed = [_packed([tokens for _, tokens in sorted({key: (key, tokens) for key, tokens in part}.values())],
                      encoder.separator, length) for part in parts]  # fmt: skip
    for name, wanted, found in zip(("calibration", "measuring"), (calibration, held_out), packed, strict=True):
        if wanted and not found:
            raise DayZeroError(f"{file} has too little text for {name}", got=f"less than {length} tokens",
                               want=f"a sequence of {length}", fix="give more text, or shorter sequences")  # fmt: skip
    return Sequences(
        calibration=packed[0][:calibration], held_out=packed[1][:held_out], length=length, encoder=encoder.name,
        sha256=hashlib.sha256(raw).hexdigest(), source="bundled" if path is None else file.name,
        licence=DEFAULT_LICENCE if path is None else None,
    )  # fmt: skip


def byte_encoder(vocab_size: int) -> Encoder:
    """A token for each byte of UTF-8, for models that have no tokenizer. Raises DayZeroError for too few tokens."""
    if vocab_size < 256:
        raise DayZeroError("a model without a tokenizer and without bytes as tokens", got=f"{vocab_size} tokens", want="256",
                           fix='give token ids: JSONL of {"tokens": [...]}')  # fmt: skip
    return Encoder(encode=lambda text: text.encode(), name="bytes")


def release_encoder(folder: Path, *, vocab_size: int) -> Encoder:
    """The release's own tokenizer and chat template; bytes where it has neither."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return byte_encoder(vocab_size)
    from transformers import AutoTokenizer

    try:
        made: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DayZeroError("the tokenizer cannot be loaded", got=f"{type(error).__name__}: {error}"[:300],
                           want=f"tokenizer files in {folder} that transformers reads",
                           fix='repair them, or give token ids: JSONL of {"tokens": [...]}') from error  # fmt: skip

    def render(messages: list[dict[str, Any]]) -> str:
        return str(made.apply_chat_template(messages, tokenize=False))

    end = made.eos_token_id
    return Encoder(
        encode=lambda text: made.encode(text, add_special_tokens=False), render=render if made.chat_template else None,
        separator=(end,) if isinstance(end, int) else (), name=type(made).__name__,
    )  # fmt: skip


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DayZeroError("the calibration text cannot be read", got=str(error), want="a JSONL or text file",
                           fix="correct the path") from error  # fmt: skip


def _documents(raw: bytes, file: Path) -> list[dict[str, Any]]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DayZeroError(f"{file} is not text", got=str(error), want="UTF-8", fix="convert it to UTF-8") from error
    if file.suffix not in (".jsonl", ".json") and not text.lstrip().startswith('{"'):
        return [{"text": part} for part in _paragraphs(text)]
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except json.JSONDecodeError as error:
            raise DayZeroError(f"{file}:{number} is not JSON", got=str(error), want="one object a line",
                               fix="correct the line") from error  # fmt: skip
        if not isinstance(document, dict) or len({"text", "messages", "tokens"} & set(document)) != 1:
            raise DayZeroError(f"{file}:{number} is no document", got=line[:120],
                               want='{"text": ...}, {"messages": [...]}, {"tokens": [...]}', fix="correct it")  # fmt: skip
        found.append({key: document[key] for key in ("text", "messages", "tokens") if key in document})
    return found


def _paragraphs(text: str) -> list[str]:
    documents, current = [], ""
    for paragraph in text.split("\n\n"):
        current += paragraph + "\n\n"
        if len(current) >= DOCUMENT_CHARACTERS:
            documents.append(current)
            current = ""
    return [*documents, current] if current.strip() else documents


def _tokens(document: dict[str, Any], encoder: Encoder, file: Path) -> list[int]:
    if "tokens" in document:
        return [int(token) for token in document["tokens"]]
    if "messages" in document:
        if encoder.render is None:
            raise DayZeroError(f"{file} holds messages", got="a tokenizer without a chat template", want="text",
                               fix='give {"text": ...} documents')  # fmt: skip
        return list(encoder.encode(encoder.render(document["messages"])))
    return list(encoder.encode(document["text"]))


def _packed(documents: list[list[int]], separator: tuple[int, ...], length: int) -> list[list[int]]:
    line: list[int] = []
    for document in documents:
        line += [*document, *separator]
    return [line[start : start + length] for start in range(0, len(line) - length + 1, length)]
