"""A release's tokenizer in, the settings a GGUF says it by out; and whether readers of the file encode as it does.

A byte-level BPE whose splitting of text has a name in the format (ours, or transformers' table of split expressions read
backwards), or one that the caller names. What a file says is compared with the tokenizer, and then the tokenizer that
transformers builds from the file is run beside it. Other kinds (those with byte fallback, unigram) are refused: the scores the
format wants of them are in no tokenizer.json.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError, one_line
from dayzero.core.model import Problem
from dayzero.model.release import Release
from dayzero.weights.gguf.fetched import CONTROL_TOKEN, PRE_TOKENIZERS, TOKEN_KEYS, tokenizer_differences, tokenizer_of

NORMAL_TOKEN, USER_TOKEN, UNUSED_TOKEN = 1, 4, 5  # gguf TokenType
# What both tokenizers encode in the end: several scripts, numbers, spaces, code, marks, and every added token between words.
TEXTS = (
    "Hello, world! It's 10:45 o'clock; I'd've said 12345678.90 (or 3x4).",
    "  leading and  double   spaces \t tabs \n\n lines ",
    "def f(x):\n    return x**2 + 1  # comment\n\tif a != b: pass\r\n",
    "Straße, naïve café, déjà vu: ÀÉÎÕÜ ñ ç ø å",
    "Привет, мир. Как дела? 你好,世界。今天天气很好。こんにちは世界 한국어 문장입니다.",
    "שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "emoji 😀👍🏽👨‍👩‍👧 zero\u200bwidth e\u0301 \u00a0nbsp \x00 \x7f",
    "CamelCase snake_case kebab-case https://example.org/?q=1&r=%20",
    "a" * 70,
)


@dataclass(kw_only=True, slots=True)
class Vocabulary:
    """`values` by the format's key. `count`: tokens of the tokenizer, the rest up to the embedding's rows are unused ones."""

    tokenizer: Any
    values: dict[str, Any] = field(default_factory=dict)
    count: int = 0
    composes: bool = False  # characters, before anything else
    problems: list[Problem] = field(default_factory=list)


def vocabulary_of(release: Release, num_rows: int, pre: str | None = None) -> Vocabulary | None:
    """The tokenizer of a release whose embedding has `num_rows` rows; None where it has none. `pre`: the format's name for
    the way it splits text, where that cannot be found."""
    from transformers import AutoTokenizer

    if not any(name.startswith("tokenizer.") for name in release.tokenizer_files):
        return None
    tokenizer = AutoTokenizer.from_pretrained(release.folder, trust_remote_code=False)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = state["model"]
    if model["type"] != "BPE" or model.get("byte_fallback") or not _pretokenizers(state, "ByteLevel"):
        kind = f"{model['type']}{' with byte fallback' if model.get('byte_fallback') else ''}"
        raise _refusal(release, f"a tokenizer of kind {kind}", "a byte-level BPE")
    name = pre or _name_of_splits(state)
    if name is None:
        splits = json.dumps(state["pre_tokenizer"], ensure_ascii=False)
        raise _refusal(release, f"text split by {splits:.200}", "a way of splitting that has a name in the format",
                       "give its name in the format (`pre`), if it has one")  # fmt: skip
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    if len(tokens) != len(tokenizer.get_vocab()) or max(tokens) >= num_rows:
        raise _refusal(release, f"{len(tokenizer.get_vocab())} tokens with ids up to {max(tokens)}",
                       f"an id for each, below {num_rows}, the rows of the embedding")  # fmt: skip
    kinds = {one["id"]: CONTROL_TOKEN if one["special"] else USER_TOKEN for one in state["added_tokens"]}
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    if any(len(pair) != 2 or " " in "".join(pair) for pair in merges):
        raise _refusal(release, "merges of tokens with spaces in them", "merges that the format can tell apart")
    first, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    found = Vocabulary(tokenizer=tokenizer, count=max(tokens) + 1)
    found.composes = _composes(state)
    if found.composes:
        found.problems.append(Problem(kind="normalizer_not_held", severity="warning", file="tokenizer.json",
                                      detail="the release's tokenizer composes characters first (NFC); the format has no key "
                                      "for that, and readers of the file take text as it is"))  # fmt: skip
    spaces = bool(_pretokenizers(state, "ByteLevel")[-1].get("add_prefix_space"))
    found.values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [tokens.get(index, f"[PAD{index}]") for index in range(num_rows)],
        "tokenizer.ggml.token_type": [
            kinds.get(index, NORMAL_TOKEN) if index in tokens else UNUSED_TOKEN for index in range(num_rows)
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.add_space_prefix": spaces,
        "tokenizer.ggml.add_bos_token": first != plain and first[0] == tokenizer.bos_token_id,
        "tokenizer.ggml.add_eos_token": first != plain and first[-1] == tokenizer.eos_token_id,
    }
    ids = {key: getattr(tokenizer, f"{name}_token_id") for key, name in TOKEN_KEYS.items()}
    for key, value in ids.items():
        if value is None:
            value = release.config.get(f"{TOKEN_KEYS[key]}_token_id")
        if isinstance(value, int):
            found.values[f"tokenizer.ggml.{key}"] = value
    if tokenizer.chat_template is not None:
        found.values["tokenizer.chat_template"] = tokenizer.chat_template
    if isinstance(tokenizer.chat_template, dict):
        raise _refusal(release, f"{len(tokenizer.chat_template)} chat templates", "one", "keep the one that is used")
    return found


def check_vocabulary(path: Path, metadata: Mapping[str, Any], ours: Vocabulary) -> list[Problem]:
    """What readers of the file get otherwise than the source has it. `metadata`: the file's, without arrays. Raises
    DayZeroError where the file itself is wrong, or a
    reader encodes otherwise."""
    from transformers import AutoTokenizer

    said = {**metadata, **ours.values}  # of the arrays only their lengths were read
    there = {name: said[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type")}
    real = {f"tokenizer.ggml.{name}": values[: ours.count] for name, values in there.items()}
    found = tokenizer_differences({**said, **real}, ours.tokenizer)
    found = [one for one in found if not (one.startswith("the vocabulary") and _gaps_alone(real, ours))]
    if found:
        raise DayZeroError(f"{path.name}: the file would say another tokenizer", got="; ".join(found),
                           want="the release's tokenizer", fix="report this with the tokenizer.json")  # fmt: skip
    pre = metadata["tokenizer.ggml.pre"]
    try:
        read = tokenizer_of(path, dict(metadata)) if pre in PRE_TOKENIZERS else AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        )  # fmt: skip
    except Exception as error:  # transformers raises many types; all of them are about what the file says
        raise _encodes_otherwise(path, f"transformers builds no tokenizer: {one_line(error)}") from error
    vocabulary, tokens = read.get_vocab(), there["tokens"]
    if wrong := [token for index, token in enumerate(tokens) if vocabulary.get(token) != index]:
        got = f"transformers gives {len(wrong)} tokens another id, {wrong[0]!r} {vocabulary.get(wrong[0])}"
        raise _encodes_otherwise(path, got)
    problems = []
    if more := sorted(set(vocabulary) - set(tokens)):
        detail = f"transformers adds {', '.join(map(repr, more[:3]))} to the {len(tokens)} tokens of the file"
        problems.append(Problem(kind="reader_differs", severity="warning", detail=detail))
    kinds = there["token_type"]
    added = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL_TOKEN, USER_TOKEN)]
    texts = (unicodedata.normalize("NFC", text) if ours.composes else text for text in TEXTS)
    for text in (*texts, *(f"a{token} b {token}\n" for token in added)):
        for special in (True, False):
            one, other = (made.encode(text, add_special_tokens=special) for made in (ours.tokenizer, read))
            if one != other:
                if pre in PRE_TOKENIZERS or _named_splits(pre):
                    raise _encodes_otherwise(path, f"{text!r:.60} becomes {other[:8]}, the release's gives {one[:8]}")
                detail = (f"transformers does not know how {pre!r} splits text: whether readers that do encode as the release "
                          "does was not checked")  # fmt: skip
                return [*problems, Problem(kind="tokenizer_not_checked", severity="warning", detail=detail)]
    return problems


def _gaps_alone(real: Mapping[str, Any], ours: Vocabulary) -> bool:
    """Whether the file's tokens are the tokenizer's, but for ids that it leaves out."""
    tokens, kinds = real["tokenizer.ggml.tokens"], real["tokenizer.ggml.token_type"]
    return {token: at for at, token in enumerate(tokens) if kinds[at] != UNUSED_TOKEN} == ours.tokenizer.get_vocab()


def _named_splits(pre: str) -> str | None:
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    return getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", {}).get(pre)


def _name_of_splits(state: Mapping[str, Any]) -> str | None:
    """The format's name for the way a byte-level tokenizer splits text: the first one that means the same."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    steps = _pretokenizers(state)
    last = steps[-1]
    if state.get("normalizer") is not None and not _composes(state):
        return None
    if last["type"] == "ByteLevel" and last.get("use_regex", True):
        kinds = tuple("digits" if one["type"] == "Digits" and one["individual_digits"] else "?" for one in steps[:-1])
        return next((name for name, splits in PRE_TOKENIZERS.items() if splits == kinds), None)
    if len(steps) == 2 and steps[0]["type"] == "Split" and steps[0]["behavior"] == "Isolated" and not steps[0]["invert"]:
        splits = getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", {})
        return next((name for name, split in splits.items() if split == steps[0]["pattern"].get("Regex")), None)
    return None


def _composes(state: Mapping[str, Any]) -> bool:
    normalizer = state.get("normalizer")
    return normalizer is not None and normalizer["type"] == "NFC"


def _pretokenizers(state: Mapping[str, Any], kind: str | None = None) -> list[dict[str, Any]]:
    one = state.get("pre_tokenizer") or {"type": "Sequence", "pretokenizers": []}
    steps = one["pretokenizers"] if one["type"] == "Sequence" else [one]
    return [step for step in steps if kind in (None, step["type"])]


def _refusal(release: Release, got: str, want: str, fix: str = "take the weights alone, from a folder without the tokenizer's"
             " files, and give readers the tokenizer beside it") -> DayZeroError:  # fmt: skip
    return DayZeroError(f"{release.name}: its tokenizer has no GGUF form", got=got, want=want, fix=fix)


def _encodes_otherwise(path: Path, got: str) -> DayZeroError:
    return DayZeroError(f"{path.name}: its tokenizer would encode otherwise than the release's", got=got, want="the same ids",
                        fix="take the weights alone, from a folder without the tokenizer's files")  # fmt: skip
