"""A plan as files for a serving engine: launch commands, a configuration file, Kubernetes and Docker Compose.

    export(plan, model, target, "vllm") -> {"launch.sh": ..., "vllm.yaml": ..., "leaderworkerset.yaml": ..., ...}

Every option is checked against the list made from the engine's own argument parser (`options/`). What a plan asks and the
engine cannot be told is a DayZeroError; what is handed over with a difference, or left to the engine, is in `NOTES.md`.
Deliberately not done: writing the files, and running anything.
"""

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Layout, Plan
from dayzero.core.target import Target
from dayzero.plan.export import compose, kubernetes, sglang, shell, vllm
from dayzero.plan.export.checked import load_options

ENGINES = {"vllm": vllm, "sglang": sglang, "vllm-ascend": vllm}


def refusal(layout: Layout, model: ModelDescription, target: Target, engine: str, *, role: str = "mixed") -> str | None:
    """Why an engine has no spelling for a layout; None where it has one. A search that asks this never proposes a layout which
    `export` would refuse for its degrees."""
    try:
        ENGINES[engine].require_layout(model, layout, target, engine, role, [])
    except DayZeroError as error:
        return f"{error.what} ({error.got})"
    return None


def export(
    plan: Plan,
    model: ModelDescription,
    target: Target,
    engine: str,
    *,
    model_path: str | None = None,
    version: str | None = None,
) -> dict[str, str]:
    """File name -> text. With a prefill and a decode pool the files of each are in a folder of its name.

    `model_path`: where the servers find the release (`/models/<name>` if not given); `version`: of the option list, the newest
    in the tree if not given. Raises DayZeroError for an unknown engine or version, and for what the engine cannot be told.
    """
    if engine not in ENGINES:
        raise DayZeroError(
            f"no engine is named {engine!r}", got=engine, want=", ".join(ENGINES), fix="give --export one of these"
        )
    listed = load_options(engine, version)
    notes: list[str] = []
    path = model_path or f"/models/{model.name}"
    files: dict[str, str] = {}
    if plan.engine != engine:
        notes.append(f"the ledger follows the memory model of {plan.engine}: plan with --engine {engine} for this engine's")
    made = ENGINES[engine].servers(plan, model, target, listed, path, notes)
    for server in made:
        folder = "" if server.role == "mixed" else f"{server.role}/"
        files[folder + "launch.sh"] = shell.script(server)
        files[folder + "commands.txt"] = shell.commands(server)
        files[folder + f"{engine}.yaml"] = shell.configuration(server)
        files[folder + "leaderworkerset.yaml"] = kubernetes.leader_worker_set(server, notes)
        files[folder + "statefulset.yaml"] = kubernetes.stateful_set(server, notes)
        files[folder + "compose.yaml"] = compose.compose(server, notes)
    if model_path is None:
        notes.append(f"the release is expected at {path} on every node; --model-path names another place")
    against = f"{listed.engine} {listed.version}" + (f" on {listed.base.engine} {listed.base.version}" if listed.base else "")
    lines = [f"# {plan.model} on {plan.target}, for {against}", "",
             f"Options were checked against the argument parser of {against}; nothing was run.", "",
             *[f"- {note}" for note in dict.fromkeys(notes)], "", "The plan's own reasons:", "",
             *[f"- {reason}" for reason in plan.reasons]]  # fmt: skip
    return files | {"NOTES.md": "\n".join(lines) + "\n"}
