"""Where things that can be made again are kept between runs: compiled kernels and layers, fetched packages."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """`~/.cache/dayzero/<kind>`, made if need be; where home cannot be written, a folder of this user among the temporary
    files."""
    with suppress(OSError, RuntimeError):  # a read-only home, or none
        folder = Path.home() / ".cache" / "dayzero" / kind
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    own = Path(tempfile.gettempdir()) / f"dayzero-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    if own.stat().st_uid != os.getuid():
        raise PermissionError(f"{own} belongs to another user")
    folder = own / kind
    folder.mkdir(exist_ok=True)
    return folder
