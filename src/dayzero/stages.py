"""Each stage of the pipeline as one function: records of the run folder in, the stage's record out.

Nothing here knows the order (`pipeline.py` does) or prints (`cli.py` does). Heavy packages are imported inside the stage
that needs them, so that planning never waits for torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dayzero.core.artifact import WeightsReport
from dayzero.core.errors import DayZeroError
from dayzero.core.generation import EngineInfo
from dayzero.core.model import ModelDescription
from dayzero.core.names import TOKENIZER_FILES
from dayzero.core.operators import OperatorMap
from dayzero.core.plan import Plan
from dayzero.core.records import from_dict, to_dict
from dayzero.core.reports import Acceptance, BenchReport, Check, NumericsReport, ServingReport, StabilityReport, overall
from dayzero.core.runstore import RunStore
from dayzero.core.target import Target, Workload
from dayzero.plan import PlanOptions, make_plan
from dayzero.plan.experience import Observation, correction_for, observe_bench, observe_serving, record
from dayzero.progress import bytes_progress

if TYPE_CHECKING:
    from dayzero.serve.launch import ServerProcess
    from dayzero.serve.spec import ServerSpec

Say = Callable[[str], None]


def require_sound(model: ModelDescription) -> None:
    """Raises DayZeroError listing every error found in the input at once."""
    errors = [problem for problem in model.problems if problem.severity == "error"]
    if errors:
        listed = [f"{problem.file or problem.tensor or problem.kind}: {problem.detail}" for problem in errors]
        raise DayZeroError(
            f"{model.name} is not sound: {len(errors)} error{'s' if len(errors) > 1 else ''}",
            got="\n         ".join(listed[:50]),
            want="config, index and shards that agree",
            fix="fetch the named files again, or correct the config",
            details={"problems": [to_dict(problem) for problem in model.problems]},
        )


def require_servable(model: ModelDescription, until: str) -> None:
    """Raises DayZeroError when the model is unsound, or described from its keys alone while a later stage needs a class."""
    require_sound(model)
    if any(problem.kind == "no_class" for problem in model.problems) and until not in ("inspect", "plan"):
        raise DayZeroError(
            f"{model.name} can be described and planned, but not served",
            got=f"model_type {model.model_type!r}, which this transformers has no class for",
            want="a class in transformers",
            fix="install a transformers that has it; running the release's own code is not supported yet. --until plan works",
        )


def source_of(store: RunStore) -> Path:
    """The release folder of a run. Raises DayZeroError when it is gone."""
    path = (store.folder / str(store.inputs["source"])).resolve()
    if not path.exists():
        raise DayZeroError(
            "the release folder of this run is gone",
            got=path,
            want="the folder `adapt` was given",
            fix="put it back, or run `dayzero adapt` on its new place",
        )
    return path


def workload_of(store: RunStore) -> Workload:
    return from_dict(Workload, store.inputs["workload"], source="0_inputs.json: workload")


def target_of(store: RunStore) -> Target:
    return from_dict(Target, store.inputs["target"], source="0_inputs.json: target")


def option_of(store: RunStore, name: str, default: Any = None) -> Any:
    return store.inputs.get("options", {}).get(name, default)


def inspect(store: RunStore, say: Say) -> ModelDescription:
    from dayzero.model.describe import describe

    model = describe(source_of(store), trust_remote_code=bool(option_of(store, "trust_remote_code")), operators=True)
    store.write("inspect", model)
    return model


def plan(store: RunStore, say: Say) -> Plan:
    model = store.read("inspect", ModelDescription)
    options = from_dict(PlanOptions, option_of(store, "plan", {}), source="0_inputs.json: plan options")
    target = target_of(store)
    result = make_plan(model, target, workload_of(store), options, corrections=correction_for(target.id, engine=options.engine))
    store.write("plan", result)
    return result


def convert(store: RunStore, say: Say) -> WeightsReport:
    """The artifact lives beside the runs, under its key: two runs of the same layout share it."""
    from dataclasses import replace

    from dayzero.weights.convert import artifact_key
    from dayzero.weights.convert import convert as convert_release
    from dayzero.weights.proof.verify import verify

    model, layout = store.read("inspect", ModelDescription), store.read("plan", Plan).layout
    out = store.folder.parent / "artifacts" / artifact_key(model.source_hash, layout)
    with bytes_progress(say) as progress:
        report = convert_release(source_of(store), model, layout, out, progress=progress)
        problems = verify(out, progress=progress)  # read back, also what was there before
    if problems:
        listed = [f"{problem.file or ''} {problem.tensor or ''}: {problem.detail}" for problem in problems]
        raise DayZeroError(
            f"the artifact {out.name} does not agree with its ledger",
            got="\n         ".join(listed[:20]),
            want="the bytes that were written",
            fix=f"remove {out} and convert again; if it repeats, check the disk",
            details={"problems": [to_dict(problem) for problem in problems]},
        )
    report = replace(report, artifact=store.relative(out), verified=True, inputs=store.input_hashes("convert"))
    store.write("convert", report)
    return report


def map_operators(store: RunStore, say: Say) -> OperatorMap:
    from dayzero.devices.backend import open_backend
    from dayzero.model.operators import map_release

    model, made = store.read("inspect", ModelDescription), store.read("plan", Plan)
    backend = open_backend(device_of(store))
    result = map_release(source_of(store), model, backend, context_tokens=made.context_tokens)
    store.write("map", result)
    return result


def device_of(store: RunStore) -> str:
    """The torch device of the run: as asked, else the target's."""
    return str(option_of(store, "device") or target_of(store).software.torch_device)


