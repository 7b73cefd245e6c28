"""What the tests of the memory ledger read: releases by name, targets by name, and how each log and deployment is posed.

Logs, deployments and refusals are copies of public records (`tests/data/planning`), each row with its source. A log says what
an engine printed; a `Case` says which model, engine and layout that was, which of its figures can be compared, and why the
others cannot.
"""

import gzip
import json
import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from dayzero.core.model import ModelDescription
from dayzero.core.plan import Layout
from dayzero.core.records import from_dict
from dayzero.core.target import Target, Workload, load_yaml
from dayzero.core.units import GIB
from dayzero.model.describe import describe
from dayzero.plan.engines import CacheModel, CacheRule, Engine, load_engine
from dayzero.plan.ledger import Evaluator
from dayzero.plan.options import PlanOptions, resolve
from dayzero.plan.unlisted import with_parameters

DATA = Path(__file__).parents[1] / "data"
HARDWARE = Path(__file__).parents[2] / "src" / "dayzero" / "devices" / "hardware"
PUBLISHED = json.loads(gzip.decompress((DATA / "published_configs.json.gz").read_bytes()))
DERIVED = json.loads((DATA / "planning" / "derived_configs.json").read_text())
LOGS = {row["id"]: row for row in json.loads((DATA / "planning" / "memory_logs.json").read_text())["logs"]}
DEPLOYMENTS = {row["id"]: row for row in json.loads((DATA / "planning" / "deployments.json").read_text())["deployments"]}
NEGATIVES = {row["id"]: row for row in json.loads((DATA / "planning" / "negatives.json").read_text())["negatives"]}
# Cards that have no hardware file: the memory that the row itself states.
EXTRA_CARDS = {"rtx-pro-6000": 95.6, "gb10": 121.7}


@cache
def described(name: str) -> ModelDescription:
    """The description of a published config, or of one derived from it, from its keys alone."""
    release = dict(PUBLISHED.get(name) or {})
    if derived := DERIVED.get(name):
        base = PUBLISHED[derived["base"]] if derived["base"] else {"config": {}}
        release = {"config": base["config"] | derived["change"]}
        for key in derived.get("drop", ()):
            release["config"].pop(key, None)
        if "text_change" in derived or "text_drop" in derived:
            text = base["config"]["text_config"] | derived.get("text_change", {})
            release["config"]["text_config"] = {k: v for k, v in text.items() if k not in derived.get("text_drop", ())}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(release["config"]))
        if settings := release.get("hf_quant_config"):
            (folder / "hf_quant_config.json").write_text(json.dumps(settings))
        return with_parameters(describe(folder, operators=False))


@cache
def target_of(name: str) -> Target:
    stand_in = {"rtx-pro-6000": "nvidia-h100-sxm", "gb10": "nvidia-h100-sxm"}.get(name, name)
    data = load_yaml(HARDWARE / f"{stand_in}.yaml")
    data.pop("schema")
    found = from_dict(Target, data)
    if name in EXTRA_CARDS:
        size = int(EXTRA_CARDS[name] * GIB)
        found = replace(found, id=name, card=replace(found.card, memory_bytes=size, usable_memory_bytes=size))
    return found


