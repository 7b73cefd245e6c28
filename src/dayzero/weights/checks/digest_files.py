"""The places where publishers and downloads leave digests, read without believing them: (file, algorithm, hex, where) out.

Names are returned as they are written; whoever uses them checks that they stay inside the folder. Every line that looks like a
digest and cannot be read is a problem. Files are read up to MAX_LIST_BYTES.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dayzero.core.model import Problem
from dayzero.model.paths import cache_blobs

Algorithm = Literal["sha256", "git-sha1"]
MAX_LIST_BYTES = 64 * 2**20  # 200,000 files of a long name
LIST = re.compile(r"^(sha256sums?|checksums?|hashes)([._-](sha256|txt|asc))*$|[._-]sha256sums?(\.txt)?$|^[^.]*\.sha256$",
                  re.IGNORECASE)  # fmt: skip
MANIFEST = re.compile(r"^(manifest|files?|checksums?|sha256)\.json$|^\.?(mdl|ms)\.json$", re.IGNORECASE)
# `hash  name`, `hash *name` (binary), and the same with a backslash in front, which says that the name has escapes.
GNU = re.compile(r"^(\\?)([0-9a-fA-F]{64})(?: [ *]|\t+| +)(.+)$")
BSD = re.compile(r"^SHA(?:2-)?256 ?\((.+)\) ?= ?([0-9a-fA-F]{64})$")
DOWNLOAD_METADATA = "download metadata"
NAME_KEYS = ("file", "path", "rfilename", "name", "filename", "Path", "Name")
LFS = re.compile(rb"\Aversion https://git-lfs[^\n]*\n(?:[^\n]*\n)*?oid sha256:([0-9a-f]{64})\n")
OTHER_ALGORITHM = re.compile(
    r"^(MD5|SHA1|SHA512|SHA384|BLAKE2b|BLAKE3) ?\(|^[0-9a-fA-F]{32}(?:[0-9a-fA-F]{8})?[ \t]|^[0-9a-fA-F]{96,128}[ \t]"
)


@dataclass
class Found:
    entries: list[tuple[str, Algorithm, str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add(self, file: str, value: str, where: str) -> None:
        self.entries.append((file, "sha256" if len(value) == 64 else "git-sha1", value.lower(), where))

    def problem(self, file: str, detail: str, severity: Literal["error", "warning"] = "warning") -> None:
        self.problems.append(Problem(kind="digest_unread", severity=severity, file=file, detail=f"{file}: {detail}"))


def listed_digests(folder: Path, found: Found) -> None:
    """Checksum files, sidecar files, manifests and pointers that lie in the folder itself."""
    for path in sorted(folder.iterdir()):
        name = path.name
        target = name[: -len(".sha256")] if name.lower().endswith(".sha256") else ""
        is_list, is_manifest = LIST.search(name) is not None, MANIFEST.search(name) is not None
        is_sidecar = bool(target) and ("." in target or (folder / target).is_file())
        pointer = name.endswith((".lfs", ".pointer"))
        if not (is_list or is_manifest or is_sidecar or pointer) or not path.is_file():
            continue
        content = _content(path, found)
        if content is None:
            continue
        if pointer:
            if match := LFS.match(content):
                found.add(name.rpartition(".")[0], match.group(1).decode(), f"LFS pointer {name}")
        elif is_manifest:
            _manifest(name, content, found)
        else:
            _lines(name, content, found, target if is_sidecar else "")


def _lines(name: str, content: bytes, found: Found, target: str) -> None:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found.problem(name, f"it is no text: {error}")
        return
    for number, line in enumerate(text.splitlines(), 1):
        line = line.rstrip()
        if not line.strip() or line.lstrip().startswith(("#", ";", "-----")):
            continue
        if target and re.fullmatch(r"[0-9a-fA-F]{64}", line.strip()):
            found.add(target, line.strip(), name)
        elif match := GNU.match(line):
            file = match.group(3).replace("\\n", "\n").replace("\\\\", "\\") if match.group(1) else match.group(3)
            found.add(file, match.group(2), name)
        elif match := BSD.match(line):
            found.add(match.group(1), match.group(2), name)
        elif OTHER_ALGORITHM.match(line):
            found.problem(name, f"line {number} is of another algorithm and is not used: {line[:100]!r}")
        else:
            found.problem(name, f"line {number} is no digest: {line[:100]!r}")


def _manifest(name: str, content: bytes, found: Found) -> None:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        found.problem(name, f"it is no JSON: {str(error)[:100]}")
        return
    for entry in _objects(data):
        file = next((entry[key] for key in NAME_KEYS if isinstance(entry.get(key), str)), None)
        lfs = entry.get("lfs") if isinstance(entry.get("lfs"), dict) else {}
        assert isinstance(lfs, dict)
        value = next((part[key] for part in (entry, lfs) for key in ("sha256", "Sha256", "SHA256") if part.get(key)), None)
        if value is None:
            oid = lfs.get("oid")
            value = oid.removeprefix("sha256:") if isinstance(oid, str) else None
        if file is None or value is None:
            continue
        if isinstance(value, str) and re.fullmatch(r"(?:sha256:)?[0-9a-fA-F]{64}", value):
            found.add(file, value.removeprefix("sha256:"), name)
        else:
            found.problem(name, f"the sha256 of {file!r:.100} is none: {value!r:.100}")


def _objects(data: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Objects of a JSON tree that may describe a file, and `name: hash` pairs as such objects."""
    if depth > 6:
        return
    if isinstance(data, list):
        for item in data:
            yield from _objects(item, depth + 1)
    elif isinstance(data, dict):
        yield data
        for key, value in data.items():
            if isinstance(value, str) and re.fullmatch(r"(?:sha256:)?[0-9a-fA-F]{64}", value) and "." in key:
                yield {"file": key, "sha256": value}
            elif isinstance(value, dict) and "." in key and not any(name in value for name in NAME_KEYS):
                yield {"file": key, **value}
            elif key != "lfs" and isinstance(value, (list, dict)):
                yield from _objects(value, depth + 1)


