"""The option lists of other engines, and the script that makes them from an engine's source without running any of it."""

import importlib.util
import json
from pathlib import Path

import pytest

from dayzero.plan.export.checked import FOLDER, load_options


def test_option_lists_are_whole_and_say_where_they_come_from():
    for path in sorted(FOLDER.glob("*.json")):
        data = json.loads(path.read_text())
        assert path.stem == f"{data['engine']}-{data['version']}"
        assert data["sources"] and all(len(digest) == 64 for digest in data["sources"].values())
        names = [name for item in data["options"] for name in (item["option"], *item["aliases"])]
        assert len(names) == len(set(names))
        assert path.stat().st_size < 80_000
    assert load_options("vllm").version == "0.33.0" and load_options("vllm-ascend").base.version == "0.23.0"
    assert load_options("vllm").options["-tp"]["option"] == "--tensor-parallel-size"


def script():
    path = Path(__file__).resolve().parents[2] / "scripts" / "engine_options.py"
    spec = importlib.util.spec_from_file_location("engine_options", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_script_reads_configuration_classes(tmp_path):
    write(tmp_path, {
        "vllm/config/a.py": 'Kind = Literal["x", "y"]\nclass AConfig:\n    size: int = 1\n    kind: Kind | None = None\n'
                            "    share: float = 0.5\n    on: bool | None = None\n    token: bool | str | None = None\n"
                            "class KVTransferConfig:\n    role: str\nclass PassConfig:\n    sp: bool\nclass CompilationConfig:\n"
                            "    level: int\n",
        "vllm/engine/arg_utils.py": 'a_kwargs = get_kwargs(AConfig)\ng.add_argument("--size", "-s", **a_kwargs["size"])\n'
                                    'g.add_argument("--kind", **{**a_kwargs["kind"], "default": None})\n'
                                    'g.add_argument("--share", **a_kwargs["share"])\ng.add_argument("--on", **a_kwargs["on"])\n'
                                    'g.add_argument("--token", **a_kwargs["token"])\n'
                                    'g.add_argument("--kv-transfer-config", type=str)\n'
                                    'g.add_argument("--rank", type=int)\ng.add_argument("--bare", action="store_true")\n',
        "vllm/entrypoints/openai/cli_args.py": "class FrontendArgs:\n    port: int = 8000\n",
    })  # fmt: skip
    module = script()
    found = {item["option"]: item for item in module.read_vllm(module.Source(tmp_path))}
    assert {name: item["type"] for name, item in found.items()} == {
        "--size": "int", "--kind": "str", "--share": "float", "--on": "bool", "--token": "str", "--kv-transfer-config": "str",
        "--rank": "int", "--bare": "bool", "--port": "int",
    }  # fmt: skip
    assert found["--size"]["aliases"] == ["-s"] and found["--kind"]["choices"] == ["x", "y"]
    with pytest.raises(SystemExit, match="parser has moved"):
        module.make("vllm", tmp_path, "9.9")


def test_the_script_reads_annotated_fields(tmp_path):
    write(tmp_path, {
        "sglang/srt/arg_groups/choices.py": 'DTYPES = ["p", "q"]\n',
        "sglang/srt/arg_groups/fields/a.py": 'class A1:\n    tp_size: A[int, Arg(help="", aliases=["--tp"])] = 1\n'
                                             '    dtype: A[Optional[str], Arg(choices=DTYPES)] = None\n'
                                             '    hidden: A[bool, Arg(no_cli=True)] = False\n    fast: A[bool, "help"] = False\n'
                                             '    odd: A[str, Arg(cli_name="--really")] = ""\n    bare: int = 3\n',
        "sglang/srt/server_args.py": 'parser.add_argument("--config", type=str)\n',
    })  # fmt: skip
    module = script()
    found = {item["option"]: item for item in module.read_sglang(module.Source(tmp_path))}
    assert set(found) == {"--tp-size", "--dtype", "--fast", "--really", "--config"}
    assert found["--tp-size"]["aliases"] == ["--tp"] and found["--dtype"]["choices"] == ["p", "q"]
    assert found["--fast"]["type"] == "bool"


def test_the_script_reads_a_plugins_keys(tmp_path):
    write(tmp_path, {"vllm_ascend/ascend_config.py":
          'class AscendConfig:\n    def __init__(self):\n        a = additional_config.get("fast", False)\n'
          '        b = self._get_config_value(additional_config, "slow", "ENV")\n        c = other.get("not_this")\n'
          'class FinegrainedTPConfig:\n    def __init__(self):\n        d = finegrained_tp_config.get("head_size", 0)\n'
          "class EplbConfig:\n    pass\n"})  # fmt: skip
    module = script()
    assert [item["option"] for item in module.read_ascend(module.Source(tmp_path))] == [
        "fast", "finegrained_tp_config.head_size", "slow"]  # fmt: skip
