"""The settings of a release in, the classes and files of its own Python code that they name out. Nothing is run or imported.

`auto_map` in config.json and tokenizer_config.json names code as `module.Class`, or `owner/repository--module.Class` for
code of another repository. Running it is `model.sandbox`'s alone, and only after the user allowed it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.model.paths import contained, module_file
from dayzero.model.release import Release
from dayzero.model.remote.objects import is_remote, normal

MAX_CODE_FILES = 1000
MAX_CODE_BYTES = 16 << 20  # of one file: far beyond what anyone writes or reads


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeReference:
    """One class in a Python file of the release, or of another repository."""

    class_name: str
    file: str
    repository: str | None = None

    def __str__(self) -> str:
        return f"class {self.class_name} in {self.file}" + (f" of {self.repository}" if self.repository else "")


def code_reference(value: object) -> CodeReference | None:
    """What one value of an `auto_map` names; None where it names nothing."""
    if not isinstance(value, str) or "." not in value:
        return None
    repository = value.split("--", 1)[0] if "--" in value else None
    return CodeReference(class_name=value.rpartition(".")[2], file=module_file(value), repository=repository)


def model_code(config: Mapping[str, Any]) -> tuple[CodeReference, CodeReference] | None:
    """The config class and the model class that a release ships; None unless it ships both."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return None
    made = code_reference(_first(auto_map.get("AutoConfig")))
    model = code_reference(_first(auto_map.get("AutoModelForCausalLM"))) or code_reference(_first(auto_map.get("AutoModel")))
    return (made, model) if made is not None and model is not None else None


def refuse_remote(folder: Path) -> None:
    """Raises DayZeroError when this is an address: code is run from a folder, where it can be read first, or not at all."""
    if is_remote(folder):
        address = normal(folder)
        raise DayZeroError(
            "the code of a release at an address is not run",
            got=f"--trust-remote-code with {address}",
            want="a release folder: code is never fetched",
            fix="download the release, look at its code, and inspect the folder; or leave --trust-remote-code out",
        )


def require_code(release: Release) -> None:
    """Raises DayZeroError when code that config.json names is not in the release folder itself."""
    for reference in model_code(release.config) or ():
        if reference.repository or not release.path(reference.file).is_file():
            raise DayZeroError(
                "the release's own code is not complete",
                got=f"{reference}, which is not in {release.folder}",
                want="the Python files that auto_map names, in the release folder",
                fix="download them into the release folder, and name them in auto_map without a repository",
            )


def tokenizer_needs_code(release: Release) -> Problem | None:
    """Says which class of which file a release's tokenizer would need, where neither tokenizer.json nor transformers has it.

    Without this check transformers may read the vocabulary into a generic class, which splits texts and special tokens
    differently and says nothing.
    """
    settings = release.tokenizer_config or {}
    auto_map = settings.get("auto_map")
    listed = auto_map.get("AutoTokenizer") if isinstance(auto_map, Mapping) else auto_map  # a bare list is the older form
    values = listed if isinstance(listed, list) else [listed]
    named = next((found for found in map(code_reference, reversed(values)) if found is not None), None)  # the fast one is last
    remote = is_remote(release.folder)
    if named is None or "tokenizer.json" in release.tokenizer_files:
        return None
    if remote and any(problem.file == "tokenizer.json" for problem in release.problems):
        return None  # it is there, and was not fetched
    declared = settings.get("tokenizer_class")
    if named.class_name == declared and _in_transformers(named.class_name):
        return None
    known = remote or named.repository or named.file in release.other_files  # of a remote release, code is not looked for
    absent = "" if known else ", which the release does not have"
    return Problem(
        kind="tokenizer_needs_code",
        severity="warning",
        file="tokenizer_config.json",
        detail=f"the tokenizer is {named}{absent}: Python code of the release, which is not run, and there is no "
        "tokenizer.json to read instead",
    )


def code_hashes(folder: Path) -> dict[str, str]:
    """`sha256` of every Python file of a release, by its name relative to the folder. Links that lead outside are left out."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py"))[:MAX_CODE_FILES]:
        name = path.relative_to(folder).as_posix()
        place, _ = contained(folder, name)
        if place is not None and place.is_file() and place.stat().st_size <= MAX_CODE_BYTES:
            found[name] = hashlib.sha256(place.read_bytes()).hexdigest()
    return found


def _first(value: object) -> object:
    return value[0] if isinstance(value, list) and value else value


def _in_transformers(class_name: str) -> bool:
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    return tokenizer_class_from_name(class_name) is not None
