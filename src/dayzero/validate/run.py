"""A subject and a reference in, the numerics report out (`6_numerics.json`).

Two passes, because equality is a claim about float32 (the limits of a reduced dtype are wide: see `limits`):

    the subject as served    -> parameters, layers, logits, tokens, server
    the subject at float32   -> layers, logits and tokens again, by the absolute limits, as `float32: ...`

Order: everything is asked of the subjects first (they may then be closed), then the reference is loaded, used and released,
then the reference at the subject's dtype where limits derive from it; so at most one reference is in memory. A subject that
is wrong gets a failing report, a reference that does not fit one that shows nothing; an error is raised only for what is not
the subject's fault, as NaN in the reference itself.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dayzero.core.model import LayerKind
from dayzero.core.reports import Check, LayerError, NumericsReport, Sample, overall
from dayzero.validate import checks, parameters
from dayzero.validate.answer_checks import ALONE, REUSE, TOGETHER, answer_checks, served_equals_engine
from dayzero.validate.answers import Path, agreement
from dayzero.validate.ask import Asked, Tokens, ask
from dayzero.validate.compare import Comparison, compare
from dayzero.validate.encoding import check_encodings
from dayzero.validate.inputs import Inputs, for_float32
from dayzero.validate.limits import EXACT_DTYPES, LIMITS, Limits
from dayzero.validate.positions import PositionErrors, joined, position_errors
from dayzero.validate.refer import Referee, Referred
from dayzero.validate.regime import Regime, selects
from dayzero.validate.subject import Generator, Reference, ReferenceTooLarge, Subject

Say = Callable[[str], None]

LAYERS, LOGITS = "layer_error", ("logits_max_abs", "kl_divergence", "top1_agreement", "perplexity")
# What the float32 pass shows of a subject that serves a reduced dtype.
EXACT_PREFIX = "float32: "
EXACT_NAMES = (LAYERS, "logits_max_abs", ALONE, TOGETHER, REUSE)


def validate(
    subject: Subject, reference: Reference, *, inputs: Inputs, served: Generator | None = None, exact: Subject | None = None,
    layer_kinds: Sequence[LayerKind] = (), limits: Limits = LIMITS, progress: Say | None = None,
) -> NumericsReport:  # fmt: skip
    """Run every check. `exact` is the same subject at float32, where `subject` computes in a reduced dtype. `layer_kinds` (of
    the model's description) name the layers and tell whether experts or keys are selected; without them no tie of a selection
    is excused. Raises DayZeroError where the reference cannot be had."""
    started = time.monotonic()
    asked = ask(subject, inputs, served)
    second = ask(exact, for_float32(inputs), parameters=False) if exact is not None else None
    report = judge(asked, reference, exact=second, layer_kinds=layer_kinds, limits=limits, progress=progress)
    return replace(report, seconds=time.monotonic() - started)


def judge(
    asked: Asked, reference: Reference, *, exact: Asked | None = None, no_exact: str = "no subject at float32 was given",
    layer_kinds: Sequence[LayerKind] = (), limits: Limits = LIMITS, progress: Say | None = None,
) -> NumericsReport:  # fmt: skip
    """The report on what was asked. `exact` are the answers at float32, `no_exact` says why there are none; they are not
    looked at where the subject itself is exact."""
    started, say = time.monotonic(), progress or (lambda _text: None)
    exact = None if asked.info.dtype in EXACT_DTYPES else exact
    assert exact is None or exact.info.dtype in EXACT_DTYPES, f"the exact pass computes in {exact.info.dtype}"
    try:
        return _judged(asked, reference, exact, no_exact, layer_kinds, limits, say, started)
    except ReferenceTooLarge as error:
        why = f"{error.what}: {error.got} available, {error.want} needed"
        say(why)
        names = (LAYERS, *LOGITS, ALONE, TOGETHER, REUSE)
        hidden = (checks.not_shown(parameters.NAME, why, required=False), *(checks.not_shown(name, why) for name in names))
        found = (*hidden, served_equals_engine(asked, None, None), check_encodings(asked), *_no_exact_checks(asked, why))
        return NumericsReport(
            verdict=overall(found), checks=found, reference=f"none: {why}", seconds=time.monotonic() - started
        )


def _judged(
    asked: Asked, reference: Reference, exact: Asked | None, no_exact: str, layer_kinds: Sequence[LayerKind], limits: Limits,
    say: Say, started: float,
) -> NumericsReport:  # fmt: skip
    say(f"reference: {reference.description}")
    referee, selecting = Referee(reference), selects(layer_kinds)
    referred = referee.refer(asked)
    exact_referred = referee.refer(exact) if exact is not None else None
    parameter_check = parameters.check_parameters(asked.parameters, asked.info.dtype, reference)
    samples = _samples(asked, referred, exact_referred, referee)
    reference.release()
    say("comparing")
    regime, own_layers = _regime(asked, reference, referred, limits, selecting, say)
    layer_check, layers = _layers(regime, asked, referred, own_layers, layer_kinds)
    found = (
        parameter_check,
        layer_check,
        *_logit_checks(regime, asked, referred),
        *answer_checks(regime, asked, referred),
        check_encodings(asked),
    )
    if exact is not None and exact_referred is not None:
        found += _exact_checks(
            exact, exact_referred, Regime(limits=limits, dtype=exact.info.dtype, selects=selecting), layer_kinds
        )
    else:
        found += _no_exact_checks(asked, no_exact)
    compared_with = f"{reference.description}; inputs: {asked.inputs.source}"
    if not regime.exact:
        compared_with += f"; limits from the same at {regime.dtype}"
    return NumericsReport(verdict=overall(found), checks=found, reference=compared_with, layers=layers, samples=samples,
                          seconds=time.monotonic() - started)  # fmt: skip


def _exact_checks(asked: Asked, referred: Referred, regime: Regime, layer_kinds: Sequence[LayerKind]) -> tuple[Check, ...]:
    every = (
        _layers(regime, asked, referred, None, layer_kinds)[0],
        *_logit_checks(regime, asked, referred),
        *answer_checks(regime, asked, referred),
    )
    by_name = {check.name: check for check in every}
    return tuple(replace(by_name[name], name=EXACT_PREFIX + name) for name in EXACT_NAMES)


def _no_exact_checks(asked: Asked, why: str) -> tuple[Check, ...]:
    """Equality at float32 is a claim that somebody has to show."""
    if asked.info.dtype in EXACT_DTYPES:
        return ()
    return tuple(checks.not_shown(EXACT_PREFIX + name, why) for name in EXACT_NAMES)


def _first_broken(asked: Asked, wants: Sequence[np.ndarray]) -> tuple[str, Comparison] | None:
    """The first text whose logits cannot be compared at all: another shape or dtype, NaN, infinities."""
    for text, got, want in zip(asked.inputs.texts, asked.scores, wants, strict=True):
        found = compare(got, want, relative=float("inf"))
        if not found.passed:
            return text.text, found
    return None


def _regime(
    asked: Asked, reference: Reference, referred: Referred, limits: Limits, selecting: bool, say: Say
) -> tuple[Regime, list[np.ndarray] | None]:
    """The limits that hold, and the reference's layer outputs at the subject's dtype. The yardstick is measured on the scored
    texts, the answers are judged by it too."""
    dtype, inputs = asked.info.dtype, asked.inputs
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
        return checks.not_shown(LAYERS, f"the {who} cannot show its layers' outputs", required=False), ()
    if regime.unusable or (own is None and not regime.exact):
        return checks.not_shown(LAYERS, regime.unusable or "the yardstick cannot show its layers' outputs"), ()
    names = {layer: kind.name for kind in layer_kinds for layer in kind.layers}
    kinds = [names.get(index, "layer") for index in range(len(referred.layers))]
    return checks.check_layers(regime, asked.layers, referred.layers, own, kinds)


def _logit_checks(regime: Regime, asked: Asked, referred: Referred) -> tuple[Check, ...]:
    inputs = asked.inputs
    if (broken := _first_broken(asked, referred.logits)) is not None:
        return checks.broken_logits(regime, *broken)
    if regime.unusable:
        return tuple(checks.not_shown(name, regime.unusable) for name in LOGITS)
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


def _samples(asked: Asked, referred: Referred, exact: Referred | None, referee: Referee) -> tuple[Sample, ...]:
    """Answers as a person would get them: up to the first stop token."""
    inputs, stops = asked.inputs, set(asked.info.stop_token_ids)

    def text(token_ids: Tokens) -> str:
        end = next((place for place, token in enumerate(token_ids) if token in stops), len(token_ids))
        return inputs.decode(list(token_ids[:end]))

    samples = []
    others: Sequence[Path | None] = [None] * len(inputs.samples) if exact is None else exact.samples
    for prompt, answer, path, other in zip(inputs.samples, asked.samples, referred.samples, others, strict=True):
        wanted = referee.answer(prompt.token_ids, (path, other), inputs.options.sample_tokens, asked.info.stop_token_ids)
        same = 0 if path is None else agreement(path, 0.0).same
        shown = text(answer) if path is not None else " ".join(str(token) for token in answer)
        samples.append(Sample(prompt=prompt.text, answer=shown, reference=text(wanted), same_tokens=same,
                              num_tokens=len(answer)))  # fmt: skip
    return tuple(samples)
