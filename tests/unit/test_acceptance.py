"""The acceptance verdict and its page, from run folders that are whole, failing, or miss stages."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from dayzero.core.errors import DayZeroError
from dayzero.core.model import LayerKind
from dayzero.core.operators import OperatorMap
from dayzero.core.plan import Plan
from dayzero.core.records import from_dict, record_json
from dayzero.core.reports import Acceptance, BenchReport, Check, LayerError, NumericsReport, Spread, StabilityReport
from dayzero.core.runstore import STAGES, RunStore
from dayzero.core.target import TargetSummary
from dayzero.report import charts, model_text, text
from dayzero.report.acceptance import build
from dayzero.report.html import render
from tests.unit.run_folder import make_model, make_operators, make_plan, make_run_folder
from tests.unit.run_folder_reports import make_bench, make_soak

DIMENSIONS = ["functional correctness", "performance", "stability", "ecosystem completeness"]
STAGES_OF_A_RUN = [stage for stage in STAGES if stage != "report"]
VOID_TAGS = {"meta", "br", "hr", "img", "input", "link"}


class PageReader(HTMLParser):
    """Collects tags and text, and fails on tags that do not close in order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID_TAGS:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if not self.stack or self.stack[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def make_report(store: RunStore) -> tuple[Acceptance, str, PageReader]:
    acceptance = build(store, created="2026-01-01T00:00:00+00:00")
    page = render(store, acceptance)
    return acceptance, page, PageReader(page)


def checks_of(acceptance: Acceptance) -> dict[str, Check]:
    return {check.name: check for dimension in acceptance.dimensions for check in dimension.checks}


def assert_self_contained(page: str, reader: PageReader) -> None:
    assert not re.search(r"(src|href)\s*=\s*[\"'](https?:)?//", page) and "@import" not in page and "url(" not in page
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "img", "iframe"}
    assert all(attributes.get("href", "#").startswith("#") for _, attributes in reader.tags)  # type: ignore[union-attr]


def test_a_whole_run_passes_in_four_dimensions(tmp_path: Path) -> None:
    store = make_run_folder(tmp_path / "runs")
    acceptance, page, reader = make_report(store)
    assert [dimension.name for dimension in acceptance.dimensions] == DIMENSIONS
    assert acceptance.verdict == "pass" and all(dimension.verdict == "pass" for dimension in acceptance.dimensions)
    assert all(":" in check.name for check in checks_of(acceptance).values())
    assert set(acceptance.inputs) == set(STAGES_OF_A_RUN)
    assert_self_contained(page, reader)
    pictures = sum(tag == "svg" for tag, _ in reader.tags)
    assert pictures == 7  # layer stack, ledger, layer errors, throughput, TPOT, memory, coverage
    assert "dayzero validate runs/Small-135M-Instruct@cpu-local" in reader.text
    assert "What failed" not in reader.text and "Signature" in reader.text and "The capital of France is Paris." in reader.text
    assert "torch 2.13.0" in reader.text and "AVX2" in reader.text
    store.write("report", acceptance)
    assert from_dict(Acceptance, {k: v for k, v in record_json(acceptance).items() if k != "schema"}) == acceptance
    assert json.loads(store.path("report").read_text())["schema"] == "dayzero.acceptance/1"


def test_a_failing_run_names_what_failed_and_every_limit(tmp_path: Path) -> None:
    acceptance, page, reader = make_report(make_run_folder(tmp_path / "runs", failing=True))
    assert [dimension.verdict for dimension in acceptance.dimensions] == ["fail", "fail", "fail", "pass"]
    failed = {name for name, check in checks_of(acceptance).items() if check.verdict == "fail"}
    assert {
        "map:bindings agree with their definitions",
        "validate:layer_error",
        "plan:fits the target's memory",
        "soak:everything freed after the load",
    } <= failed
    limits = " ".join(acceptance.limits)
    for words in (
        "T1",
        "prefix reuse is off",
        "vision tower",
        "rope_interleaved",
        "4096 tokens at most",
        "rotary",
        "no C++ compiler",
        "computed from the config",
        "no chat template",
        "10 minutes",
    ):
        assert words in limits, words
    assert len(set(acceptance.limits)) == len(acceptance.limits)
    assert all(limit[0].isupper() or not limit[0].isalpha() for limit in acceptance.limits)
    assert "What failed" in reader.text and "unexpected tensor" in reader.text
    # text of the model is text of the page, never markup
    assert "<script" not in page and "&lt;script&gt;" in page
    assert_self_contained(page, reader)


