"""A plan as another engine's command: only options it has, the right values, quoted safely, and nothing dropped in silence."""

import argparse
import itertools
import json
import os
import subprocess
from dataclasses import replace

import pytest
import yaml
from plan_builders import make_dense_model, make_latent_moe_model, make_target

from dayzero.core.errors import DayZeroError
from dayzero.core.model import CacheSpec
from dayzero.core.plan import Layout, LedgerLine, MemoryLedger, Plan, Pool
from dayzero.core.units import GIB
from dayzero.plan.export import asked, export, refusal
from dayzero.plan.export.checked import FOLDER, OptionList, load_options

ENGINES = ("vllm", "sglang", "vllm-ascend")
HOSTILE = "It's a \"model\" $(touch /tmp/x) `id` ${HOME} & more"


def make_plan_record(layout=None, **more):
    layout = layout or Layout(tp=8, stages=((0, 61),))
    lines = [("weights", 60), ("cache", 4), ("activations", 5), ("runtime", 1), ("reserve", 2)]
    ledger = MemoryLedger(rank=0, stage=0, budget_bytes=72 * GIB, cache_bytes_per_token=70272.0, cache_bytes_per_sequence=0,
                          admissible_tokens=100_000, lines=tuple(
                              LedgerLine(category=name, name=name, num_bytes=size * GIB, formula="") for name, size in lines
                          ))  # fmt: skip
    facts = dict(model="toy", target="toy-card", feasible=True, layout=layout, devices=layout.num_devices,
                 pools=(Pool(role="mixed", layout=layout),), weights_dtype="bfloat16", cache_dtype="bfloat16",
                 context_tokens=32768, concurrency=64, memory_fraction=0.9, block_tokens=64, prefill_chunk_tokens=2048,
                 weights_bytes_per_device=60 * GIB, cache_bytes_per_token_per_device=70272.0, admissible_tokens=100_000,
                 ledger=(ledger,), reasons=("because",))  # fmt: skip
    return Plan(**(facts | more))


def make_card(engine="vllm", **more):
    if engine == "vllm-ascend":
        card = make_target(**more)
        return replace(card, vendor="Huawei", software=replace(card.software, torch_device="npu"))
    return replace(make_target(**more), vendor="NVIDIA")


def parser_of(engine):
    """An argparse parser made from the option list alone: the engine's own, as far as the list knows it."""
    listed = load_options(engine)
    listed = listed.base or listed
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    if engine != "sglang":
        parser.add_argument("model_tag")
    data = json.loads((FOLDER / f"{listed.engine}-{listed.version}.json").read_text())
    for item in data["options"]:
        if item["type"] == "bool":
            parser.add_argument(item["option"], *item["aliases"], action="store_true")
        else:
            kind = {"int": int, "float": float, "json": json.loads}.get(item["type"], str)
            parser.add_argument(item["option"], *item["aliases"], type=kind, choices=item["choices"])
    return parser


def run_words(script, tmp_path, *arguments, **environment):
    """The words that a shell script really gives to the engine, which a stand-in on the PATH writes down."""
    for name in ("vllm", "python3"):
        tool = tmp_path / name
        tool.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
        tool.chmod(0o755)
    done = subprocess.run(["/bin/sh", "-c", script, "launch.sh", *arguments], capture_output=True, text=True,
                          env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **environment})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def parsed(engine, words):
    """(options given, namespace); unknown words are an error."""
    words = words[1:] if engine != "sglang" else words[2:]
    return vars(parser_of(engine).parse_args(words))


LAYOUTS = [
    Layout(tp=8, stages=((0, 61),)),
    Layout(tp=8, ep=8, stages=((0, 61),)),
    Layout(tp=4, dp=4, ep=16, stages=((0, 61),)),
    Layout(tp=8, pp=2, dp=2, ep=16, stages=((0, 32), (32, 61))),
    Layout(tp=8, pp=4, stages=((0, 16), (16, 32), (32, 47), (47, 61))),
    Layout(tp=8, cp=8, cp_in_tp=8, stages=((0, 61),)),
    Layout(tp=8, ep=8, sp=True, stages=((0, 61),)),
    Layout(dp=16, ep=16, stages=((0, 61),)),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.spelled())
