"""The command line, verb by verb: exit statuses, errors in four facts, and the JSON that scripts read.

Most rows run in this process through the same way out as the real one (`endings.run`); what depends on a process is one.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from dayzero import stages
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Plan
from dayzero.core.runstore import RunStore
from dayzero.devices.targets import load_target
from tests.e2e.builders import (
    Running,
    ask_all,
    assert_nothing_left,
    command,
    dayzero,
    dayzero_here,
    edit_json,
    environment,
    files_in,
    make_target,
    make_workload,
    told,
)

INDEX = "model.safetensors.index.json"
Checkpoint = Callable[..., Path]


@pytest.fixture
def release(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A release of its own to damage."""
    return Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path)


# -- bad input ------------------------------------------------------------------------------------------------------


def bad_commands(folder: Path) -> dict[str, tuple[list[Any], list[str]]]:
    """Name -> (arguments, what the error must say)."""
    empty, target = folder / "empty", make_target(folder)
    empty.mkdir()
    elsewhere, broken = folder / "nowhere", folder / "broken.yaml"
    broken.write_text("concurency: 3\n")
    source = folder / "model"
    adapt = ["adapt", source, "--runs", folder / "runs"]
    rows: dict[str, tuple[list[Any], list[str]]] = {
        "empty folder: inspect": (["inspect", empty], [str(empty)]),
        "empty folder: plan": (["plan", empty, "--target", target], [str(empty)]),
        "empty folder: convert": (["convert", empty, "--out", folder / "out"], [str(empty)]),
        "empty folder: adapt": (["adapt", empty, "--target", target, "--runs", folder / "runs"], [str(empty)]),
        "empty folder: map": (["map", empty], [str(empty)]),
        "wrong path": (["inspect", elsewhere], [str(elsewhere)]),
        "wrong path: adapt": (["adapt", elsewhere, "--target", target, "--runs", folder / "runs"], [str(elsewhere)]),
        "wrong target": (["plan", source, "--target", "nvidia-h100-smx"], ["nvidia-h100-smx", "nvidia-h100-sxm"]),
        "wrong target: adapt": ([*adapt, "--target", "nvidia-h100-smx"], ["nvidia-h100-smx", "nvidia-h100-sxm"]),
        "wrong target file": (["plan", source, "--target", folder / "no.yaml"], ["no.yaml"]),
        "unknown option": (["inspect", source, "--colour"], ["--colour"]),
        "unknown verb": (["inspekt", source], ["inspekt"]),
        "not a number": (["plan", source, "--target", target, "--tp", "two"], ["--tp", "two"]),
        "not positive": (["plan", source, "--target", target, "--tp", "0"], ["tp", "0"]),
        "missing option": (["plan", source], ["--target"]),
        "unknown stage": ([*adapt, "--target", target, "--until", "fly"], ["fly", "inspect"]),
        "no workload": ([*adapt, "--target", target, "--workload", folder / "no.yaml"], ["no.yaml"]),
        "misspelt workload": ([*adapt, "--target", target, "--workload", broken], ["concurency", "concurrency"]),
        "convert without place": (["convert", source], ["--out"]),
        "convert to nothing known": (["convert", source, "--out", folder / "out", "--to", "onnx"], ["onnx", "hf"]),
        "convert by two plans": (["convert", source, "--out", folder / "out", "--plan", target, "--tp", "2"], ["--plan"]),
        "verify what is none": (["convert", "--verify", empty], [str(empty)]),
        "fetch a stranger": (["fetch", "gpt-17", "--out", folder / "out"], ["gpt-17", "smollm2"]),
        "a device that is none": (["map", source, "--device", "warp9"], ["warp9"]),
    }
    for verb in ("serve", "validate", "bench", "soak", "report"):
        rows[f"no run: {verb}"] = ([verb, empty], [str(empty), "adapt"])
    return rows


def test_bad_input_is_told_in_four_facts_and_leaves_nothing(release: Path) -> None:
    folder = release.parent
    rows = bad_commands(folder)
    before = files_in(folder)
    for name, (arguments, words) in rows.items():
        ended = dayzero_here(*arguments, "--json")
        text = told(ended)
        assert all(word in text for word in words), (name, text)
        assert files_in(folder) == before, name