@pytest.mark.parametrize("missing", [*[(stage,) for stage in STAGES_OF_A_RUN], tuple(STAGES_OF_A_RUN)])
def test_what_is_missing_is_not_shown_with_the_command_that_shows_it(tmp_path: Path, missing: tuple[str, ...]) -> None:
    acceptance, page, reader = make_report(make_run_folder(tmp_path / "runs", without=missing))
    assert acceptance.verdict == "not_shown"
    for stage in missing:
        check = checks_of(acceptance)[f"{stage}:record"]
        assert check.verdict == "not_shown" and check.required and f"dayzero {stage}" in check.detail
    assert_self_contained(page, reader)
    assert acceptance.model == "Small-135M-Instruct" and acceptance.target == "cpu-local"
    assert "None" not in reader.text.replace("None in the release", "").replace("None is on record", "")


def test_a_failure_beats_what_is_not_shown(tmp_path: Path) -> None:
    acceptance = build(make_run_folder(tmp_path / "runs", failing=True, without=("bench",)))
    assert acceptance.verdict == "fail"


def test_records_that_do_not_belong_together_are_told(tmp_path: Path) -> None:
    store = make_run_folder(tmp_path / "runs")
    store.path("serve").write_text(store.path("serve").read_text().replace("11.4", "11.5"))
    acceptance = build(store)
    check = checks_of(acceptance)["run:records belong together"]
    assert acceptance.verdict == "not_shown" and check.value == "serve, validate, bench, soak"


def test_a_damaged_record_is_an_error_not_a_missing_one(tmp_path: Path) -> None:
    store = make_run_folder(tmp_path / "runs")
    store.path("bench").write_text("{")
    with pytest.raises(DayZeroError):
        build(store)


def test_evidence_that_is_not_a_number_never_passes(tmp_path: Path) -> None:
    store = make_run_folder(tmp_path / "runs")
    operators = make_operators()
    evidence = replace(operators.sites[0].evidence, worst_error=3.0)  # type: ignore[type-var]
    store.write("map", replace(operators, sites=(replace(operators.sites[0], evidence=evidence), *operators.sites[1:])))
    assert checks_of(build(store))["map:bindings agree with their definitions"].verdict == "fail"
    store.write("map", replace(operators, sites=tuple(replace(site, evidence=None) for site in operators.sites)))
    assert checks_of(build(store))["map:bindings agree with their definitions"].verdict == "not_shown"
    store.write("map", replace(operators, missing=("grouped matmul",)))
    assert checks_of(build(store))["map:no operator is missing"].verdict == "fail"


def test_commands_name_existing_paths_relative_to_the_runs_folder(tmp_path: Path) -> None:
    store = make_run_folder(tmp_path / "runs")
    _, _, reader = make_report(store)
    found = re.findall(r"dayzero convert --verify (\S+)", reader.text)
    assert found and (tmp_path / found[0] / "layout.json").is_file()
    planned = re.findall(r"dayzero plan (\S+) --target cpu-local --devices 1", reader.text)
    assert planned and (tmp_path / planned[0]).is_file()
    assert str(tmp_path) not in reader.text


def test_strange_names_are_escaped_everywhere(tmp_path: Path) -> None:
    evil = "\"><b onload=x>&'{{ 7*7 }}"
    store = make_run_folder(tmp_path / "runs")
    kind = replace(make_model().layer_kinds[0], name=evil)
    assert isinstance(kind, LayerKind)
    store.write("inspect", replace(make_model(), name=evil, architecture=evil, layer_kinds=(kind,), unconsumed_keys=(evil,)))
    store.write("plan", replace(make_plan(), target=evil, reasons=(evil,)))
    store.write(
        "map", replace(make_operators(), sites=tuple(replace(s, operator=evil, reason=evil) for s in make_operators().sites))
    )
    numerics = store.read("validate", NumericsReport)
    layers = tuple(replace(layer, kind=evil) for layer in numerics.layers)
    store.write(
        "validate",
        replace(numerics, reference=evil, layers=layers, checks=(replace(numerics.checks[0], where=evil, name=evil),)),
    )
    _, page, reader = make_report(store)
    assert "<b onload" not in page and "{{ 7*7 }}" in page and not any(tag == "b" and "onload" in a for tag, a in reader.tags)
    print_all(store)