def test_every_command_parses_with_the_engines_own_options(engine, layout, tmp_path):
    model = make_latent_moe_model(name="toy")
    files = export(make_plan_record(layout), model, make_card(engine), engine)
    words = run_words(files["launch.sh"], tmp_path, "1", "10.0.0.9")
    given = parsed(engine, words)
    assert given["nnodes"] in (None, layout.num_devices // 8)
    if layout.num_devices > 8:
        assert given["node_rank"] == 1
        assert given.get("headless", True) is True
    names = [line.split(":")[0] for line in files[f"{engine}.yaml"].splitlines()[1:] if not line.startswith((" ", "#"))]
    assert {f"--{name}" for name in names} <= set(words)


def test_degrees_and_sizes_of_the_first_engine(tmp_path):
    layout = Layout(tp=8, pp=2, dp=2, ep=16, stages=((0, 32), (32, 61)))
    files = export(make_plan_record(layout), make_latent_moe_model(name="toy"), make_card(), "vllm")
    given = parsed("vllm", run_words(files["launch.sh"], tmp_path, "0", "head"))
    assert given["tensor_parallel_size"] == 8 and given["pipeline_parallel_size"] == 2 and given["data_parallel_size"] == 2
    assert given["enable_expert_parallel"] and not given["headless"]
    assert given["max_num_seqs"] == 32  # 64 requests over two replicas
    assert given["max_num_batched_tokens"] == 2048 + 32 - 1  # a chunk beside the others' decode tokens
    assert given["max_model_len"] == 32768 and given["block_size"] == 64 and given["gpu_memory_utilization"] == 0.9
    assert given["nnodes"] == 4 and given["master_addr"] == "head"
    assert "VLLM_PP_LAYER_PARTITION=32,29" in files["launch.sh"]
    assert given["quantization"] is None and given["kv_cache_dtype"] is None  # the checkpoint says


def test_degrees_and_sizes_of_the_second_engine(tmp_path):
    layout = Layout(tp=4, dp=4, ep=8, stages=((0, 61),))
    files = export(make_plan_record(layout), make_latent_moe_model(name="toy"), make_card(), "sglang")
    given = parsed("sglang", run_words(files["launch.sh"], tmp_path, "0", "head"))
    assert given["tp_size"] == 16 and given["attn_dp_size"] == 4 and given["ep_size"] == 8 and given["dp_size"] is None
    assert given["enable_dp_lm_head"]
    assert given["max_running_requests"] == 64 and given["chunked_prefill_size"] == 2048 * 4  # the engine divides both
    assert given["dist_init_addr"] == "head:29501" and given["nnodes"] == 2
    # 72 GiB of 80 less 8 GiB that are neither weights nor caches; rounded down.
    assert given["mem_fraction_static"] == 0.8


def test_a_ledger_that_followed_an_engine_bounds_the_whole_step_by_the_chunk():
    plan, model = make_plan_record(Layout(tp=8), engine="vllm"), make_latent_moe_model(name="toy")
    assert yaml.safe_load(export(plan, model, make_card(), "vllm")["vllm.yaml"])["max-num-batched-tokens"] == 2048
    assert "plan with --engine sglang" in export(plan, model, make_card(), "sglang")["NOTES.md"]
    own = export(replace(plan, engine="dayzero"), model, make_card(), "vllm")
    assert yaml.safe_load(own["vllm.yaml"])["max-num-batched-tokens"] == 2048 + 63
    assert "follows the memory model of dayzero: plan with --engine vllm" in own["NOTES.md"]


def test_decode_context_parallelism():
    model = make_latent_moe_model(name="toy")
    inside, own = Layout(tp=8, cp=8, cp_in_tp=8), Layout(tp=4, cp=2)
    assert "--decode-context-parallel-size 8" in export(make_plan_record(inside), model, make_card(), "vllm")["commands.txt"]
    assert "--dcp-size 8" in export(make_plan_record(inside), model, make_card(), "sglang")["commands.txt"]
    both = export(make_plan_record(own), model, make_card(), "vllm")["commands.txt"]
    assert "--prefill-context-parallel-size 2 --decode-context-parallel-size 2" in both
    with pytest.raises(DayZeroError, match="context ranks of their own"):
        export(make_plan_record(own), model, make_card(), "sglang")


def test_a_plan_that_partly_shards_experts_is_refused_where_there_is_no_option():
    layout = Layout(tp=4, dp=4, ep=8, stages=((0, 61),))
    with pytest.raises(DayZeroError, match="divide experts over 8 of a stage's 16") as error:
        export(make_plan_record(layout), make_latent_moe_model(), make_card(), "vllm")
    assert "--tp 4 --pp 1 --dp 4 --cp 1 --dcp 1 --ep 16 " in error.value.fix  # --ep alone divides no other layout's ranks


REFUSED = [
    ("vllm", Layout(tp=4, cp=2), {}, "divide this model's cache by context"),
    ("sglang", Layout(tp=4, cp=4, cp_in_tp=4), {}, "divide a cache of heads"),
    ("sglang", Layout(tp=4, dp=4), {}, "copies of a model on several nodes"),
    ("vllm", Layout(tp=4), {"weights_dtype": "int4"}, "quantize a bfloat16 release to int4"),
    ("vllm-ascend", Layout(tp=4), {"weights_dtype": "fp8"}, "quantize a bfloat16 release to fp8"),
    ("vllm-ascend", Layout(tp=4), {"cache_dtype": "float8_e4m3fn"}, "keep the cache in"),
    ("vllm", Layout(tp=4), {"cache_dtype": "float64"}, "has no --kv-cache-dtype float64"),
    ("vllm", Layout(tp=4), {"feasible": False}, "infeasible plan"),
    ("vllm", Layout(tp=4), {"context_tokens": 9_000_000}, "more positions than the model states"),
    ("vllm", Layout(tp=4), {"pools": (Pool(role="prefill", layout=Layout(tp=4)),)}, "these pools"),
    ("vllm", Layout(tp=4), {"pools": (Pool(role="mixed", layout=Layout(tp=4), role_layouts={"head": Layout(tp=2, dp=2)}),)},
     "shard head parameters otherwise"),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "layout", "more", "told"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_an_engine_cannot_be_told_is_an_error(engine, layout, more, told):
    model = make_dense_model(name="toy")
    model = replace(model, dimensions=replace(model.dimensions, max_position_tokens=1_000_000))
    with pytest.raises(DayZeroError, match=told) as error:
        export(make_plan_record(layout, **more), model, make_card(engine), engine)
    assert error.value.got and error.value.want and error.value.fix


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("build", [make_dense_model, make_latent_moe_model])
def test_a_search_can_ask_before_what_the_export_would_refuse(engine, build):
    """For every layout of up to 16 cards: refused by `refusal` exactly where the export is refused."""
    model, card, seen = build(name="toy"), make_card(engine), {True: 0, False: 0}
    degrees = (1, 2, 4, 8, 16)
    for tp, pp, dp, cp, dcp, ep in itertools.product(degrees, (1, 2), degrees, (1, 2), (1, 2, 4), degrees):
        if tp % dcp or tp * pp * dp * cp > 16 or (tp * dp * cp) % ep:
            continue
        layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp * dcp, cp_in_tp=dcp, ep=ep)
        told = refusal(layout, model, card, engine)
        seen[told is None] += 1
        if told is None:
            export(make_plan_record(layout), model, card, engine)
        else:
            with pytest.raises(DayZeroError) as error:
                export(make_plan_record(layout), model, card, engine)
            assert told.startswith(error.value.what)
    assert seen[True] > 5 and seen[False] > 5


def test_a_quantized_release_is_not_quantized_again():
    model = make_dense_model(name="toy", quantization={"method": "fp8"})
    assert "--quantization" not in export(
        make_plan_record(Layout(tp=4), weights_dtype="as published"), model, make_card(), "vllm")["commands.txt"]  # fmt: skip
    with pytest.raises(DayZeroError, match="load this quantized release as int8"):
        export(make_plan_record(Layout(tp=4), weights_dtype="int8"), model, make_card(), "vllm")


def test_what_is_made_at_load_and_stored_in_the_cache():
    plan = make_plan_record(Layout(tp=4), weights_dtype="fp8", cache_dtype="float8_e4m3fn")
    first, second = (export(plan, make_dense_model(), make_card(), engine)["commands.txt"] for engine in ("vllm", "sglang"))
    assert "--quantization fp8_per_block --kv-cache-dtype fp8_e4m3" in first
    assert "--quantization fp8 --kv-cache-dtype fp8_e4m3" in second


def test_a_field_nobody_taught_the_exports_is_refused(monkeypatch):
    """Tomorrow's field of a layout must not be lost: one the exports do not know is an error unless it has its default."""
    monkeypatch.setattr(asked, "_LAYOUT", tuple(name for name in asked._LAYOUT if name != "sp"))
    assert export(make_plan_record(Layout(tp=4)), make_dense_model(), make_card(), "vllm")
    with pytest.raises(DayZeroError, match=r"layout\.sp"):
        export(make_plan_record(Layout(tp=4, sp=True)), make_dense_model(), make_card(), "vllm")


@pytest.mark.parametrize(("engine", "option"), [("vllm", "--max-num-seqs"), ("sglang", "--attn-dp-size"), ("vllm-ascend", "--headless")])
def test_an_option_that_a_version_lost_is_an_error(engine, option, monkeypatch):
    real = load_options(engine)

    def without(listed):
        options = {name: item for name, item in listed.options.items() if name != option}
        return replace(listed, options=options, base=without(listed.base) if listed.base else None)

    monkeypatch.setattr("dayzero.plan.export.load_options", lambda *given: without(real))
    with pytest.raises(DayZeroError, match=f"has no option {option}"):
        export(make_plan_record(Layout(tp=4, dp=4, ep=16)), make_latent_moe_model(), make_card(engine), engine)


def test_values_are_checked_too():
    listed = OptionList(engine="e", version="1", options={"--n": {"type": "int", "choices": None},
                        "--c": {"type": "str", "choices": ["a", "b"]}, "--j": {"type": "json", "fields": ["x", "y", "y.z"]}})  # fmt: skip
    listed.check("--n", 3)
    listed.check("--j", {"x": 1, "y": {"z": 2}})
    for name, value in (("--n", "3"), ("--n", True), ("--n", 3.5), ("--c", "d"), ("--j", {"w": 1}), ("--j", {"y": {"q": 2}})):
        with pytest.raises(DayZeroError):
            listed.check(name, value)


def test_a_hostile_name_stays_one_word_everywhere(tmp_path):
    """Shell, Kubernetes ($(NAME) in commands) and Compose ($NAME) each have an expansion of their own."""
    layout = Layout(tp=8, pp=2, stages=((0, 32), (32, 61)))
    for engine in ENGINES:
        files = export(make_plan_record(layout), make_latent_moe_model(name=HOSTILE.replace(":", "")), make_card(engine), engine)
        by_shell = run_words(files["launch.sh"], tmp_path, "1", "head")
        assert f"/models/{HOSTILE}" in by_shell and HOSTILE in by_shell
        pods = yaml.safe_load_all(files["leaderworkerset.yaml"])
        template = next(pods)["spec"]["leaderWorkerTemplate"]
        command = template["workerTemplate"]["spec"]["containers"][0]["command"]
        assert command[:2] == ["/bin/sh", "-c"]
        in_pod = command[2].replace("$$(", "$(")  # what the kubelet does
        assert "$(" not in command[2].replace("$$(", "")  # nothing else for it to expand
        assert run_words(in_pod, tmp_path, LWS_LEADER_ADDRESS="head", LWS_WORKER_INDEX="1") == by_shell
        service = next(iter(yaml.safe_load(files["compose.yaml"])["services"].values()))
        by_compose = service["command"][0].replace("$$", "$")  # what Compose does
        assert "$" not in service["command"][0].replace("$$", "")
        assert run_words(by_compose, tmp_path, NODE_RANK="1", MASTER_ADDR="head") == by_shell
        sets = [one for one in yaml.safe_load_all(files["statefulset.yaml"]) if one["kind"] == "StatefulSet"]
        text = sets[0]["spec"]["template"]["spec"]["containers"][0]["command"][2].replace("$$(", "$(")
        name = sets[0]["metadata"]["name"]
        words = run_words(text, tmp_path, HOSTNAME=f"{name}-1")
        first = f"{name}-0.{sets[0]['spec']['serviceName']}"
        assert [word.replace(first, "head") for word in words] == by_shell


def test_files_of_a_cluster():
    layout = Layout(tp=8, pp=4, stages=((0, 16), (16, 32), (32, 47), (47, 61)))
    files = export(make_plan_record(layout), make_latent_moe_model(name="Big.Model_1"), make_card(), "vllm")
    group, service = yaml.safe_load_all(files["leaderworkerset.yaml"])
    assert group["kind"] == "LeaderWorkerSet" and group["metadata"]["name"] == "big-model-1"
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 4
    leader, worker = (template[f"{part}Template"]["spec"]["containers"][0] for part in ("leader", "worker"))
    assert leader["resources"]["limits"] == {"nvidia.com/gpu": "8"} == worker["resources"]["limits"]
    assert "readinessProbe" in leader and "readinessProbe" not in worker
    assert service["spec"]["selector"].items() <= template["leaderTemplate"]["metadata"]["labels"].items()
    documents = {one["kind"]: one for one in yaml.safe_load_all(files["statefulset.yaml"])}
    assert documents["StatefulSet"]["spec"]["replicas"] == 4
    assert documents["StatefulSet"]["spec"]["podManagementPolicy"] == "Parallel"
    commands = [line for line in files["commands.txt"].splitlines() if not line.startswith("#")]
    assert len(commands) == 4
    assert [f"--node-rank {rank} " in line for rank, line in enumerate(commands)] == [True] * 4
    assert ["--headless" in line for line in commands] == [False, True, True, True]
    assert not any("*id" in text or "&id" in text for text in files.values())  # YAML aliases: not every reader takes them


def test_one_card_needs_no_cluster():
    files = export(make_plan_record(Layout()), make_dense_model(name="toy"), make_card(), "vllm")
    assert "nnodes" not in files["commands.txt"] and "NODE_RANK" not in files["launch.sh"]
    assert next(iter(yaml.safe_load(files["compose.yaml"])["services"].values())).get("environment") is None
    assert yaml.safe_load(files["vllm.yaml"])["tensor-parallel-size"] == 1


def test_nodes_are_divided_as_the_engine_can():
    layout = Layout(tp=4, dp=3, ep=12)
    files = export(make_plan_record(layout), make_latent_moe_model(), make_card(), "vllm")
    assert "--nnodes 3" in files["commands.txt"]  # replicas of 4 cards: not 2 nodes of 6
    assert "4 of the 8 cards of a node are used" in files["NOTES.md"]
    assert "--nnodes" not in export(make_plan_record(layout), make_latent_moe_model(), make_card(num_cards=16), "vllm")["commands.txt"]


def test_prefill_and_decode_pools():
    pools = (Pool(role="prefill", layout=Layout(tp=8)), Pool(role="decode", layout=Layout(dp=8, ep=8)))
    plan = make_plan_record(Layout(dp=8, ep=8), pools=pools)
    model = make_latent_moe_model(name="toy")
    first = export(plan, model, make_card(), "vllm")
    for role, told in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        transfer = yaml.safe_load(first[f"{role}/vllm.yaml"])["kv-transfer-config"]
        assert transfer["kv_role"] == told and transfer["kv_connector"] in load_options("vllm").connectors
        container = yaml.safe_load(first[f"{role}/leaderworkerset.yaml"].split("---")[0])
        variables = container["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"][0]["env"]
        assert variables[0]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    second = export(plan, model, make_card(), "sglang")
    assert yaml.safe_load(second["prefill/sglang.yaml"])["disaggregation-mode"] == "prefill"
    assert yaml.safe_load(second["decode/sglang.yaml"])["attn-dp-size"] == 8
    third = yaml.safe_load(export(plan, model, make_card("vllm-ascend"), "vllm-ascend")["decode/vllm-ascend.yaml"])
    assert third["kv-transfer-config"]["kv_connector"] in load_options("vllm-ascend").connectors
    assert third["kv-transfer-config"]["kv_connector_extra_config"] == {"prefill": {"dp_size": 1, "tp_size": 8},
                                                                        "decode": {"dp_size": 8, "tp_size": 1}}  # fmt: skip
    assert "router" in first["NOTES.md"]


def test_a_pool_that_shards_its_prefill_cache():
    pools = (Pool(role="prefill", layout=Layout(tp=4, cp=2)), Pool(role="decode", layout=Layout(tp=8)))
    files = export(make_plan_record(Layout(tp=8), pools=pools, block_tokens=16), make_latent_moe_model(), make_card(), "sglang")
    first, second = (yaml.safe_load(files[f"{role}/sglang.yaml"]) for role in ("prefill", "decode"))
    assert first["tp-size"] == 8 and first["attn-cp-size"] == 2 and first["enable-kv-cache-sharding"]
    assert first["page-size"] == second["page-size"] == 64


def test_sequence_parallelism_is_asked_for_where_a_version_has_it():
    plan, model = make_plan_record(Layout(tp=8, ep=8, sp=True)), make_latent_moe_model()
    newer, older = (export(plan, model, make_card(), "vllm", version=version) for version in ("0.33.0", "0.23.0"))
    assert "compilation-config" not in newer["vllm.yaml"] and "sequence parallelism is not asked for" in newer["NOTES.md"]
    assert yaml.safe_load(older["vllm.yaml"])["compilation-config"] == {"pass_config": {"enable_sp": True}}
    plugin = export(plan, model, make_card("vllm-ascend"), "vllm-ascend")
    assert yaml.safe_load(plugin["vllm-ascend.yaml"])["additional-config"] == {"enable_flashcomm1": True}
    assert "sequence parallelism is not asked for" in export(plan, model, make_card(), "sglang")["NOTES.md"]


def test_sequence_parallelism_is_left_out_where_an_engine_would_not_start_with_it():
    """The plugin asserts tp > 1, and whole experts where there are experts; nothing else of the plan may change."""
    model, card = make_latent_moe_model(), make_card("vllm-ascend")
    for layout, told in ((Layout(tp=8, sp=True), True), (Layout(dp=8, ep=8, sp=True), False)):
        files = export(make_plan_record(layout), model, card, "vllm-ascend")
        assert "additional-config" not in files["vllm-ascend.yaml"]
        assert ("has it with whole experts only; results are the same" in files["NOTES.md"]) is told
        plain = export(make_plan_record(replace(layout, sp=False)), model, card, "vllm-ascend")
        assert files["vllm-ascend.yaml"] == plain["vllm-ascend.yaml"]
    dense = export(make_plan_record(Layout(tp=4, sp=True)), make_dense_model(), card, "vllm-ascend")
    assert yaml.safe_load(dense["vllm-ascend.yaml"])["additional-config"] == {"enable_flashcomm1": True}


def with_mixer(model, **changes):
    return replace(model, layer_kinds=tuple(replace(kind, **changes) for kind in model.layer_kinds))


STATE = CacheSpec(kind="state", name="states", dtype="bfloat16", elements_per_sequence=64)


def test_context_parallelism_beside_windows_states_and_indexers():
    """The same caches are divided where every layer keeps all tokens, so the refusal is about the windows and states."""
    inside = Layout(tp=8, cp=2, cp_in_tp=2)
    plain, windowed = (make_dense_model(heads=32, kv_heads=4, window=window) for window in (None, 128))
    assert "dcp=2" not in (refusal(inside, plain, make_card(), "vllm") or "")
    assert "--decode-context-parallel-size 2" in export(make_plan_record(inside), plain, make_card(), "vllm")["commands.txt"]
    for engine in ("vllm", "vllm-ascend"):
        assert "model with windows" in refusal(inside, windowed, make_card(engine), engine)
        with pytest.raises(DayZeroError, match="model with windows") as error:
            export(make_plan_record(inside), windowed, make_card(engine), engine)
        assert "--dcp 1" in error.value.fix
        assert refusal(Layout(tp=8), windowed, make_card(engine), engine) is None
    stateful = with_mixer(plain, cache=(*plain.layer_kinds[0].cache, STATE))
    assert "layers that keep a state" in export(make_plan_record(inside), stateful, make_card(), "vllm")["NOTES.md"]
    assert "layers keep states" in refusal(Layout(tp=8, cp=2), stateful, make_card(), "vllm")
    sparse, card = with_mixer(make_latent_moe_model(), mixer="sparse_latent"), make_card("vllm-ascend")
    assert "part of the tensor-parallel ranks" in refusal(inside, sparse, card, "vllm-ascend")
    assert refusal(Layout(tp=8, cp=8, cp_in_tp=8), sparse, card, "vllm-ascend") is None
    assert refusal(inside, sparse, make_card(), "vllm") is None


def test_pools_that_divide_the_cache_hand_over_whole_blocks():
    """The plugin asserts that runs of tokens on one rank are as long as its blocks when caches are handed over."""
    inside = Layout(tp=8, cp=8, cp_in_tp=8)
    pools = (Pool(role="prefill", layout=inside), Pool(role="decode", layout=inside))
    files = export(make_plan_record(inside, pools=pools), make_latent_moe_model(), make_card("vllm-ascend"), "vllm-ascend")
    assert yaml.safe_load(files["decode/vllm-ascend.yaml"])["cp-kv-cache-interleave-size"] == 128
    mixed = export(make_plan_record(inside), make_latent_moe_model(), make_card("vllm-ascend"), "vllm-ascend")
    assert "interleave" not in mixed["vllm-ascend.yaml"]


def test_a_placement_is_told_only_where_it_would_lie_on_other_links():
    moved = ("pp", "tp", "cp", "dp")
    small, large = Layout(tp=4, pp=2, placement=moved), Layout(tp=8, pp=2, placement=moved)
    for engine in ENGINES:
        told = [export(make_plan_record(one), make_latent_moe_model(), make_card(engine), engine) for one in (small, large)]
        assert "innermost first" not in told[0]["NOTES.md"] and "the plan placed them pp, tp" in told[1]["NOTES.md"]
        plain = export(make_plan_record(Layout(tp=8, pp=2)), make_latent_moe_model(), make_card(engine), engine)
        assert "innermost first" not in plain["NOTES.md"]
        assert plain["commands.txt"] == told[1]["commands.txt"]


def test_what_is_left_to_the_engine_is_written_down():
    plan = make_plan_record(Layout(tp=8, pp=2, dp=2, stages=((0, 32), (32, 61))), block_tokens=16, reasons=("why",))
    notes = export(plan, make_latent_moe_model(), make_card(), "vllm")["NOTES.md"]
    assert "cache blocks of 16 tokens are not asked for" in notes and "multiples of 64" in notes
    assert "in the order tp, pp, dp" in notes  # the plan has pp outermost
    assert "vllm 0.33.0" in notes and "- why" in notes
    assert "block-size: 16" in export(replace(plan, layout=Layout(), pools=()), make_dense_model(), make_card(), "vllm")["vllm.yaml"]


def test_engines_and_cards_that_do_not_go_together():
    plan, model = make_plan_record(Layout(tp=4)), make_dense_model()
    for engine, card in (("vllm", "vllm-ascend"), ("vllm-ascend", "vllm")):
        with pytest.raises(DayZeroError, match="does not run on"):
            export(plan, model, make_card(card), engine)
    with pytest.raises(DayZeroError, match="no engine is named"):
        export(plan, model, make_card(), "other")
    with pytest.raises(DayZeroError, match=r"no option list of vllm 0\.1\.0"):
        export(plan, model, make_card(), "vllm", version="0.1.0")


def test_roles_of_their_own_width():
    layout = Layout(dp=8, ep=8)
    pool = Pool(role="mixed", layout=layout, role_layouts={"head": Layout(tp=4, dp=2, ep=8)})
    files = export(make_plan_record(layout, pools=(pool,)), make_latent_moe_model(), make_card("vllm-ascend"), "vllm-ascend")
    extra = yaml.safe_load(files["vllm-ascend.yaml"])["additional-config"]
    assert extra == {"finegrained_tp_config": {"lmhead_tensor_parallel_size": 4}}
    pool = Pool(role="mixed", layout=layout, role_layouts={"mlp": Layout(dp=8, ep=8, sp=True), "head": Layout(tp=8, ep=8)})
    options = yaml.safe_load(export(make_plan_record(layout, pools=(pool,)), make_latent_moe_model(), make_card(), "sglang")["sglang.yaml"])
    assert options["moe-dense-tp-size"] == 1 and "enable-dp-lm-head" not in options


def test_copies_of_experts_are_asked_for_as_each_engine_spells_them():
    """TP-03: 16 copies beside 256 experts on 16 ranks; 8 copies would leave ranks uneven, which no engine takes."""
    model, layout = make_latent_moe_model(layers=4, dense=1), Layout(dp=16, ep=16, redundant_experts=16, stages=((0, 4),))
    commands = {}
    for engine in ENGINES:
        card = make_card(engine)
        files = export(make_plan_record(layout), model, card, engine)
        commands[engine] = files["commands.txt"]
        uneven = replace(layout, redundant_experts=8)
        assert "different numbers of experts" in refusal(uneven, model, card, engine)
        with pytest.raises(DayZeroError, match="different numbers") as caught:
            export(make_plan_record(uneven), model, card, engine)
        assert "16 copies" in caught.value.fix
    assert "--enable-eplb" in commands["vllm"] and '"num_redundant_experts":16' in commands["vllm"]
    assert "--ep-num-redundant-experts 16" in commands["sglang"]
    assert '"eplb_config":{"dynamic_eplb":true,"num_redundant_experts":16}' in commands["vllm-ascend"]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_request_for_a_prompts_scores_would_take_is_told(engine):
    """ME-03: those engines keep room for sampled rows alone: 8192 rows of 163,840 would take 7.5 GiB more."""
    model = make_latent_moe_model(vocab=163840)
    plan = make_plan_record(engine=engine, prefill_chunk_tokens=8192)
    notes = export(plan, model, make_card(engine), engine)["NOTES.md"]
    assert "8192 rows x 163840 vocabulary" in notes and "7.50 GiB a card at least; refuse requests" in notes
    own = export(make_plan_record(prefill_chunk_tokens=8192), model, make_card(engine), engine)["NOTES.md"]
    assert "log-probabilities" not in own
