"""A plan as a `vllm serve` command, for the engine itself and for its plugin for NPUs (`vllm-ascend`).

How the degrees are spelled there: tensor, pipeline and data parallel sizes as planned; experts are divided over all ranks of a
stage, either each expert's tensors (no option) or whole experts (`--enable-expert-parallel`), nothing between. Context ranks
that are devices of their own are its prefill context parallelism, which alone repeats the cache: decode context parallelism
over all context ranks divides it, as planned. Ranks are numbered with data parallelism outermost.
`--gpu-memory-utilization` covers everything the engine allocates, as our memory fraction does.
"""

from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Layout, Plan, Pool
from dayzero.core.target import Target
from dayzero.plan.export import asked
from dayzero.plan.export.checked import OptionList
from dayzero.plan.export.servers import PORT, RENDEZVOUS_PORT, Server, Variable, resource_name, split_nodes

# What the engine makes of a plain checkpoint while loading; blocks and scales are those of our formats of the same name.
QUANTIZED_AT_LOAD = {"fp8": "fp8_per_block", "int8": "int8_per_channel_weight_only"}
CACHE_DTYPES = {
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
    "float4_e2m1": "nvfp4",
}
# Roles whose own tensor-parallel width the plugin can be told, over the data-parallel ranks of an expert model.
PLUGIN_BLOCK = 128
ORDER = ("tp", "cp", "pp", "dp")
FINE_GRAINED = {"head": "lmhead_tensor_parallel_size", "mlp": "mlp_tensor_parallel_size"}


def servers(
    plan: Plan, model: ModelDescription, target: Target, listed: OptionList, path: str, notes: list[str]
) -> tuple[Server, ...]:
    """One server per pool. `listed` is the engine's option list, or the plugin's with the engine's as its base."""
    pools = asked.require_expressible(plan, model, listed.engine)
    made = tuple(_server(plan, model, target, pool, pools, listed, path, notes) for pool in pools)
    if (note := asked.pool_note(pools)) is not None:
        notes.append(note)
    return made


def _server(
    plan: Plan, model: ModelDescription, target: Target, pool: Pool, pools: tuple[Pool, ...], listed: OptionList,
    path: str, notes: list[str],
) -> Server:  # fmt: skip
    layout = pool.layout
    nodes, cards = require_layout(model, layout, target, listed.engine, pool.role, notes)
    asked.placement_note(layout, ORDER, target, notes)
    options = [*_parallel(model, layout), *_sizes(plan, model, layout, listed, notes), *_numbers(plan, model, listed.engine)]
    if layout.cp > 1 and pool.role != "mixed" and listed.base is not None:  # it hands over whole blocks of one rank only
        options.append(("--cp-kv-cache-interleave-size", PLUGIN_BLOCK))
    if (transfer := _transfer(model, pool, pools, listed)) is not None:
        options.append(("--kv-transfer-config", transfer))
    extra = _fine_grained(model, pool, listed) | _copies_of_experts(layout, listed, options)
    if layout.sp and layout.tp > 1:
        extra |= _sequence_parallel(model, layout, listed, options, notes)
    if extra:
        options.append(("--additional-config", extra))
    name = resource_name(model.name if pool.role == "mixed" else f"{model.name}-{pool.role}")
    options += [("--served-model-name", model.name), ("--host", "0.0.0.0"), ("--port", PORT)]
    node_options: tuple[tuple[str, int | Variable], ...] = ()
    if nodes > 1:
        node_options = (("--nnodes", nodes), ("--node-rank", Variable(name="NODE_RANK")),
                        ("--master-addr", Variable(name="MASTER_ADDR")), ("--master-port", RENDEZVOUS_PORT))  # fmt: skip
    engine = listed.base or listed
    for option, value in options:
        engine.check(option, True if value is None else value)
    for option, given in node_options:
        engine.check(option, 0 if isinstance(given, Variable) and option == "--node-rank" else
                     "host" if isinstance(given, Variable) else given)  # fmt: skip
    engine.check("--headless", True)
    environment, own = [], []
    if (sizes := asked.stage_sizes(layout)) is not None:
        engine.check_environment("VLLM_PP_LAYER_PARTITION")
        environment.append(("VLLM_PP_LAYER_PARTITION", sizes))
    if transfer is not None and transfer["kv_connector"] == "NixlConnector":
        engine.check_environment("VLLM_NIXL_SIDE_CHANNEL_HOST")
        own.append("VLLM_NIXL_SIDE_CHANNEL_HOST")
    return Server(
        role=pool.role, name=name, program=("vllm", "serve", path), options=tuple(options), node_options=node_options,
        worker_options=("--headless",) if nodes > 1 else (), environment=tuple(environment), own_address=tuple(own),
        num_nodes=nodes, cards_per_node=cards, image=_image(listed, target, notes), vendor=target.vendor, model_path=path,
    )  # fmt: skip


