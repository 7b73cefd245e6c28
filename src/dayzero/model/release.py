"""A release folder (or a bare config.json) in, everything but the tensor bytes out. The one reader of releases; no torch.

Read: config, generation, tokenizer and quantization settings (strict JSON), the shard index, and every safetensors header
(`model.headers`). The index is compared with the disk and with the headers, in both directions, and ALL disagreements are
listed as `Problem`s: nothing is raised for a damaged checkpoint here, callers that need sound weights call
`require_weights`. Names found in files are never opened before they were shown to stay inside the folder. Not done here:
reading tensors, executing or importing anything of the release, pickle checkpoints (named and refused).
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.core.names import TOKENIZER_FILES
from dayzero.model.headers import ShardHeader, TensorEntry, read_header
from dayzero.model.paths import contained, unsafe_names
from dayzero.model.stored.doubts import quantization_doubts
from dayzero.model.stored.quantization import BESIDE

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
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
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Larger than any real settings file (tokenizer.json of a 256k vocabulary has 35 MB), small enough to parse.
MAX_JSON_BYTES = 256 << 20


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
    config = read_object(config_place)
    quantization_file = _optional(folder, BESIDE, problems)
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
    settings = {name: _optional(folder, name, problems) for name in ("generation_config.json", "tokenizer_config.json")}
    for name, content in {config_name: config, **settings}.items():
        problems += unsafe_names(folder, content or {}, name)
    weights = _Weights(folder, problems)
    weights.read()
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


def read_object(path: Path) -> dict[str, Any]:
    """One JSON object from a file of the release. Raises DayZeroError naming the file and the place of the mistake."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes, more than {MAX_JSON_BYTES}")
        data = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DayZeroError(
            f"{path} is not readable JSON", got=str(error)[:300], want="one JSON object in UTF-8", fix="download the file again"
        ) from error
    if not isinstance(data, dict):
        raise DayZeroError(
            f"{path} is not a JSON object", got=type(data).__name__, want="an object", fix="download the file again"
        )
    return data


