"""`dayzero adapt`, whole: every required type, the records of a run, its resume after anything, and models that need care.

Three types go through the command line alone, the others through the same stages in this process (which then imports torch
once); their servers are real processes either way. They are float32: few of their answers are cut at a tie.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from dayzero import pipeline, stages
from dayzero.core.artifact import WeightsReport
from dayzero.core.model import ModelDescription
from dayzero.core.operators import OperatorMap
from dayzero.core.plan import Plan
from dayzero.core.reports import Acceptance, BenchReport, NumericsReport, ServingReport, StabilityReport
from dayzero.core.runstore import STAGES, RunStore
from dayzero.core.target import Workload
from dayzero.devices.targets import load_target
from dayzero.serve.launch import ServerProcess
from tests.e2e.builders import (
    GIB,
    WORKLOAD,
    Running,
    assert_nothing_left,
    dayzero,
    dayzero_here,
    edit_json,
    files_in,
    make_large_checkpoint,
    make_target,
    make_workload,
    modified,
)
from tests.tiny.overrides import REQUIRED_TYPES

THROUGH_THE_COMMAND_LINE = ("llama", "qwen3_next", "gpt_oss")
IN_PROCESS = [name for name in REQUIRED_TYPES if name not in THROUGH_THE_COMMAND_LINE]
RECORDS = {
    "inspect": ModelDescription, "plan": Plan, "convert": WeightsReport, "map": OperatorMap, "serve": ServingReport,
    "validate": NumericsReport, "bench": BenchReport, "soak": StabilityReport, "report": Acceptance,
}  # fmt: skip
Checkpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a hardware file, a workload and, once there are any, runs."""
    folder = tmp_path_factory.mktemp("adapt")
    make_target(folder)
    make_workload(folder)
    return folder


def adapt_arguments(place: Path, source: Path, *more: Any) -> list[Any]:
    return ["adapt", source, "--target", place / "bench-top.yaml", "--workload", place / "workload-0.yaml",
            "--runs", place / "runs", "--json", *more]  # fmt: skip


# -- every required type ---------------------------------------------------------------------------------------


def open_tiny_run(place: Path, source: Path) -> RunStore:
    return pipeline.open_run(
        source, load_target(str(place / "bench-top.yaml")), devices=None, workload=Workload(**WORKLOAD),
        runs=place / "in-process", options={}, resume=False,
    )  # fmt: skip


class ServersAhead:
    """Brings up the server of the type after the one that is looked at: two processors are then both in use."""

    def __init__(self, place: Path, checkpoint: Checkpoint, order: list[str]) -> None:
        self._place, self._checkpoint, self._order = place, checkpoint, order
        self._pool, self._open = ThreadPoolExecutor(2), ExitStack()
        self._started: dict[str, tuple[RunStore, Future[ServerProcess]]] = {}

    def get(self, model_type: str) -> tuple[RunStore, ServerProcess]:
        place = self._order.index(model_type)
        for name in self._order[place : place + 2]:
            if name not in self._started:
                store = open_tiny_run(self._place, self._checkpoint(name, dtype="float32"))
                pipeline.run(store, until="map", resume=False, say=lambda text: None)
                self._started[name] = store, self._pool.submit(self._start, store)
        store, server = self._started[model_type]
        return store, server.result()

    def _start(self, store: RunStore) -> ServerProcess:
        server = ServerProcess(stages.server_spec(store, port=0), log=store.logs / "server.log")
        self._open.callback(server.kill)
        server.start()
        return server

    def end(self, server: ServerProcess) -> None:
        """In the background: that its processes are gone takes an init that reaps them, a second on some machines."""
        self._pool.submit(server.kill)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._open.close()


