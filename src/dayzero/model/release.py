"""A release folder (or a bare config.json) in, everything but the tensor bytes out. The one reader of releases; no torch.

Read: config, generation, tokenizer and quantization settings (strict JSON), the shard index, and every safetensors header
(`model.headers`). The index is compared with the disk and with the headers, in both directions, and ALL disagreements are
listed as `Problem`s: nothing is raised for a damaged checkpoint here, callers that need sound weights call
`require_weights`. Names found in files are never opened before they were shown to stay inside the folder. Not done here:
reading tensors, executing or importing anything of the release, pickle checkpoints (named and refused).
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.core.names import TOKENIZER_FILES
from dayzero.model.config_against_tensors import SCHEMA_KINDS, config_against_tensors
from dayzero.model.headers import ShardHeader, TensorEntry
from dayzero.model.paths import contained, unsafe_names
from dayzero.model.settings_files import MAX_JSON_BYTES as MAX_JSON_BYTES
from dayzero.model.settings_files import optional_settings, read_settings
from dayzero.model.settings_files import read_object as read_object
from dayzero.model.shard_index import INDEX as INDEX
from dayzero.model.shard_index import PICKLE_SUFFIXES, SINGLE, Weights
from dayzero.model.stored.doubts import quantization_doubts
from dayzero.model.stored.quantization import BESIDE

CONFIG = "config.json"
# Settings beside the config whose content decides what is served; hashed into the source hash.
TOKENIZER_SETTINGS = (
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """A release as found on disk. `tensors` come from the headers: where a name is in several files, the index decides.

    `source_hash` covers the settings, the headers and the file sizes, not the tensor bytes.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tokenizer_config: dict[str, Any] | None
    tokenizer_files: tuple[str, ...]
    other_files: tuple[str, ...]  # every regular file at the top that is neither weights nor their index
    shards: dict[str, ShardHeader]
    tensors: dict[str, TensorEntry]
    problems: tuple[Problem, ...]
    source_hash: str
    metadata_total_bytes: int | None = None
    header_tensors: dict[str, tuple[str, ...]] = field(default_factory=dict)  # file -> names, in the order of their bytes
    quantization_file: dict[str, Any] | None = None  # content of the settings file that some tools write beside the config

    @property
    def has_weights(self) -> bool:
        return bool(self.tensors)

    @property
    def checkpoint_bytes(self) -> int | None:
        """Bytes of all tensors: the sum over headers, never what an index claims. None without weights."""
        return sum(entry.num_bytes for entry in self.tensors.values()) if self.tensors else None

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "error")

    def path(self, file: str) -> Path:
        """Absolute path of a file of the release. Raises DayZeroError when the name leaves the folder."""
        place, reason = contained(self.folder, file)
        if place is None:
            raise DayZeroError(f"the file name {file!r} is not acceptable", got=reason, want="a file inside the release folder",
                               fix="do not use this release: it points outside itself")  # fmt: skip
        return place

    def require_readable(self) -> "Release":
        """Itself, when its tensors can be read, right for the config or not: what else is wrong is listed by the mapping."""
        if unreadable := [problem for problem in self.errors if problem.kind not in SCHEMA_KINDS]:
            raise damaged([*unreadable, *(one for one in self.errors if one.kind in SCHEMA_KINDS)], str(self.folder))
        return self if self.tensors else self.require_weights()

    def require_weights(self) -> "Release":
        """Itself, when there are weights and nothing is wrong with them. Otherwise a DayZeroError listing everything."""
        if self.errors:
            raise damaged(self.errors, str(self.folder))
        if not self.tensors:
            raise DayZeroError(f"{self.folder} holds no weights", got="no safetensors file",
                               want=f"{SINGLE} or shards with {INDEX}",
                               fix="download the weights of the release into the same folder")  # fmt: skip
        return self


def damaged(errors: Iterable[Problem], where: str) -> DayZeroError:
    """One error that lists every problem: users fix a broken download once, not once per file."""
    found = list(errors)
    return DayZeroError(
        f"the checkpoint in {where} is not usable: {len(found)} problem{'s' * (len(found) != 1)}",
        got="\n          ".join(problem.detail for problem in found),
        want="an index, files and headers that agree",
        fix="download the named files again",
    )