class _Weights:
    """Index, disk and headers of one folder, compared."""

    def __init__(self, folder: Path, problems: list[Problem]) -> None:
        self.folder = folder
        self.problems = problems
        self.shards: dict[str, ShardHeader] = {}
        self.tensors: dict[str, TensorEntry] = {}
        self.total_size: int | None = None

    def note(
        self, kind: str, detail: str, *, file: str | None = None, tensor: str | None = None, warning: bool = False
    ) -> None:
        severity = "warning" if warning else "error"
        self.problems.append(Problem(kind=kind, severity=severity, detail=detail, file=file, tensor=tensor))  # type: ignore[arg-type]

    def read(self) -> None:
        on_disk = sorted(entry.name for entry in self.folder.iterdir() if entry.name.endswith(".safetensors"))
        index = self._index()
        if index is None:
            files, weight_map = self._unindexed(on_disk), {}
        else:
            weight_map = self._safe_map(index)
            files = list(dict.fromkeys(weight_map.values()))
            for extra in sorted(set(on_disk) - set(files)):
                self.note("unlisted_file", f"{extra} is not in the index and is not read", file=extra, warning=True)
        first_of: dict[str, str] = {}
        for tensor, file in weight_map.items():
            first_of.setdefault(file, tensor)
        absent = bool(weight_map) and not on_disk and not any(self._lies_there(file) for file in files)
        if absent:  # a release before its download; some of several missing is a damaged one
            count = f"none of the {len(files)} files" if len(files) > 1 else f"not the file {files[0]}"
            self.note("no_shards", f"{count} that {INDEX} names is here: no weights are read", file=INDEX, warning=True)
            files = []
        for file in sorted(files):
            self._read_file(file, weight_map, first_of.get(file))
        self._collect(weight_map)
        if index is not None:
            self._check_index(weight_map)
        pickles = sorted(entry.name for entry in self.folder.iterdir() if entry.name.endswith(PICKLE_SUFFIXES))
        if pickles and not on_disk and (index is None or absent):
            self.note(
                "pickle_checkpoint",
                f"only pickle weights ({', '.join(pickles[:3])}), which can run code when read, are not read;"
                " convert them to safetensors",
                file=pickles[0],
            )

    def _index(self) -> dict[str, Any] | None:
        place, reason = contained(self.folder, INDEX)
        if place is None:
            self.note("unsafe_path", f"{INDEX}: {reason}", file=INDEX)
            return None
        if not place.is_file():
            return None
        try:
            index = read_object(place)
        except DayZeroError as error:
            self.note("index_json", f"{INDEX} is not one JSON object: {error.got}", file=INDEX)
            return None
        if not isinstance(index.get("weight_map"), dict):
            self.note("index_json", f"{INDEX} has no weight_map object", file=INDEX)
            return None
        return index

    def _lies_there(self, file: str) -> bool:
        """Whether anything has this name, be it a link to nothing."""
        place, _ = contained(self.folder, file)
        return place is None or place.is_symlink() or place.exists()

    def _unindexed(self, on_disk: list[str]) -> list[str]:
        """Without an index: model.safetensors alone, else every file of the standard naming, else every file."""
        standard = [name for name in on_disk if name == SINGLE] or [name for name in on_disk if name.startswith("model")]
        for extra in sorted(set(on_disk) - set(standard)) if standard else []:
            self.note(
                "unlisted_file", f"{extra} lies beside {standard[0]} without an index and is not read", file=extra, warning=True
            )
        return standard or on_disk

    def _safe_map(self, index: Mapping[str, Any]) -> dict[str, str]:
        total = index["metadata"].get("total_size") if isinstance(index.get("metadata"), dict) else None
        if isinstance(total, (int, float)) and not isinstance(total, bool):
            self.total_size = int(total)
        safe: dict[str, str] = {}
        reasons: dict[tuple[str, str], str] = {}  # by file, not by tensor: looking at links is slow
        for tensor, file in index["weight_map"].items():
            key = (type(file).__name__, str(file))
            if key not in reasons:
                reasons[key] = contained(self.folder, file)[1]
            if reason := reasons[key]:
                self.note(
                    "unsafe_path", f"{INDEX}: weight_map[{tensor!r}] = {file!r} is refused: {reason}", file=INDEX, tensor=tensor
                )
            else:
                safe[tensor] = file
        return safe

    def _read_file(self, file: str, weight_map: Mapping[str, str], first_tensor: str | None) -> None:
        place, reason = contained(self.folder, file)
        if place is None:
            self.note("unsafe_path", f"{file!r} is refused: {reason}", file=file)
        elif not place.exists():
            listed = [tensor for tensor, where in weight_map.items() if where == file]
            shown = ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
            self.note(
                "missing_file",
                f"{file} is in the index and not on disk; it should hold {len(listed)} tensors: {shown}",
                file=file,
            )
        else:
            header, problems = read_header(place, file, first_tensor=first_tensor)
            self.problems += problems
            if header is not None:
                self.shards[file] = header

    def _collect(self, weight_map: Mapping[str, str]) -> None:
        for file, shard in self.shards.items():
            for name, entry in shard.tensors.items():
                if name not in self.tensors:
                    self.tensors[name] = entry
                    continue
                self.note("duplicate_tensor", f"{name} is in {self.tensors[name].file} and in {file}", file=file, tensor=name)
                if weight_map.get(name) == file:
                    self.tensors[name] = entry

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        for tensor, file in weight_map.items():
            if file not in self.shards or tensor in self.shards[file].tensors:
                continue  # an unreadable or missing file is a problem of its own
            if tensor in self.tensors:
                self.note(
                    "misplaced_tensor",
                    f"{tensor}: the index says {file}, it is in {self.tensors[tensor].file}",
                    file=file,
                    tensor=tensor,
                )
            else:
                self.note("missing_tensor", f"{tensor}: the index says {file}, no header has it", file=file, tensor=tensor)
        for tensor in sorted(set(self.tensors) - set(weight_map)):
            file = self.tensors[tensor].file
            self.note("unlisted_tensor", f"{tensor} is in {file} and not in the index", file=file, tensor=tensor, warning=True)
        found = sum(entry.num_bytes for entry in self.tensors.values())
        if self.total_size is not None and self.total_size != found and len(self.shards) == len(set(weight_map.values())):
            self.note(
                "total_size",
                f"{INDEX} says total_size {self.total_size}, the headers sum to {found} bytes, which is used",
                file=INDEX,
                warning=True,
            )


def _optional(folder: Path, name: str, problems: list[Problem]) -> dict[str, Any] | None:
    """A settings file that may be absent; one that is broken is a problem, not an end."""
    place, reason = contained(folder, name)
    if place is None:
        problems.append(Problem(kind="unsafe_path", severity="error", file=name, detail=f"{name}: {reason}"))
        return None
    if not place.is_file():
        return None
    try:
        return read_object(place)
    except DayZeroError as error:
        problems.append(
            Problem(kind="settings_json", severity="error", file=name, detail=f"{name} is not one JSON object: {error.got}")
        )
        return None


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