def require_layout(
    model: ModelDescription, layout: Layout, target: Target, engine: str, role: str, notes: list[str]
) -> tuple[int, int]:
    """(nodes, cards a node) of a layout. Raises DayZeroError for degrees the engine has no spelling for."""
    plugin = engine != "vllm"
    if plugin and layout.dp > 1 and layout.cp_devices > 1:
        raise asked.cannot(engine, "data and context parallelism together", f"dp={layout.dp}, cp={layout.cp}",
                           "plan with --dp 1 or --cp 1")  # fmt: skip
    _require_experts(layout, engine)
    asked.require_even_places(model, layout, engine)
    _require_context(model, layout, engine)
    if layout.cp > 1 and asked.has_states(model):
        notes.append("decode context parallelism beside layers that keep a state is young in this engine: older versions "
                     "refuse it when they start")  # fmt: skip
    whole_cache = layout.cp == max(layout.tp, layout.cp_devices) and asked.is_latent(model)
    if role != "mixed" and not plugin and layout.cp > 1 and not whole_cache:
        raise asked.cannot(
            engine,
            "to hand over caches that are divided by context this way",
            f"tp={layout.tp}, cp={layout.cp}",
            "plan pools without context parallelism",
        )
    # Ranks of one replica: a node holds whole replicas, or a replica whole nodes.
    within = layout.tp * layout.pp * layout.cp_devices
    counted = layout.dp * layout.pp * layout.tp if plugin else layout.num_devices  # 0.23 leaves the context out of its check

    def fits(nodes: int, cards: int) -> bool:
        return (cards % within == 0 or within % cards == 0) and counted % nodes == 0

    return split_nodes(layout.num_devices, target, notes, fits)


def _require_experts(layout: Layout, engine: str) -> None:
    whole = layout.stage_devices
    if layout.ep not in (1, whole):
        raise asked.cannot(engine, f"to divide experts over {layout.ep} of a stage's {whole} ranks", f"ep={layout.ep}",
                           f"plan with {asked.degrees(layout)} --ep {whole} (whole experts on all ranks), or with --ep 1 (each "
                           "expert's tensors cut)",
                           f"1 or {whole}")  # fmt: skip


def _require_context(model: ModelDescription, layout: Layout, engine: str) -> None:
    if layout.cp_devices > 1 and layout.cp not in (layout.cp_devices, layout.cp_devices * layout.tp):
        raise asked.cannot(
            engine,
            "to divide a cache over part of the tensor-parallel ranks and over context ranks of their own",
            f"tp={layout.tp}, cp={layout.cp_devices}, dcp={layout.cp_in_tp}",
            f"plan with --dcp 1 or --dcp {layout.tp}",
        )
    if layout.cp == 1:
        return
    if asked.has_windows(model):  # its manager of windows asserts that nothing is divided, at the first request
        raise asked.cannot(engine, "to divide the cache of a model with windows by context", f"cp={layout.cp}",
                           "plan with --cp 1 --dcp 1", "no context parallelism")  # fmt: skip
    if layout.cp_devices > 1 and asked.has_states(model):
        raise asked.cannot(engine, "to give context ranks of their own to a model whose layers keep states",
                           f"cp={layout.cp_devices}", "plan with --cp 1", "--dcp alone")  # fmt: skip
    if engine != "vllm" and asked.is_sparse(model) and layout.cp_devices == 1 and layout.cp_in_tp != layout.tp:
        raise asked.cannot(engine, "to divide a sparse cache over part of the tensor-parallel ranks",
                           f"tp={layout.tp}, dcp={layout.cp_in_tp}", f"plan with --dcp {layout.tp} or --dcp 1",
                           f"dcp of 1 or {layout.tp}")  # fmt: skip
    if asked.is_latent(model):
        return
    keys = model.dimensions.num_key_value_heads or 0
    queries = model.dimensions.num_attention_heads or 0
    if keys == 0 or layout.tp <= keys or layout.tp // keys < layout.cp or queries // keys % layout.cp:
        raise asked.cannot(
            engine,
            "to divide this model's cache by context",
            f"tp={layout.tp}, cp={layout.cp}, {keys} key/value heads",
            "plan without context parallelism, or with at least key/value heads times cp tensor-parallel ranks",
            f"tp of at least {keys * layout.cp}, and cp a divisor of the queries of a key/value head",
        )


