"""A file name found in a release in, the place it may be read from out. Nothing is opened here.

A release decides which files are read by names in its own JSON files, so every such name is checked before `open`: it must
stay inside the folder, as text and after symbolic links. One layout is allowed to leave it: snapshots of the Hugging
Face cache, whose files are links to `../../blobs` of the same repository.
"""

from pathlib import Path, PurePosixPath
from typing import Any

from dayzero.core.model import Problem

# Settings keys whose values are file names, in tokenizer_config.json and config.json.
FILE_NAME_KEYS = ("tokenizer_file", "vocab_file", "merges_file", "spm_file", "sentencepiece_model_file", "chat_template_file")


def refusal(name: object) -> str:
    """Why `name` is no acceptable relative file name, or an empty string. Looks at the text alone."""
    if not isinstance(name, str):
        return f"a file name must be a string, not {type(name).__name__}"
    if not name.strip():
        return "the name is empty"
    if any(ord(letter) < 32 for letter in name):
        return "the name holds a NUL or another control character"
    if "\\" in name:
        return "the name holds a backslash"
    if PurePosixPath(name).is_absolute() or name[1:2] == ":":
        return "the name is an absolute path"
    if ".." in PurePosixPath(name).parts:
        return "the name leaves the folder with '..'"
    return ""


def contained(folder: Path, name: object) -> tuple[Path | None, str]:
    """The path of `name` in `folder`, or None and the reason for refusing it. The file need not exist."""
    reason = refusal(name)
    if reason:
        return None, reason
    assert isinstance(name, str)
    place = folder / name
    try:
        final, root = place.resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or a name the system cannot hold
        return None, f"the name cannot be resolved: {error}"
    if final.is_relative_to(root) or ((blobs := cache_blobs(root)) is not None and final.is_relative_to(blobs)):
        return place, ""
    return None, f"a symbolic link leads outside the folder, to {final}"


def cache_blobs(root: Path) -> Path | None:
    """`.../models--x/blobs` for a snapshot folder `.../models--x/snapshots/<commit>` of the Hugging Face cache."""
    if root.parent.name != "snapshots" or not root.parent.parent.name.startswith(("models--", "datasets--", "spaces--")):
        return None
    return root.parent.parent / "blobs"


def unsafe_names(folder: Path, settings: dict[str, Any], file: str) -> list[Problem]:
    """Problems with the file names that a settings file holds: modules of `auto_map` and tokenizer files."""
    names = [(key, settings[key]) for key in FILE_NAME_KEYS if isinstance(settings.get(key), str)]
    auto_map = settings.get("auto_map")
    for key, value in auto_map.items() if isinstance(auto_map, dict) else []:
        for reference in value if isinstance(value, list) else [value]:
            if reference is not None:
                # "owner/repository--module.Class" names another repository: only the module is a file name.
                names.append((f"auto_map.{key}", module_file(str(reference))))
    found = []
    for key, name in names:
        if reason := contained(folder, name)[1]:
            found.append(
                Problem(
                    kind="unsafe_path", severity="error", file=file, detail=f"{file}: {key} = {name!r} is refused: {reason}"
                )
            )
    for value in (settings.get("text_config"),):
        if isinstance(value, dict):
            found += unsafe_names(folder, value, file)
    return found


def module_file(reference: str) -> str:
    """`modeling_x.Model` -> `modeling_x.py`: the file that remote code would be read from."""
    return reference.split("--", 1)[-1].rpartition(".")[0] + ".py"
