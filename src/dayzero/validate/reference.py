"""A release folder in, reference logits and layer outputs out: transformers, uncached, eager, in float32 by default.

Independent of what it judges: weights go through transformers' own `from_pretrained`, never through our converter, and the
host's CPU runs it, whatever the engine's device is, so that one wrong kernel cannot stand on both sides. The experts and the
attention are the plain eager ones. Of a quantized release our own arithmetic makes the numbers first. Deliberately not done
here: streaming a model that does not fit (it is refused).
"""

import gc
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dayzero.core.errors import DayZeroError
from dayzero.core.units import DTYPE_BITS, canonical_dtype, format_bytes
from dayzero.validate.subject import ReferenceTooLarge

if TYPE_CHECKING:
    import torch

# Beyond the weights: activations and eager attention of a few hundred tokens, and the allocator's slack.
WORKING_BYTES = 512 * 2**20


class ReleaseReference:
    """Loads on first use; `release()` frees. Logits and layer outputs are float32 (float64 at float64) numpy arrays."""

    def __init__(self, folder: Path, *, dtype: str = "float32",
                 memory_bytes: int | None = None) -> None:  # fmt: skip
        """`memory_bytes` is what the reference may use (default: what the host has available when it loads)."""
        self.folder, self.dtype = Path(folder), canonical_dtype(dtype)
        self.memory_bytes = memory_bytes
        self._model: Any = None
        self._plain: tempfile.TemporaryDirectory[str] | None = None

    @property
    def description(self) -> str:
        import transformers

        return f"transformers {transformers.__version__}, uncached forward, eager, {self.dtype}, on the host's CPU"

    def at(self, dtype: str) -> "ReleaseReference":
        return ReleaseReference(self.folder, dtype=dtype, memory_bytes=self.memory_bytes)

    def release(self) -> None:
        self._model = None
        gc.collect()  # modules refer to each other in circles

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        return self._array(self._forward(token_ids).logits[0])

    def layer_outputs(self, token_ids: Sequence[int]) -> list[np.ndarray] | None:
        """The output of each decoder layer, [n, hidden]; of a layer that runs several times the last. None where the model
        has no list of layers, or one of them returns something else than one row per token."""
        from dayzero.model.classes import find_layers

        try:
            _, layers = find_layers(self._loaded())
        except DayZeroError:
            return None  # the check then says "not shown"
        seen: dict[int, Any] = {}

        def keep(index: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                seen[index] = output[0] if isinstance(output, (tuple, list)) else output

            return hook

        hooks = [layer.register_forward_hook(keep(index)) for index, layer in enumerate(layers)]
        try:
            self._forward(token_ids)
        finally:
            for hook in hooks:
                hook.remove()
        outputs = [seen.get(index) for index in range(len(layers))]
        if any(out is None or out.ndim < 3 or tuple(out.shape[:2]) != (1, len(token_ids)) for out in outputs):
            return None
        return [self._array(out[0].reshape(len(token_ids), -1)) for out in outputs if out is not None]

    def generate(self, token_ids: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int] = ()) -> list[int]:
        tokens = list(token_ids)
        for _ in range(max_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
            if tokens[-1] in stop_token_ids:
                break
        return tokens[len(token_ids) :]

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, parameter in self._loaded().named_parameters():
            yield name, self._array(parameter.detach())

    def _forward(self, token_ids: Sequence[int]) -> Any:
        import torch

        model = self._loaded()
        with torch.no_grad():
            return model(input_ids=torch.tensor([list(token_ids)], dtype=torch.long), use_cache=False)

    def _array(self, tensor: "torch.Tensor") -> np.ndarray:
        import torch

        return tensor.to(torch.float64 if self.dtype == "float64" else torch.float32).numpy()

    def _loaded(self) -> Any:
        if self._model is None:
            self._refuse_what_cannot_be_read()
            self._model = self._load()
        return self._model

    def _refuse_what_cannot_be_read(self) -> None:
        needed = num_stored_elements(self.folder) * DTYPE_BITS[self.dtype] // 8 + WORKING_BYTES
        if self.memory_bytes is None:
            from dayzero.devices.host import host_memory

            available = host_memory().available_bytes
        else:
            available = self.memory_bytes
        if needed > available:
            raise ReferenceTooLarge(f"the reference does not fit the host's memory at {self.dtype}",
                                    got=format_bytes(available), want=format_bytes(needed),
                                    fix="validate on a host with more memory")  # fmt: skip

    def _plain_folder(self) -> Path:
        """The release's folder; of a quantized one, a folder with the numbers that its codes stand for, until this is gone.

        Those are decoded by our own arithmetic, which tests hold against independent definitions bit for bit.
        """
        from dayzero.model.config_keys import config_dtype
        from dayzero.model.release import open_release
        from dayzero.weights.changes import Changes
        from dayzero.weights.forms.stored import is_quantized
        from dayzero.weights.to_hf import export

        release = open_release(self.folder)
        if not is_quantized(release):
            return self.folder
        if self._plain is None:
            self._plain = tempfile.TemporaryDirectory(prefix="dayzero-reference-")
            plain = Changes(dtype=config_dtype(release.config)[0] or "bfloat16")
            export(self.folder, Path(self._plain.name) / "plain", changes=plain)
        return Path(self._plain.name) / "plain"

    def _load(self) -> Any:
        import torch
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # progress is the caller's to show

        from dayzero.model.classes import class_config, model_class
        from dayzero.model.resolve import read_config

        folder = self._plain_folder()
        try:
            config = read_config(folder / "config.json")
            cls: Any = model_class(config)
            config = class_config(config)
            model, told = cls.from_pretrained(folder, config=config, dtype=getattr(torch, self.dtype),
                                              attn_implementation="eager", output_loading_info=True,
                                              trust_remote_code=False, local_files_only=True)  # fmt: skip
        except (OSError, ValueError, ImportError, RuntimeError, KeyError, AttributeError) as error:
            raise DayZeroError(f"transformers cannot load {self.folder} as the reference",
                               got=f"{type(error).__name__}: {error}"[:800], want="a release which from_pretrained reads",
                               fix="repair the folder") from error  # fmt: skip
        # transformers fills what is missing with random numbers and warns: such a model is no reference.
        missing = sorted(told["missing_keys"]) + sorted(str(item) for item in told["mismatched_keys"])
        if missing:
            raise DayZeroError("the reference would run on parameters that the checkpoint does not hold",
                               got=f"{len(missing)} missing or of another shape: {', '.join(missing[:5])}",
                               want="every parameter of the class in the release", fix="repair the release folder")  # fmt: skip
        if model._can_set_experts_implementation():
            model.set_experts_implementation("eager")
        return model.eval()


def num_stored_elements(folder: Path) -> int:
    """Elements of all tensors in a folder's safetensors files, from the headers alone; 2 bytes each in other formats."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        others = sum(path.stat().st_size for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if not others:
            raise DayZeroError(f"{folder} holds no weights", got="no *.safetensors", want="a release folder with its shards",
                               fix="give the folder the weights were published in")  # fmt: skip
        return others // 2
    total = 0
    for path in paths:
        total += sum(int(np.prod(entry["shape"], dtype=np.int64)) for entry in _header(path).values())
    return total


def _header(path: Path) -> dict[str, Any]:
    import json

    with path.open("rb") as file:
        prefix = file.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < size <= path.stat().st_size - 8:
            raise DayZeroError(f"{path} is not a safetensors file", got=f"a header of {size} bytes",
                               want="a header inside the file", fix="fetch the file again")  # fmt: skip
        header = json.loads(file.read(size))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}