@pytest.fixture(scope="module")
def servers(place: Path, tiny_checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Iterator[ServersAhead]:
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    wanted = [call.params["model_type"] for call in calls if call is not None and "model_type" in call.params]
    ahead = ServersAhead(place, tiny_checkpoint, [name for name in IN_PROCESS if name in wanted])
    yield ahead
    ahead.close()


@pytest.mark.parametrize("model_type", IN_PROCESS)
def test_a_required_type_is_served_right(servers: ServersAhead, model_type: str) -> None:
    """Equality between server, engine and the uncached forward: alone, eight at once, and with prefix reuse where it is on."""
    store, server = servers.get(model_type)
    try:
        serving = stages.serve(store, server, 1.0)
        report = stages.validate(store, server.url, lambda text: None)
    finally:
        servers.end(server)
    assert_right(serving, report)


def assert_right(serving: ServingReport, report: NumericsReport) -> None:
    failed = [check for check in (*serving.checks, *report.checks) if check.required and check.verdict != "pass"]
    assert serving.verdict == report.verdict == "pass", failed
    verdicts = {check.name: check.verdict for check in report.checks}
    # In a reduced dtype most answers of random weights are ties: there the same weights in float32 decide.
    decided = "float32: " if any(name.startswith("float32: ") for name in verdicts) else ""
    assert verdicts["served_equals_engine"] == "pass"
    assert verdicts[f"{decided}greedy_tokens"] == verdicts[f"{decided}greedy_tokens_concurrent"] == "pass"
    assert verdicts[f"{decided}prefix_reuse_equal"] == ("pass" if serving.engine["prefix_reuse"] else "not_shown")
    if serving.engine["tier"] != "T2":
        assert serving.fallbacks, "a lower tier without a reason"


# -- the command line, one type cut off twice and resumed -----------------------------------------------------------


@pytest.fixture(scope="module")
def others(place: Path, tiny_checkpoint: Checkpoint) -> Iterator[dict[str, Running]]:
    """Two whole runs, side by side: a model with recurrent layers, and one whose folder has no tokenizer."""
    sources = {
        "qwen3_next": tiny_checkpoint("qwen3_next", dtype="float32"),
        "gpt_oss": tiny_checkpoint("gpt_oss", dtype="float32", tokenizer=False),
    }
    with ExitStack() as stack:
        running = {}
        for name, source in sources.items():
            (folder := place / name).mkdir()
            running[name] = stack.enter_context(Running(folder, *adapt_arguments(place, source)))
        yield running


@pytest.fixture(scope="module")
def adapted(place: Path, tiny_checkpoint: Checkpoint, others: dict[str, Running]) -> tuple[Path, dict[str, Any], str]:
    """A run that was interrupted once, killed once, and finished: its folder, its acceptance, the last run's stderr."""
    arguments = adapt_arguments(place, tiny_checkpoint("llama"))
    folder = place / "runs" / "llama@bench-top"
    with Running(place, *arguments) as interrupted:
        interrupted.wait_for_line("serve: starting the server")
        interrupted.wait_for(lambda: len(interrupted.family()) >= 2, "a server with an engine")
        ended = interrupted.signal(signal.SIGINT)
        assert ended.status == 130 and ended.json["error"]["what"] == "interrupted" and "Traceback" not in ended.stderr
        assert_nothing_left(interrupted)
    before = modified(folder)
    assert list(before) == ["0_inputs.json", "1_model.json", "2_plan.json", "3_weights.json", "4_operators.json"]
    with Running(place, *arguments, "--resume") as killed:
        killed.wait_for_line("serve: ready")
        assert len(killed.family()) >= 2
        assert killed.signal(signal.SIGKILL).status == -signal.SIGKILL
        assert_nothing_left(killed)
    finished = dayzero(*arguments, "--resume")
    assert finished.status == 0, finished.stderr
    after = modified(folder)
    assert {name: after[name] for name in before} == before  # what was finished before both is kept
    return folder, finished.json, finished.stderr


def test_a_run_ends_with_every_record(adapted: tuple[Path, dict[str, Any], str]) -> None:
    folder, printed, stderr = adapted
    assert printed["verdict"] == "pass" and printed["run"] == str(folder)
    assert [line for line in stderr.splitlines() if "kept from before" in line][:4] == [
        f"{stage}: kept from before" for stage in ("inspect", "plan", "convert", "map")
    ]
    store = RunStore.open(folder)
    assert {stage: STAGES[stage][0] for stage in RECORDS} == {stage: store.path(stage).name for stage in STAGES}
    for stage, record in RECORDS.items():
        read = store.read(stage, record)  # strict: the schema and every key
        assert getattr(read, "inputs", {}).keys() <= {"inputs", *STAGES}
        assert store.is_valid(stage), stage
    assert json.loads((folder / "0_inputs.json").read_text())["schema"] == "dayzero.inputs/1"
    assert {name: value for name, value in printed.items() if name != "run"} == json.loads(
        (folder / "acceptance.json").read_text()
    )
    assert [one["name"] for one in printed["dimensions"]] == [
        "functional correctness", "performance", "stability", "ecosystem completeness",
    ]  # fmt: skip
    assert_right(store.read("serve", ServingReport), store.read("validate", NumericsReport))
    assert not [name for name in files_in(folder.parent) if "partial" in name or ".tmp" in name]


def test_no_record_has_a_path_of_this_machine(adapted: tuple[Path, dict[str, Any], str]) -> None:
    """Paths inside a run are relative; only the inputs say where the release was."""
    folder, _, _ = adapted
    for file in folder.glob("[1-9]_*.json"):
        assert str(folder.parent) not in file.read_text(), file


def test_the_report_needs_no_network(adapted: tuple[Path, dict[str, Any], str]) -> None:
    html = (adapted[0] / "acceptance.html").read_text()
    loads = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)""", html) + re.findall(r"url\(([^)]*)\)|@import", html)
    assert not [one for one in loads if not one.startswith(("#", "data:"))], loads
    assert "llama" in html and "<svg" in html


def test_a_finished_run_is_kept_as_it_is(
    adapted: tuple[Path, dict[str, Any], str], place: Path, tiny_checkpoint: Checkpoint
) -> None:
    folder, printed, _ = adapted
    before = modified(folder)
    again = dayzero_here(*adapt_arguments(place, tiny_checkpoint("llama"), "--resume"))
    assert again.status == 0 and again.json["verdict"] == printed["verdict"]
    after = modified(folder)
    assert {name for name in before if after[name] != before[name]} <= {"acceptance.json"}


def test_the_same_inputs_share_a_folder_and_others_the_artifact(
    adapted: tuple[Path, dict[str, Any], str], place: Path, tiny_checkpoint: Checkpoint
) -> None:
    folder, _, _ = adapted
    artifacts = files_in(place / "runs" / "artifacts")
    arguments = adapt_arguments(place, tiny_checkpoint("llama"))
    arguments[arguments.index("--workload") + 1] = make_workload(place, concurrency=1)
    other = dayzero_here(*arguments, "--until", "convert")
    assert (other.status, other.json["run"]) == (0, f"{folder}-2"), other.stderr
    assert files_in(place / "runs" / "artifacts") == artifacts
    weights = [json.loads((run / "3_weights.json").read_text()) for run in (folder, Path(other.json["run"]))]
    assert weights[0]["artifact"] == weights[1]["artifact"] == f"../artifacts/{weights[0]['key']}" and weights[1]["reused"]
    before = modified(folder)
    same = dayzero_here(*adapt_arguments(place, tiny_checkpoint("llama"), "--resume", "--until", "plan"))
    assert same.json["run"] == str(folder) and modified(folder) == before


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss"])
def test_a_type_passes_through_the_command_line(others: dict[str, Running], place: Path, name: str) -> None:
    running = others[name]
    status = running.process.wait(timeout=300.0)
    assert status == 0, running.err.read_text()
    assert json.loads(running.out.read_text())["verdict"] == "pass"
    assert_nothing_left(running)
    store = RunStore.open(place / "runs" / f"{name}@bench-top")
    assert_right(store.read("serve", ServingReport), store.read("validate", NumericsReport))
    tokenizers = list((stages.artifact_of(store) / "release").glob("tokenizer*"))
    assert bool(tokenizers) == (name == "qwen3_next"), tokenizers  # the other is served with token ids


# -- cut off while weights are written ------------------------------------------------------------------------------


def test_a_conversion_cut_off_leaves_nothing_half_done(place: Path, tiny_checkpoint: Checkpoint) -> None:
    source = make_large_checkpoint(tiny_checkpoint("llama"), place / "large")
    arguments = [*adapt_arguments(place, source, "--until", "convert"), "--runs", place / "cut"]
    artifacts, run = place / "cut" / "artifacts", place / "cut" / "large@bench-top"
    for number, status, more in ((signal.SIGINT, 130, []), (signal.SIGKILL, -signal.SIGKILL, ["--resume"])):
        with Running(place, *arguments, *more) as running:
            running.wait_for_line("plan: kept from before" if more else "plan: done")
            running.wait_for(lambda: any(artifacts.glob(".*.partial/rank-*/*")), "weights on the disk")
            assert running.signal(number).status == status
            assert_nothing_left(running)
        assert not [path for path in artifacts.iterdir() if not path.name.startswith(".")], "an artifact that is not whole"
        assert not (run / "3_weights.json").exists() and (run / "2_plan.json").exists()
    finished = dayzero_here(*arguments, "--resume")
    assert finished.status == 0, finished.stderr
    assert json.loads((run / "3_weights.json").read_text())["verified"]
    assert len(list(artifacts.iterdir())) == 1 and not list(artifacts.rglob("*.partial"))
    shutil.rmtree(place / "cut")
    shutil.rmtree(source)


# -- where it stops, and why -----------------------------------------------------------------------------------------


def test_until_plan_stops_there(place: Path, tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    ended = dayzero_here(*adapt_arguments(place, tiny_checkpoint("qwen3_next"), "--until", "plan"), "--runs", tmp_path)
    assert ended.status == 0, ended.stderr
    assert (ended.json["until"], ended.json["schema"]) == ("plan", "dayzero.run/1")
    assert [file.name for file in sorted(Path(ended.json["run"]).glob("*.json"))] == [
        "0_inputs.json",
        "1_model.json",
        "2_plan.json",
    ]
    assert not (tmp_path / "artifacts").exists()


def test_a_target_that_is_too_small_is_told_by_how_much(place: Path, tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    target = make_target(tmp_path, memory_bytes=GIB // 4096, name="tiny-card")
    ended = dayzero_here("adapt", tiny_checkpoint("llama"), "--target", target, "--runs", tmp_path, "--json")
    assert ended.status == 1, ended.stderr
    plan = ended.json
    assert plan["feasible"] is False and plan["schema"] == Plan.SCHEMA
    told = " ".join(map(str, plan["reasons"])) + json.dumps(plan["rejected"])
    assert re.search(r"\d[\d.,]* ?(?:[KMG]iB|bytes)", told), told
    assert not (tmp_path / "artifacts").exists() and not (Path(plan["run"]) / "3_weights.json").exists()


def test_an_artifact_that_was_removed_is_made_again(place: Path, tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    store = open_tiny_run(tmp_path.parent / place.name, tiny_checkpoint("qwen3"))
    pipeline.run(store, until="convert", resume=False, say=lambda text: None)
    shutil.rmtree(stages.artifact_of(store))
    said: list[str] = []
    pipeline.run(store, until="convert", resume=True, say=said.append)
    assert (stages.artifact_of(store) / "layout.json").is_file()
    assert "plan: kept from before" in said and "convert: kept from before" not in said


def test_other_weights_of_the_same_shape_are_converted_anew(place: Path, tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Headers are alike, so that the artifact's key is the same: only the files tell."""
    source = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("qwen3"), source)
    first = open_tiny_run(tmp_path, source) if (make_target(tmp_path)) else None
    assert first is not None
    pipeline.run(first, until="convert", resume=False, say=lambda text: None)
    from safetensors.torch import load_file, save_file

    shard = sorted(source.glob("*.safetensors"))[0]
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard, metadata={"format": "pt"})
    second = open_tiny_run(tmp_path, source)
    pipeline.run(second, until="convert", resume=True, say=lambda text: None)
    report = second.read("convert", WeightsReport)
    assert report.verified and not report.reused and report.bytes_written > 0


