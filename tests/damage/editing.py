"""A copy of a release in, the same with something changed out: bytes, headers, tensors, index and settings. No torch.

`Checkpoint` knows which tensors and files were touched, so that a finding can be checked for naming one of them. Tensors are
(dtype as in the file, shape, bytes). Whoever rewrites a shard gets a sound one; what is to be unsound is said explicitly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Stored = tuple[str, list[int], bytes]
INDEX = "model.safetensors.index.json"


def layout(tensors: dict[str, Stored]) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a shard that holds these tensors end to end."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return header, data


class Checkpoint:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.touched: set[str] = set()  # names of tensors and files, any of which a finding may name

    # --- files -----------------------------------------------------------------------------------------------------------

    @property
    def shards(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.safetensors"))

    def path(self, file: str) -> Path:
        """The path of a file that is about to be changed."""
        self.touched.add(file)
        return self.folder / file

    def raw(self, file: str) -> bytes:
        return (self.folder / file).read_bytes()

    def write_raw(self, file: str, content: bytes) -> None:
        self.path(file).write_bytes(content)

    def parts(self, file: str) -> tuple[dict[str, Any], bytes]:
        raw = self.raw(file)
        begin = 8 + int.from_bytes(raw[:8], "little")
        return json.loads(raw[8:begin]), raw[begin:]

    def write_parts(self, file: str, header: dict[str, Any] | bytes, data: bytes) -> None:
        raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
        self.write_raw(file, len(raw).to_bytes(8, "little") + raw + data)

    def tensors(self, file: str) -> dict[str, Stored]:
        header, data = self.parts(file)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ordered = sorted(entries, key=lambda name: entries[name]["data_offsets"])
        return {name: (entries[name]["dtype"], entries[name]["shape"], data[slice(*entries[name]["data_offsets"])])
                for name in ordered}  # fmt: skip

    def write_tensors(self, file: str, tensors: dict[str, Stored]) -> None:
        self.write_parts(file, *layout(tensors))

    # --- tensors ---------------------------------------------------------------------------------------------------------

    def file_of(self, tensor: str) -> str:
        return self.index()["weight_map"][tensor]

    def names(self, part: str = "") -> list[str]:
        return [name for name in self.index()["weight_map"] if part in name]

    def get(self, tensor: str) -> Stored:
        return self.tensors(self.file_of(tensor))[tensor]

    def put(self, tensor: str, stored: Stored) -> None:
        """Replace a tensor where it lies."""
        self.touched.add(tensor)
        file = self.file_of(tensor)
        self.write_tensors(file, self.tensors(file) | {tensor: stored})

    def alter(self, tensor: str, change: Callable[[bytearray], bytes | bytearray | None]) -> None:
        """Change the bytes of one tensor and nothing else."""
        dtype, shape, content = self.get(tensor)
        buffer = bytearray(content)
        made = change(buffer)
        self.put(tensor, (dtype, shape, bytes(buffer if made is None else made)))

    def flip(self, tensor: str, bit: int) -> None:
        def change(content: bytearray) -> None:
            content[bit // 8] ^= 1 << bit % 8

        self.alter(tensor, change)

    def remove(self, *tensors: str) -> None:
        """Tensors gone from the file and the index, both sound afterwards."""
        for tensor in tensors:
            self.touched.add(tensor)
            file = self.file_of(tensor)
            self.write_tensors(file, {name: stored for name, stored in self.tensors(file).items() if name != tensor})
            self.edit_index(lambda index, tensor=tensor: index["weight_map"].pop(tensor))
        self.correct_total()

    def add(self, tensor: str, stored: Stored, file: str) -> None:
        self.touched.add(tensor)
        self.write_tensors(file, self.tensors(file) | {tensor: stored})
        self.edit_index(lambda index: index["weight_map"].update({tensor: file}))
        self.correct_total()

    def swap(self, first: str, second: str) -> None:
        """The bytes of two tensors of one shape exchanged."""
        one, other = self.get(first), self.get(second)
        assert one[:2] == other[:2], (first, second)
        self.put(first, other)
        self.put(second, one)

    def edit_entry(self, tensor: str, **change: Any) -> None:
        """Change what the header says of a tensor, and no byte of the data."""
        self.touched.add(tensor)
        file = self.file_of(tensor)
        header, data = self.parts(file)
        header[tensor] |= change
        self.write_parts(file, header, data)

    # --- settings --------------------------------------------------------------------------------------------------------

    def index(self) -> dict[str, Any]:
        return json.loads((self.folder / INDEX).read_text())

    def edit_index(self, change: Callable[[dict[str, Any]], object]) -> None:
        index = self.index()
        change(index)
        self.path(INDEX).write_text(json.dumps(index, indent=2))

    def correct_total(self) -> None:
        total = sum(len(stored[2]) for file in self.shards for stored in self.tensors(file).values())
        self.edit_index(lambda index: index["metadata"].update(total_size=total))

    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text())

    def edit_config(self, **change: Any) -> None:
        """Keys of the config replaced; None removes one. A finding may name a key, as well as the file."""
        self.touched.update(change)
        config = {key: value for key, value in (self.config() | change).items() if value is not None}
        self.path("config.json").write_text(json.dumps(config, indent=2))
