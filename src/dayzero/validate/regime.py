"""The subject's dtype and the reference's own errors at it in, the limits that hold out. See `limits` for the two regimes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dayzero.core.model import LayerKind
from dayzero.validate.limits import EXACT_DTYPES, UNIT_ROUNDOFF, Limits
from dayzero.validate.positions import PositionErrors

# Mixers that pick which keys to attend to, beside those that keep an index for it.
SELECTING_MIXERS = frozenset({"sparse_latent", "compressed"})


def selects(layer_kinds: Sequence[LayerKind]) -> bool:
    """Whether any layer chooses experts or keys by score: there a tie within rounding changes the result by more than
    rounding."""
    return any(
        kind.feed_forward == "moe" or kind.mixer in SELECTING_MIXERS or any(cache.kind == "indexer" for cache in kind.cache)
        for kind in layer_kinds
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """`own` are the reference's errors at the subject's dtype on the scored texts (None where limits are absolute).
    `unusable` says why no limit can be derived."""

    limits: Limits
    dtype: str
    selects: bool
    own: PositionErrors | None = None
    unusable: str = ""

    @property
    def exact(self) -> bool:
        return self.dtype in EXACT_DTYPES

    @property
    def excused_share(self) -> float:
        """Share of the positions left out as ties of a selection; none in the exact dtypes."""
        return 0.0 if self.exact or not self.selects else self.limits.selection_share.value

    def num_excused(self, num_positions: int) -> int:
        return int(self.excused_share * num_positions)

    def kept(self, values: np.ndarray) -> np.ndarray:
        """The values without the largest ones that are excused, smallest first."""
        return np.sort(values)[: len(values) - self.num_excused(len(values))]

    def typical(self, values: np.ndarray) -> float:
        """Root mean square over tokens; in a reduced dtype the median (see `Limits.layer_relative`). NaN (a reference row of
        zeros, missed) counts as infinite."""
        values = np.nan_to_num(values, nan=np.inf)
        return float(np.sqrt(np.mean(values**2))) if self.exact else float(np.median(values))

    @property
    def tie_gap(self) -> float:
        """Distance of the two best logits below which either may come first. In a reduced dtype: what an error of twice the
        reference's own can turn round."""
        if self.exact:
            return self.limits.tie_gap.value
        assert self.own is not None
        return max(self.limits.tie_gap.value, self.limits.own_error_factor.value * float(self.kept(self.own.gap_error).max()))

    def logits_limit(self) -> float:
        if self.exact:
            return self.limits.logits_max_abs.value
        assert self.own is not None
        return self.limits.own_error_factor.value * float(self.kept(self.own.worst_abs).max())

    def kl_limit(self) -> float:
        if self.exact:
            return self.limits.kl_divergence.value
        assert self.own is not None
        own = float(self.kept(self.own.kl).mean())
        return max(self.limits.kl_divergence.value, self.limits.own_kl_factor.value * own)

    def perplexity_limit(self) -> float:
        if self.exact:
            return self.limits.perplexity_relative.value
        assert self.own is not None
        shift = self.own.nll_got - self.own.nll_want
        spread = self.limits.own_mean_sigmas.value * float(shift.std(ddof=1)) / len(shift) ** 0.5
        bound = self.limits.own_error_factor.value * (abs(float(shift.mean())) + spread)
        return max(self.limits.perplexity_relative.value, float(np.expm1(bound)))

    def layer_limit(self, own_relative: float) -> float:
        if self.exact:
            return self.limits.layer_relative.value
        rounding = self.limits.dtype_rounding.value * UNIT_ROUNDOFF.get(self.dtype, 0.0)
        return max(rounding, self.limits.own_error_factor.value * own_relative)
