"""The verbs `plan` and `prepare`. Paths and names only; defaults live in the records, the work in `planning`."""

from pathlib import Path
from typing import Annotated

import typer

from dayzero import inputs
from dayzero.core.records import record_json
from dayzero.terminal import JsonOption, TargetOption, TrustOption, app, show


@app.command()
def plan(
    path: Annotated[Path, typer.Argument(help="a release folder, a config.json or a 1_model.json")],
    target: TargetOption,
    devices: Annotated[int | None, typer.Option(help="how many devices to use; the fewest that fit if not given")] = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    dp: int | None = None,
    cp: int | None = None,
    dcp: Annotated[int | None, typer.Option(help="decode context parallelism inside the tensor-parallel group")] = None,
    sp: Annotated[bool | None, typer.Option("--sp/--no-sp", help="sequence parallelism in the tensor-parallel group")] = None,
    redundant_experts: Annotated[int | None, typer.Option(help="copies of experts beyond one of each")] = None,
    context: Annotated[int | None, typer.Option(help="tokens of one request, prompt and output")] = None,
    concurrency: Annotated[int | None, typer.Option(help="requests at once")] = None,
    memory_fraction: Annotated[float | None, typer.Option(help="share of device memory to use; else the engine's")] = None,
    weights_dtype: Annotated[str | None, typer.Option(help="bf16, fp8, int8, int4, mxfp4, nvfp4; several with commas")] = None,
    cache_dtype: Annotated[str | None, typer.Option(help="as --weights-dtype, for what grows with the context")] = None,
    objective: Annotated[str | None, typer.Option(help="throughput, latency, cost or fewest_cards")] = None,
    pools: Annotated[str | None, typer.Option(help="mixed, split (prefill and decode apart) or auto")] = None,
    prefill: Annotated[str | None, typer.Option(help="layout of a prefill pool, such as TP8xDP2")] = None,
    decode: Annotated[str | None, typer.Option(help="layout of a decode pool")] = None,
    role_tp: Annotated[list[str] | None, typer.Option(help="ROLE=N: split a role over N cards; may be repeated")] = None,
    split_roles: Annotated[bool, typer.Option("--split-roles", help="search splits of embedding, head and mlp")] = False,
    engine: Annotated[str | None, typer.Option(help="whose memory model: dayzero, vllm, sglang, vllm-ascend")] = None,
    figures: Annotated[list[str] | None, typer.Option("--set", help="FIGURE=VALUE of the target; may be repeated")] = None,
    preset: Annotated[Path | None, typer.Option(help="a file of `dayzero prepare`")] = None,
    workload: Annotated[Path | None, typer.Option(help="a workload file (YAML)")] = None,
    every: Annotated[bool, typer.Option("--all", help="every legal layout with its figures")] = False,
    explain: Annotated[str | None, typer.Option(help="what one layout needs and what kills it, such as TP8xPP2xEP8")] = None,
    export: Annotated[str | None, typer.Option(help="write the files of another engine: vllm, sglang, vllm-ascend")] = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="with --export: the folder to write")] = None,
    model_path: Annotated[str | None, typer.Option(help="with --export: where the servers find the release")] = None,
    engine_version: Annotated[str | None, typer.Option(help="with --export: of the engine's options")] = None,
    page: Annotated[Path | None, typer.Option("--html", help="also write the plan as a page with pictures")] = None,
    as_json: JsonOption = False,
    trust_remote_code: TrustOption = False,
) -> int:
    """On how many devices and how a model runs: a memory ledger and a layout, with reasons."""
    from dayzero import planning
    from dayzero.report.text import explanation_table, layouts_table, plan_table

    given = inputs.given(
        devices=devices, tp=tp, pp=pp, ep=ep, dp=dp, cp=cp, dcp=dcp, sp=sp, context=context, concurrency=concurrency,
        memory_fraction=memory_fraction, weights_dtype=weights_dtype, cache_dtype=cache_dtype, objective=objective, pools=pools,
        prefill=prefill, decode=decode, role_tp=planning.role_degrees(role_tp or ()) or None,
        split_roles=split_roles or None, redundant_experts=redundant_experts, engine=engine or export,
    )  # fmt: skip
    case = planning.asked(
        path, target, workload, given, figures=figures or (), preset=preset, trust_remote_code=trust_remote_code
    )
    if every:
        listed = case.all()
        show(as_json, record_json(listed), lambda: layouts_table(listed))
        return 0 if any(row.fits for row in listed.layouts) else 1
    if explain is not None:
        told = case.explain(explain)
        show(as_json, record_json(told), lambda: explanation_table(told))
        return 0 if told.row.fits else 1
    result = case.plan()
    if export is not None:
        planning.export_files(case, result, export, out_folder, model_path=model_path, version=engine_version)
    if page is not None:
        planning.write_page(case, result, page)
    show(as_json, record_json(result), lambda: plan_table(result))
    return 0 if result.feasible else 1


@app.command()
def prepare(
    family: Annotated[Path, typer.Option(help="a config.json of the family, or a YAML file with its ranges")],
    target: TargetOption,
    sizes: Annotated[str | None, typer.Option(help="total parameters: 0.5T-4T, or 0.5T,1T,2T")] = None,
    out_folder: Annotated[Path, typer.Option("--out", help="the folder to write")] = Path("presets"),
    workload: Annotated[Path | None, typer.Option(help="a workload file (YAML)")] = None,
    as_json: JsonOption = False,
) -> int:
    """Plans of an announced family for a range of sizes, before its release: one preset a size, to be tuned on the day."""
    from dayzero import planning

    files = planning.prepare(family, target, sizes, workload, out_folder)
    show(
        as_json,
        {"schema": "dayzero.presets/1", "files": [str(file) for file in files]},
        lambda: "\n".join(str(file) for file in files),
    )
    return 0


