"""The validator passes a right engine and catches one that is wrong in a known way, on tiny generated checkpoints.

The right engine here is transformers' own cached path: prefill in chunks, then single tokens. It shares no forward with the
reference, which is uncached.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dayzero.core.errors import DayZeroError
from dayzero.core.model import LayerKind
from dayzero.core.records import from_dict, record_json
from dayzero.core.reports import Check, NumericsReport
from dayzero.model.classes import find_layers
from dayzero.validate.inputs import InputOptions, Inputs, load_inputs
from dayzero.validate.reference import ReleaseReference
from dayzero.validate.run import validate
from dayzero.validate.subject import ServerRefused

OPTIONS = InputOptions(scored_tokens=96, sample_tokens=8, concurrent_tokens=6, reuse_tokens=4, layer_tokens=24)
# The cached path is the test's subject, under whatever name transformers takes its cache.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")

Logits = Callable[[np.ndarray], np.ndarray]


def unchanged(values: np.ndarray) -> np.ndarray:
    return values


class CachedSubject:
    """transformers with its cache, chunks of 24 tokens, the last eight tokens one by one. Wrong on demand."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.info = SimpleNamespace(
            model=folder.name, device="cpu", dtype=dtype, vocab_size=self.model.config.get_text_config().vocab_size,
            sampled_tokens=self.model.config.get_text_config().vocab_size,
            context_tokens=256, capacity_tokens=256, block_tokens=16, prefix_reuse=True, stop_token_ids=(1,), folder=folder,
        )  # fmt: skip
        self.change_logits: Logits = unchanged
        self.change_answer: Callable[[list[int]], list[int]] = list
        self.shows_layers = True
        self.asked = 0

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        return self.change_logits(self._cached(token_ids))

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        self.asked += 1
        return [self.change_answer(self._greedy(prompt, max_tokens)) for prompt in prompts]

    def layer_outputs(self, token_ids: Sequence[int]) -> list[np.ndarray] | None:
        if not self.shows_layers:
            return None
        parts: list[list[np.ndarray]] = [[] for _ in find_layers(self.model)[1]]

        def keep(place: list[np.ndarray]) -> Any:
            def hook(_m: Any, _i: Any, output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                place.append(hidden[0].reshape(hidden.shape[1], -1).float().numpy())

            return hook

        hooks = [layer.register_forward_hook(keep(parts[i])) for i, layer in enumerate(find_layers(self.model)[1])]
        self._cached(token_ids)
        for hook in hooks:
            hook.remove()
        return [np.concatenate(part) for part in parts]

    def _greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        with torch.no_grad():
            out = self.model(torch.tensor([prompt]), use_cache=True)
            answer = [int(out.logits[0, -1].argmax())]
            while len(answer) < max_tokens:
                out = self.model(torch.tensor([answer[-1:]]), past_key_values=out.past_key_values, use_cache=True)
                answer.append(int(out.logits[0, -1].argmax()))
        return answer

    def _cached(self, token_ids: Sequence[int]) -> np.ndarray:
        tail = max(1, len(token_ids) - 8)
        cuts = [*range(0, tail, 24), *range(tail, len(token_ids) + 1)]
        cache, rows = None, []
        with torch.no_grad():
            for start, stop in pairwise(cuts):
                out = self.model(torch.tensor([list(token_ids[start:stop])]), past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                rows.append(out.logits[0].float().numpy())
        return np.concatenate(rows)


class FullSubject(CachedSubject):
    """Shows its parameters too, and as a server the tokens it makes of a text."""

    change_prompt: Callable[[list[int]], list[int]] = list

    def prompt_ids(self, kind: str, text: str) -> list[int]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.info.folder)
        if kind == "text":
            return self.change_prompt(tokenizer.encode(text))
        chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        return self.change_prompt(tokenizer.encode(chat, add_special_tokens=False))

    def parameters(self) -> Any:
        return ((name, p.detach().float().numpy()) for name, p in self.model.named_parameters())


@dataclass
class Case:
    folder: Path
    inputs: Inputs
    subject: CachedSubject
    kinds: tuple[LayerKind, ...] = ()
    served: Any = None
    reference: Any = field(default=None)
    exact: Any = None

    def report(self) -> NumericsReport:
        reference = self.reference or ReleaseReference(self.folder)
        return validate(
            self.subject, reference, inputs=self.inputs, served=self.served, exact=self.exact, layer_kinds=self.kinds
        )

    def checks(self) -> dict[str, Check]:
        return {check.name: check for check in self.report().checks}


@pytest.fixture
def make_case(tiny_checkpoint: Callable[..., Path]) -> Callable[..., Case]:
    def make(model_type: str = "llama", dtype: str = "float32", cls: type[CachedSubject] = CachedSubject) -> Case:
        folder = tiny_checkpoint(model_type, dtype="bfloat16")
        subject = cls(folder, dtype)
        inputs = load_inputs(folder, subject.info, options=OPTIONS)
        return Case(folder=folder, inputs=inputs, subject=subject, exact=cls(folder) if dtype != "float32" else None)

    return make


NAMES = ["parameters_bitwise", "layer_error", "logits_max_abs", "kl_divergence", "top1_agreement", "perplexity",
         "greedy_tokens", "greedy_tokens_concurrent", "prefix_reuse_equal", "served_equals_engine",
         "tokenizer_equal"]  # fmt: skip
EXACT_NAMES = ["float32: layer_error", "float32: logits_max_abs", "float32: greedy_tokens",
               "float32: greedy_tokens_concurrent", "float32: prefix_reuse_equal"]  # fmt: skip


def assert_only_failing(checks: dict[str, Check], *names: str) -> None:
    failing = {name for name, check in checks.items() if check.verdict == "fail"}
    assert failing == set(names), {name: checks[name] for name in failing ^ set(names)}


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "mixtral", "nemotron_h"])
def test_a_right_engine_passes_every_check_in_float32(make_case: Callable[..., Case], model_type: str) -> None:
    case = make_case(model_type, cls=FullSubject)
    case.served = case.subject
    report = case.report()
    assert [check.name for check in report.checks] == NAMES
    assert {c.verdict for c in report.checks} == {"pass"} and report.verdict == "pass", report.checks
    assert len(report.samples) == 3 and all(s.same_tokens == s.num_tokens == 8 for s in report.samples)
    assert report.samples[0].prompt.startswith("In one sentence") and report.samples[0].answer == report.samples[0].reference
    assert len(report.layers) == len(find_layers(case.subject.model)[1])
    assert "uncached" in report.reference and "chat template" in report.reference
    stored = json.loads(json.dumps(record_json(report)))
    assert stored.pop("schema") == NumericsReport.SCHEMA and from_dict(NumericsReport, stored) == report


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_a_right_engine_passes_in_bfloat16_by_the_reference_s_own_error(
    make_case: Callable[..., Case], model_type: str
) -> None:
    case = make_case(model_type, "bfloat16")
    feed_forward = "moe" if model_type == "mixtral" else "dense"
    layers = tuple(range(len(find_layers(case.subject.model)[1])))
    case.kinds = (LayerKind(name="all", mixer="full", feed_forward=feed_forward, layers=layers),)
    report = case.report()
    checks = {check.name: check for check in report.checks}
    assert report.verdict == "pass", [c for c in report.checks if c.verdict != "pass"]
    assert checks["logits_max_abs"].value > 1e-3, "an absolute limit would have judged the dtype"
    assert all(layer.reference_relative > 1e-4 and layer.kind == "all" for layer in report.layers)
    assert ("selection" in checks["logits_max_abs"].detail) == (model_type == "mixtral")
    assert [name for name in checks if name.startswith("float32: ")] == EXACT_NAMES
    for name in EXACT_NAMES:
        assert checks[name].required and checks[name].verdict == "pass", checks[name]
    for name in ("greedy_tokens", "greedy_tokens_concurrent", "prefix_reuse_equal"):
        assert not checks[name].required and "the float32 checks decide" in checks[name].detail
    assert "48 of 48 tokens compared" in checks["float32: greedy_tokens_concurrent"].detail


