"""`make_run_folder`: a realistic run folder with every record of a small dense model, for tests of what reads run folders.

Records can be left out by stage name; `failing=True` gives one in which something went wrong at nearly every stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from dayzero.core.artifact import ArtifactLayout, LedgerCounts, ShardFile, WeightsReport
from dayzero.core.generation import EngineInfo
from dayzero.core.model import CacheSpec, Dimensions, LayerKind, ModelDescription, Parameter, Problem
from dayzero.core.operators import Coverage, Evidence, OperatorMap, Site
from dayzero.core.plan import Layout, LedgerLine, MemoryLedger, Plan, Pool, Rejected, TimeEstimate
from dayzero.core.records import write_record
from dayzero.core.reports import Check, ServingReport, overall
from dayzero.core.runstore import RunStore
from dayzero.core.units import GIB, MIB
from tests.unit.run_folder_reports import LAYERS, make_bench, make_numerics, make_soak

HIDDEN, VOCAB = 576, 49152
NAME, TARGET = "Small-135M-Instruct", "cpu-local"


def make_run_folder(runs: Path, *, without: Iterable[str] = (), failing: bool = False, soak_s: float = 15.0) -> RunStore:
    """A run under `runs` with the records of all stages but those in `without`."""
    inputs = {
        "source": "models/" + NAME,
        "source_hash": "5f0c" * 16,
        "target_id": TARGET,
        "devices": 1,
        "workload": {},
        "options": {},
        "versions": {"dayzero": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "transformers": "5.24.0"},
    }
    store = RunStore.create(runs, NAME, TARGET, inputs)
    records = {
        "inspect": make_model(failing=failing),
        "plan": make_plan(failing=failing),
        "convert": make_weights(store, failing=failing),
        "map": make_operators(failing=failing),
        "serve": make_serving(failing=failing),
        "validate": make_numerics(failing=failing),
        "bench": make_bench(failing=failing),
        "soak": make_soak(soak_s, failing=failing),
    }
    for stage, record in records.items():
        if stage not in set(without):
            store.write(stage, record)
    return store


def make_model(*, failing: bool = False) -> ModelDescription:
    cache = tuple(
        CacheSpec(kind="full", name=name, dtype="bfloat16", elements_per_token=192, heads=3) for name in ("keys", "values")
    )
    kind = LayerKind(name="full+dense", mixer="full", feed_forward="dense", layers=tuple(range(LAYERS)), cache=cache)
    model = ModelDescription(
        name=NAME,
        model_type="small",
        architecture="SmallForCausalLM",
        source_hash="5f0c" * 16,
        dtype="bfloat16",
        dimensions=Dimensions(
            hidden_size=HIDDEN,
            num_layers=LAYERS,
            vocab_size=VOCAB,
            max_position_tokens=8192,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            intermediate_size=1536,
        ),
        layer_kinds=(kind,),
        total_parameters=134_515_008,
        active_parameters=134_515_008,
        checkpoint_bytes=269_060_552,
        has_weights=True,
        parameters=(Parameter(name="model.embed_tokens.weight", shape=(VOCAB, HIDDEN), dtype="bfloat16", role="embedding"),),
    )
    if not failing:
        return model
    problems = (
        Problem(kind="unread key", severity="warning", detail="config key 'rope_interleaved' is read by nothing"),
        Problem(
            kind="dtype", severity="warning", detail="the config says float16, the tensors are bfloat16", file="config.json"
        ),
    )
    return replace(model, problems=problems, unconsumed_keys=("rope_interleaved", "pretraining_tp"), towers=("vision tower",))


def make_plan(*, failing: bool = False) -> Plan:
    lines = (
        LedgerLine(category="weights", name="mlp", num_bytes=152 * MIB, formula="30 x 3 x 576 x 1536 x 2"),
        LedgerLine(
            category="weights", name="attention", num_bytes=51 * MIB, formula="30 x (2 x 576 x 576 + 2 x 576 x 192) x 2"
        ),
        LedgerLine(category="weights", name="embedding, tied", num_bytes=54 * MIB, formula="49152 x 576 x 2"),
        LedgerLine(category="cache", name="full attention", num_bytes=360 * MIB, formula="16384 tokens x 23040"),
        LedgerLine(
            category="activations",
            name="prefill of 512 tokens",
            num_bytes=118 * MIB,
            formula="512 x (4 x 576 + 2 x 1536 + 49152) x 4",
        ),
        LedgerLine(category="runtime", name="PyTorch and Python", num_bytes=420 * MIB, formula="measured on this machine"),
        LedgerLine(category="loader", name="one tensor in flight", num_bytes=54 * MIB, formula="largest tensor"),
        LedgerLine(category="reserve", name="reserve", num_bytes=160 * MIB, formula="5% of the budget"),
    )
    budget = 1 * GIB if failing else int(3.2 * GIB)
    ledger = MemoryLedger(
        rank=0,
        stage=0,
        budget_bytes=budget,
        lines=lines,
        cache_bytes_per_token=23040.0,
        cache_bytes_per_sequence=0,
        admissible_tokens=16384,
    )
    return Plan(
        model=NAME,
        target=TARGET,
        feasible=not failing,
        layout=Layout(stages=((0, LAYERS),)),
        devices=1,
        pools=(Pool(role="mixed", layout=Layout(stages=((0, LAYERS),))),),
        weights_dtype="bfloat16",
        cache_dtype="bfloat16",
        context_tokens=2048,
        concurrency=8,
        memory_fraction=0.9,
        block_tokens=16,
        prefill_chunk_tokens=512,
        weights_bytes_per_device=257 * MIB,
        cache_bytes_per_token_per_device=23040.0,
        admissible_tokens=16384,
        ledger=(ledger,),
        prefill=TimeEstimate(compute_s=0.4, memory_s=0.02, communication_s=0.0, low_s=0.3, high_s=0.7),
        decode=TimeEstimate(compute_s=0.001, memory_s=0.011, communication_s=0.0, low_s=0.009, high_s=0.016),
        reasons=("one device is enough: weights, cache and overhead take 43% of the budget",),
        rejected=(Rejected(layout=Layout(tp=2), constraint="the target has one device"),),
        rests_on=("memory bandwidth 21.4 GB/s (measured)", "float32 rate 92 GFLOP/s (measured)"),
    )


def make_weights(store: RunStore, *, failing: bool = False) -> WeightsReport:
    artifact = store.folder.parent / "artifacts" / "5f0c-tp1"
    shard = ShardFile(file="rank-00000/model-00001.safetensors", num_bytes=269_060_552, checksum="sha256:00")
    names = ("config.json", "tokenizer.json", "tokenizer_config.json") + (() if failing else ("chat_template.jinja",))
    layout = ArtifactLayout(
        key="5f0c-tp1",
        model=NAME,
        source_hash="5f0c" * 16,
        layout=Layout(),
        dtype="bfloat16",
        quantization=None,
        files=((shard,),),
        ledgers=(ShardFile(file="rank-00000/ledger.jsonl", num_bytes=9000, checksum="sha256:01"),),
        release_files=tuple(ShardFile(file=f"release/{name}", num_bytes=1000, checksum="sha256:02") for name in names),
    )
    write_record(layout, artifact / "layout.json")
    problems = (
        Problem(
            kind="unexpected tensor",
            severity="warning",
            detail="the class has no such parameter",
            file="model-00002.safetensors",
            tensor="model.layers.3.self_attn.rotary_emb.inv_freq",
        ),
    )
    dropped = {"model.layers.3.self_attn.rotary_emb.inv_freq": "computed from the config"} if failing else {}
    return WeightsReport(
        artifact=store.relative(artifact),
        key="5f0c-tp1",
        ledger=LedgerCounts(source_bytes=269_060_552, used_bytes=269_060_552, dropped=dropped),
        problems=problems if failing else (),
        bytes_read=269_060_552,
        bytes_written=269_060_552,
        seconds=1.9,
        verified=True,
    )


def make_operators(*, failing: bool = False) -> OperatorMap:
    def site(
        operator: str,
        count: int,
        signature: str,
        binding: str,
        kernel: str,
        flops: float,
        num_bytes: float,
        error: float | None,
    ) -> Site:
        evidence = (
            None
            if error is None
            else Evidence(cases=24, worst_error=error, limit=2e-2, method="against the float64 definition")
        )
        return Site(
            operator=operator,
            names=tuple(f"model.layers.{i}.{operator}" for i in range(count)),
            signature=signature,
            binding=binding,
            kernel=kernel,
            reason="fastest of those that agree",
            evidence=evidence,
            flops_share=flops,
            bytes_share=num_bytes,
        )  # type: ignore[arg-type]

    worst = 0.31 if failing else 0.0071
    sites = [
        site("linear", 120, "576->576, 576->192", "custom", "cpu.matmul_bf16", 0.18, 0.18, 0.0042),
        site("gated_mlp", 30, "576->1536->576", "fused", "cpu.gated_mlp", 0.51, 0.52, worst),
        site("attention", 30, "9 heads of 64, 3 shared", "custom", "cpu.paged_attention", 0.08, 0.09, 0.0063),
        site("rms_norm", 61, "576", "library", "torch.rms_norm", 0.001, 0.002, 0.0011),
        site("linear", 1, "576->49152", "library", "torch.linear", 0.22, 0.20, 0.0039),
        site("rotary", 30, "64", "fallback" if failing else "composed", "eager module", 0.009, 0.008, None),
    ]
    coverage: dict[str, Coverage] = {}
    for entry in sites:
        old = coverage.get(entry.binding, Coverage(sites=0, flops_share=0.0, bytes_share=0.0))
        coverage[entry.binding] = Coverage(
            sites=old.sites + len(entry.names),
            flops_share=old.flops_share + entry.flops_share,
            bytes_share=old.bytes_share + entry.bytes_share,
        )
    fallbacks = ("The rotary embedding of 30 layers runs as the module's own Python code, because no kernel agreed with it.",)
    return OperatorMap(
        model=NAME,
        device="cpu",
        instruction_set="AVX2",
        sites=tuple(sites),
        coverage=coverage,
        fallbacks=fallbacks if failing else (),
    )


def make_serving(*, failing: bool = False) -> ServingReport:
    engine = EngineInfo(
        model=NAME,
        tier="T1" if failing else "T2",
        tier_reasons=("layer 7's mixer takes an argument that cannot be paged",) if failing else (),
        device="cpu",
        dtype="bfloat16",
        instruction_set="AVX2",
        vocab_size=VOCAB,
        context_tokens=8192,
        capacity_tokens=4096 if failing else 8192,
        block_tokens=16,
        num_blocks=1024,
        max_sequences=64,
        prefix_reuse=not failing,
        stop_token_ids=(2,),
        towers_not_served=("vision tower",) if failing else (),
    )
    checks = (
        Check(
            name="T1 equals T0",
            verdict="pass",
            value=2.1e-5,
            limit=1e-3,
            where="step 14, sequence 2",
            detail="shrunken instance, float32",
        ),
        Check(
            name="T2 equals T1",
            verdict="not_shown" if failing else "pass",
            value=None if failing else 3.4e-5,
            limit=1e-3,
            required=not failing,
        ),
        Check(name="64 tokens on the real weights", verdict="pass", value=64, limit=64),
    )
    fallbacks = ("Layers run uncompiled: no C++ compiler was found.",) if failing else ()
    return ServingReport(verdict=overall(checks), engine=asdict(engine), checks=checks, load_s=11.4, fallbacks=fallbacks)
