"""Plain file work that must be right under bad luck: hashing, syncing, publishing by rename. No torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

# progress(what, done_bytes, total_bytes); a total of 0 means unknown.
Progress = Callable[[str, int, int], None]

CHUNK_BYTES = 2**20


def hash_file(path: Path, algorithm: str = "sha256") -> str:
    """`<algorithm>:<hex>` of a file, read in pieces."""
    digest = hashlib.new(algorithm)
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return f"{algorithm}:{digest.hexdigest()}"


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable (a rename is not, until its folder is synced)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make every file below `folder`, and the folders, durable."""
    for root, _, files in os.walk(folder):
        for name in files:
            handle = os.open(Path(root) / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        sync_folder(Path(root))
