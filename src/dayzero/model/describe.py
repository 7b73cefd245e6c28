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

from dayzero.core.errors import DayZeroError, one_line
from dayzero.core.model import Dimensions, LayerKind, ModelDescription, OperatorGraph, Parameter, Problem
from dayzero.core.structure import QuantizationGroup, Structure
from dayzero.model.config_keys import normalise_rope, quantization_summary, text_keys
from dayzero.model.contradictions import with_contradictions
from dayzero.model.estimate import MTP
from dayzero.model.provisional import config_problems, model_dtype, provisional, token_facts
from dayzero.model.release import Release, open_release
from dayzero.model.stored import assignment, checkpoint_bytes, quantization_groups
from dayzero.model.stored.quantization import settings_beside


def describe(path: Path, *, trust_remote_code: bool = False, operators: bool = False) -> ModelDescription:
    """The description of a release folder or a bare config.json.

    Raises DayZeroError when there is no config, or its class refuses it.
    """
    return describe_release(open_release(path), trust_remote_code=trust_remote_code, operators=operators)


def describe_release(release: Release, *, trust_remote_code: bool = False, operators: bool = False) -> ModelDescription:
    """As `describe`, for a release that is already open. `operators`: with their graphs and the structure facts, which take a
    few seconds and no stage but `inspect` needs. Code of the release is run only when trusted, in a confined process."""
    # Before transformers sees it: contradictions are errors here and silent there.
    doubts = config_problems(release)
    rope = normalise_rope(text_keys(release.config))
    dtype, problems = model_dtype(release)
    with _quiet():
        from dayzero.model.key_usage import recorded_reads
        from dayzero.model.remote.code import tokenizer_needs_code
        from dayzero.model.remote.sandbox import allowed_here, describe_in_sandbox
        from dayzero.model.resolve import Resolved, remote_class, resolve

        if trust_remote_code and not allowed_here() and remote_class(release) is not None:
            return describe_in_sandbox(release.folder)
        reads: dict[str, str] = {}
        with recorded_reads(reads):
            resolved = resolve(release, trust_remote_code=trust_remote_code)
        problems = [*release.problems, *problems, *doubts]
        if (needed := tokenizer_needs_code(release)) is not None:
            problems.append(needed)
        if isinstance(resolved, Resolved):
            return _Measured(release, resolved, dtype, rope, problems, reads, operators=operators).description()
        return provisional(release, [*problems, resolved])


class _Measured:
    """The description of a release whose class could be built."""

    def __init__(
        self,
        release: Release,
        resolved: Any,
        dtype: str,
        rope: dict[str, Any],
        problems: list[Problem],
        reads: dict[str, str],
        *,
        operators: bool,
    ) -> None:
        self.operators, self.reads = operators, reads
        self.release, self.resolved, self.dtype, self.rope = release, resolved, dtype, rope
        self.problems = [*problems, *resolved.problems]
        self.provisional = False

    def description(self) -> ModelDescription:
        import torch

        from dayzero.model import inventory, layer_kinds
        from dayzero.model.classes import find_layers, text_config
        from dayzero.model.key_usage import key_usage, recorded_reads
        from dayzero.model.shard_rules import ShardRules

        with recorded_reads(self.reads):
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
        by_role, active = inventory.count_parameters(parameters, num_experts, per_token)
        parameters, mtp_parameters = self._with_sources(model, parameters, len(layers), num_experts)
        parameters, groups, expected_mtp = self._stored(model, parameters, len(layers))
        kinds, outer, structure = self._followed(model, kinds, parameters, text)
        usage = key_usage(self.release.config, self.resolved.config, self.reads)
        dimensions = _dimensions(model, text, kinds, len(layers), num_experts, per_token, self.release.config)
        tokens = token_facts(self.release, dimensions.vocab_size)
        found = ModelDescription(
            name=self.release.name,
            model_type=str(self.release.config.get("model_type", model.config.model_type)),
            architecture=type(model).__name__,
            source_hash=self.release.source_hash,
            dtype=self.dtype,
            dimensions=dimensions,
            layer_kinds=kinds,
            parameters=tuple(parameters),
            total_parameters=sum(by_role.values()),
            parameters_by_role=by_role,
            active_parameters=active,
            mtp_parameters=mtp_parameters if self.release.has_weights else expected_mtp,
            outer_operators=outer,
            structure=structure,
            towers=place.towers,
            stop_token_ids=tokens.stops,
            tokenizer_tokens=tokens.num_tokens,
            quantization=quantization_summary(self.release.config),
            quantization_groups=groups,
            rope=self.rope,
            consumed_keys=usage.consumed,
            inert_keys=usage.inert,
            unconsumed_keys=usage.unconsumed,
            novel_keys=usage.novel,
            key_readers=usage.readers,
            checkpoint_bytes=self.release.checkpoint_bytes if self.release.has_weights else checkpoint_bytes(groups),
            has_weights=self.release.has_weights,
            provisional=self.provisional,
            problems=(*self.problems, *tokens.problems),
        )
        return with_contradictions(self.release, found)

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

    def _stored(
        self, model: Any, parameters: list[Parameter], num_layers: int
    ) -> tuple[list[Parameter], tuple[QuantizationGroup, ...], int]:
        """Parameters with the group that the release stores them in; the groups, draft layers included; how many those have."""
        from dayzero.model.reconcile import ignorable_patterns
        from dayzero.model.stored.drafts import draft_block

        config = self.release.config
        drafts = draft_block(config, parameters, num_layers=num_layers, ignorable=ignorable_patterns(model))
        if not self.release.has_weights:  # what is assumed; the headers know
            told = [Problem(kind="draft_layers", severity="warning", file="config.json", detail=n) for n in drafts.notes]
            self.problems += told
        beside = settings_beside(self.release)
        group_of = assignment(config, parameters, beside=beside)
        groups = quantization_groups(config, (*parameters, *drafts.parameters), beside=beside)
        return [replace(item, group=group_of[item.name]) for item in parameters], groups, drafts.stored_parameters

    def _followed(
        self, model: Any, kinds: tuple[LayerKind, ...], parameters: list[Parameter], text: Any
    ) -> tuple[tuple[LayerKind, ...], OperatorGraph, Structure]:
        """Layer kinds with their operators, those outside the layers, and the facts measured on a small instance."""
        if not self.operators:
            return kinds, OperatorGraph(), Structure()
        import torch

        from dayzero.model.operator_graph import operator_graphs
        from dayzero.model.shrink import build_shrunken
        from dayzero.model.structure import read_structure

        graphs = operator_graphs(model, kinds, text)
        notes: tuple[str, ...] = ()
        small = None
        try:
            small = build_shrunken(self.resolved.config, dtype=torch.float32, seed=0)
        except DayZeroError as error:
            notes = (f"no small instance to measure on: {error.what} ({error.got})",)
        structure = read_structure(model, self.release.config, kinds, parameters, small=small)
        kinds = tuple(replace(kind, operators=graphs.by_kind[kind.name]) for kind in kinds)
        return kinds, graphs.outer, replace(structure, notes=(*structure.notes, *notes))

    def _with_sources(
        self, model: Any, parameters: list[Parameter], num_layers: int, num_experts: int
    ) -> tuple[list[Parameter], int]:
        from dayzero.model import reconcile
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
        num_mtp_layers=next((int(part[name]) for part in (text_keys(config), config) for name in MTP if part.get(name)), 0),
    )


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