def _parallel(model: ModelDescription, layout: Layout) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [("--tensor-parallel-size", layout.tp)]
    if layout.pp > 1:
        options.append(("--pipeline-parallel-size", layout.pp))
    if layout.dp > 1:
        options.append(("--data-parallel-size", layout.dp))
    if layout.cp_devices > 1:
        options.append(("--prefill-context-parallel-size", layout.cp_devices))
    if layout.cp > 1:
        options.append(("--decode-context-parallel-size", layout.cp))
    if layout.ep > 1 and asked.has_experts(model):
        options.append(("--enable-expert-parallel", None))
    return options


def _copies_of_experts(layout: Layout, listed: OptionList, options: list[tuple[str, Any]]) -> dict[str, Any]:
    """Copies of busy experts: two options of the engine, a key of the plugin's configuration (returned)."""
    if not layout.redundant_experts:
        return {}
    if listed.base is None:
        options += [("--enable-eplb", None), ("--eplb-config", {"num_redundant_experts": layout.redundant_experts})]
        return {}
    listed.check("eplb_config", {})
    return {"eplb_config": {"dynamic_eplb": True, "num_redundant_experts": layout.redundant_experts}}


def _sizes(plan: Plan, model: ModelDescription, layout: Layout, listed: OptionList, notes: list[str]) -> list[tuple[str, Any]]:
    """Context, sequences, tokens of a step (a chunk beside the other sequences' decode tokens), blocks, memory."""
    running = asked.sequences(plan, layout)
    if (note := asked.prompt_scores_note(plan, model, asked.step_tokens(plan, running))) is not None:
        notes.append(note)
    options: list[tuple[str, Any]] = [
        ("--max-model-len", plan.context_tokens), ("--max-num-seqs", running), ("--enable-chunked-prefill", None),
        ("--max-num-batched-tokens", asked.step_tokens(plan, running)),
        ("--gpu-memory-utilization", plan.memory_fraction),
    ]  # fmt: skip
    if listed.base is not None:
        if plan.block_tokens != PLUGIN_BLOCK:
            notes.append(f"cache blocks of {plan.block_tokens} tokens are not asked for: the plugin sets {PLUGIN_BLOCK}")
    elif (block := asked.block_tokens(plan, model, notes)) is not None:
        options.append(("--block-size", block))
    return options


def _numbers(plan: Plan, model: ModelDescription, engine: str) -> list[tuple[str, Any]]:
    quantization, dtype = asked.quantize_at_load(plan, model, engine, QUANTIZED_AT_LOAD if engine == "vllm" else {})
    options: list[tuple[str, Any]] = []
    if quantization is not None:
        options.append(("--quantization", quantization))
    if dtype is not None:
        options.append(("--dtype", dtype))
    if (cache := asked.cache_dtype(plan, model)) is not None:
        if engine != "vllm":
            raise asked.cannot(
                engine,
                f"to keep the cache in {cache}",
                plan.cache_dtype,
                "plan without --cache-dtype: the plugin takes the cache's dtype from the checkpoint",
            )
        options.append(("--kv-cache-dtype", CACHE_DTYPES.get(cache, cache)))
    return options


