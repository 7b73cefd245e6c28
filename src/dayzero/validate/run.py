"""A subject and a reference in, the numerics report out (`6_numerics.json`).

Order: everything is asked of the subject first, then the reference is loaded, used and released, then the reference at the
subject's dtype where limits derive from it; so at most one reference is in memory. A subject that is wrong gets a failing
report; an error is raised only for what is not the subject's fault, as NaN in the reference itself.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dayzero.core.errors import DayZeroError
from dayzero.core.model import LayerKind
from dayzero.core.reports import Check, LayerError, NumericsReport, Sample, overall
from dayzero.validate import checks
from dayzero.validate.answers import Path, agreement, malformed, path_of
from dayzero.validate.compare import Comparison, compare
from dayzero.validate.inputs import Inputs
from dayzero.validate.limits import EXACT_DTYPES, LIMITS, Limits
from dayzero.validate.parameters import check_parameters
from dayzero.validate.positions import PositionErrors, joined, position_errors
from dayzero.validate.regime import Regime, selects
from dayzero.validate.subject import Generator, Reference, Subject

NUM_REPEATS = 3  # the second finds blocks the first left, the third what the second did to them

Tokens = Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Everything the subject (and the server) answered. `reuse[i]` are the answers to one prompt sent again and again."""

    scores: list[np.ndarray]
    layers: list[np.ndarray] | None
    samples: list[list[int]]
    concurrent: list[list[int]]
    reuse: list[list[list[int]]]
    served_samples: list[list[int]] | None
    served_concurrent: list[list[int]] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Referred:
    """The reference on the same tokens. Paths are None for answers which are malformed."""

    logits: list[np.ndarray]
    layers: list[np.ndarray] | None
    samples: list[Path | None]
    concurrent: list[Path | None]
    reuse: list[Path | None]
    sample_answers: list[list[int]]
    parameters: Check


def validate(
    subject: Subject, reference: Reference, *, inputs: Inputs, served: Generator | None = None,
    layer_kinds: Sequence[LayerKind] = (), limits: Limits = LIMITS, progress: Callable[[str], None] | None = None,
) -> NumericsReport:  # fmt: skip
    """Run every check. `layer_kinds` (of the model's description) name the layers and tell whether experts or keys are
    selected; without them no tie of a selection is excused. Raises DayZeroError where the reference cannot be had."""
    started, say = time.monotonic(), progress or (lambda _text: None)
    say("asking the subject")
    asked = _ask(subject, served, inputs)
    say(f"reference: {reference.description}")
    referred = _refer(reference, subject, asked, inputs)
    reference.release()
    say("comparing")
    broken = _first_broken(asked.scores, referred.logits, inputs)
    regime, own_layers = _regime(subject, reference, referred, inputs, limits, selects(layer_kinds), say)
    layer_check, layers = _layers(regime, asked, referred, own_layers, layer_kinds)
    found = (
        referred.parameters,
        layer_check,
        *_logit_checks(regime, asked, referred, inputs, broken),
        *_answer_checks(regime, subject, asked, referred, inputs),
    )
    samples = _samples(subject, asked, referred, inputs)
    compared_with = f"{reference.description}; inputs: {inputs.source}"
    if not regime.exact:
        compared_with += f"; limits from the same at {regime.dtype}"
    return NumericsReport(verdict=overall(found), checks=found, reference=compared_with, layers=layers, samples=samples,
                          seconds=time.monotonic() - started)  # fmt: skip


def _ask(subject: Subject, served: Generator | None, inputs: Inputs) -> Asked:
    options = inputs.options

    def answers(who: Generator, prompts: Sequence[Tokens], max_tokens: int, *, at_once: bool) -> list[list[int]]:
        lists = [list(prompt) for prompt in prompts]
        if at_once:
            return who.generate(lists, max_tokens)
        return [who.generate([prompt], max_tokens)[0] for prompt in lists]

    samples, concurrent = [s.token_ids for s in inputs.samples], [s.token_ids for s in inputs.concurrent]
    repeats = inputs.reuse if subject.info.prefix_reuse else ()
    return Asked(
        samples=answers(subject, samples, options.sample_tokens, at_once=False),
        concurrent=answers(subject, concurrent, options.concurrent_tokens, at_once=True),
        reuse=[answers(subject, [r.token_ids] * NUM_REPEATS, options.reuse_tokens, at_once=False) for r in repeats],
        scores=[np.asarray(subject.score(text.token_ids)) for text in inputs.texts],
        layers=subject.layer_outputs(inputs.texts[0].token_ids[: options.layer_tokens]),
        served_samples=answers(served, samples, options.sample_tokens, at_once=False) if served else None,
        served_concurrent=answers(served, concurrent, options.concurrent_tokens, at_once=True) if served else None,
    )


