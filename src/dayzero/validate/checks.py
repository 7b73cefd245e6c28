"""Measured errors and a `Regime` in, one `Check` each out. Pure functions: nothing runs a model here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dayzero.core.reports import Check, LayerError, Verdict
from dayzero.validate.answers import Path, agreement, first_difference, first_tie
from dayzero.validate.compare import Comparison, compare
from dayzero.validate.positions import PositionErrors
from dayzero.validate.regime import Regime

# Position of the joined scored texts -> where a person finds it.
Locate = Callable[[int], str]

# A token check that could have failed for fewer of its tokens than this shows nothing.
MIN_COMPARED_SHARE = 0.1
INTERVAL_SIGMAS = 1.96  # half-width of a 95 % interval of a normal distribution


def not_shown(name: str, why: str, *, required: bool = True) -> Check:
    return Check(name=name, verdict="not_shown", value=None, limit=None, detail=why, required=required)


def _verdict(holds: bool) -> Verdict:
    return "pass" if holds else "fail"


def broken_logits(regime: Regime, name: str, broken: Comparison) -> tuple[Check, ...]:
    """The checks on logits where they are not even comparable (`broken` of the text `name`)."""
    place = f"{name}, {_row_and_token(broken.worst_index)}" if broken.worst_index else name
    first = Check(name="logits_max_abs", verdict="fail", value=broken.max_abs, limit=regime.limits.logits_max_abs.value,
                  where=place, detail=broken.describe())  # fmt: skip
    rest = ("kl_divergence", "top1_agreement", "perplexity")
    return (first, *(Check(name=n, verdict="fail", value=None, limit=None, where=place, detail=broken.reason) for n in rest))


def check_logits(regime: Regime, errors: PositionErrors, comparisons: Sequence[Comparison], locate: Locate) -> Check:
    kept, limit = regime.kept(errors.worst_abs), regime.logits_limit()
    order = np.argsort(errors.worst_abs, kind="stable")
    worst = int(order[len(kept) - 1])
    detail = max(comparisons, key=lambda c: (not c.passed, c.max_abs)).describe()
    if not regime.exact:
        over = int((errors.worst_abs > limit).sum())
        factor = regime.limits.own_error_factor.value
        detail = (f"mean over {len(errors)} positions {kept.mean():.4g}; limit is {factor:g} times the reference's own "
                  f"largest error at {regime.dtype}" + _excused_text(regime, len(errors), over))  # fmt: skip
    holds = bool(kept[-1] <= limit) and (not regime.exact or all(c.passed for c in comparisons))
    return Check(name="logits_max_abs", verdict=_verdict(holds), value=float(kept[-1]), limit=limit, detail=detail,
                 where=f"{locate(worst)}, token {errors.worst_token[worst]}")  # fmt: skip


def check_kl(regime: Regime, errors: PositionErrors, locate: Locate) -> Check:
    value, limit = float(regime.kept(errors.kl).mean()), regime.kl_limit()
    # Rounding may leave a mean of -1e-17.
    return Check(name="kl_divergence", verdict=_verdict(value <= limit), value=max(0.0, value), limit=limit,
                 where=locate(int(errors.kl.argmax())),
                 detail=f"nats per token, mean over {len(errors)} positions; largest {errors.kl.max():.3g}")  # fmt: skip


def check_top1(regime: Regime, errors: PositionErrors, locate: Locate) -> Check:
    """The best token is the reference's, or within the tie gap of it."""
    wrong = ~errors.same_best & (errors.regret >= regime.tie_gap)
    allowed, count = regime.num_excused(len(errors)), int(wrong.sum())
    ties = int((errors.gap < regime.tie_gap).sum())
    return Check(name="top1_agreement", verdict=_verdict(count <= allowed), value=1 - count / len(errors),
                 limit=1 - allowed / len(errors), where=locate(int(np.argmax(wrong * errors.regret))) if count else "",
                 detail=f"the same best token at {int(errors.same_best.sum())} of {len(errors)} positions; {ties} are ties "
                        f"(two best closer than {regime.tie_gap:.3g})")  # fmt: skip