def test_errors_are_the_same_from_a_real_process(tmp_path: Path) -> None:
    """Also without --json: then stdout is empty. And with the console script's own name."""
    for arguments in (["inspect", tmp_path], ["targets", "--colour"]):
        as_json = dayzero(*arguments, "--json")
        assert as_json.error
        plain = dayzero(*arguments)
        assert (plain.status, plain.stdout) == (2, "") and plain.stderr == as_json.stderr.replace(" --json", "")


# -- a folder without weights -------------------------------------------------------------------------------------------


def test_a_folder_without_weights_is_described_and_planned_alone(release: Path, target: Path) -> None:
    whole = {verb: answer.json for verb, answer in ask_all(release, target).items()}
    for file in (*release.glob("*.safetensors"), release / INDEX):
        file.unlink()
    shutil.rmtree(release.parent / "written")
    answers = ask_all(release, target)
    assert [answers[verb].status for verb in ("inspect", "plan", "convert")] == [0, 0, 2]
    for key in ("total_parameters", "active_parameters", "layer_kinds", "cache"):
        assert answers["inspect"].json[key] == whole["inspect"][key], key
    assert not answers["inspect"].json["has_weights"]
    for key in ("feasible", "layout", "weights_bytes_per_device", "cache_bytes_per_token_per_device"):
        assert answers["plan"].json[key] == whole["plan"][key], key
    assert str(release) in told(answers["convert"])
    adapted = dayzero_here("adapt", release, "--target", target, "--runs", release.parent / "runs", "--json")
    assert str(release) in told(adapted)
    assert not (release.parent / "runs" / "artifacts").exists()
    assert (
        dayzero_here("inspect", release / "config.json", "--json").json["total_parameters"]
        == whole["inspect"]["total_parameters"]
    )


# -- contracts for scripts ----------------------------------------------------------------------------------------------


def test_inspect_and_plan_have_their_fields(release: Path, target: Path) -> None:
    model = dayzero_here("inspect", release, "--json").json
    assert model["schema"] == ModelDescription.SCHEMA
    assert model["total_parameters"] == model["active_parameters"] == sum(model["parameters_by_role"].values())
    assert [(kind["kind"], kind["count"]) for kind in model["layer_kinds"]] == [("full+dense", 2)]
    assert (model["cache"]["bytes_per_token"], model["cache"]["bytes_per_sequence"]) == (2 * 2 * 4 * 16 * 2, 0)
    assert model["unconsumed_keys"] == [] and model["problems"] == []
    # Whether sequence parallelism pays is a matter of times, which the record's operators tell better than the release.
    options = ["--devices", 2, "--tp", 2, "--no-sp", "--context", 256, "--concurrency", 2, "--memory-fraction", 0.5]
    pair = make_target(release.parent, name="pair", num_cards=2)
    planned = dayzero_here(
        "plan", release, "--target", pair, *options, "--weights-dtype", "bfloat16", "--cache-dtype", "bfloat16", "--json"
    )
    assert planned.status == 0, planned.stderr
    plan = planned.json
    assert plan["schema"] == Plan.SCHEMA and plan["feasible"] is True and plan["devices"] == 2
    assert {axis: plan["layout"][axis] for axis in ("tp", "pp", "ep", "dp", "cp")} == {
        "tp": 2,
        "pp": 1,
        "ep": 1,
        "dp": 1,
        "cp": 1,
    }
    assert plan["cache_bytes_per_token_per_device"] == model["cache"]["bytes_per_token"] / 2
    assert model["total_parameters"] <= plan["weights_bytes_per_device"] < 2 * model["total_parameters"]
    assert (
        plan["admissible_tokens"] >= 512 and len(plan["ledger"]) == 2 and plan["reasons"] and isinstance(plan["rejected"], list)
    )
    written = release.parent / "1_model.json"
    run = dayzero_here(
        "adapt", release, "--target", target, "--until", "inspect", "--runs", release.parent / "runs", "--json"
    ).json["run"]
    shutil.copy(Path(run) / "1_model.json", written)
    again = dayzero_here("plan", written, "--target", pair, *options, "--json").json
    assert again["ledger"] == plan["ledger"]