# -- more than text ---------------------------------------------------------------------------------------------------


def test_a_multimodal_model_is_served_as_text(place: Path, tiny_checkpoint: Checkpoint) -> None:
    """Also one whose text decoder transformers lists under no causal class of its own."""
    store = open_tiny_run(place, tiny_checkpoint("qwen3_vl", dtype="float32"))
    pipeline.run(store, until="map", resume=False, say=lambda text: None)
    towers = store.read("inspect", ModelDescription).towers
    assert towers
    with stages.serving(store, lambda text: None) as server:
        listed = httpx.get(f"{server.url}/v1/models", timeout=30.0).json()["data"][0]
        assert tuple(listed["engine"]["towers_not_served"]) == towers
        serving = stages.serve(store, server, 1.0)
        assert_right(serving, stages.validate(store, server.url, lambda text: None))
        message = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
        body = {"model": store.inputs["model"], "messages": [message], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60.0)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4, answer.text
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        refused = httpx.post(
            f"{server.url}/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": [image]}]}, timeout=60.0
        )
        assert refused.status_code == 400 and "messages" in str(refused.json()["error"]["param"]), refused.text


def test_a_type_without_class_is_refused_before_it_is_converted(
    place: Path, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = tmp_path / "unknown"
    shutil.copytree(tiny_checkpoint("llama"), source)
    edit_json(source / "config.json", model_type="not_yet_known", architectures=["NotYetKnownForCausalLM"])
    ended = dayzero_here(*adapt_arguments(place, source))
    assert "class" in ended.error["wanted"] + ended.error["got"]
    assert not (place / "runs" / "unknown@bench-top" / "3_weights.json").exists()