def evaluator_of(
    model: str, target: str, engine: str | Engine, *, weights: str | None = None, cache_dtype: str | None = None, context: int = 8192,
    concurrency: int = 1, chunk: int = 2048, fraction: float = 0.9, mtp: bool = False, block: int | None = None,
) -> Evaluator:  # fmt: skip
    found, memory = described(model), engine if isinstance(engine, Engine) else load_engine(engine)
    work = Workload(context_tokens=context, prefill_chunk_tokens=min(chunk, context), concurrency=concurrency,
                    input_tokens=min(128, context // 2), output_tokens=min(32, context // 2))  # fmt: skip
    options = PlanOptions(weights_dtype=weights, memory_fraction=fraction, mtp=mtp,
                          block_tokens=block or memory.cache.block_tokens)  # fmt: skip
    request = replace(resolve(found, work, options), cache_dtype=cache_dtype)
    return Evaluator(found, target_of(target), request, engine=memory)


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A log, posed. `weights`, `per_token`, `tokens`: the logged figure (GiB, bytes, tokens) where it can be compared;
    `reasons`: why a column of the log cannot be, or what a figure rests on. `loose`: shown, but too doubtful to assert."""

    id: str
    model: str | None = None
    target: str = "nvidia-h100-sxm"
    engine: str | Engine = "vllm"
    layout: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    weights: float | None = None
    per_token: float | None = None
    tokens: int | None = None
    available_bytes: float | None = None
    exact: bool = False
    loose: bool = False
    reasons: dict = field(default_factory=dict)
    label: str = ""


# The cache declarations of a model's own reference code, which no serving engine follows: index keys in MXFP4.
DECLARED = replace(load_engine("dayzero"), cache=CacheModel(
    rules=(CacheRule(kind="indexer", asked="nvfp4", dtype="mxfp4", source="log v41-kv-layout"),)))  # fmt: skip
NO_CONFIG = "the release's config is stored nowhere here"
CASES = (
    Case(id="k2t-h200-tp8", model="Kimi-K2-Thinking", target="nvidia-h200-sxm", layout={"tp": 8}, exact=True,
         options={"context": 262144, "block": 64}, available_bytes=46.8 * GIB, per_token=46.8 * GIB / 715072, tokens=715072),
    Case(id="k2t-h200-tp8", label=" dcp 8", model="Kimi-K2-Thinking", target="nvidia-h200-sxm", layout={"tp": 1, "cp": 8},
         options={"context": 262144, "block": 64}, available_bytes=46.8 * GIB, tokens=5721088,
         reasons={"tokens": "the second block of the same start-up log; the cache alone, as if CP had ranks of its own"}),
    Case(id="dsv3-w8a8-a2x2", model="DeepSeek-V3", target="ascend-910b3-64g", engine="vllm-ascend",
         layout={"tp": 4, "dp": 4, "ep": 16}, options={"weights": "w8a8"}, weights=44.1591),
    Case(id="v4pro-b300-tp8", model="DeepSeek-V4-Pro", target="nvidia-b300-sxm", layout={"tp": 8}, weights=141.53,
         reasons={"weights": "the draft is not in the config: its bytes are the logged checkpoint's (831 GiB) less the model's",
                  "tokens": "no tokens logged"}),
    Case(id="v4pro-fp8-mi300x", model="DeepSeek-V4-Pro", target="amd-mi300x", layout={"tp": 8}, weights=131.0,
         reasons={"tokens": "no available bytes logged; concurrency x length of a cache with pools of its own", "weights": "labelled FP8; only FP4 experts padded to 256 come near it (FP8 experts would take 191 GiB)"}),
    Case(id="v4pro-mxfp4-mi355x", reasons={"tokens": "neither weights nor available bytes logged, and the tokens are "
         "concurrency x a length that is not logged; that half the step's tokens gave 1.8 times as many is what blocks for windows "
         "and waiting rows do"}),
    Case(id="k3-b300-tp8", model="Kimi-K3", target="nvidia-b300-sxm", layout={"tp": 8}, weights=188.0, tokens=3249215,
         options={"context": 1048576, "cache_dtype": "fp8"}, available_bytes=42.23 * GIB,
         reasons={"weights": "the log gives a range, 188-195: its nearer end", "per token": "a hybrid"}),
    Case(id="glm52-nvfp4-sgl", model="GLM-5.2-NVFP4", target="nvidia-b200-sxm", engine="sglang", layout={"tp": 8}, weights=54.0,
         options={"context": 262144, "cache_dtype": "fp8", "block": 64}, reasons={"weights": "logged in whole GB"}),
    Case(id="glm52-nvfp4-sgl", label=" + draft", model="GLM-5.2-NVFP4", target="nvidia-b200-sxm", engine="sglang",
         layout={"tp": 8}, options={"context": 262144, "cache_dtype": "fp8", "block": 64, "mtp": True}, tokens=464768,
         available_bytes=23.91 * GIB, per_token=23.91 * GIB / 464768,
         reasons={"per token": "the pool counts the draft layer's cache too; without it 53,940 B, 2.4% less"}),
    Case(id="q35-397b-rtx", model="Qwen3.5-397B-A17B-NVFP4", target="rtx-pro-6000", engine="sglang", layout={"tp": 4},
         weights=56.12, reasons={"tokens": "available bytes are not logged, nor the share of states in the pool"}),
    Case(id="q35-397b-rtx", label=" + draft", model="Qwen3.5-397B-A17B-NVFP4", target="rtx-pro-6000", engine="sglang",
         layout={"tp": 4}, options={"mtp": True}, weights=56.12 + 4.05, reasons={"weights": "that a draft holds its own embedding and head was taken from this log"}),
    Case(id="q3-235b-fp8-h100-vllm", model="Qwen3-235B-A22B-FP8", layout={"tp": 4}, options={"context": 40960},
         available_bytes=8.11 * GIB, tokens=178880, per_token=8.11 * GIB / 178880,
         reasons={"per token": "the log contradicts its own formula (48,681 and 48,128): bytes of one rank, tokens of the least"}),
    Case(id="gptoss120-h100", model="gpt-oss-120b", layout={"tp": 1}, weights=64.38, reasons={"weights": "fits, since the padding of that kernel was taken from this log; unpadded 60.8"}),
    Case(id="gptoss120-llamacpp", model="gpt-oss-120b", layout={"tp": 1}, engine="dayzero", options={"context": 131072}, exact=True,
         per_token=9216 * 2**20 / 262144, reasons={"tokens": "cells are given to that engine, not found; its window cells (90 MiB) "
         "follow from a batch size that is not logged"}),
    Case(id="r1-gguf-16x3090", reasons={"weights": "'about 3.5 bit' mixes types per tensor and says not which"}),
    Case(id="r1-wna16-3090", model="DeepSeek-R1-W4G128", layout={"tp": 16}, weights=21.21,
         loose=True, reasons={"weights": "the group size is not logged: 128 taken (64 gives +4.5%)", "tokens": "no tokens logged"}),
    Case(id="r1-llamacpp-kv", model="DeepSeek-R1", layout={"tp": 1}, engine="dayzero", exact=True,
         options={"cache_dtype": "q8_0", "context": 32768}, per_token=1166.62 * 2**20 / 32768, tokens=32768,
         available_bytes=1166.62 * 2**20),
    Case(id="dsv3-lmdeploy", model="DeepSeek-V3", target="nvidia-h800-sxm", layout={"tp": 8}, weights=83.5, loose=True,
         reasons={"weights": "an engine without a memory model here, and 'GB' may be 10^9 (then 77.8 GiB and +2.5%)"}),
    Case(id="r1-distill14b-tp2", model="DeepSeek-R1-Distill-Qwen-14B", layout={"tp": 2}, weights=13.9476,
         reasons={"tokens": "the log does not reconcile with itself: weights only, as its note says"}),
    Case(id="llama8b-3090-20k", model="Meta-Llama-3.1-8B", layout={"tp": 1}, weights=14.9888, exact=True, tokens=31232,
         available_bytes=3.81 * GIB, per_token=3.81 * GIB / 31232),
    Case(id="qwen3-8b-5090", model="Qwen3-8B", layout={"tp": 1}, weights=15.27, exact=True, tokens=89040,
         available_bytes=13.13e9, per_token=13.13e9 / 89040),
    Case(id="qwen3-30b-tp4", model="Qwen3-30B-A3B", layout={"tp": 4}, weights=14.2474),
    Case(id="qwen38-27b-a6000", model="Qwen3.6-27B-NVFP4", layout={"tp": 1}, weights=19.75, loose=True,
         reasons={"weights": f"{NO_CONFIG}; shown is another release's mix of NVFP4 and FP8 at the same sizes"}),
    Case(id="qwen38-27b-nvfp4a-5090x2", reasons={"weights": f"{NO_CONFIG}", "tokens": "no available bytes"}),
    Case(id="qwen38-27b-nvfp4b-5090x2", reasons={"weights": f"{NO_CONFIG}", "tokens": "no available bytes"}),
    Case(id="muse-glimmer-mi300x", reasons={"tokens": f"{NO_CONFIG} (key/value heads unknown), no available bytes"}),
    Case(id="muse-glimmer-5090", reasons={"tokens": f"{NO_CONFIG} (key/value heads unknown), no available bytes"}),
    Case(id="muse-glimmer-5090x2-util", reasons={"tokens": f"{NO_CONFIG} (key/value heads unknown): the slope cannot be had"}),
    Case(id="v41-native-composition", model="DeepSeek-V4.1-Flash", target="nvidia-h200-sxm", layout={"tp": 1},
         weights=475.24 - 189.13 - 7.39, reasons={"weights": "less the Engram tables, whose storage no setting states, and the draft"}),
    Case(id="v41-4spark-nodspark", reasons={"weights": "a patched engine with tables on disk; the staging it counts is not logged"}),
    Case(id="v41-kv-layout", model="DeepSeek-V4.1-Flash", target="nvidia-h200-sxm", layout={"tp": 1}, engine="dayzero",
         options={"cache_dtype": "nvfp4"}, per_token=890,
         reasons={"per token": "the description comes from keys: it gives all 8 index layers keys of their own (+288 B), the "
                  "model 4; and index keys are NVFP4 like the rest (+10 B)"}),
    Case(id="v41-kv-layout", label=" as declared", model="DeepSeek-V4.1-Flash-index-keys", target="nvidia-h200-sxm", engine=DECLARED,
         layout={"tp": 1}, options={"cache_dtype": "nvfp4"}, per_token=890, exact=True,
         reasons={"per token": "which layers own index keys, and that they are MXFP4, were taken from this log"}),
    Case(id="v4flash-a3-offload", reasons={"weights": "experts offloaded: how many slots stay is the operator's choice"}),
    Case(id="v4flash-b200-1M", reasons={"tokens": "no available bytes logged: both layouts' concurrency is predicted from the launch, in a test of its own"}),
    Case(id="dsocr-910b", model="DeepSeek-OCR-decoder-cache", target="ascend-910b3-64g", engine="vllm-ascend", layout={"tp": 1},
         options={"block": 128}, exact=True, tokens=831872, available_bytes=51114070016, per_token=51114070016 / 831872,
         reasons={"weights": f"{NO_CONFIG}; the cache sizes are the log's own"}),
    Case(id="hy3-a3", reasons={"weights": "process memory, pool included: it says the memory fraction (0.9 of 64 GiB) and no more"}),
    Case(id="glm53flash-4spark", reasons={"per token": NO_CONFIG}),
    Case(id="glm53flash-2spark", reasons={"tokens": NO_CONFIG, "weights": "EXL3 bits per weight vary by tensor"}),
    Case(id="vultr-mi325x", label=" V3.2", model="DeepSeek-V3.2", target="amd-mi325x", layout={"tp": 8}, weights=83.0, loose=True,
         reasons={"weights": "low confidence, whole GB of an unknown kind"}),
    Case(id="vultr-mi325x", label=" VL-235B", model="Qwen3-VL-235B-A22B-Instruct", target="amd-mi325x", layout={"tp": 8},
         weights=58.0, loose=True, reasons={"weights": "low confidence, whole GB of an unknown kind"}),
    Case(id="vultr-mi325x", label=" K2.5", model="Kimi-K2.5", target="amd-mi325x", layout={"tp": 4}, weights=145.0, loose=True,
         reasons={"weights": "low confidence, whole GB of an unknown kind"}),
    Case(id="r1-awq-gh200", model="DeepSeek-R1-AWQ", target="nvidia-h200-sxm", layout={"tp": 1}, weights=339.7),
    Case(id="inkling-small-mi355x", reasons={"weights": NO_CONFIG}),
    Case(id="overheads", reasons={"weights": "constants of another planner: the reserves of the engine files are compared with them"}),
)  # fmt: skip


def layout_of(parallel: dict, devices: int, experts: int = 0) -> Layout:
    """One pool of a deployment's row. Where it has data-parallel attention and no word on experts, they are spread over all.
    More expert ranks than `experts` hold copies: one place each."""
    tp, pp = parallel.get("tp") or parallel.get("attn_tp") or 1, parallel.get("pp", 1)
    dp = parallel.get("dp") or parallel.get("attn_dp") or 1
    if "devices" in parallel:
        dp = parallel["devices"] // (tp * pp)
    ep = parallel.get("ep") or parallel.get("moe_ep") or (tp * dp if dp > 1 else 1)
    ep = min(ep, tp * dp)
    return Layout(tp=tp, pp=pp, dp=dp, ep=ep, redundant_experts=max(0, ep - experts) if experts else 0)


# What a deployment's or a refusal's row names: config, and the weights dtype where the row runs another one than the release's.
RELEASES = {
    "DeepSeek-R1/V3/V3.2": "DeepSeek-V3.2", "DeepSeek-V3 W8A8": "DeepSeek-V3", "DeepSeek-V3.1": "DeepSeek-V3",
    "DeepSeek-V3.2-Exp": "DeepSeek-V3.2", "Hy3-preview": "default-hy_v3", "Hy3": "default-hy_v3",
    "Qwen3.5-397B-A17B": "Qwen3.5-397B-A17B-NVFP4", "Mistral-Large-4-1T-A52B": "default-mistral_large4",
    "Qwen3.8-27B": "Qwen3.5-27B",
    "Kimi-K3 (2.8T)": "Kimi-K3",
}  # fmt: skip
BY_WEIGHTS = {
    ("GLM-5.2", "FP8"): ("GLM-5.2-FP8", None), ("Qwen3.8-2.4T-A95B", "NVFP4"): ("Qwen3.8-2.4T-A95B-NVFP4", None),
    ("Qwen3.8-2.4T-A95B", "FP8 128x128"): ("Qwen3.8-2.4T-A95B-FP8", None), ("Qwen3.8-27B", "INT8"): ("Qwen3.5-27B", "int8"),
    ("GLM-4.5", "BF16/INT8"): ("GLM-4.5", "int8"), ("Mistral-Large-4-1T-A52B", "FP8"): ("default-mistral_large4", "fp8"),
    ("Hy3", "FP8 W8A8 (native on 950)"): ("default-hy_v3", "fp8"), ("DeepSeek-R1", "INT8"): ("DeepSeek-R1", "int8"),
    ("DeepSeek-R1", "int4 g128"): ("DeepSeek-R1", "int4"), ("GLM-5", "int4 experts, int8 activations"): ("GLM-5", "w4a8"),
    ("DeepSeek-R1", "int8"): ("DeepSeek-R1", "int8"),
    ("DeepSeek-V4.1-Flash", "native FP4/FP8, Engram on NVMe"): ("DeepSeek-V4.1-Flash-tables-on-disk", None),
}  # fmt: skip
CARDS = (
    ("950DT", "ascend-950dt-144g"), ("950PR/DT", "ascend-950pr-112g"), ("950PR", "ascend-950pr-112g"),
    ("CloudMatrix", "ascend-cloudmatrix384"), ("A3", "ascend-910c-die"), ("A2", "ascend-910b3-64g"), ("64 GB", "ascend-910b3-64g"),
    ("B300", "nvidia-b300-sxm"), ("GB200/GB300", "nvidia-gb200"), ("GB200", "nvidia-gb200"), ("GB300", "nvidia-gb300"),
    ("B200", "nvidia-b200-sxm"), ("H200", "nvidia-h200-sxm"), ("RTX PRO 6000", "rtx-pro-6000"), ("GB10", "gb10"),
    ("P800", "kunlun-p800"),
)  # fmt: skip
NOT_POSED = {
    "cann-longcat2": "no config is published; the row states only about 2.1 TB",
    "cann-ling25": "no config is published (hybrid of a family whose published sizes differ)",
    "rc-inkling": "no config is published; the class's defaults are not its sizes",
}


@dataclass(frozen=True, kw_only=True)
class Pose:
    """One pool of a deployment, ready to be priced. `layouts`: the one that is documented, or all that could be meant."""

    id: str
    model: str
    target: str
    engine: str
    layouts: tuple[Layout, ...]
    options: dict


def poses(row: dict) -> list[Pose]:
    """The pools of a deployment's row."""
    target = next(card for name, card in CARDS if name in row["hardware"])
    ascend = any(name in row["engine"] for name in ("ascend", "cann", "CloudMatrix"))
    engine = "vllm-ascend" if ascend else "vllm"
    text = row["weights"]
    model, weights = BY_WEIGHTS.get((row["model"], text), (RELEASES.get(row["model"], row["model"]), _asked(text)))
    context = row["max_model_len"] or 8192
    devices = row["devices"] or 8  # a row without a number states a minimum of memory that a node of 8 has
    parallel = row["parallel"]
    pools = [parallel]
    if parallel and "prefill" in parallel:
        pools = [parallel["prefill"], parallel["decode"]]
    found = []
    for index, pool in enumerate(pools):
        layouts = (layout_of(pool, devices, described(model).dimensions.num_experts),) if pool else tuple(_all_layouts(devices))
        seats = (row["max_num_seqs"] or 1) * layouts[0].dp
        # A row that states no utilization may have raised it: the default first, then what launch scripts go up to.
        options = {"weights": weights, "context": context, "concurrency": seats, "mtp": "MTP" in text, "chunk": 4096,
                   "fraction": row["mem_utilization"] or 0.9, "cache_dtype": "int8" if "C8" in text and "C16" not in text else None}  # fmt: skip
        suffix = ("", "/decode")[index] if len(pools) > 1 else ""
        found.append(Pose(id=row["id"] + suffix, model=model, target=target, engine=engine, layouts=layouts, options=options))
    return found


def _asked(text: str) -> str | None:
    for sign, dtype in (("W8A8", "w8a8"), ("W4A8", "w4a8"), ("BF16", "bfloat16")):
        if text.startswith(sign):
            return dtype
    return None


def _all_layouts(devices: int) -> list[Layout]:
    """Where a row gives no layout: TP within a node, attention replicas over the rest, experts over all or within TP."""
    found = []
    for tp in (1, 2, 4, 8, 16):
        if devices % tp == 0:
            found += [Layout(tp=tp, dp=devices // tp, ep=ep) for ep in {1, devices}]
            found += [Layout(tp=tp, pp=devices // tp)] if devices > tp else []
    return found


def negative(row: dict, engine: str) -> Pose:
    """A deployment that does not work, in the memory model of an engine."""
    model, weights = BY_WEIGHTS.get((row["model"], row["weights"]), (RELEASES.get(row["model"], row["model"]), None))
    options = {"weights": weights, "context": row["context"], "fraction": row["memory_fraction"]}
    return Pose(
        id=row["id"], model=model, target=row["target"], engine=engine, layouts=(Layout(**row["layout"]),), options=options
    )
