"""The `convert` verb on the command line: to rank shards or another form, in parts, and the proof of what came out."""

from pathlib import Path
from typing import Annotated

import typer

from dayzero.core.errors import DayZeroError
from dayzero.terminal import JsonOption, app, say, show


@app.command()
def convert(
    paths: Annotated[list[str] | None, typer.Argument(help="a release: a folder, a .gguf file, or an address")] = None,
    out: Annotated[str | None, typer.Option("--out", help="where the result goes: a folder or an address")] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="a 2_plan.json")] = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    dp: int = 1,
    cp: int = 1,
    to: Annotated[str | None, typer.Option(help="hf: an ordinary Hugging Face folder; gguf: a GGUF file")] = None,
    dtype: Annotated[str | None, typer.Option(help="what the release's own dtype becomes: bfloat16, float16, float32")] = None,
    quantize: Annotated[str | None, typer.Option(help="a preset: int8, w8a8, int4-g128, fp8, mxfp4, ...")] = None,
    keep: Annotated[list[str] | None, typer.Option(help="a role, name or pattern that --quantize leaves alone")] = None,
    override: Annotated[list[str] | None, typer.Option(help="RULE=PRESET; PRESET may be none")] = None,
    calibrate: Annotated[str | None, typer.Option(help="choose codes on a text file, or default")] = None,
    method: Annotated[str, typer.Option(help="with --calibrate: gptq, or scales alone")] = "gptq",
    part: Annotated[str | None, typer.Option(help="I/N: this host's share of the work")] = None,
    merge: Annotated[Path | None, typer.Option("--merge", help="OUT: join its parts, those named or those beside it")] = None,
    verify: Annotated[Path | None, typer.Option("--verify", help="prove an artifact instead")] = None,
    source: Annotated[str | None, typer.Option(help="with --verify: the release it was made from")] = None,
    allow_pickle: Annotated[bool, typer.Option(help="read pickle weights, by ranges: nothing of them runs")] = False,
    assume_unscaled: Annotated[bool, typer.Option(help="take FP8 weights that have no scale as they are")] = False,
    accept_values: Annotated[bool, typer.Option(help="go on when values say that the checkpoint is damaged")] = False,
    spool: Annotated[Path | None, typer.Option(help="a folder where weights from an address lie until all is done")] = None,
    keep_copy: Annotated[Path | None, typer.Option(help="a folder that gets a copy of what goes to an address")] = None,
    as_json: JsonOption = False,
) -> int:
    """Stream a checkpoint into rank shards with a conservation ledger, or into another form; or prove an artifact."""
    from dayzero import conversion

    if verify is not None:
        report = conversion.verify_artifact(verify, source, say, allow_pickle=allow_pickle)
        show(as_json, report, lambda: conversion.problems_table(report))
        return 0 if not report["problems"] else 1
    named = paths or []
    if merge is None and (out is None or len(named) != 1):
        raise DayZeroError("convert needs a release and a place", got=f"PATH={' '.join(named) or None}, --out={out}",
                           want="dayzero convert PATH --out DIR", fix="give both, or --verify DIR")  # fmt: skip
    request = conversion.Request(
        path=named[0] if named and merge is None else None, out=str(merge or out), merge=merge is not None,
        parts=tuple(map(Path, named)) if merge is not None else (), part=part, plan_file=plan_file,
        degrees={"tp": tp, "pp": pp, "ep": ep, "dp": dp, "cp": cp}, to=to, dtype=dtype, quantize=quantize,
        calibrate=calibrate, method=method, keep=tuple(keep or ()), override=tuple(override or ()),
        allow_pickle=allow_pickle, assume_unscaled=assume_unscaled, accept_values=accept_values, spool=spool,
        keep_copy=keep_copy,
    )  # fmt: skip
    result = conversion.convert_release(request, say)
    show(as_json, result, lambda: conversion.result_table(result))
    return 0 if not any(problem["severity"] == "error" for problem in result["problems"]) else 1