def check_perplexity(regime: Regime, errors: PositionErrors, source: str) -> Check:
    """Relative difference of the perplexities. Intervals are normal over tokens, as if these were independent."""
    shift, limit = errors.nll_got - errors.nll_want, regime.perplexity_limit()
    value = abs(float(np.expm1(shift.mean())))
    got, want = _perplexity_text(errors.nll_got), _perplexity_text(errors.nll_want)
    error = INTERVAL_SIGMAS * float(shift.std(ddof=1)) / len(shift) ** 0.5
    return Check(name="perplexity", verdict=_verdict(value <= limit), value=value, limit=limit, where=source,
                 detail=f"{got}, reference {want}, over {len(shift)} tokens; relative difference {np.expm1(shift.mean()):+.3g} "
                        f"+- {error:.2g} (95 %, paired)")  # fmt: skip


def _perplexity_text(nll: np.ndarray) -> str:
    mean, error = float(nll.mean()), INTERVAL_SIGMAS * float(nll.std(ddof=1)) / len(nll) ** 0.5
    return f"{np.exp(mean):.4f} (95 %: {np.exp(mean - error):.3f} to {np.exp(mean + error):.3f})"


def row_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Relative error of each token's hidden state. Infinite where the reference is zero and the subject is not."""
    error = np.linalg.norm(got.astype(np.float64) - want.astype(np.float64), axis=1)
    size = np.linalg.norm(want.astype(np.float64), axis=1)
    return np.where(error == 0, 0.0, error / np.where(size == 0, np.nan, size)).astype(np.float64)


def check_layers(
    regime: Regime, got: Sequence[np.ndarray], want: Sequence[np.ndarray], own: Sequence[np.ndarray] | None,
    kinds: Sequence[str],
) -> tuple[Check, tuple[LayerError, ...]]:  # fmt: skip
    """Per layer; the check's value is of the layer that exceeds its own limit by the largest factor."""
    if len(got) != len(want):
        return Check(name="layer_error", verdict="fail", value=None, limit=None,
                     detail=f"got outputs of {len(got)} layers, want {len(want)}"), ()  # fmt: skip
    layers: list[LayerError] = []
    limits: list[float] = []
    for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        found = compare(ours, theirs, relative=float("inf"))
        if not found.passed:
            return Check(name="layer_error", verdict="fail", value=found.max_abs, limit=None,
                         where=f"layer {index} ({kinds[index]})", detail=found.describe()), tuple(layers)  # fmt: skip
        own_relative = regime.typical(row_errors(own[index], theirs)) if own is not None else 0.0
        relative = regime.typical(row_errors(ours, theirs))
        assert found.max_abs is not None
        layers.append(LayerError(layer=index, kind=kinds[index], max_abs=found.max_abs, relative=relative,
                                 reference_relative=own_relative))  # fmt: skip
        limits.append(regime.layer_limit(own_relative))
    excess = [layer.relative / limit for layer, limit in zip(layers, limits, strict=True)]
    worst = int(np.argmax(excess))
    over = [index for index, ratio in enumerate(excess) if not ratio <= 1]
    where = f"layer {worst} ({kinds[worst]})"
    where += f"; the first over its limit is layer {over[0]} ({kinds[over[0]]})" if over else ""
    mean = "root mean square" if regime.exact else "median"
    detail = f"relative error per token, {mean} over {len(want[0])} tokens, of {len(layers)} layers"
    detail += f"; the reference's own at {regime.dtype}: {layers[worst].reference_relative:.3g}" if own is not None else ""
    return Check(name="layer_error", verdict=_verdict(not over), value=layers[worst].relative, limit=limits[worst],
                 where=where, detail=detail), tuple(layers)  # fmt: skip


