"""Release folders that hold a tokenizer and nothing else, built with `tokenizers`; no torch.

`byte_level`: one token per byte (ids 3 to 258 in an order of its own) and a few merges. `byte_fallback`: as SentencePiece
vocabularies are: "▁" for spaces, a leading one dropped at the start of a text, "<0x00>" to "<0xFF>" for what has no piece.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

BOS, EOS, END = "<|bos|>", "<|eos|>", "<|im_end|>"
SPECIALS = [BOS, EOS, END]
EOS_ID = 1
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'martian' %}{{ raise_exception('no martians here') }}{% endif %}"
    "{{ message['role'] }}:{{ message['content'] }}{% if message['tool_calls'] %}[{{ message['tool_calls']|length }} calls]"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_byte_level_folder(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "l"), ("t", "a"), ("Ġ", "a"), ("al", "p"), ("ð", "Ł"), ("g", "a")]
    vocabulary = {piece: place for place, piece in enumerate([*SPECIALS, *alphabet, *(left + right for left, right in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _save(tokenizer, folder, chat_template)


def make_byte_fallback_folder(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    letters = [chr(code) for code in range(33, 127)] + ["é", "中", "▁"]
    merges = [("▁", "a"), ("▁", "b"), ("▁", "▁"), ("a", "l")]
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *(left + right for left, right in merges)]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save(tokenizer, folder, chat_template)


def _save(tokenizer: Tokenizer, folder: Path, chat_template: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