def artifact_of(store: RunStore) -> Path:
    return (store.folder / store.read("convert", WeightsReport).artifact).resolve()


def has_artifact(store: RunStore) -> bool:
    """Whether the artifact that the record speaks of is still there: it lives outside the run folder."""
    return (artifact_of(store) / "layout.json").is_file()


def engine_arguments(store: RunStore) -> dict[str, Any]:
    """What an engine process needs to load this run's artifact: the fields of a runtime EngineSpec."""
    model, made = store.read("inspect", ModelDescription), store.read("plan", Plan)
    limit = model.dimensions.max_position_tokens  # beyond it a model's positions do not exist
    context = made.context_tokens if limit is None else min(made.context_tokens, limit)
    wanted_tokens = context * made.concurrency
    return {
        "artifact": str(artifact_of(store)),
        "model": model.name,
        "device": device_of(store),
        "dtype": option_of(store, "dtype") or "auto",
        "context_tokens": context,
        "max_sequences": made.concurrency,
        "pool_tokens": min(made.admissible_tokens, wanted_tokens),
        "block_tokens": made.block_tokens,
        "chunk_tokens": made.prefill_chunk_tokens,
        "stop_token_ids": list(model.stop_token_ids),
        "towers_not_served": list(model.towers),
        "known_tokens": model.tokenizer_tokens,
    }


def server_spec(store: RunStore, **settings: Any) -> "ServerSpec":
    from dayzero.serve.spec import ServerSpec

    folder = artifact_of(store) / "release"
    has_tokenizer = any((folder / name).exists() for name in TOKENIZER_FILES)
    return ServerSpec(
        engine_factory="dayzero.runtime.load:create_engine",
        engine_arguments=engine_arguments(store),
        served_model_name=store.read("inspect", ModelDescription).name,
        tokenizer_folder=folder if has_tokenizer else None,
        **settings,
    )


@contextmanager
def serving(store: RunStore, say: Say) -> Iterator["ServerProcess"]:
    """This run's server for as long as the block runs; nothing of it is left afterwards."""
    from dayzero.serve.launch import ServerProcess

    say("starting the server")
    with ServerProcess(server_spec(store, port=0), log=store.logs / "server.log") as server:
        yield server


def learn(observations: tuple[Observation, ...], missing: tuple[str, ...], *, say: Say = lambda text: None) -> None:
    """Keep what a run showed, for the next plan of this target. A history that cannot be written is told and no more."""
    try:
        record(observations)
    except OSError as error:
        say(f"what this run showed could not be kept for the next plan: {error}")
    for text in missing:
        say(f"not learnt for the next plan: {text}")


def engine_info(url: str) -> EngineInfo:
    """The facts of the engine behind a server, from its model list."""
    import httpx

    try:
        listed = httpx.get(f"{url}/v1/models", timeout=30.0, trust_env=False).json()["data"][0]
        if "engine" not in listed:
            raise ValueError("a model list without `engine`")
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise DayZeroError(
            f"the server at {url} does not say what it runs",
            got=f"{type(error).__name__}: {error}"[:300],
            want="a server that `dayzero serve` started",
            fix="start it, correct --url, or leave it out",
        ) from error
    return from_dict(EngineInfo, listed["engine"], source="the server's model list")


def process_ids(server: "ServerProcess") -> tuple[int, ...]:
    """The front's and the engine's, for memory figures."""
    engine = server.engine_pid
    return (server.pid,) if engine is None else (server.pid, engine)


