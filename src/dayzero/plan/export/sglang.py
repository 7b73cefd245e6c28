"""A plan as a `python -m sglang.launch_server` command.

How the degrees are spelled there: `--tp-size` is all ranks of a pipeline stage, of which attention uses `--attn-dp-size`
replicas; experts are divided over any divisor of it (`--ep-size`). `--dp-size` counts independent copies,
which is what data parallelism is for a model without experts, and exists on one node only. `--mem-fraction-static` is the
share for weights and caches alone, so it is computed from the ledger. `--chunked-prefill-size` and `--max-running-requests` are
of all attention replicas together: the engine divides them.
"""

from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Layout, Plan, Pool
from dayzero.core.target import Target
from dayzero.plan.export import asked
from dayzero.plan.export.checked import OptionList
from dayzero.plan.export.servers import PORT, RENDEZVOUS_PORT, Server, Variable, resource_name, split_nodes

ORDER = ("tp", "cp", "dp", "pp")
QUANTIZED_AT_LOAD = {"fp8": "fp8", "mxfp4": "mxfp4"}
CACHE_DTYPES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "float4_e2m1": "nvfp4", "mxfp4": "fp4_mx_block16"}


def servers(
    plan: Plan, model: ModelDescription, target: Target, listed: OptionList, path: str, notes: list[str]
) -> tuple[Server, ...]:
    """One server per pool."""
    pools = asked.require_expressible(plan, model, listed.engine)
    if ":" in model.name:
        raise asked.cannot(listed.engine, "a model name with a colon", model.name, "rename the release's folder")
    page = None if plan.block_tokens == 1 else asked.block_tokens(plan, model, notes)  # 1 is the engine's own
    sharded = any(pool.role == "prefill" and pool.layout.cp_devices > 1 for pool in pools)
    if sharded and (page is None or page % asked.LATENT_BLOCK):
        page = asked.LATENT_BLOCK
        notes.append(f"cache pages are {page} tokens on both servers: a prefill server that shards its cache needs real pages")
    made = tuple(_server(plan, model, target, pool, listed, path, page, notes) for pool in pools)
    if (note := asked.pool_note(pools)) is not None:
        notes.append(note)
    return made


def _server(
    plan: Plan, model: ModelDescription, target: Target, pool: Pool, listed: OptionList, path: str, page: int | None,
    notes: list[str],
) -> Server:  # fmt: skip
    layout, copies = pool.layout, _copies(pool.layout, model)
    world = layout.num_devices // layout.pp // copies
    nodes, cards = require_layout(model, layout, target, listed.engine, pool.role, notes)
    asked.placement_note(layout, ORDER, target, notes)
    options = [*_parallel(model, pool, world, copies, listed, notes), *_sizes(plan, model, layout, copies, page, notes),
               *_numbers(plan, model, listed.engine)]  # fmt: skip
    if pool.role != "mixed":
        backend = "ascend" if target.software.torch_device == "npu" else "nixl"
        options += [("--disaggregation-mode", pool.role), ("--disaggregation-transfer-backend", backend)]
    options += [("--served-model-name", model.name), ("--host", "0.0.0.0"), ("--port", PORT)]
    node_options: tuple[tuple[str, int | Variable], ...] = ()
    if nodes > 1:
        node_options = (("--nnodes", nodes), ("--node-rank", Variable(name="NODE_RANK")),
                        ("--dist-init-addr", Variable(name="MASTER_ADDR", suffix=f":{RENDEZVOUS_PORT}")))  # fmt: skip
    listed.check("--model-path", path)
    for option, value in options:
        listed.check(option, True if value is None else value)
    for option, given in node_options:
        listed.check(option, given if isinstance(given, int) else 0 if option == "--node-rank" else "host")
    environment = []
    if (sizes := asked.stage_sizes(layout)) is not None:
        listed.check_environment("SGLANG_PP_LAYER_PARTITION")
        environment.append(("SGLANG_PP_LAYER_PARTITION", sizes))
    if target.vendor != "NVIDIA":
        notes.append(f"the image named is for another vendor: put the one of {target.vendor} in its place")
    return Server(
        role=pool.role,
        name=resource_name(model.name if pool.role == "mixed" else f"{model.name}-{pool.role}"),
        program=("python3", "-m", "sglang.launch_server", "--model-path", path),
        options=tuple(options),
        node_options=node_options,
        environment=tuple(environment),
        num_nodes=nodes,
        cards_per_node=cards,
        image=f"lmsysorg/sglang:v{listed.version}",
        vendor=target.vendor,
        model_path=path,
    )


def require_layout(
    model: ModelDescription, layout: Layout, target: Target, engine: str, role: str, notes: list[str]
) -> tuple[int, int]:
    """(nodes, cards a node) of a layout. Raises DayZeroError for degrees the engine has no spelling for."""
    if layout.cp_in_tp > 1 and not asked.is_latent(model):
        raise asked.cannot(
            engine, "to divide a cache of heads by context", f"dcp={layout.cp_in_tp}", "plan with --dcp 1",
            "caches shared by all heads",
        )  # fmt: skip
    if layout.cp_devices > 1 and (role != "prefill" or layout.cp_in_tp > 1):
        raise asked.cannot(
            engine,
            "to divide a cache over context ranks of their own",
            f"cp={layout.cp_devices} in a {role} pool",
            "plan with --dcp (ranks of the tensor-parallel group) instead of --cp, or give --cp to a prefill pool alone",
        )
    asked.require_even_places(model, layout, engine)
    copies = _copies(layout, model)

    def fits(nodes: int, cards: int) -> bool:
        return nodes == 1 or (copies == 1 and (nodes % layout.pp == 0 or layout.pp % nodes == 0))

    try:
        return split_nodes(layout.num_devices, target, notes, fits)
    except DayZeroError:
        if copies == 1:
            raise
        raise asked.cannot(
            engine,
            "to run copies of a model on several nodes",
            f"dp={layout.dp} on {layout.num_devices} devices",
            f"plan one copy with --dp 1 and start {layout.dp} of them behind a balancer",
        ) from None