def _refer(reference: Reference, subject: Subject, asked: Asked, inputs: Inputs) -> Referred:
    options = inputs.options

    def paths(prompts: Sequence[Tokens], answers: Sequence[Tokens], max_tokens: int) -> list[Path | None]:
        found: list[Path | None] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            if malformed(answer, subject.info.vocab_size, max_tokens):
                found.append(None)
            else:
                found.append(path_of(_trusted(reference.logits([*prompt, *answer])), len(prompt), answer))
        return found

    samples = paths([s.token_ids for s in inputs.samples], asked.samples, options.sample_tokens)
    return Referred(
        logits=[_trusted(reference.logits(text.token_ids)) for text in inputs.texts],
        layers=None if asked.layers is None else reference.layer_outputs(inputs.texts[0].token_ids[: options.layer_tokens]),
        samples=samples,
        concurrent=paths([s.token_ids for s in inputs.concurrent], asked.concurrent, options.concurrent_tokens),
        reuse=paths([s.token_ids for s in inputs.reuse[: len(asked.reuse)]], [r[0] for r in asked.reuse], options.reuse_tokens),
        sample_answers=[
            _reference_answer(reference, prompt.token_ids, path, options.sample_tokens, subject.info.stop_token_ids)
            for prompt, path in zip(inputs.samples, samples, strict=True)
        ],
        parameters=check_parameters(subject, reference),
    )


def _reference_answer(reference: Reference, prompt: Tokens, path: Path | None, max_tokens: int, stops: Tokens) -> list[int]:
    """The reference's own greedy answer: the part both share needs no second computation."""
    start = [] if path is None else list(path.token_ids[: agreement(path, 0.0).same])
    if len(start) == max_tokens or any(token in stops for token in start):
        return start
    return start + reference.generate([*prompt, *start], max_tokens - len(start), stops)


def _trusted(logits: np.ndarray) -> np.ndarray:
    """NU-17: NaN in the reference is an error of the test itself."""
    if np.isnan(logits).any():
        row, token = np.argwhere(np.isnan(logits))[0]
        raise DayZeroError("the reference itself computes NaN, so nothing can be compared with it",
                           got=f"NaN at position {row}, token {token}", want="finite logits",
                           fix="try a float64 reference; if it stays, the release's weights are broken")  # fmt: skip
    return logits


def _first_broken(scores: Sequence[np.ndarray], wants: Sequence[np.ndarray], inputs: Inputs) -> tuple[str, Comparison] | None:
    """The first text whose logits cannot be compared at all: another shape or dtype, NaN, infinities."""
    for text, got, want in zip(inputs.texts, scores, wants, strict=True):
        found = compare(got, want, relative=float("inf"))
        if not found.passed:
            return text.text, found
    return None


def _regime(
    subject: Subject, reference: Reference, referred: Referred, inputs: Inputs, limits: Limits, selecting: bool,
    say: Callable[[str], None],
) -> tuple[Regime, list[np.ndarray] | None]:  # fmt: skip
    """The limits that hold, and the reference's layer outputs at the subject's dtype. The yardstick is measured on the scored
    texts, the answers are judged by it too."""
    dtype = subject.info.dtype
    if dtype in EXACT_DTYPES:
        return Regime(limits=limits, dtype=dtype, selects=selecting), None
    yardstick = reference.at(dtype)
    say(f"yardstick: {yardstick.description}")
    parts: list[PositionErrors] = []
    layers = None
    try:
        for text, want in zip(inputs.texts, referred.logits, strict=True):
            own = yardstick.logits(text.token_ids)
            found = compare(own, want, relative=float("inf"))
            if not found.passed:
                why = f"the reference itself is not finite at {dtype}: {text.text}: {found.describe()}"
                return Regime(limits=limits, dtype=dtype, selects=selecting, unusable=why), None
            parts.append(position_errors(own, want, text.token_ids))
        if referred.layers is not None:
            layers = yardstick.layer_outputs(inputs.texts[0].token_ids[: inputs.options.layer_tokens])
    finally:
        yardstick.release()
    return Regime(limits=limits, dtype=dtype, selects=selecting, own=joined(parts)), layers


def _layers(
    regime: Regime, asked: Asked, referred: Referred, own: list[np.ndarray] | None, layer_kinds: Sequence[LayerKind]
) -> tuple[Check, tuple[LayerError, ...]]:
    if asked.layers is None or referred.layers is None:
        who = "subject" if asked.layers is None else "reference"
        return checks.not_shown("layer_error", f"the {who} cannot show its layers' outputs", required=False), ()
    if regime.unusable or (own is None and not regime.exact):
        return checks.not_shown("layer_error", regime.unusable or "the yardstick cannot show its layers' outputs"), ()
    names = {layer: kind.name for kind in layer_kinds for layer in kind.layers}
    kinds = [names.get(index, "layer") for index in range(len(referred.layers))]
    return checks.check_layers(regime, asked.layers, referred.layers, own, kinds)


