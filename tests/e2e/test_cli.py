"""The command line, verb by verb: exit statuses, errors in four facts, and the JSON that scripts read.

Most rows run in this process through the same way out as the real one (`endings.run`); what depends on a process is one.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dayzero import pipeline, stages
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Plan
from dayzero.core.runstore import RunStore
from dayzero.core.target import Workload
from dayzero.devices.targets import load_target
from dayzero.serve.launch import ServerProcess
from tests.e2e.builders import (
    GIB,
    WORKLOAD,
    Ended,
    dayzero,
    dayzero_here,
    edit_json,
    files_in,
    make_target,
    make_workload,
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


def ask_all(release: Path, target: Path) -> dict[str, Ended]:
    """inspect, plan and convert of one release. Nothing may be left where convert was to write when it refused."""
    out = release.parent / "written" / "artifact"
    answers = {
        "inspect": dayzero_here("inspect", release, "--json"),
        "plan": dayzero_here("plan", release, "--target", target, "--json"),
        "convert": dayzero_here("convert", release, "--out", out, "--json"),
    }
    if answers["convert"].status != 0:
        assert files_in(out.parent) == []
    return answers


def told(ended: Ended) -> str:
    """Everything an error says, after a look at its shape."""
    error = ended.error
    assert error["what"] in ended.stderr and error["fix"] in ended.stderr, ended.stderr  # people read the same there
    return "\n".join(error.values())


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


def test_a_port_in_use_is_told_at_once(runs: Runs) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = dayzero("serve", runs.llama, "--port", port, "--json")
    assert str(port) in ended.error["what"] and "--port 0" in ended.error["fix"]


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
    options = ["--devices", 2, "--tp", 2, "--context", 256, "--concurrency", 2, "--memory-fraction", 0.5]
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


def test_convert_writes_ranks_and_finds_a_flipped_bit(release: Path) -> None:
    out = release.parent / "ranks"
    for degrees, count in ((("--tp", 2), 2), (("--pp", 2), 2), (("--tp", 2, "--pp", 2), 4)):
        shutil.rmtree(out, ignore_errors=True)
        written = dayzero_here("convert", release, "--out", out, *degrees, "--json")
        assert written.status == 0, written.stderr
        report = written.json
        assert report["schema"].startswith("dayzero.") and report["problems"] == []
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
    assert written.json["problems"] == [] and written.json["bytes_written"] > 0
    first, second = (AutoModelForCausalLM.from_pretrained(folder) for folder in (release, out))
    for (name, one), (_, other) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    assert (
        AutoTokenizer.from_pretrained(out)("the fox").input_ids == AutoTokenizer.from_pretrained(release)("the fox").input_ids
    )


# -- a run and its server -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    llama: Path
    url: str


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoint) -> Iterator[Runs]:
    """A run up to `serve`, with its server running."""
    folder = tmp_path_factory.mktemp("runs")
    store = pipeline.open_run(
        tiny_checkpoint("llama"), load_target(str(make_target(folder))), devices=None, workload=Workload(**WORKLOAD),
        runs=folder / "runs", options={}, resume=False,
    )  # fmt: skip
    pipeline.run(store, until="map", resume=False, say=lambda text: None)
    with ServerProcess(stages.server_spec(store, port=0), log=store.logs / "server.log") as server:
        stages.serve(store, server, 1.0)
        yield Runs(llama=store.folder, url=server.url)


def test_validate_bench_and_soak_measure_a_running_server(runs: Runs) -> None:
    validated = dayzero_here("validate", runs.llama, "--url", runs.url, "--json")
    assert validated.status == 0, validated.stdout
    assert validated.json["verdict"] == "pass" and validated.json["schema"] == "dayzero.numerics/1"
    for check in validated.json["checks"]:
        assert {"name", "verdict", "value", "limit", "where"} <= check.keys()
        assert check["verdict"] in ("pass", "fail", "not_shown")
    benched = dayzero_here("bench", runs.llama, "--url", runs.url, "--json")
    assert benched.status == 0 and [point["concurrency"] for point in benched.json["points"]] == [1, 2], benched.stdout
    for point in benched.json["points"]:
        assert point["failed"] == 0 and point["ttft_s"]["n"] > 0 and point["ttft_s"]["p10"] <= point["ttft_s"]["p90"]
        assert point["tpot_s"]["median"] > 0 and point["output_tokens_per_s"] > 0
    soaked = dayzero_here("soak", runs.llama, "--url", runs.url, "--duration", 1, "--json")
    assert soaked.status == 0 and soaked.json["duration_s"] >= 1 and soaked.json["requests"] > 0, soaked.stdout
    reported = dayzero_here("report", runs.llama, "--json")
    assert reported.status == 0 and reported.json["verdict"] == "pass", reported.stdout
    assert (runs.llama / "acceptance.html").is_file()
    for verb, schema in (("validate", "numerics"), ("bench", "performance"), ("soak", "stability"), ("report", "acceptance")):
        printed = {"validate": validated, "bench": benched, "soak": soaked, "report": reported}[verb].json
        assert printed["schema"] == f"dayzero.{schema}/1"
        assert printed == json.loads(RunStore.open(runs.llama).path(verb).read_text()), verb  # as the run folder keeps it


def test_an_unreachable_server_is_told(runs: Runs) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        for verb in ("validate", "bench", "soak"):
            assert url in told(dayzero_here(verb, runs.llama, "--url", url, "--json")), verb


def test_a_report_of_half_a_run_says_not_shown(runs: Runs, tmp_path: Path) -> None:
    half = Path(shutil.copytree(runs.llama, tmp_path / "half", symlinks=True))
    for name in ("6_numerics.json", "7_performance.json", "8_stability.json"):
        (half / name).unlink(missing_ok=True)
    ended = dayzero_here("report", half, "--json")
    assert (ended.status, ended.json["verdict"]) == (1, "not_shown")


def test_map_of_a_run_and_of_a_release(runs: Runs, tiny_checkpoint: Checkpoint) -> None:
    of_run = dayzero_here("map", runs.llama, "--json")
    of_release = dayzero_here("map", tiny_checkpoint("llama"), "--context", 128, "--json")
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
    measured = dayzero_here("targets", "measure", "--out", tmp_path / "this.yaml", "--json")
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


# -- cases: checkpoints ----------------------------------------------------------------------------------------------------


def weight_map(release: Path) -> dict[str, str]:
    return dict(json.loads((release / INDEX).read_text())["weight_map"])


@pytest.mark.parametrize("cut", ["data", "header", "length"])
def test_ck_01_a_short_shard_stops_every_verb(release: Path, target: Path, cut: str) -> None:
    shard = sorted(release.glob("*.safetensors"))[1]
    size, header = shard.stat().st_size, int.from_bytes(shard.read_bytes()[:8], "little")
    kept = {"data": int(size * 0.6), "header": 8 + header // 2, "length": 5}[cut]
    described = json.loads(shard.read_bytes()[8 : 8 + header])
    os.truncate(shard, kept)
    ends = {name: 8 + header + entry["data_offsets"][1] for name, entry in described.items() if name != "__metadata__"}
    first = min((name for name in ends if ends[name] > kept), key=ends.__getitem__)
    for verb, ended in ask_all(release, target).items():
        text = told(ended)
        facts = [shard.name, str(kept)] + {"data": [first, str(size)], "header": [str(8 + header)], "length": ["8"]}[cut]
        assert all(fact in text.replace(",", "") for fact in facts), (verb, facts, text)


def test_ck_01_only_headers_are_read(release: Path, target: Path) -> None:
    """A shard that lacks one byte of 64 GiB (a sparse file) is found at once."""
    header = json.dumps({"huge": {"dtype": "F32", "shape": [16 * GIB], "data_offsets": [0, 64 * GIB]}}).encode()
    shard = sorted(release.glob("*.safetensors"))[1]
    with shard.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 64 * GIB - 1)
    started = time.monotonic()
    assert all(fact in told(dayzero_here("inspect", release, "--json")) for fact in (shard.name, "huge"))
    assert time.monotonic() - started < 5.0


def test_ck_02_an_index_that_disagrees_names_everything(release: Path, target: Path) -> None:
    names, whole = weight_map(release), (release / INDEX).read_text()
    files = sorted(set(names.values()))
    inside = [name for name in names if names[name] == files[1]]

    removed = (release / files[1]).read_bytes()
    (release / files[1]).unlink()
    assert_all_say(ask_all(release, target), [files[1]])
    (release / files[1]).write_bytes(removed)

    edit_json(release / INDEX, weight_map=names | dict.fromkeys(inside[:2], files[0]))
    assert_all_say(ask_all(release, target), [*inside[:2], files[0]])

    edit_json(release / INDEX, weight_map=names | {"mtp.fc.weight": files[0], "mtp.norm.weight": files[2]})
    assert_all_say(ask_all(release, target), ["mtp.fc.weight", "mtp.norm.weight"])

    (release / INDEX).write_text(whole + '{"metadata": {}}')
    assert_all_say(ask_all(release, target), [INDEX])

    (release / INDEX).write_text(whole)
    sound = ask_all(release, target)
    stated, true = json.loads(whole)["metadata"]["total_size"] + 2 * 1000, json.loads(whole)["metadata"]["total_size"]
    edit_json(release / INDEX, metadata={"total_size": stated})
    shutil.rmtree(release.parent / "written")
    answers = ask_all(release, target)
    assert [ended.status for ended in answers.values()] == [0, 0, 0], {verb: ended.stderr for verb, ended in answers.items()}
    for verb in ("inspect", "convert"):
        warnings = [one for one in answers[verb].json["problems"] if one["severity"] == "warning"]
        assert len(warnings) == 1 and str(stated) in warnings[0]["detail"] and str(true) in warnings[0]["detail"], (
            verb,
            warnings,
        )
    assert answers["plan"].json["weights_bytes_per_device"] == sound["plan"].json["weights_bytes_per_device"] == true


def assert_all_say(answers: dict[str, Ended], words: list[str]) -> None:
    for verb, ended in answers.items():
        text = told(ended)
        assert all(word in text for word in words), (verb, words, text)


def test_ck_04_names_that_leave_the_folder_are_never_opened(release: Path, target: Path) -> None:
    """The file outside is a pipe nobody writes to: opening it would wait for ever."""
    names = weight_map(release)
    tensor = next(iter(names))
    (release.parent / "secret").mkdir()
    os.mkfifo(pipe := release.parent / "secret" / "w.safetensors")
    for bad in (
        "../secret/w.safetensors",
        str(pipe),
        "sub/../../secret/w.safetensors",
        "a\x00b.safetensors",
        "..\\secret\\w.safetensors",
        "",
    ):
        edit_json(release / INDEX, weight_map=names | {tensor: bad})
        assert_all_say(ask_all(release, target), [tensor])


def test_ck_04_a_nested_shard_is_accepted(release: Path, target: Path) -> None:
    names = weight_map(release)
    (release / "part1").mkdir()
    for file in set(names.values()):
        (release / file).rename(release / "part1" / file)
    edit_json(release / INDEX, weight_map={name: f"part1/{file}" for name, file in names.items()})
    answers = ask_all(release, target)
    assert [ended.status for ended in answers.values()] == [0, 0, 0], {verb: ended.stderr for verb, ended in answers.items()}
    assert (release.parent / "written" / "artifact" / "layout.json").is_file()


# -- cases: configs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(release: Path) -> Callable[..., Ended]:
    """Inspect the config alone, with some of its keys changed (None: null; ...: absent)."""
    folder = release.parent / "config"
    folder.mkdir()
    written = json.loads((release / "config.json").read_text())

    def inspect(**changes: Any) -> Ended:
        changed = written | changes
        (folder / "config.json").write_text(json.dumps({name: value for name, value in changed.items() if value is not ...}))
        return dayzero_here("inspect", folder, "--json")

    return inspect


SCALED = {"factor": 4.0, "original_max_position_embeddings": 128}
# CF-01: rope_scaling as written -> the form inspect shows (keys that must be there), or words of the error.
ROPE = [
    ({"type": "yarn"} | SCALED, {"rope_type": "yarn", "factor": 4.0}),
    ({"rope_type": "yarn"} | SCALED, {"rope_type": "yarn", "factor": 4.0}),
    ({"type": "yarn", "rope_type": "yarn"} | SCALED, {"rope_type": "yarn", "factor": 4.0}),
    ({"type": "yarn", "rope_type": "linear"} | SCALED, ["'yarn'", "'linear'"]),
    ({"factor": 4}, ["factor", "rope_type"]),
    (None, {"rope_type": "default"}),
    ({}, {"rope_type": "default"}),
    ({"type": "default"}, {"rope_type": "default"}),
    ({"type": "foo"}, ["'foo'"]),
]


def test_cf_01_position_scaling_has_one_form_or_an_error(config: Callable[..., Ended]) -> None:
    for written, wanted in ROPE:
        ended = config(rope_parameters=..., rope_theta=10000.0, rope_scaling=written)
        if isinstance(wanted, list):
            assert all(word in told(ended) for word in wanted), (written, told(ended))
        else:
            assert ended.status == 0, (written, ended.stderr)
            assert wanted.items() <= ended.json["rope"]["all"].items(), (written, ended.json["rope"])


def test_cf_04_heads_give_the_cache_or_an_error_that_names_the_key(config: Callable[..., Ended]) -> None:
    layers, value_bytes = 2, 2
    rows: list[tuple[dict[str, Any], Any]] = [
        ({"hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64, "num_key_value_heads": 8}, 8 * 64),
        ({"head_dim": None}, 4 * 16),
        ({"head_dim": ..., "hidden_size": 128}, 4 * 32),
        ({"num_key_value_heads": ...}, 4 * 16),
        ({"num_key_value_heads": None}, 4 * 16),
        ({"num_key_value_heads": 2}, 2 * 16),
        ({"head_dim": ..., "hidden_size": 100, "num_attention_heads": 3, "num_key_value_heads": 3}, "head_dim"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ]
    for changes, wanted in rows:
        ended = config(**changes)
        if isinstance(wanted, str):
            assert wanted in told(ended), (changes, told(ended))
        else:
            assert ended.json["cache"]["bytes_per_token"] == 2 * wanted * layers * value_bytes, changes


def test_cf_08_inspect_shows_the_stop_set_of_all_sources(release: Path) -> None:
    def stops(config: Any, generation: Any) -> tuple[list[int], list[str]]:
        edit_json(release / "config.json", eos_token_id=config)
        (release / "generation_config.json").write_text(json.dumps({"eos_token_id": generation, "temperature": 0.5}))
        shown = dayzero_here("inspect", release, "--json").json
        return shown["stop_token_ids"], [one["detail"] for one in shown["problems"]]

    assert stops(2, [2, 7]) == ([1, 2, 7], [])  # 1: the tokenizer's own
    assert stops(None, [7]) == ([1, 7], [])
    assert stops([], []) == ([1], [])
    assert stops([3, 2], 7) == ([1, 2, 3, 7], [])
    found, problems = stops(2, [99_999])
    assert found == [1, 2] and len(problems) == 1 and "99999" in problems[0]


def test_the_context_is_the_workloads_within_the_models(release: Path, target: Path, tmp_path: Path) -> None:
    workload = make_workload(tmp_path, context_tokens=96)
    plans = [dayzero_here("plan", release, "--target", target, *more, "--json").json for more in ([], ["--workload", workload])]
    assert [plan["context_tokens"] for plan in plans] == [512, 96]  # what the model's positions allow, and less