def serve(store: RunStore, server: "ServerProcess", load_s: float) -> ServingReport:
    """What came up: the engine's own facts, and whether it admits what the plan promised."""
    info = engine_info(server.url)
    made = store.read("plan", Plan)
    promised = min(made.admissible_tokens, info.context_tokens * made.concurrency)
    admitted = info.num_blocks * info.block_tokens
    checks = (
        Check(name="server_ready", verdict="pass", value=round(load_s, 2), limit=None, detail="seconds to the first health"),
        Check(
            name="capacity_as_planned",
            verdict="pass" if admitted >= promised else "fail",
            value=admitted,
            limit=promised,
            detail="tokens of cache that the engine admits, against the plan",
        ),
        Check(
            name="tier",
            verdict="pass",
            value=info.tier,
            limit=None,
            detail="; ".join(info.tier_reasons),
        ),
    )
    report = ServingReport(
        verdict=overall(checks),
        engine=to_dict(info),
        checks=checks,
        load_s=load_s,
        fallbacks=info.fallbacks,
        inputs=store.input_hashes("serve"),
    )
    store.write("serve", report)
    hashed = store.read("inspect", ModelDescription).source_hash
    learn(*observe_serving(made, hashed, info, applied=made.corrections))
    return report


def validate(store: RunStore, url: str, say: Say) -> NumericsReport:
    """Numbers of in-process engines on the same artifact (as served, and at float32), and the running server's tokens,
    against transformers."""
    import time
    from dataclasses import replace

    from dayzero.validate.engines import ask_engine, no_room_at_float32
    from dayzero.validate.http_subject import HttpSubject
    from dayzero.validate.inputs import InputOptions, for_float32
    from dayzero.validate.limits import EXACT_DTYPES
    from dayzero.validate.reference import ReleaseReference
    from dayzero.validate.run import judge

    started, source, arguments = time.monotonic(), source_of(store), engine_arguments(store)
    say("asking the engine and the server")
    with HttpSubject(url) as served:
        asked = ask_engine(arguments, source, options=InputOptions(), served=served)
    exact, no_exact = None, ""
    if asked.info.dtype not in EXACT_DTYPES:
        no_exact = no_room_at_float32(arguments, source, store.read("plan", Plan))
        say(no_exact or "asking an engine at float32")
        if not no_exact:
            exact = ask_engine(arguments | {"dtype": "float32"}, source, inputs=for_float32(asked.inputs), parameters=False)
    report = judge(
        asked,
        ReleaseReference(source),
        exact=exact,
        no_exact=no_exact,
        layer_kinds=store.read("inspect", ModelDescription).layer_kinds,
        progress=say,
    )
    report = replace(report, inputs=store.input_hashes("validate"), seconds=time.monotonic() - started)
    store.write("validate", report)
    return report


def bench(store: RunStore, url: str, pids: tuple[int, ...], say: Say) -> BenchReport:
    from dataclasses import replace

    from dayzero.report.bench import bench as measure

    workload, engine = workload_of(store), engine_info(url)
    concurrencies = sorted({1, 2, 4, workload.concurrency} & set(range(1, workload.concurrency + 1)))
    report = measure(
        url,
        instruction_set=engine.instruction_set,
        concurrencies=concurrencies,
        requests_per_point=max(4, workload.concurrency),
        input_tokens=workload.input_tokens,
        output_tokens=workload.output_tokens,
        vocab_size=engine.vocab_size,
        memory_of=list(pids),
        max_ttft_s=workload.max_ttft_s,
        max_tpot_s=workload.max_tpot_s,
        goal_concurrency=workload.concurrency,
        progress=say,
    )
    report = replace(report, inputs=store.input_hashes("bench"))
    store.write("bench", report)
    made = store.read("plan", Plan)
    hashed = store.read("inspect", ModelDescription).source_hash
    learn(*observe_bench(made, hashed, report, workload, device=engine.device, applied=made.corrections), say=say)
    return report


def soak(store: RunStore, url: str, pids: tuple[int, ...], say: Say, duration_s: float | None = None) -> StabilityReport:
    from dataclasses import replace

    from dayzero.report.soak import soak as load

    workload, engine = workload_of(store), engine_info(url)
    report = load(
        url,
        duration_s=workload.soak_s if duration_s is None else duration_s,
        concurrency=workload.concurrency,
        pids=list(pids),
        vocab_size=engine.vocab_size,
        context_tokens=engine.capacity_tokens,
        progress=say,
    )
    report = replace(report, inputs=store.input_hashes("soak"))
    store.write("soak", report)
    return report


def report(store: RunStore, say: Say) -> Acceptance:
    from dayzero.core.records import write_text_atomic
    from dayzero.report.acceptance import build
    from dayzero.report.html import render

    acceptance = build(store)
    store.write("report", acceptance)
    write_text_atomic(store.folder / "acceptance.html", render(store, acceptance))
    return acceptance
