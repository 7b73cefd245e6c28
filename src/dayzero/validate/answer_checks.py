"""Answers of a subject, of the server and of the reference in, one check of tokens each out.

Where the subject promises the same bits for the same request, what it repeats and what is served must be equal to the token;
elsewhere they may part at a tie of the reference.
"""

from collections.abc import Sequence
from dataclasses import replace

from dayzero.core.reports import Check
from dayzero.validate import checks
from dayzero.validate.answers import Path, malformed
from dayzero.validate.ask import Asked, Tokens
from dayzero.validate.checks import Repeat
from dayzero.validate.inputs import TokenText
from dayzero.validate.refer import Referred
from dayzero.validate.regime import Regime
from dayzero.validate.subject import is_batch_invariant

ALONE, TOGETHER, REUSE, SERVED = "greedy_tokens", "greedy_tokens_concurrent", "prefix_reuse_equal", "served_equals_engine"
DECIDED = "in a reduced dtype the float32 checks decide"


def answer_checks(regime: Regime, asked: Asked, referred: Referred) -> tuple[Check, ...]:
    """In a reduced dtype a tie of the reference is so wide that hardly a token may differ from another's: those checks are
    not required."""
    if regime.unusable:
        found = [checks.not_shown(name, regime.unusable) for name in (ALONE, TOGETHER, REUSE)]
    else:
        options, inputs = asked.inputs.options, asked.inputs
        found = [
            _judged(regime, ALONE, asked, referred.samples, asked.samples, options.sample_tokens, inputs.samples),
            _judged(
                regime, TOGETHER, asked, referred.concurrent, asked.concurrent, options.concurrent_tokens, inputs.concurrent
            ),
            _reuse(regime, asked, referred),
        ]
    if not regime.exact:
        found = [_decided_in_float32(check, asked) for check in found]
    return *found, served_equals_engine(asked, referred, regime)


def served_equals_engine(asked: Asked, referred: Referred | None, regime: Regime | None) -> Check:
    """Without a reference (None for both) only what is promised bit for bit can be compared."""
    if asked.served_samples is None or asked.served_concurrent is None:
        return checks.not_shown(SERVED, "no server was given", required=False)
    same_bits, options = is_batch_invariant(asked.info), asked.inputs.options
    if not same_bits and (referred is None or regime is None or regime.unusable):
        return checks.not_shown(SERVED, regime.unusable if regime else "without a reference no tie can be told from an error")
    limits = (*[options.sample_tokens] * len(asked.samples), *[options.concurrent_tokens] * len(asked.concurrent))
    firsts = [*asked.samples, *asked.concurrent]
    if any(malformed(first, asked.info.sampled_tokens, limit) for first, limit in zip(firsts, limits, strict=True)):
        return checks.not_shown(SERVED, "an answer of the engine itself is malformed")
    paths = [None] * len(firsts) if referred is None else [*referred.samples, *referred.concurrent]
    labels = [text.text for text in (*asked.inputs.samples, *asked.inputs.concurrent)]
    others = [[answer] for answer in (*asked.served_samples, *asked.served_concurrent)]
    repeats = _repeats(labels, firsts, others, paths)
    return checks.check_repeats(SERVED, repeats, "served answer", regime=None if same_bits else regime)


def _judged(
    regime: Regime, name: str, asked: Asked, paths: Sequence[Path | None], answers: Sequence[Tokens], max_tokens: int,
    prompts: Sequence[TokenText],
) -> Check:  # fmt: skip
    for answer, prompt in zip(answers, prompts, strict=True):
        if why := malformed(answer, asked.info.sampled_tokens, max_tokens):
            return Check(name=name, verdict="fail", value=None, limit=None, where=prompt.text, detail=f"an answer has {why}")
    return checks.check_answers(regime, name, [path for path in paths if path is not None], [p.text for p in prompts])


def _reuse(regime: Regime, asked: Asked, referred: Referred) -> Check:
    """The first answer must be right, and the ones from the cache must be the first."""
    if not asked.reuse:
        return checks.not_shown(REUSE, "the subject does not reuse prefixes", required=False)
    prompts, firsts = asked.inputs.reuse[: len(asked.reuse)], [answers[0] for answers in asked.reuse]
    first = _judged(regime, REUSE, asked, referred.reuse, firsts, asked.inputs.options.reuse_tokens, prompts)
    # In a reduced dtype whether the first is right may not be shown, and whether the others equal it still is.
    if first.verdict == "fail" or (first.verdict == "not_shown" and regime.exact):
        return first
    repeats = _repeats([p.text for p in prompts], firsts, [answers[1:] for answers in asked.reuse], referred.reuse)
    return checks.check_repeats(REUSE, repeats, "repeat", regime=None if is_batch_invariant(asked.info) else regime)


def _repeats(
    labels: Sequence[str], firsts: Sequence[Tokens], others: Sequence[Sequence[Tokens]], paths: Sequence[Path | None]
) -> list[Repeat]:
    return [
        Repeat(label=label, first=tuple(first), others=tuple(tuple(other) for other in more), path=path)
        for label, first, more, path in zip(labels, firsts, others, paths, strict=True)
    ]


def _decided_in_float32(check: Check, asked: Asked) -> Check:
    if check.name == REUSE and is_batch_invariant(asked.info):
        return check  # compared bit for bit: no tie rule stands in the way
    return replace(check, required=False, detail=f"{check.detail}; {DECIDED}")
