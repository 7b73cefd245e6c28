"""`plan` and `prepare` as a user meets them: every way of asking, what is written, what is refused."""

from pathlib import Path

import pytest
import yaml

from tests.e2e.builders import dayzero_here

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
H100, H200, A2 = "nvidia-h100-sxm", "nvidia-h200-sxm", "ascend-910b3-64g"


def test_a_thousand_cards_are_planned_from_keys_alone(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    told = dayzero_here(
        "plan", CONFIGS / "Kimi-K3", "--target", "ascend-950dt-144g", "--devices", 1024, "--context", 1_048_576, "--html", page, "--json"
    )  # fmt: skip
    plan = told.json
    assert told.status == 0 and plan["feasible"] and plan["devices"] == 1024 and len(plan["ledger"]) == 1024
    counts = [point["concurrency"] for point in plan["frontier"]]
    assert counts == sorted(counts, reverse=True) and counts[-1] >= 1
    assert all(line["formula"] for line in plan["ledger"][0]["lines"])
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 3 and "Kimi-K3" in text


def test_every_layout_is_listed_and_any_one_explained() -> None:
    asked = ("plan", CONFIGS / "DeepSeek-V3", "--target", A2)
    listed = dayzero_here(*asked, "--devices", 16, "--all", "--json").json
    assert listed["enumerated"] >= len(listed["layouts"]) > 20
    fits = [row["fits"] for row in listed["layouts"]]
    assert fits == sorted(fits, reverse=True)
    refused = dayzero_here(*asked, "--explain", "TP8xEP8", "--json")
    assert refused.status == 1 and refused.json["row"]["legal"] and not refused.json["row"]["fits"]
    assert "GiB per card" in refused.json["row"]["constraint"] and refused.json["ledger"]["lines"]
    illegal = dayzero_here(*asked, "--explain", "TP7", "--json")
    assert illegal.status == 1 and not illegal.json["row"]["legal"] and "7" in illegal.json["row"]["constraint"]
    nonsense = dayzero_here(*asked, "--explain", "QP8", "--json")
    assert nonsense.status == 2 and "qp8" in str(nonsense.json["error"]).lower()


def test_figures_of_the_target_can_be_set_and_misspelt_ones_are_told() -> None:
    asked = ("plan", CONFIGS / "gpt-oss-120b", "--target", H100, "--devices", 1)
    small = dayzero_here(*asked, "--set", "card.memory_bytes=40e9", "--json")
    assert small.status == 1 and not small.json["feasible"] and any("GiB per card" in reason for reason in small.json["reasons"])
    wrong = dayzero_here(*asked, "--set", "card.memory=1", "--json")
    assert wrong.status == 2 and "memory_bytes" in str(wrong.json["error"])
    assert dayzero_here(*asked, "--set", "nothing", "--json").status == 2


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_export_is_a_folder_or_nothing(engine: str, tmp_path: Path) -> None:
    asked = ("plan", CONFIGS / "gpt-oss-120b", "--target", H100, "--devices", 2, "--tp", 2, "--export", engine)
    folder = tmp_path / "serve"
    done = dayzero_here(*asked, "--out", folder, "--json")
    assert done.status == 0 and done.json["engine"] == engine
    assert {"launch.sh", "NOTES.md", "leaderworkerset.yaml", "statefulset.yaml", "compose.yaml"} <= {file.name for file in folder.iterdir()}
    assert "2" in (folder / "commands.txt").read_text() and list(yaml.safe_load_all((folder / "leaderworkerset.yaml").read_text()))
    again = dayzero_here(*asked, "--out", folder, "--json")
    assert again.status == 2 and "not empty" in str(again.json["error"])
    nowhere = dayzero_here("plan", CONFIGS / "DeepSeek-V3", "--target", H100, "--devices", 1, "--export", engine, "--out", tmp_path / "no", "--json")
    assert nowhere.status == 2 and not (tmp_path / "no").exists()
    unknown = dayzero_here("plan", CONFIGS / "gpt-oss-120b", "--target", H100, "--export", "triton", "--out", tmp_path / "x", "--json")
    assert unknown.status == 2 and "vllm" in str(unknown.json["error"])


def test_presets_are_made_before_a_release_and_used_on_the_day(tmp_path: Path) -> None:
    folder = tmp_path / "presets"
    done = dayzero_here(
        "prepare", "--family", CONFIGS / "DeepSeek-V3" / "config.json", "--target", H200, "--sizes", "0.7T,1T", "--out", folder, "--json"
    )  # fmt: skip
    files = [Path(name) for name in done.json["files"]]
    assert done.status == 0 and len(files) == 2
    preset = yaml.safe_load(files[0].read_text())
    assert abs(preset["parameters"] / preset["wanted_parameters"] - 1) < 0.1 and preset["tune"]
    plan = dayzero_here("plan", CONFIGS / "DeepSeek-V3", "--target", H200, "--preset", files[0], "--json")
    assert plan.status == 0 and plan.json["layout"]["tp"] == preset["options"]["tp"]