def _transfer(model: ModelDescription, pool: Pool, pools: tuple[Pool, ...], listed: OptionList) -> dict[str, Any] | None:
    """How a prefill pool hands caches to the decode pool."""
    if pool.role == "mixed":
        return None
    sides = {one.role: one.layout for one in pools}
    role = "kv_producer" if pool.role == "prefill" else "kv_consumer"
    if listed.base is not None:
        if not asked.is_latent(model) and sides["prefill"].tp % sides["decode"].tp:
            raise asked.cannot(listed.engine, "to hand caches over between these widths",
                               f"prefill tp={sides['prefill'].tp}, decode tp={sides['decode'].tp}",
                               "plan a prefill tp that is a multiple of the decode tp")  # fmt: skip
        connector = "MooncakeConnectorV1"
        listed.check_connector(connector)
        both = {side: {"dp_size": one.dp, "tp_size": one.tp} for side, one in sides.items()}
        return {"kv_connector": connector, "kv_buffer_device": "npu", "kv_role": role, "kv_port": 20001,
                "kv_connector_extra_config": both}  # fmt: skip
    listed.check_connector("NixlConnector")
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": "fail"}


def _sequence_parallel(
    model: ModelDescription, layout: Layout, listed: OptionList, options: list[tuple[str, Any]], notes: list[str]
) -> dict[str, Any]:
    """Tokens split between matrix products: a compiler pass of the engine, a switch of the plugin (returned)."""
    if listed.base is None:
        if listed.has_key("--compilation-config", "pass_config.enable_sp"):
            options.append(("--compilation-config", {"pass_config": {"enable_sp": True}}))
        else:
            notes.append(
                f"sequence parallelism is not asked for: vllm {listed.version} has no switch for it (experts split their "
                f"tokens by themselves where whole experts and data parallelism meet); {asked.SAME_RESULTS}"
            )
        return {}
    if asked.has_experts(model) and layout.ep == 1:
        notes.append(f"sequence parallelism is not asked for: the plugin has it with whole experts only; {asked.SAME_RESULTS}")
        return {}
    listed.check("enable_flashcomm1", True)
    return {"enable_flashcomm1": True}


def _fine_grained(model: ModelDescription, pool: Pool, listed: OptionList) -> dict[str, Any]:
    """Per-role widths, which only the plugin knows, and only for a replica of one rank (whole layers, experts over all)."""
    wanted = asked.overrides(pool)
    if not wanted:
        return {}
    sizes = {}
    for role, layout in wanted.items():
        legal = listed.base is not None and role in FINE_GRAINED and asked.has_experts(model)
        if not legal or pool.layout.tp != 1 or pool.layout.dp % layout.tp or layout.pp != pool.layout.pp:
            raise asked.cannot(listed.engine, f"to shard {role} parameters otherwise than the rest",
                               f"tp={layout.tp} against tp={pool.layout.tp}, dp={pool.layout.dp}",
                               "plan without a layout of their own for these parameters")  # fmt: skip
        listed.check(f"finegrained_tp_config.{FINE_GRAINED[role]}", layout.tp)
        sizes[FINE_GRAINED[role]] = layout.tp
    return {"finegrained_tp_config": sizes}


def _image(listed: OptionList, target: Target, notes: list[str]) -> str:
    """The public image of that version. Raises DayZeroError where the engine and the card do not go together."""
    npu = target.software.torch_device == "npu"
    if npu != (listed.base is not None):
        raise DayZeroError(f"{listed.engine} does not run on {target.id}", got=f"torch device {target.software.torch_device}",
                           want="npu" if not npu else "another engine",
                           fix="give --export vllm-ascend" if npu else "give --export vllm")  # fmt: skip
    if npu:
        notes.append("the image's tag is for the A2 series; the A3 and A5 series have tags of their own")
        return f"quay.io/ascend/vllm-ascend:v{listed.version}"
    if target.vendor != "NVIDIA":
        notes.append(f"the image named is for another vendor: put the one of {target.vendor} in its place")
    return f"vllm/vllm-openai:v{listed.version}"