def test_a_reduced_dtype_without_a_float32_pass_is_never_a_pass(make_case: Callable[..., Case]) -> None:
    case = make_case("llama", "bfloat16")
    case.exact = None
    report = case.report()
    assert report.verdict == "not_shown"
    assert [c.name for c in report.checks if c.required and c.verdict == "not_shown"] == EXACT_NAMES


def test_a_fault_that_a_reduced_dtype_hides_is_caught_at_float32(make_case: Callable[..., Case]) -> None:
    """A weight off by a thousandth: within the error of bfloat16, not of float32."""
    case = make_case("llama", "bfloat16")
    for subject in (case.subject, case.exact):
        with torch.no_grad():
            find_layers(subject.model)[1][1].mlp.down_proj.weight.mul_(1.001)
    case.exact.change_answer = lambda answer: [*answer[:3], (answer[3] + 1) % 256, *answer[4:]]
    assert_only_failing(case.checks(), "float32: layer_error", "float32: greedy_tokens", "float32: greedy_tokens_concurrent",
                        "float32: prefix_reuse_equal")  # fmt: skip


def test_bfloat16_limits_still_catch_a_fault(make_case: Callable[..., Case]) -> None:
    """An error of 0.1 in the logits, where the dtype's own is 0.01; a weight off by a tenth."""
    case = make_case("llama", "bfloat16")
    wave = 0.1 * np.sin(np.arange(case.subject.info.vocab_size, dtype=np.float32))
    case.subject.change_logits = lambda logits: logits + wave
    assert_only_failing(case.checks(), "logits_max_abs", "kl_divergence", "top1_agreement", "perplexity")
    case.subject.change_logits = unchanged
    with torch.no_grad():
        find_layers(case.subject.model)[1][1].mlp.down_proj.weight.mul_(1.1)
    checks = case.checks()
    assert checks["layer_error"].verdict == "fail" and "first over its limit is layer 1" in checks["layer_error"].where


