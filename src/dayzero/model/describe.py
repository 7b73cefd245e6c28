"""A release in, its `ModelDescription` out, from config and safetensors headers alone: no tensor is read.

The class is built on the meta device and everything is read off that instance: parameters, roles, ties, layer kinds,
caches, checkpoint names. Headers, where there are any, are reconciled with it. Everything found wrong or doubtful is in
`problems`; only a config that cannot be used at all is raised, as DayZeroError. Where no class can be had, the description
is an estimate from keys and says so (`provisional`). Operators are filled in by later stages.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dayzero.core.model import Dimensions, LayerKind, ModelDescription, Parameter, Problem
from dayzero.model.config_keys import config_dtype, normalise_rope, quantization_summary, stop_tokens
from dayzero.model.estimate import MTP, estimate
from dayzero.model.release import Release, open_release, read_object


def describe(path: Path, *, trust_remote_code: bool = False) -> ModelDescription:
    """The description of a release folder or a bare config.json.

    Raises DayZeroError when there is no config, or its class refuses it.
    """
    return describe_release(open_release(path), trust_remote_code=trust_remote_code)


def describe_release(release: Release, *, trust_remote_code: bool = False) -> ModelDescription:
    """As `describe`, for a release that is already open."""
    text = _text_keys(release.config)
    rope = normalise_rope(text)  # before transformers sees it: contradictions are errors here and silent there
    declared, dtype_problems = config_dtype(release.config)
    with _quiet():
        from dayzero.model.resolve import Resolved, compute_dtype, resolve

        dtype = compute_dtype(declared or _census(release))
        resolved = resolve(release, trust_remote_code=trust_remote_code)
        problems = [*release.problems, *dtype_problems]
        if isinstance(resolved, Resolved):
            return _Measured(release, resolved, dtype, rope, problems).description()
        return _estimated(release, dtype, rope, [*problems, resolved])


class _Measured:
    """The description of a release whose class could be built."""

    def __init__(self, release: Release, resolved: Any, dtype: str, rope: dict[str, Any], problems: list[Problem]) -> None:
        self.release, self.resolved, self.dtype, self.rope = release, resolved, dtype, rope
        self.problems = [*problems, *resolved.problems]
        self.provisional = False

    def description(self) -> ModelDescription:
        import torch

        from dayzero.model import inventory, layer_kinds
        from dayzero.model.classes import find_layers, text_config
        from dayzero.model.key_usage import key_usage, recorded_reads
        from dayzero.model.shard_rules import ShardRules

        with recorded_reads() as reads:
            model = self.resolved.build(getattr(torch, self.dtype))
            text = text_config(model.config)
            layers_name, layers = find_layers(model)
            caches = self._caches(model, list(layers), text)
        place = inventory.find_place(model, layers_name)
        stateful = {index for index, cache in enumerate(caches) if any(spec.kind == "state" for spec in cache.specs)}
        mixers = {index: cache.mixers for index, cache in enumerate(caches)}
        parameters = inventory.list_parameters(model, place, mixers, stateful=stateful, dtype=self.dtype)
        heads = layer_kinds.attention_heads(list(layers), caches, text)
        parameters = ShardRules(model, getattr(model, "tp_plan", None) or {}, heads).apply(parameters)
        kinds = layer_kinds.with_sharded_heads(layer_kinds.group_layers(list(layers), caches, parameters, text), parameters)
        num_experts, per_token = inventory.count_experts(model, place), inventory.experts_per_token(text)
        total, active = inventory.count_parameters(parameters, num_experts, per_token)
        parameters, mtp_parameters = self._with_sources(model, parameters, len(layers), num_experts)
        consumed, unconsumed = key_usage(self.release.config, self.resolved.config, reads)
        dimensions = _dimensions(model, text, kinds, len(layers), num_experts, per_token, self.release.config)
        stops, stop_problems = _stops(self.release, dimensions.vocab_size)
        return ModelDescription(
            name=self.release.name,
            model_type=str(self.release.config.get("model_type", model.config.model_type)),
            architecture=type(model).__name__,
            source_hash=self.release.source_hash,
            dtype=self.dtype,
            dimensions=dimensions,
            layer_kinds=kinds,
            parameters=tuple(parameters),
            total_parameters=total,
            active_parameters=active,
            mtp_parameters=mtp_parameters,
            towers=place.towers,
            stop_token_ids=stops,
            quantization=quantization_summary(self.release.config),
            rope=self.rope,
            consumed_keys=consumed,
            unconsumed_keys=unconsumed,
            checkpoint_bytes=self.release.checkpoint_bytes,
            has_weights=self.release.has_weights,
            provisional=self.provisional,
            problems=(*self.problems, *stop_problems),
        )

    def _caches(self, model: Any, layers: list[Any], text: Any) -> list[Any]:
        from dayzero.model.cache_probe import probe_caches
        from dayzero.model.classes import layer_kind_signatures
        from dayzero.model.layer_kinds import assumed_caches, refined_caches

        signatures = [
            (signature, tuple((name, tuple(item.shape)) for name, item in layer.named_parameters()))
            for signature, layer in zip(layer_kind_signatures(model, self.resolved.config), layers, strict=True)
        ]
        if hasattr(model, "set_experts_implementation"):
            # The one implementation without data-dependent loops; types that do not have it loop, which meta can do too.
            with contextlib.suppress(ValueError, AttributeError, KeyError):
                model.set_experts_implementation("batched_mm")
        limit = getattr(text, "max_position_embeddings", None)
        try:
            return refined_caches(
                probe_caches(model, layers, signatures, max_tokens=limit if isinstance(limit, int) else None), text
            )
        except RuntimeError as error:
            self.provisional = True
            self.problems.append(
                Problem(
                    kind="cache_not_measured",
                    severity="warning",
                    file="config.json",
                    detail=f"the model cannot be run on the meta device ({error}); its cache is assumed from keys",
                )
            )
            return assumed_caches(layers, text, self.dtype)

    def _with_sources(
        self, model: Any, parameters: list[Parameter], num_layers: int, num_experts: int
    ) -> tuple[list[Parameter], int]:
        from dayzero.model import reconcile
        from dayzero.model.resolve import one_line
        from dayzero.model.sources import expected_sources

        if not self.release.has_weights:
            try:
                expected = expected_sources(model, [item.name for item in parameters if item.tied_to is None])
            except Exception as error:  # a mapping that transformers itself cannot reverse
                self.problems.append(
                    Problem(
                        kind="sources_unknown", severity="warning", detail=f"checkpoint names are not known: {one_line(error)}"
                    )
                )
                expected = {}
            return [replace(item, sources=expected.get(item.name, ())) for item in parameters], 0
        num_mtp = reconcile.num_mtp_layers(self.release.config)
        result = reconcile.reconcile(
            model, parameters, self.release, num_layers=num_layers, num_mtp=num_mtp, num_experts=num_experts
        )
        self.problems += result.problems
        return result.parameters, result.mtp_parameters


def _dimensions(
    model: Any,
    text: Any,
    kinds: tuple[LayerKind, ...],
    num_layers: int,
    num_experts: int,
    per_token: int,
    config: Mapping[str, Any],
) -> Dimensions:
    def key(*names: str) -> int | None:
        values = (getattr(text, name, None) for name in names)
        return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)

    embedding = model.get_input_embeddings().weight.shape
    # Heads and their sizes as they are cached, where they are cached per head: config keys differ in meaning.
    cached = [spec for kind in kinds for spec in kind.cache if spec.kind in ("full", "sliding", "chunked") and spec.heads]
    kv_heads = cached[0].heads if cached else key("num_key_value_heads")
    latent = any(spec.kind == "latent" for kind in kinds for spec in kind.cache)
    latent_dim = (key("qk_nope_head_dim") or 0) + (key("qk_rope_head_dim") or 0) if latent else 0
    return Dimensions(
        hidden_size=key("hidden_size", "d_model", "n_embd") or embedding[-1],
        num_layers=num_layers,
        vocab_size=key("vocab_size") or embedding[0],
        max_position_tokens=key("max_position_embeddings", "n_positions", "max_seq_len"),
        num_attention_heads=key("num_attention_heads", "n_head", "num_heads"),
        num_key_value_heads=kv_heads,
        head_dim=cached[0].elements_per_token // cached[0].heads if cached else latent_dim or key("head_dim"),
        value_head_dim=cached[1].elements_per_token // cached[1].heads if len(cached) > 1 else key("v_head_dim"),
        intermediate_size=key("intermediate_size", "ffn_dim", "n_inner"),
        num_experts=num_experts,
        num_experts_per_token=per_token if num_experts else 0,
        num_shared_experts=(key("n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 0) if num_experts else 0,
        num_mtp_layers=next((int(part[name]) for part in (_text_keys(config), config) for name in MTP if part.get(name)), 0),
    )


def _estimated(release: Release, dtype: str, rope: dict[str, Any], problems: list[Problem]) -> ModelDescription:
    guess = estimate(release.config, dtype)
    stops, stop_problems = _stops(release, guess.dimensions.vocab_size)
    if guess.unknown:
        problems.append(
            Problem(kind="estimate", severity="warning", file="config.json", detail="not known: " + "; ".join(guess.unknown))
        )
    from dayzero.model.key_usage import GENERIC

    keys = _paths(release.config)
    consumed = set(guess.consumed) & set(keys) | {key for key in keys if key.rpartition(".")[2] in GENERIC}
    return ModelDescription(
        name=release.name,
        model_type=str(release.config.get("model_type", "unknown")),
        architecture=str((release.config.get("architectures") or ["unknown"])[0]),
        source_hash=release.source_hash,
        dtype=dtype,
        dimensions=guess.dimensions,
        layer_kinds=guess.layer_kinds,
        parameters=(),
        total_parameters=guess.total_parameters,
        active_parameters=guess.active_parameters,
        stop_token_ids=stops,
        quantization=quantization_summary(release.config),
        rope=rope,
        consumed_keys=tuple(sorted(consumed)),
        unconsumed_keys=tuple(sorted(set(keys) - consumed)),
        checkpoint_bytes=release.checkpoint_bytes,
        has_weights=release.has_weights,
        provisional=True,
        problems=(*problems, *stop_problems),
    )


def _paths(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    paths = []
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("_config") and key != "quantization_config":
            paths += _paths(value, f"{prefix}{key}.")
        else:
            paths.append(prefix + key)
    return paths


def _text_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _stops(release: Release, vocab_size: int) -> tuple[tuple[int, ...], tuple[Problem, ...]]:
    tokenizer = read_object(release.path("tokenizer.json")) if "tokenizer.json" in release.tokenizer_files else None
    return stop_tokens(
        release.config,
        vocab_size=vocab_size,
        generation_config=release.generation_config,
        tokenizer_config=release.tokenizer_config,
        tokenizer=tokenizer,
    )


def _census(release: Release) -> str | None:
    """The floating dtype that most of the checkpoint's bytes have, where the config names none."""
    sizes: dict[str, int] = {}
    for entry in release.tensors.values():
        if entry.dtype in ("float32", "float16", "bfloat16", "float64"):
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.num_bytes
    return max(sizes, key=lambda name: sizes[name]) if sizes else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers reports what it ignores on its logger; here that is what `problems` and `unconsumed_keys` are for."""
    from transformers.utils import logging  # importing it sets the level, so first import, then lower it

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