def test_the_context_is_the_workloads_within_the_models(release: Path, target: Path, tmp_path: Path) -> None:
    workload = make_workload(tmp_path, context_tokens=96)
    plans = [dayzero_here("plan", release, "--target", target, *more, "--json").json for more in ([], ["--workload", workload])]
    assert [plan["context_tokens"] for plan in plans] == [512, 96]  # what the model's positions allow, and less


def test_convert_writes_ranks_and_finds_a_flipped_bit(release: Path) -> None:
    out = release.parent / "ranks"
    for degrees, count in ((("--tp", 2), 2), (("--pp", 2), 2), (("--tp", 2, "--pp", 2), 4)):
        shutil.rmtree(out, ignore_errors=True)
        written = dayzero_here("convert", release, "--out", out, *degrees, "--json")
        assert written.status == 0, written.stderr
        report = written.json
        assert report["schema"].startswith("dayzero.") and [one["kind"] for one in report["problems"]] == ["digests"]
        assert report["bytes_read"] > 0 and report["bytes_written"] > 0 and report["seconds"] >= 0
        assert [folder.name for folder in sorted(out.glob("rank-*"))] == [f"rank-{rank:05d}" for rank in range(count)]
    checked = dayzero_here("convert", "--verify", out, "--source", release, "--json")
    assert checked.status == 0 and checked.json["problems"] == [] and checked.json["bytes_read"] > 0
    shard = sorted(out.glob("rank-00003/*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    found = dayzero_here("convert", "--verify", out, "--json")
    assert found.status == 1
    problems = found.json["problems"]
    assert {"kind", "file", "tensor", "detail"} <= problems[0].keys()
    assert problems[0]["file"].endswith(f"rank-00003/{shard.name}") and problems[0]["tensor"], problems
    assert not (out.parent / ".ranks.lock").exists()


def test_convert_takes_a_plan(release: Path, target: Path) -> None:
    plan = dayzero_here(
        "plan", release, "--target", make_target(release.parent, name="pair", num_cards=2), "--tp", 2, "--json"
    ).json
    (file := release.parent / "2_plan.json").write_text(json.dumps(plan))
    out = release.parent / "out"
    assert dayzero_here("convert", release, "--out", out, "--plan", file, "--json").status == 0
    assert len(list(out.glob("rank-*"))) == 2


def test_convert_to_hf_loads_in_transformers(release: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = release.parent / "hf"
    written = dayzero_here("convert", release, "--out", out, "--to", "hf", "--json")
    assert written.status == 0, written.stderr
    assert [one["kind"] for one in written.json["problems"]] == ["digests"] and written.json["bytes_written"] > 0
    first, second = (AutoModelForCausalLM.from_pretrained(folder) for folder in (release, out))
    for (name, one), (_, other) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    assert (
        AutoTokenizer.from_pretrained(out)("the fox").input_ids == AutoTokenizer.from_pretrained(release)("the fox").input_ids
    )


# -- a run and its server -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A run up to `serve`, and what `dayzero serve` printed."""

    run: Path
    ready: dict[str, Any]

    @property
    def url(self) -> str:
        return str(self.ready["url"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoint) -> Iterator[Served]:
    """A release without tokenizer, adapted and served by `dayzero serve`; a signal ends it with 0 and nothing is left."""
    folder = tmp_path_factory.mktemp("served")
    source = tiny_checkpoint("gpt_oss", dtype="float32", tokenizer=False)
    adapted = dayzero_here(
        "adapt", source, "--target", make_target(folder), "--workload", make_workload(folder), "--runs", folder / "runs",
        "--until", "map", "--json",
    )  # fmt: skip
    assert adapted.status == 0, adapted.stderr
    run = Path(adapted.json["run"])
    with Running(folder, "serve", run, "--port", 0, "--json") as running:
        running.wait_for(lambda: running.out.read_text().endswith("\n"), "a ready server")
        one = Served(run=run, ready=json.loads(running.out.read_text()))
        stages.serve(RunStore.open(run), SimpleNamespace(url=one.url), 1.0)  # the record that `adapt` writes when it serves
        yield one
        assert running.signal(signal.SIGTERM).status == 0
        assert_nothing_left(running)


def test_a_model_without_tokenizer_is_served_with_ids(served: Served) -> None:
    body = {"model": "gpt_oss", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60.0).json()
    assert len(answer["choices"][0]["token_ids"]) == 4 and answer["choices"][0]["text"] == ""
    refused = httpx.post(f"{served.url}/v1/completions", json=body | {"prompt": "words"}, timeout=60.0)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "no_tokenizer"


def test_validate_bench_and_soak_measure_a_running_server(served: Served) -> None:
    validated = dayzero_here("validate", served.run, "--url", served.url, "--json")
    assert validated.status == 0, validated.stdout
    assert validated.json["verdict"] == "pass" and validated.json["schema"] == "dayzero.numerics/1"
    for check in validated.json["checks"]:
        assert {"name", "verdict", "value", "limit", "where"} <= check.keys()
        assert check["verdict"] in ("pass", "fail", "not_shown")
    benched = dayzero_here("bench", served.run, "--url", served.url, "--json")
    assert benched.status == 0 and [point["concurrency"] for point in benched.json["points"]] == [1, 2], benched.stdout
    for point in benched.json["points"]:
        assert point["failed"] == 0 and point["ttft_s"]["n"] > 0 and point["ttft_s"]["p10"] <= point["ttft_s"]["p90"]
        assert point["tpot_s"]["median"] > 0 and point["output_tokens_per_s"] > 0
    soaked = dayzero_here("soak", served.run, "--url", served.url, "--duration", 1, "--json")
    assert soaked.status == 0 and soaked.json["duration_s"] >= 1 and soaked.json["requests"] > 0, soaked.stdout
    reported = dayzero_here("report", served.run, "--json")
    assert reported.status == 0 and reported.json["verdict"] == "pass", reported.stdout
    assert (served.run / "acceptance.html").is_file()
    for verb, schema in (("validate", "numerics"), ("bench", "performance"), ("soak", "stability"), ("report", "acceptance")):
        printed = {"validate": validated, "bench": benched, "soak": soaked, "report": reported}[verb].json
        assert printed["schema"] == f"dayzero.{schema}/1"
        assert printed == json.loads(RunStore.open(served.run).path(verb).read_text()), verb  # as the run folder keeps it


def test_a_port_in_use_is_told(served: Served) -> None:
    port = served.url.rpartition(":")[2]
    ended = dayzero("serve", served.run, "--port", port, "--json")
    assert port in ended.error["what"] and "--port 0" in ended.error["fix"]


def test_an_unreachable_server_is_told(served: Served) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        for verb in ("validate", "bench", "soak"):
            assert url in told(dayzero_here(verb, served.run, "--url", url, "--json")), verb


def test_a_report_of_half_a_run_says_not_shown(served: Served, tmp_path: Path) -> None:
    half = Path(shutil.copytree(served.run, tmp_path / "half", symlinks=True))
    for name in ("6_numerics.json", "7_performance.json", "8_stability.json"):
        (half / name).unlink(missing_ok=True)
    ended = dayzero_here("report", half, "--json")
    assert (ended.status, ended.json["verdict"]) == (1, "not_shown")


def test_map_of_a_run_and_of_a_release(served: Served) -> None:
    of_run = dayzero_here("map", served.run, "--json")
    of_release = dayzero_here(
        "map", json.loads((served.run / "0_inputs.json").read_text())["source"], "--context", 128, "--json"
    )
    assert of_run.status == of_release.status == 0
    assert of_run.json["sites"] == of_release.json["sites"] and of_run.json["schema"] == "dayzero.operators/1"
    assert all(site["binding"] and site["evidence"] for site in of_run.json["sites"])


# -- the machine ---------------------------------------------------------------------------------------------------------


def test_doctor_targets_and_measure(tmp_path: Path) -> None:
    found = dayzero_here("doctor", "--json")
    assert found.status == 0 and found.json["schema"].startswith("dayzero.doctor/") and found.json["ok"] is True
    listed = dayzero_here("targets", "--json").json
    names = [one["id"] for one in listed["targets"]]
    assert names[0] == "cpu-local" and "nvidia-h100-sxm" in names and len(set(names)) == len(names)
    measured = dayzero_here("targets", "measure", "--devices", "1", "--out", tmp_path / "this.yaml", "--json")
    assert measured.status == 0 and measured.json["card"]["memory_bytes_per_s"] > 1e9
    assert load_target(str(tmp_path / "this.yaml")).id == measured.json["id"]
    tables = [dayzero_here("targets"), dayzero_here("doctor")]
    assert all(table.status == 0 and len(table.stdout.splitlines()) > 5 and table.stderr == "" for table in tables)


def test_planning_needs_no_torch(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A description and a hardware file are enough: half a second, without torch."""
    ended = dayzero_here(
        "adapt", tiny_checkpoint("llama"), "--target", make_target(tmp_path), "--until", "inspect", "--runs", tmp_path, "--json"
    )
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')\n")
    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        planned = dayzero("plan", Path(ended.json["run"]) / "1_model.json", "--target", "nvidia-h100-sxm", "--json")
    finally:
        os.environ.pop("PYTHONPATH") if old is None else os.environ.__setitem__("PYTHONPATH", old)
    assert planned.status == 0, planned.stderr
    assert planned.json["feasible"]


def test_inspect_answers_from_keys_alone_and_compares(tmp_path: Path) -> None:
    """The first answer says that it is provisional; --against, --target and --html add to the measured one."""
    data = Path(__file__).parents[1] / "data" / "configs"
    first = dayzero_here("inspect", data / "Kimi-K3", "--provisional", "--json").json
    assert first["provisional"] and abs(first["total_parameters"] / 2_779_479_459_840 - 1) < 0.01
    assert first["novel_keys"] == ["text_config.attn_res_block_size"]
    assert first["quantization"]["groups"]["group_0"]["scheme"] == "mxfp4"
    page = tmp_path / "new" / "page.html"
    told = dayzero_here(
        "inspect", data / "DeepSeek-V3.2", "--against", data / "DeepSeek-V3", "--target", "ascend-910b3-64g", "--html", page, "--json"
    ).json
    assert {change["item"] for change in told["against"]["changes"] if change["section"] == "keys"} >= {"index_topk"}
    assert told["coverage"]["device"] == "npu" and told["coverage"]["decode"]["fused"]["count"] > 0
    shares = [part["flops_share"] for part in told["coverage"]["decode"].values()]
    assert sum(shares) == pytest.approx(1)
    cache = told["cache"]
    assert cache["by_dtype"]["bfloat16"] == cache["bytes_at_tokens"] and cache["bytes_at_tokens"]["8192"] == 8192 * 85_888
    kinds = {one["kind"]: one for one in told["operators"]}
    assert kinds["attention"]["count"] == 61 and "C" in kinds["attention"]["decode"]["flops"]
    assert all(one["same"] for one in told["corrected"] if one["figure"] in ("total_parameters", "cache_bytes_per_token"))
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text and "DeepSeek-V3.2" in text and "http" not in text.replace("http://www.w3.org", "")
    ended = dayzero_here("inspect", "http://127.0.0.1:9/model", "--json")
    assert ended.status == 2 and "127.0.0.1" in json.dumps(ended.json["error"])


# -- how a command ends ---------------------------------------------------------------------------------------------------

KIMI = Path(__file__).parents[1] / "data" / "configs" / "Kimi-K3"


def into(stdout: Any, *arguments: Any) -> tuple[int, str]:
    done = subprocess.run(command(*arguments), stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment(), check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [["--json"], [], None])
def test_output_that_nobody_reads_or_that_has_no_room(arguments: list[str] | None) -> None:
    """A closed pipe ends quietly, as other programs end; a full disk is told, and neither is a verdict (status 1)."""
    line = ["--help"] if arguments is None else ["inspect", KIMI, "--provisional", *arguments]
    read, write = os.pipe()
    os.close(read)
    assert into(write, *line) == (141, "")
    os.close(write)
    with Path("/dev/full").open("w") as full:
        status, text = into(full, *line)
    assert status == 2 and text.startswith("the output cannot be written") and "No space left" in text
    assert "Traceback" not in text and "did not expect" not in text


def test_an_empty_argument_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(KIMI / "config.json", tmp_path / "config.json")
    monkeypatch.chdir(tmp_path)
    rows: list[list[Any]] = [
        ["inspect", ""], ["inspect", " "], ["inspect", KIMI, "--html="], ["inspect", KIMI, "--against", ""],
        ["plan", "", "--target", "cpu-local"], ["convert", ".", "--out", ""], ["map", ""],
    ]  # fmt: skip
    for row in rows:
        assert "is empty" in told(dayzero_here(*row, "--json")), row
    assert "current folder is `.`" in told(dayzero_here("inspect", "", "--json"))
    assert dayzero_here("inspect", ".", "--provisional", "--json").status == 0
    assert files_in(tmp_path) == ["config.json"]


@pytest.mark.parametrize("address", ["ftp://x/y", "hf://org/model"])
def test_an_address_that_nothing_reads_is_named(address: str) -> None:
    for verb in (["inspect", address], ["inspect", KIMI, "--provisional", "--against", address], ["map", address]):
        text = told(dayzero_here(*verb, "--json"))
        assert address in text and "download" in text, text


@pytest.mark.parametrize(("verb", "words"), [("inspect", "again"), ("plan", "again"), ("adapt", "--resume")])
def test_an_interruption_names_resume_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, release: Path, target: Path, verb: str, words: str
) -> None:
    def interrupted(*given: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    for where in ("dayzero.inspection.inspect", "dayzero.planning.asked", "dayzero.pipeline.open_run"):
        monkeypatch.setattr(where, interrupted)
    ended = dayzero_here(verb, release, *([] if verb == "inspect" else ["--target", target]), "--json")
    assert ended.status == 130
    fix = ended.json["error"]["fix"]
    assert words in fix and ("--resume" in fix) == (verb == "adapt")


# -- answers that are there before an error -------------------------------------------------------------------------------


def test_an_error_keeps_the_answers_that_were_there(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dayzero_here("inspect", release, "--json").json
    ended = dayzero_here("inspect", release, "--against", release / "nowhere", "--json")
    assert "nowhere" in told(ended) and ended.json["total_parameters"] == whole["total_parameters"]
    assert ended.json["schema"] == ModelDescription.SCHEMA and ended.json["provisional"] is False

    for error in (DayZeroError("no class", got="x", want="y", fix="z"), RuntimeError("no class")):

        def fails(*given: Any, _error: Exception = error, **more: Any) -> Any:
            raise _error

        monkeypatch.setattr("dayzero.model.describe.describe_release", fails)
        ended = dayzero_here("inspect", release, "--json")
        assert "no class" in told(ended), ended.stderr
        first = dayzero_here("inspect", release, "--provisional", "--json").json
        assert ended.json == first | {"error": ended.json["error"]} and first["provisional"]


# -- releases at an address -----------------------------------------------------------------------------------------------


class Plain(http.server.SimpleHTTPRequestHandler):
    """The server of Python's own `http.server`, which knows no ranges."""

    def copyfile(self, source: Any, outputfile: Any) -> None:
        with contextlib.suppress(ConnectionError):  # the client leaves when it sees a whole shard coming, as it must
            super().copyfile(source, outputfile)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def address(release: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Plain, directory=str(release))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_a_server_without_ranges_still_gives_a_description(release: Path, address: str) -> None:
    local = dayzero_here("inspect", release, "--json").json
    ended = dayzero_here("inspect", address, "--json")
    assert ended.status == 0 and ended.json["total_parameters"] == local["total_parameters"], ended.stderr
    assert not ended.json["has_weights"] and local["has_weights"]
    (said,) = [one for one in ended.json["problems"] if "safetensors" in one["file"]]
    assert said["severity"] == "warning" and "ignores Range" in said["detail"]


def test_an_address_gives_the_figures_of_the_folder(release: Path, address: str) -> None:
    for file in (*release.glob("*.safetensors"), release / INDEX):
        file.unlink()
    beside = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    (release / "hf_quant_config.json").write_text(json.dumps(beside))
    local, remote = (dayzero_here("inspect", where, "--json").json for where in (release, address))
    assert [group["scheme"] for group in local["quantization"]["groups"].values()] == ["nvfp4", "none"]
    for key in ("quantization", "checkpoint_bytes", "total_parameters", "layer_kinds"):
        assert remote[key] == local[key], key


def test_code_of_an_address_is_refused_for_the_true_reason(release: Path, address: str) -> None:
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    edit_json(release / "config.json", model_type="toy", auto_map=auto_map)
    ended = dayzero_here("inspect", address, "--trust-remote-code", "--json")
    text = told(ended)
    assert address.rstrip("/") in text and "download the release" in text and "does not exist" not in text
    assert ended.json["provisional"] is True  # the answer from its keys is there
    assert dayzero_here("inspect", address, "--json").status == 0
