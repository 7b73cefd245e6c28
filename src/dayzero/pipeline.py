"""The stages in order, from a release folder and a target to an acceptance report.

    inspect -> plan -> convert -> map -> serve -> validate -> bench -> soak -> report

A run is one folder. `resume` keeps every record that was made from the inputs as they are now; without it stages run
again (a finished artifact is reused either way). An interruption at any point leaves a folder that can be resumed.
"""

import hashlib
import json
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dayzero
from dayzero import stages
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Plan
from dayzero.core.records import to_dict
from dayzero.core.runstore import STAGES, RunStore
from dayzero.core.target import Target, Workload

Say = Callable[[str], None]

OFFLINE = ("inspect", "plan", "convert", "map")
RUN = {"inspect": stages.inspect, "plan": stages.plan, "convert": stages.convert, "map": stages.map_operators}
SERVED = ("serve", "validate", "bench", "soak")


class Infeasible(Exception):
    """The plan does not fit: the run ends after `plan`, with its record in place (exit status 1)."""


def open_run(
    path: Path, target: Target, *, devices: int | None, workload: Workload, runs: Path, options: dict[str, Any], resume: bool
) -> RunStore:
    """The run of these inputs, new or continued. Raises DayZeroError when `path` is no release."""
    from dayzero.model.release import open_release

    release = open_release(path)
    name = path.resolve().name if path.is_dir() else path.resolve().parent.name
    measured = target.confidence == "measured"
    content = json.dumps(to_dict(target), sort_keys=True)
    inputs: dict[str, Any] = {
        "schema": "dayzero.inputs/1",
        "model": name,
        "source": str(path.resolve()),
        "source_hash": release.source_hash,
        "source_state": source_state(path, sorted(release.shards)),
        "target_id": target.id,
        "target_hash": "measured" if measured else hashlib.sha256(content.encode()).hexdigest(),
        "target": to_dict(target),
        "devices": devices,
        "workload": to_dict(workload),
        "options": options,
        "versions": versions(),
    }
    return RunStore.create(runs, name, target.id, inputs, keep=resume)


def source_state(folder: Path, shards: list[str]) -> str:
    """Sizes and times of the shards: headers do not change when weights of the same shape are put in their place."""
    found = [(name, status.st_size, status.st_mtime_ns) for name in shards for status in [(folder / name).stat()]]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def versions() -> dict[str, str]:
    found = {"dayzero": dayzero.__version__}
    for package in ("torch", "transformers", "safetensors", "tokenizers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def stages_until(until: str) -> list[str]:
    """The stages up to and with `until`. Raises DayZeroError when there is no such stage."""
    if until not in STAGES:
        raise DayZeroError("unknown stage", got=until, want=", ".join(STAGES), fix="give --until one of these")
    return list(STAGES)[: list(STAGES).index(until) + 1]


def run(store: RunStore, *, until: str, resume: bool, say: Say) -> None:
    """Run every stage up to `until`. Raises Infeasible when the plan does not fit."""
    wanted = stages_until(until)
    for stage in [stage for stage in OFFLINE if stage in wanted]:
        if not _kept(store, stage, resume, say):
            started = time.monotonic()
            RUN[stage](store, _prefixed(say, stage))
            say(f"{stage}: done in {time.monotonic() - started:.1f} s")
        if stage == "inspect":  # the gates hold for records that are kept, too
            stages.require_servable(store.read("inspect", ModelDescription), until)
        if stage == "plan" and not store.read("plan", Plan).feasible:
            raise Infeasible
    _run_served(store, [stage for stage in SERVED if stage in wanted], resume, say)
    if "report" in wanted:
        stages.report(store, _prefixed(say, "report"))
        say(f"report: {store.folder / 'acceptance.html'}")


def _run_served(store: RunStore, wanted: list[str], resume: bool, say: Say) -> None:
    """The stages that need the running server. It is started once, and only if one of them has to run."""
    if all(_kept(store, stage, resume, say) for stage in wanted):
        return
    started = time.monotonic()
    with stages.serving(store, _prefixed(say, "serve")) as server:
        load_s = time.monotonic() - started
        say(f"serve: ready in {load_s:.1f} s")
        if not _kept(store, "serve", resume, lambda text: None):
            stages.serve(store, server, load_s)
        for stage in wanted[1:]:
            if _kept(store, stage, resume, lambda text: None):
                continue
            began, told = time.monotonic(), _prefixed(say, stage)
            if stage == "validate":
                stages.validate(store, server.url, told)
            elif stage == "bench":
                stages.bench(store, server.url, stages.process_ids(server), told)
            else:
                stages.soak(store, server.url, stages.process_ids(server), told)
            say(f"{stage}: done in {time.monotonic() - began:.1f} s")


def _kept(store: RunStore, stage: str, resume: bool, say: Say) -> bool:
    if not (resume and store.is_valid(stage)) or (stage == "convert" and not stages.has_artifact(store)):
        return False
    say(f"{stage}: kept from before")
    return True


def _prefixed(say: Say, stage: str) -> Say:
    return lambda text: say(f"{stage}: {text}")
