"""What the command line is given, as records: models by folder, config or description, workloads by file."""

from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.records import from_dict, read_json, read_record
from dayzero.core.runstore import INPUTS_FILE
from dayzero.core.target import Workload, load_yaml
from dayzero.stages import require_sound


def given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def is_run(path: Path) -> bool:
    return (path / INPUTS_FILE).is_file()


def description(path: Path, trust_remote_code: bool = False) -> ModelDescription:
    """The description of a release folder, a config.json or a 1_model.json; unsound ones are refused."""
    data = read_json(path) if path.is_file() else None
    if isinstance(data, dict) and str(data.get("schema", "")).startswith("dayzero.model/"):
        model = read_record(ModelDescription, path)
    else:
        from dayzero.model.describe import describe

        model = describe(path, trust_remote_code=trust_remote_code)
    require_sound(model)
    return model


def workload(path: Path | None) -> Workload:
    """A workload file, or the default workload."""
    if path is None:
        return Workload()
    if not path.is_file():
        raise DayZeroError(
            f"there is no workload file at {path}", got="no such file", want="a YAML file", fix="correct --workload"
        )
    data = load_yaml(path) or {}
    if isinstance(data, dict):
        data.pop("schema", None)
    return from_dict(Workload, data, source=str(path))
