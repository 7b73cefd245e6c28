"""What `--json` prints where a record is large: the fields that scripts read, under their contract names."""

from typing import Any

from dayzero.core.model import ModelDescription
from dayzero.core.records import to_dict

CACHE_LENGTHS = (8_192, 131_072, 1_048_576)


def inspect_summary(model: ModelDescription) -> dict[str, Any]:
    """`dayzero inspect --json`. `cache.bytes_per_token` is the slope beyond every window, `bytes_per_sequence` the constant."""
    return {
        "schema": ModelDescription.SCHEMA,
        "name": model.name,
        "model_type": model.model_type,
        "architecture": model.architecture,
        "dtype": model.dtype,
        "dimensions": to_dict(model.dimensions),
        "total_parameters": model.total_parameters,
        "active_parameters": model.active_parameters,
        "mtp_parameters": model.mtp_parameters,
        "parameters_by_role": parameters_by_role(model),
        "layer_kinds": [
            {"kind": kind.name, "count": len(kind.layers), "mixer": kind.mixer, "feed_forward": kind.feed_forward}
            for kind in model.layer_kinds
        ],
        "cache": {
            "dtype": model.dtype,
            "bytes_per_token": model.cache_bytes_per_token,
            "bytes_per_sequence": model.cache_bytes_per_sequence,
            "bytes_at_tokens": {str(tokens): model.cache_bytes(tokens) for tokens in CACHE_LENGTHS},
        },
        "towers": list(model.towers),
        "stop_token_ids": list(model.stop_token_ids),
        "rope": model.rope,
        "quantization": model.quantization,
        "checkpoint_bytes": model.checkpoint_bytes,
        "has_weights": model.has_weights,
        "provisional": model.provisional,
        "unconsumed_keys": list(model.unconsumed_keys),
        "problems": [to_dict(problem) for problem in model.problems],
    }


def parameters_by_role(model: ModelDescription) -> dict[str, int]:
    """Elements by role: tied ones once, without buffers."""
    counts: dict[str, int] = {}
    for parameter in model.parameters:
        if parameter.tied_to is None and not parameter.is_buffer:
            counts[parameter.role] = counts.get(parameter.role, 0) + parameter.num_elements
    return counts
