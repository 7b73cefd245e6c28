"""The command line: one verb a stage, no logic. Paths and names only; defaults live in the records.

Exit status: 0 done and every required verdict passes, 1 done but one fails or is not shown, 2 bad input or environment,
130 interrupted, 141 when nobody reads the output any more. Under `--json` one object goes to stdout; people read stdout,
progress and logs go to stderr.
"""

import json
import signal
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from dayzero import cli_convert, cli_plan, cli_tools, endings, inputs
from dayzero.core.errors import DayZeroError
from dayzero.core.records import record_json
from dayzero.terminal import (
    DeviceOption,
    JsonOption,
    RunArgument,
    RunsOption,
    TargetOption,
    TrustOption,
    app,
    out,
    say,
    show,
    status,
)

__all__ = ["app", "cli_convert", "cli_plan", "cli_tools", "main"]  # importing the other three registers their verbs


def main() -> NoReturn:
    endings.run(app)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="a release folder, a config.json, or the URL of a release folder")],
    against: Annotated[str | None, typer.Option(help="another release or a 1_model.json: what changed since it")] = None,
    target: Annotated[str | None, typer.Option("--target", help="also: which operators this target has kernels for")] = None,
    only_first: Annotated[bool, typer.Option("--provisional", help="the first answer, from keys, and no more")] = False,
    page: Annotated[Path | None, typer.Option("--html", help="also write the description as a page")] = None,
    as_json: JsonOption = False,
    trust_remote_code: TrustOption = False,
) -> int:
    """Describe a model from its config and tensor headers: parameters, layers, caches, operators, and what in it is new."""
    from dayzero import inspection
    from dayzero.report import model_text
    from dayzero.stages import require_sound

    found = inspection.inspect(
        path, trust_remote_code=trust_remote_code, only_first=only_first, against=against, target=target,
        show_first=lambda first: None if as_json else out.print(model_text.first_answer(first)),
    )  # fmt: skip
    if page is not None:
        inspection.write_page(found, page)
    try:
        require_sound(found.model)
    except DayZeroError as error:
        error.details = found.summary() | error.details
        raise
    show(as_json, found.summary() if as_json else None, lambda: model_text.inspection(
        found.model, corrections=found.corrections(), against=found.against, coverage=found.coverage
    ))  # fmt: skip
    return 0


@app.command("map")
def map_operators(
    path: Annotated[Path, typer.Argument(help="a release folder, a config.json or a run folder")],
    device: DeviceOption = None,
    context: Annotated[int | None, typer.Option(help="context tokens at which shares are computed; 2048")] = None,
    as_json: JsonOption = False,
) -> int:
    """Every operator site of a model, what runs there on a device, and the evidence for it."""
    from dayzero.core.runstore import RunStore
    from dayzero.report.text import operators_table

    if inputs.is_run(path):
        from dayzero import stages

        if device is not None or context is not None:
            raise DayZeroError("a run has its own device and context", got="--device or --context with a run folder",
                               want="dayzero map RUN", fix="leave them out, or map the release folder")  # fmt: skip
        result = stages.map_operators(RunStore.open(path), say)
    else:
        from dayzero.devices.backend import open_backend
        from dayzero.model.operators import map_release

        result = map_release(
            path, inputs.description(path), open_backend(device or "cpu"), context_tokens=context or 2048
        )
    show(as_json, record_json(result), lambda: operators_table(result))
    return 0 if not result.missing else 1


@app.command()
def serve(
    run: RunArgument,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 picks a free one and prints it")] = 8000,
    grace: Annotated[float, typer.Option(help="seconds that open requests get after SIGTERM")] = 30.0,
    as_json: JsonOption = False,
) -> int:
    """Start an OpenAI-compatible server of a run's artifact."""
    from dayzero import stages
    from dayzero.core.runstore import RunStore
    from dayzero.serve.server import run_server

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server drains on it by itself
    spec = stages.server_spec(RunStore.open(run), host=host, port=port, grace_s=grace)
    return run_server(spec, on_ready=(lambda ready: print(json.dumps(ready), flush=True)) if as_json else None)


@app.command()
def validate(
    run: RunArgument,
    url: Annotated[str | None, typer.Option(help="a server that runs already")] = None,
    as_json: JsonOption = False,
) -> int:
    """Compare the engine and the server with the transformers reference."""
    from dayzero import stages
    from dayzero.report.text import checks_table

    report = _served(run, url, lambda store, where, pids: stages.validate(store, where, say))
    show(as_json, record_json(report), lambda: checks_table(report.checks))
    return status(report.verdict)