def _copies(layout: Layout, model: ModelDescription) -> int:
    """Independent copies behind one address: what data parallelism is where there are no experts to share."""
    return 1 if asked.has_experts(model) else layout.dp


def _parallel(
    model: ModelDescription, pool: Pool, world: int, copies: int, listed: OptionList, notes: list[str]
) -> list[tuple[str, Any]]:
    layout, wanted = pool.layout, asked.overrides(pool)
    options: list[tuple[str, Any]] = [("--tp-size", world)]
    if layout.pp > 1:
        options.append(("--pp-size", layout.pp))
    if copies > 1:
        options.append(("--dp-size", copies))
    elif layout.dp > 1:
        options.append(("--attn-dp-size", layout.dp))
        head = wanted.pop("head", None)
        if head is None:
            options.append(("--enable-dp-lm-head", None))  # the head is cut over a replica's ranks, as planned
        elif head.tp != world:
            raise _no_role(listed, "head", head, f"tp={layout.tp} or {world}")
        mlp = wanted.pop("mlp", None)
        if mlp is not None and mlp.tp not in (1, world):
            raise _no_role(listed, "mlp", mlp, f"1 or {world}")
        if mlp is not None and mlp.tp == 1:
            options.append(("--moe-dense-tp-size", 1))
        elif mlp is None:
            notes.append(
                f"dense feed-forwards and shared experts are cut over all {world} ranks of a stage, not over a replica's "
                f"{layout.tp}: less memory than planned, one more collective"
            )
    for role, other in wanted.items():
        raise _no_role(listed, role, other, "the pool's own layout")
    if layout.ep > 1 and asked.has_experts(model):
        options.append(("--ep-size", layout.ep))
    if layout.redundant_experts:
        options += [("--enable-eplb", None), ("--ep-num-redundant-experts", layout.redundant_experts)]
    if layout.sp and layout.tp > 1:
        notes.append(
            "sequence parallelism is not asked for: this engine splits tokens between matrix products for a few classes only "
            f"(--enable-layernorm-sp); {asked.SAME_RESULTS}"
        )
    return options + _context_parallel(model, pool, notes)


def _no_role(listed: OptionList, role: str, layout: Layout, want: str) -> DayZeroError:
    return asked.cannot(listed.engine, f"to shard {role} parameters otherwise than the rest", f"tp={layout.tp}",
                        "plan without a layout of their own for these parameters", want)  # fmt: skip


def _context_parallel(model: ModelDescription, pool: Pool, notes: list[str]) -> list[tuple[str, Any]]:
    """Its decode context parallelism divides the cache inside the tensor-parallel group. Its attention context parallelism
    adds ranks and repeats the cache on them, unless a prefill server shards it at rest."""
    layout = pool.layout
    options: list[tuple[str, Any]] = [("--dcp-size", layout.cp_in_tp)] if layout.cp_in_tp > 1 else []
    if layout.cp_devices == 1:
        return options
    notes.append(
        "whether a model takes context parallelism, and in which layout (--cp-strategy), is decided per class in the "
        "engine: try it before relying on it"
    )
    strategy = "interleave" if asked.is_sparse(model) else "zigzag"
    return [*options, ("--attn-cp-size", layout.cp_devices), ("--enable-prefill-cp", None),
            ("--enable-kv-cache-sharding", None), ("--cp-strategy", strategy)]  # fmt: skip


def _sizes(
    plan: Plan, model: ModelDescription, layout: Layout, copies: int, page: int | None, notes: list[str]
) -> list[tuple[str, Any]]:
    replicas = layout.dp // copies
    running, chunk = asked.sequences(plan, layout), plan.prefill_chunk_tokens
    if (note := asked.prompt_scores_note(plan, model, max(running, chunk))) is not None:
        notes.append(note)
    options: list[tuple[str, Any]] = [("--context-length", plan.context_tokens), ("--max-running-requests", running * replicas)]
    if page is not None:
        options.append(("--page-size", page))
    step = page or asked.LATENT_BLOCK
    if chunk % step:
        notes.append(f"prefill chunks are raised from {chunk} to {-(-chunk // step) * step} tokens, whole cache pages")
    options.append(("--chunked-prefill-size", -(-chunk // step) * step * replicas))
    if (share := asked.static_fraction(plan)) is None:
        notes.append("the plan has no ledger: the share of memory for weights and caches is left to the engine")
    elif not 0.0 < share < 1.0:
        raise asked.cannot("sglang", "a share of memory for weights and caches", share, "make the plan again")
    else:
        options.append(("--mem-fraction-static", share))
    return options


def _numbers(plan: Plan, model: ModelDescription, engine: str) -> list[tuple[str, Any]]:
    quantization, dtype = asked.quantize_at_load(plan, model, engine, QUANTIZED_AT_LOAD)
    if quantization == "mxfp4" and not asked.has_experts(model):
        raise asked.cannot(engine, "to quantize a model without experts to mxfp4 while loading", plan.weights_dtype,
                           "convert the checkpoint first and plan its folder")  # fmt: skip
    options: list[tuple[str, Any]] = []
    if quantization is not None:
        options.append(("--quantization", quantization))
    if dtype is not None:
        options.append(("--dtype", dtype))
    if (cache := asked.cache_dtype(plan, model)) is not None:
        options.append(("--kv-cache-dtype", CACHE_DTYPES.get(cache, cache)))
    return options