def check_answers(regime: Regime, name: str, paths: Sequence[Path], prompts: Sequence[str]) -> Check:
    """Greedy answers against the reference; the value counts wrong tokens."""
    found = [agreement(path, regime.tie_gap) for path in paths]
    num_tokens, wrong = sum(f.num_tokens for f in found), sum(len(f.wrong) for f in found)
    cut, allowed = sum(f.cut for f in found), regime.num_excused(num_tokens)
    tie = f"{regime.tie_gap:.3g}"
    best, num_cut = sum(f.best for f in found), sum(f.cut > 0 for f in found)
    detail = (f"{num_tokens - cut} of {num_tokens} tokens compared one by one, in {len(found)} answers; {cut} cut after a tie "
              f"of the reference (two best closer than {tie}; in {num_cut} answers), where a token only has to be within "
              f"{tie} of the best; {best} are the reference's best")  # fmt: skip
    blind = float(np.mean(np.concatenate([path.blind_regret for path in paths])))
    if wrong <= allowed and regime.tie_gap >= blind:
        return not_shown(name, f"at {regime.dtype} the reference cannot tell a right token from a guess: its own error can "
                               f"bridge {tie}, a blind guess costs {blind:.3g}; {detail}")  # fmt: skip
    if wrong <= allowed and too_few(num_tokens - cut, num_tokens):
        return not_shown(name, f"too few tokens could have failed: {detail}")
    where = ""
    if wrong:
        index = next(i for i, f in enumerate(found) if f.wrong)
        place, path = found[index].wrong[0], paths[index]
        where = f"answer {index} ({prompts[index]}), token {place}"
        got, want = path.token_ids[place], path.best[place, 0]
        detail = f"got {got}, want {want}, whose logit is {path.regret[place]:.4g} higher; {detail}"
    return Check(name=name, verdict=_verdict(wrong <= allowed), value=wrong, limit=allowed, where=where, detail=detail)


def too_few(compared: int, num_tokens: int) -> bool:
    return compared == 0 or compared < MIN_COMPARED_SHARE * num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeat:
    """Answers to one prompt: the first, and others which must be the same. `path` is the reference's view of the first; only
    a comparison with ties needs it."""

    label: str
    first: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]
    path: Path | None


def check_repeats(name: str, repeats: Sequence[Repeat], what: str, *, regime: Regime | None) -> Check:
    """Other answers to the same prompts leave the first at a tie of the reference only; without a `regime` (for an engine
    that promises the same bits) nowhere at all. An answer that is equal is compared whole, another up to the first tie."""
    num_tokens = compared = wrong = same = 0
    where = ""
    for repeat in repeats:
        for number, other in enumerate(repeat.others):
            num_tokens += len(repeat.first)
            if other == repeat.first:
                same, compared = same + 1, compared + len(repeat.first)
                continue
            if regime is None:
                limit = len(repeat.first)
            else:
                assert repeat.path is not None
                limit = first_tie(repeat.path, regime.tie_gap)
            compared += limit
            if (place := first_difference(other, repeat.first, limit)) is not None:
                wrong += 1
                got = other[place] if place < len(other) else "nothing"
                want = repeat.first[place] if place < len(repeat.first) else "nothing"
                where = where or f"{repeat.label}, {what} {number + 1}, token {place}: got {got}, want {want}"
    allowed = 0 if regime is None else regime.num_excused(num_tokens)
    total = sum(len(repeat.others) for repeat in repeats)
    rule = "exactly, for the engine promises the same bits" if regime is None else "up to the first tie of the reference"
    detail = f"{compared} of {num_tokens} tokens compared, {rule}; {same} of {total} answers equal token for token"
    detail += f", {wrong} differ" + ("" if regime is None else " before a tie")
    if wrong <= allowed and too_few(compared, num_tokens):
        return not_shown(name, f"too few tokens could have failed: {detail}")
    return Check(name=name, verdict=_verdict(wrong <= allowed), value=wrong, limit=allowed, where=where, detail=detail)


def _excused_text(regime: Regime, count: int, over: int) -> str:
    if not regime.excused_share:
        return ""
    return f"; {regime.num_excused(count)} positions left out as ties of a selection, on both sides; {over} are over the limit"


def _row_and_token(index: tuple[int, ...]) -> str:
    return f"position {index[0]}, token {index[-1]}"
