"""A GGUF file in, the model's config as transformers reads it out, and where it disagrees with the file's own metadata.

The values, and which class of config takes them, are transformers' own. Not here: tensors, tokenizers, writing files.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError, one_line
from dayzero.weights.gguf.fetched import CONFIG_KEYS, config_differences, shortest_decimals
from dayzero.weights.gguf.header import GgufHeader, write_stand_in

VOCABULARY = "tokenizer.ggml."


def config_values(path: Path, header: GgufHeader) -> dict[str, Any]:
    """The config's keys as transformers reads them off the file; off one without the vocabulary, of which it makes objects for
    every token several times over (7 s for 49 thousand), and of which it needs the length alone."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with tempfile.TemporaryDirectory(prefix="dayzero.gguf.") as scrap:
        try:
            stand_in = Path(scrap) / path.name
            write_stand_in(path, header, stand_in, without=VOCABULARY)
            read = load_gguf_checkpoint(str(stand_in), return_tensors=False)["config"]
        except Exception as error:  # transformers and gguf raise many types; all of them are about the user's file
            raise unreadable_file(path, error) from error
    if f"{VOCABULARY}tokens" in header.arrays:  # its rule, too
        read.setdefault("vocab_size", header.arrays[f"{VOCABULARY}tokens"])
    return read


def differences_from_file(metadata: dict[str, Any], config: Any) -> list[str]:
    """Where the config says something else than the file. Of keys that this class of config has under these names; not the
    size of rotary parts, which is that of whole heads only where all of a head rotates."""
    architecture = metadata["general.architecture"]
    read = {path.partition(".")[0]: getattr(config, path.partition(".")[0], None) for path in CONFIG_KEYS.values()}
    read |= {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")}
    told = {
        f"{architecture}.{key}": metadata.get(f"{architecture}.{key}")
        for key, path in CONFIG_KEYS.items()
        if read[path.partition(".")[0]] is not None and key != "rope.dimension_count"
    }
    told |= {f"{VOCABULARY}{name}": metadata.get(f"{VOCABULARY}{name}") for name in read if isinstance(read[name], int)}
    return config_differences({"general.architecture": architecture, **told}, read)


def config_object(path: Path, read: dict[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[read["model_type"]].from_dict(shortest_decimals(read))
    except Exception as error:  # as above
        raise unreadable_file(path, error) from error


def unreadable_file(path: Path, error: Exception) -> DayZeroError:
    return DayZeroError(f"{path.name}: transformers cannot read this GGUF file", got=one_line(error),
                        want="a language model whose GGUF form transformers knows",
                        fix="take the model's safetensors release, or another version of transformers")  # fmt: skip