def cache_digests(folder: Path, found: Found) -> None:
    """Names of blobs that the files of a hub cache's snapshot link to: the sha256 of large files, git's id of small ones."""
    blobs = cache_blobs(folder.resolve())
    if blobs is None:
        return
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink():
            continue
        target = path.readlink()
        blob = target.name
        if target.parent.name != "blobs" or path.resolve().parent != blobs:
            continue  # `contained` refuses it where the file itself is read
        file = path.relative_to(folder).as_posix()
        if re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{40}", blob):
            found.add(file, blob, "hub cache blob name")
        else:
            found.problem(file, f"the blob it links to is not named by a hash: {blob[:80]!r}")


def metadata_digests(folder: Path, found: Found) -> None:
    """`.cache/huggingface/download/<file>.metadata`: commit, entity tag (sha256 or git's id), time of the download."""
    root = folder / ".cache" / "huggingface" / "download"
    if not root.is_dir():
        return
    for path in sorted(root.rglob("*.metadata")):
        if not path.is_file():
            continue
        content = _content(path, found)
        file = path.relative_to(root).as_posix().removesuffix(".metadata")
        lines = content.decode("utf-8", "replace").splitlines() if content is not None else []
        if content is None:
            continue
        tag = lines[1].strip().removeprefix("W/").strip('"') if len(lines) > 1 else ""
        if re.fullmatch(r"[0-9a-fA-F]{64}|[0-9a-fA-F]{40}", tag):
            found.add(file, tag, DOWNLOAD_METADATA)
        else:
            found.problem(path.relative_to(folder).as_posix(), f"its second line is no hash: {tag[:80]!r}")


def _content(path: Path, found: Found) -> bytes | None:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_LIST_BYTES + 1)
    except OSError as error:
        found.problem(path.name, f"it cannot be read: {error.strerror}")
        return None
    if len(content) > MAX_LIST_BYTES:
        found.problem(path.name, f"it is longer than {MAX_LIST_BYTES} bytes and is not read")
        return None
    return content