def _logit_checks(
    regime: Regime, asked: Asked, referred: Referred, inputs: Inputs, broken: tuple[str, Comparison] | None
) -> tuple[Check, ...]:
    if broken is not None:
        return checks.broken_logits(regime, *broken)
    if regime.unusable:
        names = ("logits_max_abs", "kl_divergence", "top1_agreement", "perplexity")
        return tuple(checks.not_shown(name, regime.unusable) for name in names)
    triples = list(zip(asked.scores, referred.logits, inputs.texts, strict=True))
    errors = joined([position_errors(got, want, text.token_ids) for got, want, text in triples])
    relative, max_abs = regime.limits.logits_relative.value, regime.limits.logits_max_abs.value
    comparisons = [compare(got, want, relative=relative, max_abs=max_abs) for got, want, _ in triples]
    places = [f"{text.text}, position {place}" for text in inputs.texts for place in range(len(text.token_ids))]
    return (
        checks.check_logits(regime, errors, comparisons, places.__getitem__),
        checks.check_kl(regime, errors, places.__getitem__),
        checks.check_top1(regime, errors, places.__getitem__),
        checks.check_perplexity(regime, errors, ", ".join(text.text for text in inputs.texts)),
    )


def _answer_checks(regime: Regime, subject: Subject, asked: Asked, referred: Referred, inputs: Inputs) -> tuple[Check, ...]:
    names = ("greedy_tokens", "greedy_tokens_concurrent", "prefix_reuse_equal", "served_equals_engine")
    if regime.unusable:
        return tuple(checks.not_shown(name, regime.unusable) for name in names)
    options, vocab_size = inputs.options, subject.info.vocab_size
    labels = [s.text for s in inputs.samples], [s.text for s in inputs.concurrent]

    def judged(
        name: str, paths: Sequence[Path | None], answers: Sequence[Tokens], max_tokens: int, prompts: list[str]
    ) -> Check:
        for answer, prompt in zip(answers, prompts, strict=True):
            if why := malformed(answer, vocab_size, max_tokens):
                return Check(name=name, verdict="fail", value=None, limit=None, where=prompt, detail=f"an answer has {why}")
        return checks.check_answers(regime, name, [path for path in paths if path is not None], prompts)

    alone = judged(names[0], referred.samples, asked.samples, options.sample_tokens, labels[0])
    together = judged(names[1], referred.concurrent, asked.concurrent, options.concurrent_tokens, labels[1])
    reuse_labels = [r.text for r in inputs.reuse[: len(asked.reuse)]]
    if not asked.reuse:
        reuse = checks.not_shown(names[2], "the subject does not reuse prefixes", required=False)
    else:
        # The first answer must be right, and the ones from the cache must be the first.
        reuse = judged(names[2], referred.reuse, [r[0] for r in asked.reuse], options.reuse_tokens, reuse_labels)
        if reuse.verdict == "pass":
            triples = zip(reuse_labels, referred.reuse, asked.reuse, strict=True)
            repeats = [(label, path, r[1:]) for label, path, r in triples if path is not None]
            reuse = checks.check_repeats(regime, names[2], repeats, "repeat")
    if asked.served_samples is None or asked.served_concurrent is None:
        served = checks.not_shown(names[3], "no server was given", required=False)
    else:
        pairs = [*zip(labels[0], referred.samples, asked.served_samples, strict=True),
                 *zip(labels[1], referred.concurrent, asked.served_concurrent, strict=True)]  # fmt: skip
        whole = [(label, path, [answer]) for label, path, answer in pairs if path is not None]
        served = checks.check_repeats(regime, names[3], whole, "served answer")
        if len(whole) < len(pairs):
            served = checks.not_shown(names[3], "an answer of the engine itself is malformed")
    return alone, together, reuse, served


def _samples(subject: Subject, asked: Asked, referred: Referred, inputs: Inputs) -> tuple[Sample, ...]:
    """Answers as a person would get them: up to the first stop token."""
    stops = set(subject.info.stop_token_ids)

    def text(token_ids: Tokens) -> str:
        end = next((place for place, token in enumerate(token_ids) if token in stops), len(token_ids))
        return inputs.decode(list(token_ids[:end]))

    samples = []
    rows = zip(inputs.samples, asked.samples, referred.sample_answers, referred.samples, strict=True)
    for prompt, answer, wanted, path in rows:
        same = 0 if path is None else agreement(path, 0.0).same
        shown = text(answer) if path is not None else " ".join(str(token) for token in answer)
        samples.append(Sample(prompt=prompt.text, answer=shown, reference=text(wanted), same_tokens=same,
                              num_tokens=len(answer)))  # fmt: skip
    return tuple(samples)