@pytest.mark.parametrize("count", [1, 2, 126])
def test_charts_stand_any_number_of_layers_and_zero_errors(count: int) -> None:
    layers = [
        LayerError(layer=i, kind="k", max_abs=0.0, relative=0.0 if i % 2 else 1e-7, reference_relative=0.0)
        for i in range(count)
    ]
    assert_svg(charts.layer_errors(layers))
    assert_svg(charts.layer_errors([replace(layer, relative=0.0) for layer in layers]))


def test_charts_stand_extremes() -> None:
    ledger = make_plan().ledger[0]
    assert_svg(charts.memory_ledger([replace(ledger, rank=rank) for rank in range(1024)]))
    assert_svg(charts.memory_ledger([replace(ledger, rank=r, lines=ledger.lines[:r]) for r in range(20)]))
    assert "ranks 0 to 1023 (1024 alike)" in charts.memory_ledger([replace(ledger, rank=rank) for rank in range(1024)])
    nothing = Spread(n=0, median=0.0, p10=0.0, p90=0.0)
    point = replace(make_bench().points[0], ttft_s=nothing, tpot_s=nothing, output_tokens_per_s=0.0)
    for kind in ("throughput", "tpot", "ttft"):
        assert_svg(charts.over_concurrency([point], kind))
    assert "not measured" in charts.over_concurrency([point], "tpot")
    flat = replace(make_soak(15.0), memory_bytes=(5,) * 9, memory_time_s=tuple(map(float, range(9))))
    assert_svg(charts.memory_over_time(flat))
    assert_svg(charts.memory_over_time(replace(flat, memory_slope_bytes_per_s=None, memory_slope_ci95_bytes_per_s=None)))


def assert_svg(markup: str) -> None:
    reader = PageReader(str(markup))
    for _, attributes in reader.tags:
        for value in attributes.values():
            assert value is not None and "nan" not in value.lower().split() and "inf" not in re.split(r"[ ,]", value), (
                attributes
            )


def print_all(store: RunStore) -> str:
    """Every table on one wide console, as plain text."""
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    acceptance = build(store)
    target = TargetSummary(id="x[1]", vendor="v", memory_bytes=2**36, memory_bytes_per_s=1e12, num_cards=8, torch_device="cpu",
                           torch_plugin=None, confidence="high")  # fmt: skip
    for table in (
        model_text.model_table(make_model(failing=True)),
        text.plan_table(store.read("plan", Plan)),
        text.targets_table([target]),
        text.operators_table(store.read("map", OperatorMap)),
        text.bench_table(store.read("bench", BenchReport)),
        text.soak_table(store.read("soak", StabilityReport)),
        text.acceptance_table(acceptance),
    ):
        console.print(table)
    console.file.close()
    return console.export_text()


def test_tables_for_the_terminal_say_it_all(tmp_path: Path) -> None:
    printed = print_all(make_run_folder(tmp_path / "runs", failing=True))
    for words in (
        "134.5M",
        "x[1]",
        "not shown",
        "✗ fail",
        "gated_mlp",
        "budget 1.00 GiB",
        "30.3 (28.5 to 36.7), n=8",
        "dayzero soak",
    ):
        assert words in printed, words


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, ""),
        (0.0, "0"),
        (3, "3"),
        (1435500544, "1,435,500,544"),
        (2.1e-5, "2.100e-05"),
        (0.98, "0.98"),
        ("inf", "inf"),
        (-0.5, "-0.5"),
        (1e300, "1.000e+300"),
    ],
)
def test_values_for_people(value: float | int | str | None, told: str) -> None:
    assert text.format_value(value) == told
