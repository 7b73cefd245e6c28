"""The limits of the numerics checks, each with its justification. Chosen before any run; never widened to pass one.

Two regimes. Where the subject computes in float32 or more, limits are absolute. In a reduced dtype an absolute limit would
judge the dtype, not the engine, so the yardstick is the reference's own error at that dtype against float32, on the same
tokens.
"""

from dataclasses import dataclass, fields

# Dtypes judged by the absolute limits.
EXACT_DTYPES = frozenset({"float32", "float64"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A number and why it is this number."""

    value: float
    because: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    logits_max_abs: Limit = Limit(
        value=1e-3,
        because="Absolute, float32. Reordered float32 sums differ by 1e-5 on tiny models, by 1e-4 in a real one of 30 layers; "
        "a wrong mask, position or weight moves logits by 1e-2 and more.",
    )
    logits_relative: Limit = Limit(
        value=1e-3,
        because="Float32, Frobenius norm of the error over that of the reference. Catches what the absolute limit cannot see "
        "where logits are small: all of them scaled by one factor.",
    )
    layer_relative: Limit = Limit(
        value=1e-4,
        because="Float32, relative error of a token's hidden state, root mean square over tokens (per token, because the first "
        "token's norm is often a thousand times the others' and would hide them). Logits of spread 10 at 1e-4 are within 1e-3. "
        "In reduced dtypes the median over tokens is taken: one token with a huge activation errs by 0.8 to 3.6 times the "
        "reference's own error in a correct program, the median by 0.9 to 1.0.",
    )
    kl_divergence: Limit = Limit(
        value=1e-6,
        because="Float32, nats per token. Logits within e of each other give at most about e*e/2, which is 5e-7 for 1e-3.",
    )
    perplexity_relative: Limit = Limit(
        value=1e-3,
        because="Float32. Logits within 1e-3 move a token's log-probability by at most 2e-3, and in the mean by far less.",
    )
    tie_gap: Limit = Limit(
        value=1e-4,
        because="Float32. Where the reference's two best logits are closer, either token is right: ten times the rounding seen "
        "between two correct orders of summation.",
    )
    own_error_factor: Limit = Limit(
        value=2.0,
        because="Reduced dtypes. Two correct programs at one dtype err about equally against float32 (ratios 0.9 to 1.1 of the "
        "largest errors over 14 architectures), one that rounds once more than it should errs several times as much.",
    )
    own_kl_factor: Limit = Limit(
        value=4.0, because="Reduced dtypes. Divergence grows with the square of the error: the square of own_error_factor."
    )
    own_mean_sigmas: Limit = Limit(
        value=3.0,
        because="Reduced dtypes, perplexity. The reference's own shift of the mean may cancel by chance, so its uncertainty "
        "over the tokens (three standard errors) is added before the factor is applied.",
    )
    selection_share: Limit = Limit(
        value=0.05,
        because="Reduced dtypes, models that select experts or keys. Scores that tie within rounding send a token elsewhere "
        "in any correct implementation, with errors a hundred times the usual; seen for 0 to 4 of 96 tokens, not the "
        "same ones in two runs. So many tokens at most are left out, on both sides, and their number is printed.",
    )
    dtype_rounding: Limit = Limit(
        value=1.0,
        because="Reduced dtypes, layers: an error of one unit roundoff of the output itself is never counted as wrong, for "
        "where the reference's own first layers happen to be exact.",
    )

    def justifications(self) -> dict[str, str]:
        return {field.name: getattr(self, field.name).because for field in fields(self)}


LIMITS = Limits()

# Unit roundoff: half the distance from 1 to the next number.
UNIT_ROUNDOFF: dict[str, float] = {
    "float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3,
}  # fmt: skip