@app.command()
def bench(
    run: RunArgument,
    url: Annotated[str | None, typer.Option(help="a server that runs already")] = None,
    as_json: JsonOption = False,
) -> int:
    """Measure TTFT, TPOT, throughput and memory at several concurrencies."""
    from dayzero import stages
    from dayzero.report.text import bench_table

    report = _served(run, url, lambda store, where, pids: stages.bench(store, where, pids, say))
    show(as_json, record_json(report), lambda: bench_table(report))
    return status(report.verdict)


@app.command()
def soak(
    run: RunArgument,
    duration: Annotated[float | None, typer.Option(help="seconds; the workload's if not given")] = None,
    url: Annotated[str | None, typer.Option(help="a server that runs already")] = None,
    as_json: JsonOption = False,
) -> int:
    """Load the server with good, bad and departing requests, and watch its memory."""
    from dayzero import stages
    from dayzero.report.text import soak_table

    report = _served(run, url, lambda store, where, pids: stages.soak(store, where, pids, say, duration))
    show(as_json, record_json(report), lambda: soak_table(report))
    return status(report.verdict)


@app.command()
def report(run: RunArgument, as_json: JsonOption = False) -> int:
    """Write acceptance.json and acceptance.html from the records of a run."""
    from dayzero import stages
    from dayzero.core.runstore import RunStore
    from dayzero.report.text import acceptance_table

    acceptance = stages.report(RunStore.open(run), say)
    show(as_json, record_json(acceptance), lambda: acceptance_table(acceptance))
    return status(acceptance.verdict)


@app.command()
def adapt(
    path: Annotated[Path, typer.Argument(help="a release folder")],
    target: TargetOption,
    devices: Annotated[int | None, typer.Option(help="how many devices to use")] = None,
    workload: Annotated[Path | None, typer.Option(help="a workload file (YAML)")] = None,
    until: Annotated[str, typer.Option(help="the last stage to run")] = "report",
    resume: Annotated[bool, typer.Option("--resume", help="keep the records that are still valid")] = False,
    runs: RunsOption = Path("runs"),
    device: DeviceOption = None,
    dtype: Annotated[str | None, typer.Option(help="served dtype; the release's if not given")] = None,
    context: int | None = None,
    concurrency: int | None = None,
    memory_fraction: float | None = None,
    as_json: JsonOption = False,
) -> int:
    """The whole pipeline: from a release folder to a served, validated model and an acceptance report."""
    from dayzero import pipeline
    from dayzero.core.plan import Plan
    from dayzero.core.reports import Acceptance
    from dayzero.devices.targets import load_target
    from dayzero.report.text import acceptance_table, plan_table

    options = inputs.given(
        plan=inputs.given(devices=devices, context=context, concurrency=concurrency, memory_fraction=memory_fraction) or None,
        device=device, dtype=dtype,
    )  # fmt: skip
    pipeline.stages_until(until)  # a misspelt stage must not leave a run folder
    store = pipeline.open_run(
        path,
        load_target(target),
        devices=devices,
        workload=inputs.workload(workload),
        runs=runs,
        options=options,
        resume=resume,
    )
    say(f"run folder: {store.folder}")
    try:
        pipeline.run(store, until=until, resume=resume, say=say)
    except pipeline.Infeasible:
        made = store.read("plan", Plan)
        show(as_json, {"run": str(store.folder), **record_json(made)}, lambda: plan_table(made))
        return 1
    if until != "report":
        show(
            as_json,
            {"schema": "dayzero.run/1", "run": str(store.folder), "until": until},
            lambda: f"{until} is done: {store.folder}",
        )
        return 0
    acceptance = store.read("report", Acceptance)
    show(as_json, {"run": str(store.folder), **record_json(acceptance)}, lambda: acceptance_table(acceptance))
    return status(acceptance.verdict)


def _served(run: Path, url: str | None, measure: Any) -> Any:
    """Measure against a given server, or against this run's own, started for the occasion."""
    from dayzero import stages
    from dayzero.core.runstore import RunStore

    store = RunStore.open(run)
    if url is not None:
        return measure(store, url, ())
    with stages.serving(store, say) as server:
        return measure(store, server.url, stages.process_ids(server))


if __name__ == "__main__":
    main()
