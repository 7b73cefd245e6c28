"""An artifact in, what its in-process engine answers out; the engine is gone again when the function returns.

One engine at a time: first as served, then at float32, and no reference beside either. Deliberately not done: lending the
server's engine, since it belongs to another process.
"""

import gc
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.plan import Plan
from dayzero.core.units import format_bytes
from dayzero.validate.ask import Asked, ask
from dayzero.validate.inputs import InputOptions, Inputs, load_inputs
from dayzero.validate.reference import WORKING_BYTES, num_stored_elements
from dayzero.validate.subject import Generator

# The engine's own activations and logits, and the proof it makes when it loads, are within the reference's working bytes.
FLOAT32_BYTES, REDUCED_BYTES = 4, 2


def ask_engine(
    arguments: dict[str, Any], source: Path, *, inputs: Inputs | None = None, options: InputOptions | None = None,
    served: Generator | None = None, parameters: bool = True,
) -> Asked:  # fmt: skip
    """Load an engine (`arguments` are the fields of an EngineSpec), ask it for everything, and free it. `inputs` are those of
    the release in `source` if not given."""
    from dayzero.runtime.load import create_engine
    from dayzero.runtime.subject import EngineSubject

    engine = create_engine(**arguments)
    try:
        inputs = inputs or load_inputs(source, engine.info, options=options)
        return ask(EngineSubject(engine), inputs, served, parameters=parameters)
    finally:
        engine.close()
        del engine
        free_memory(arguments["device"])


def free_memory(device: str) -> None:
    """What nobody refers to any more goes back to the device, where it keeps freed memory for itself."""
    import torch

    gc.collect()
    empty = getattr(getattr(torch, torch.device(device).type, None), "empty_cache", None)
    if empty is not None:
        empty()


def no_room_at_float32(arguments: dict[str, Any], source: Path, plan: Plan) -> str:
    """Why an engine at float32 does not fit beside the server; "" where it does."""
    from dayzero.devices.backend import open_backend

    worst = max(plan.ledger, key=lambda ledger: ledger.cache_bytes_per_token, default=None)
    cache = 0.0
    if worst is not None:
        sequences = worst.cache_bytes_per_sequence * arguments["max_sequences"]
        cache = (worst.cache_bytes_per_token * arguments["pool_tokens"] + sequences) * FLOAT32_BYTES / REDUCED_BYTES
    needed = num_stored_elements(source) * FLOAT32_BYTES + int(cache) + WORKING_BYTES
    try:
        available = open_backend(arguments["device"]).memory().available_bytes
    except DayZeroError as error:
        return f"whether an engine at float32 fits cannot be told: {error.what}"
    if needed <= available:
        return ""
    return f"an engine at float32 does not fit: {format_bytes(available)} available, {format_bytes(needed)} needed"