def is_address(text: object) -> bool:
    """Whether this is a web address; also one that went through `Path`, which makes `http:/host` of it."""
    return re.match(r"https?:/", str(text), re.IGNORECASE) is not None


def open_release(path: Path) -> Release:
    """The release at `path`: a folder with a config.json, or a config.json by itself.

    Raises DayZeroError when there is no readable config. Everything else that is wrong is in `problems`.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    config_name = CONFIG if path.is_dir() else path.name
    if not path.exists():
        if address := re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):/+(.*)", str(path), re.DOTALL):
            raise DayZeroError(f"{address[1]}://{address[2]} is an address, and this reads folders",
                               got=f"an address of scheme {address[1]!r}", want="a release folder or a config.json",
                               fix="download the release; of addresses, `inspect` reads those of http(s)")  # fmt: skip
        raise DayZeroError(
            f"{path} does not exist", got="no such path", want="a release folder or a config.json", fix="check the path"
        )
    if path.is_dir() and not any(path.iterdir()):
        raise DayZeroError(f"{path} is an empty folder", got="no files", want="a release folder with config.json",
                           fix="download the release into it")  # fmt: skip
    folder = folder.absolute()
    problems: list[Problem] = []
    config_place, reason = contained(folder, config_name)
    if config_place is None or not config_place.is_file():
        listing = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5])
        raise DayZeroError(f"{path} holds no {CONFIG}", got=reason or f"files: {listing}",
                           want=f"a {CONFIG} in the Hugging Face layout",
                           fix="give the folder that holds it, or the file itself")  # fmt: skip
    config, repeated = read_settings(config_place, config_name)
    problems += repeated
    quantization_file = optional_settings(folder, BESIDE, problems)
    problems += quantization_doubts(config, quantization_file)
    beside = [folder / BESIDE] if quantization_file is not None else []
    if path.is_file():
        return Release(
            folder=folder,
            name=folder.name,
            config=config,
            generation_config=None,
            tokenizer_config=None,
            tokenizer_files=(),
            other_files=(config_name,),
            shards={},
            tensors={},
            problems=(*unsafe_names(folder, config, config_name), *problems),
            source_hash=_source_hash([config_place, *beside], {}),
            quantization_file=quantization_file,
        )
    settings = {name: optional_settings(folder, name, problems) for name in ("generation_config.json", "tokenizer_config.json")}
    for name, content in {config_name: config, **settings}.items():
        problems += unsafe_names(folder, content or {}, name)
    weights = Weights(folder, problems)
    weights.read()
    problems += config_against_tensors(config, weights.tensors)
    tokenizer_files = tuple(name for name in TOKENIZER_SETTINGS if _is_regular(folder, name))
    hashed = [config_name, *(name for name in settings if _is_regular(folder, name)), *tokenizer_files]
    return Release(
        folder=folder,
        name=_release_name(folder),
        config=config,
        generation_config=settings["generation_config.json"],
        tokenizer_config=settings["tokenizer_config.json"],
        tokenizer_files=tokenizer_files,
        other_files=_other_files(folder),
        shards=weights.shards,
        tensors=weights.tensors,
        problems=tuple(problems),
        source_hash=_source_hash([*(folder / name for name in dict.fromkeys(hashed)), *beside], weights.shards),
        metadata_total_bytes=weights.total_size,
        header_tensors={
            file: tuple(sorted(shard.tensors, key=lambda name: shard.tensors[name].begin))
            for file, shard in weights.shards.items()
        },
        quantization_file=quantization_file,
    )


def _is_regular(folder: Path, name: str) -> bool:
    place, _ = contained(folder, name)
    return place is not None and place.is_file()


def _other_files(folder: Path) -> tuple[str, ...]:
    weights = (*PICKLE_SUFFIXES, ".safetensors", ".safetensors.index.json", ".gguf", ".bin.index.json")
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    return tuple(name for name in names if not name.endswith(weights) and _is_regular(folder, name))


def _release_name(folder: Path) -> str:
    """The folder's name; in the Hugging Face cache, where folders are commits, the repository's."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.split("--")[-1]
    return folder.resolve().name


def _source_hash(settings: Iterable[Path], shards: Mapping[str, ShardHeader]) -> str:
    digest = hashlib.sha256()
    for path in settings:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    for file, shard in sorted(shards.items()):
        digest.update(f"{file} {shard.num_bytes} {shard.header_hash}\n".encode())
    return digest.hexdigest()
