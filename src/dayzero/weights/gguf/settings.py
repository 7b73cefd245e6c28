"""A GGUF source in, the settings files of a release folder out: config, generation settings, tokenizer.

A tokenizer is rebuilt from the file only where that is known to be exact (`fetched` has the conditions); else its files must
come from elsewhere, and give the file's ids to its tokens. Not here: weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.model.release import TOKENIZER_SETTINGS
from dayzero.weights.gguf.fetched import read_metadata, rewrite_json, tokenizer_differences, tokenizer_of
from dayzero.weights.gguf.source import GgufSource


def write_settings(source: GgufSource, folder: Path, *, tokenizer: Path | None = None) -> None:
    """Write config.json, generation_config.json and the tokenizer of a GGUF into a new folder.

    tokenizer: a folder with the tokenizer's files, needed where the file's own cannot be rebuilt exactly; by default the
    GGUF's own folder where it has them. Raises DayZeroError where what would be written disagrees with the file's metadata.
    """
    from transformers import AutoTokenizer

    metadata = read_metadata(source.path)
    beside = tokenizer or source.path.parent
    files = [name for name in TOKENIZER_SETTINGS if (beside / name).is_file()]
    made: Any = None
    if "tokenizer.ggml.tokens" not in metadata:  # weights alone: tokens go in and out as ids
        files, differences = [], []
    elif any(name.startswith("tokenizer.") for name in files):
        made = AutoTokenizer.from_pretrained(beside, trust_remote_code=False)
        differences = _vocabulary_differences(metadata, made)
    else:
        made, files = tokenizer_of(source.path, metadata), []
        differences = tokenizer_differences(metadata, made)
    if differences:
        raise DayZeroError(f"{source.path.name}: what was read disagrees with its metadata", got="; ".join(differences),
                           want="the values in the file", fix="use another version of transformers")  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        shutil.copyfile(beside / name, folder / name)
    if made is not None and not files:
        made.save_pretrained(folder, save_jinja_files=False)
        rewrite_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"},
                 drop=("backend", "is_local", "local_files_only"))  # fmt: skip
    ids = {name: source.config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config.json", source.config), ("generation_config.json", ids)):
        text = json.dumps({key: value for key, value in content.items() if value is not None}, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def _vocabulary_differences(metadata: dict[str, Any], tokenizer: Any) -> list[str]:
    """Where a tokenizer from elsewhere gives an id to another token than the file does."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    other = [
        f"{token!r} is {index}, the file has {tokens[index]!r} there" if index < len(tokens) else f"{token!r} is {index}"
        for token, index in tokenizer.get_vocab().items()
        if index >= len(tokens) or tokens[index] != token
    ]
    return [f"{len(other)} tokens differ: {'; '.join(sorted(other)[:3])}"] if other else []