def test_noise_below_the_limit_passes(make_case: Callable[..., Case]) -> None:
    """Logits rounded to float16 differ by up to 5e-4 at magnitude 1: within the limit of 1e-3."""
    case = make_case()
    case.subject.change_logits = lambda logits: logits.astype(np.float16).astype(np.float32)
    checks = case.checks()
    assert 0 < checks["logits_max_abs"].value < 1e-3
    assert_only_failing(checks)


def test_one_wrong_layer_is_named(make_case: Callable[..., Case]) -> None:
    case = make_case()
    with torch.no_grad():
        find_layers(case.subject.model)[1][1].mlp.down_proj.weight.mul_(1.02)
    report = case.report()
    checks = {check.name: check for check in report.checks}
    assert checks["layer_error"].verdict == "fail" and "first over its limit is layer 1" in checks["layer_error"].where
    assert checks["logits_max_abs"].verdict == "fail" and report.verdict == "fail"
    assert [layer.relative > 1e-4 for layer in report.layers][:2] == [False, True]


def with_value(logits: np.ndarray, value: float) -> np.ndarray:
    """Of position 5, token 7."""
    changed = logits.copy()
    changed[5, 7] = value
    return changed


# How logits are broken -> the checks that must fail, and a word in the detail of logits_max_abs.
LOGITS = ("logits_max_abs", "kl_divergence", "top1_agreement", "perplexity")
BROKEN: dict[str, tuple[Logits, tuple[str, ...], str]] = {
    "NaN at one place": (lambda x: with_value(x, np.nan), LOGITS, "NaN"),
    "infinity at one place": (lambda x: with_value(x, np.inf), LOGITS, "infinite"),
    "twice too large (cosine 1)": (lambda x: 2 * x, ("logits_max_abs", "kl_divergence", "perplexity"), "cosine 1.0000"),
    "rows off by one position": (lambda x: np.roll(x, 1, axis=0), LOGITS, "relative"),
    "two tokens swapped": (
        lambda x: x[:, [1, 0, *range(2, x.shape[1])]], ("logits_max_abs", "kl_divergence"), "relative"),
    "vocabulary cut short": (lambda x: x[:, :-1], LOGITS, "shapes differ"),
    "integers": (lambda x: x.astype(np.int64), LOGITS, "dtypes differ"),
    "one logit off by 2e-3": (
        lambda x: x + 2e-3 * (np.arange(x.size).reshape(x.shape) == 300), ("logits_max_abs",), "over"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_logits_are_caught(make_case: Callable[..., Case], name: str) -> None:
    case = make_case()
    case.subject.change_logits, failing, word = BROKEN[name]
    checks = case.checks()
    assert set(failing) <= {n for n, c in checks.items() if c.verdict == "fail"} <= {*LOGITS}, checks
    assert word in checks["logits_max_abs"].detail
    if "one place" in name:
        assert checks["logits_max_abs"].where == "prose, position 5, token 7"


def test_position_ids_off_by_one_in_decode_are_caught(make_case: Callable[..., Case]) -> None:
    """A classic: the first decoded token gets the position of the last prompt token. A random model's best tokens do not
    change by that, so the greedy checks alone would miss it."""
    case = make_case()
    forward = case.subject.model.forward

    def shifted(input_ids: torch.Tensor, past_key_values: Any = None, **options: Any) -> Any:
        if past_key_values is not None:
            start = past_key_values.get_seq_length() - 1
            options["position_ids"] = torch.arange(start, start + input_ids.shape[1])[None]
        return forward(input_ids, past_key_values=past_key_values, **options)

    case.subject.model.forward = shifted
    checks = case.checks()
    assert checks["logits_max_abs"].verdict == checks["layer_error"].verdict == "fail"


def test_wrong_tokens_are_caught_where_they_first_differ(make_case: Callable[..., Case]) -> None:
    case = make_case()
    case.subject.change_answer = lambda answer: [*answer[:3], (answer[3] + 1) % 256, *answer[4:]]
    checks = case.checks()
    assert_only_failing(checks, "greedy_tokens", "greedy_tokens_concurrent", "prefix_reuse_equal")
    assert checks["greedy_tokens"].where.endswith("token 3")


@pytest.mark.parametrize(
    ("change", "word"), [(lambda a: a[:-1], "7 tokens instead of 8"), (lambda a: [*a[:-1], 99_999], "outside")]
)
def test_malformed_answers_fail_without_reaching_the_reference(
    make_case: Callable[..., Case], change: Callable[[list[int]], list[int]], word: str
) -> None:
    case = make_case()
    case.subject.change_answer = change
    checks = case.checks()
    assert_only_failing(checks, "greedy_tokens", "greedy_tokens_concurrent", "prefix_reuse_equal")
    assert word in checks["greedy_tokens"].detail


def test_kv_02_another_answer_from_the_cache_is_caught(make_case: Callable[..., Case]) -> None:
    """The third answer to one prompt is wrong, as if the second had written into shared blocks."""
    case = make_case()
    seen: dict[tuple[int, ...], int] = {}

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        answers = [case.subject._greedy(prompt, max_tokens) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            seen[tuple(prompt)] = seen.get(tuple(prompt), 0) + 1
            if seen[tuple(prompt)] == 3:
                answer[2] = (answer[2] + 1) % 256
        return answers

    case.subject.generate = generate
    checks = case.checks()
    assert_only_failing(checks, "prefix_reuse_equal")
    assert "repeat 2, token 2" in checks["prefix_reuse_equal"].where and checks["prefix_reuse_equal"].value == 4
    assert "32 of 32 tokens compared" in checks["prefix_reuse_equal"].detail


def test_who_promises_the_same_bits_is_held_to_them(make_case: Callable[..., Case]) -> None:
    """In bfloat16 the last token of an answer may be another one by the tie rule, not by the promise."""
    case = make_case("llama", "bfloat16")
    case.served = CachedSubject(case.folder, "bfloat16")
    case.served.change_answer = lambda answer: [*answer[:-1], (answer[-1] + 1) % 256]
    by_ties = case.checks()["served_equals_engine"]
    assert by_ties.value < 11 and "up to the first tie" in by_ties.detail
    case.subject.info.batch_invariant = True
    checks = case.checks()
    assert_only_failing(checks, "served_equals_engine")
    assert checks["served_equals_engine"].value == 11 and "72 of 72 tokens" in checks["served_equals_engine"].detail
    assert checks["prefix_reuse_equal"].required and checks["prefix_reuse_equal"].verdict == "pass"


@pytest.mark.parametrize("broken", [lambda ids: [0, *ids], lambda ids: ids[:-1]])
def test_a_server_that_makes_other_tokens_of_a_text_is_caught(
    make_case: Callable[..., Case], broken: Callable[[list[int]], list[int]]
) -> None:
    case = make_case()
    case.served = FullSubject(case.folder)
    case.served.change_prompt = broken
    check = case.checks()["tokenizer_equal"]
    assert check.verdict == "fail" and check.required and check.value == 6 and check.where.startswith("text: In one")

    def refuse(kind: str, text: str) -> list[int]:
        raise ServerRefused("no such template", got="400")

    case.served.prompt_ids = refuse
    assert "no such template" in case.checks()["tokenizer_equal"].detail
    case.inputs = replace(case.inputs, encodings=(), not_encoded="the release has no tokenizer")
    check = case.checks()["tokenizer_equal"]
    assert check.verdict == "not_shown" and not check.required


def test_a_reference_that_does_not_fit_shows_nothing_and_raises_nothing(make_case: Callable[..., Case]) -> None:
    case = make_case("llama", "bfloat16")
    case.reference = ReleaseReference(case.folder, memory_bytes=2**20)
    case.served = FullSubject(case.folder, "bfloat16")
    case.subject.info.batch_invariant = True
    report = case.report()
    assert report.verdict == "not_shown" and [c.name for c in report.checks] == [*NAMES, *EXACT_NAMES]
    shown = {c.name: c.verdict for c in report.checks if c.verdict != "not_shown"}
    assert shown == {"served_equals_engine": "pass", "tokenizer_equal": "pass"}
    assert all("does not fit" in c.detail for c in report.checks if c.name not in shown)


def test_a_server_that_serves_something_else_is_caught(make_case: Callable[..., Case]) -> None:
    case = make_case()
    case.served = CachedSubject(case.folder)
    case.served.change_answer = lambda answer: [*answer[:-1], (answer[-1] + 1) % 256]
    checks = case.checks()
    assert_only_failing(checks, "served_equals_engine")
    assert checks["served_equals_engine"].value == 11  # 3 samples and 8 at once


def test_wrong_parameters_are_named(make_case: Callable[..., Case]) -> None:
    case = make_case(cls=FullSubject)
    weight = find_layers(case.subject.model)[1][0].mlp.up_proj.weight
    with torch.no_grad():
        weight[3, 4] += 1e-7
    report = case.report()
    check = report.checks[0]
    assert check.verdict == "fail" and check.where.endswith("0.mlp.up_proj.weight") and "1 of " in check.detail
    assert check.required and report.verdict == "fail"


def test_what_a_subject_cannot_show_is_not_shown_and_never_a_pass(make_case: Callable[..., Case]) -> None:
    case = make_case()
    case.subject.shows_layers, case.subject.info.prefix_reuse = False, False
    report = case.report()
    hidden = {c.name for c in report.checks if c.verdict == "not_shown"}
    assert hidden == {"parameters_bitwise", "layer_error", "prefix_reuse_equal", "served_equals_engine", "tokenizer_equal"}
    assert report.verdict == "pass" and not any(c.required for c in report.checks if c.name in hidden)


def test_without_a_tokenizer_token_ids_are_shown(make_case: Callable[..., Case], tmp_path: Path) -> None:
    case = make_case()
    shutil.copytree(case.folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    case.inputs = load_inputs(tmp_path / "bare", case.subject.info, options=OPTIONS)
    report = case.report()
    assert report.verdict == "pass" and "no tokenizer" in report.reference
    assert all(part.isdigit() for part in report.samples[0].prompt.split())


class BrokenReference(ReleaseReference):
    """NaN at the dtypes named."""

    broken: tuple[str, ...] = ()

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        found = super().logits(token_ids)
        if self.dtype in self.broken:
            found[-1, 3] = np.nan
        return found

    def at(self, dtype: str) -> BrokenReference:
        other = BrokenReference(self.folder, dtype=dtype)
        other.broken = self.broken
        return other


def test_nu_17_nan_in_the_reference_is_an_error_of_the_test(make_case: Callable[..., Case]) -> None:
    case = make_case("llama", "bfloat16")
    case.reference = BrokenReference(case.folder)
    case.reference.broken = ("float32",)
    with pytest.raises(DayZeroError, match="reference itself"):
        case.report()
    case.reference.broken = ("bfloat16",)
    report = case.report()
    assert report.verdict == "not_shown" and "not finite at bfloat16" in report.checks[2].detail
    assert {c.verdict for c in report.checks if c.name in EXACT_NAMES} == {"pass"}


def test_reference_is_transformers_and_float64_agrees(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("qwen3_moe", dtype="bfloat16")
    reference, ids = ReleaseReference(folder), list(range(40, 80))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        plain = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(reference.logits(ids), plain, atol=1e-5)
    wide = reference.at("float64").logits(ids)
    assert wide.dtype == np.float64
    np.testing.assert_allclose(wide, plain, atol=1e-5)
    answer = reference.generate(ids, 4)
    assert reference.generate(ids, 4, stop_token_ids=[answer[1]]) == answer[: answer.index(answer[1]) + 1]
    # The last layer is what the final norm and the head see.
    last = torch.from_numpy(reference.layer_outputs(ids)[-1])[None]
    with torch.no_grad():
        np.testing.assert_allclose(model.lm_head(model.model.norm(last))[0].numpy(), plain, atol=1e-5)


def test_reference_refuses_what_it_cannot_be(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", dtype="bfloat16")
    with pytest.raises(DayZeroError, match="does not fit"):
        ReleaseReference(folder, memory_bytes=2**20).logits([5])
    empty = shutil.copytree(folder, tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors*"))
    with pytest.raises(DayZeroError, match="no weights"):
        ReleaseReference(empty).logits([5])
    # transformers would fill a lost tensor with random numbers and go on.
    from safetensors.torch import load_file, save_file

    partial = shutil.copytree(empty, tmp_path / "partial")
    tensors = {k: v for shard in sorted(folder.glob("*.safetensors")) for k, v in load_file(shard).items()}
    tensors.pop(next(name for name in tensors if name.endswith("up_proj.weight")))
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DayZeroError, match="does not hold") as caught:
        ReleaseReference(partial).logits([5])
    assert "up_proj.weight" in str(caught.value)


def test_layer_kinds_are_named(make_case: Callable[..., Case]) -> None:
    case = make_case()
    total = len(find_layers(case.subject.model)[1])
    kind = LayerKind(name="full+dense", mixer="full", feed_forward="dense", layers=tuple(range(total)))
    case.kinds = (replace(kind, layers=(0,)), replace(kind, name="other", layers=tuple(range(1, total))))
    assert [layer.kind for layer in case.report().layers] == ["full+dense", *["other"] * (total - 1)]
