"""How long a prefill and a decode step take: a roofline per operator plus alpha-beta per collective, as a range.

Each operator takes the longer of computing and reading; collectives overlap with them partly; starting operators and what
lies between steps take time of their own. The range spans what good and poor kernels and engines reach of the published
rates. It is narrower where the target was measured and wider where a figure is unverified; `TimeEstimate.note` says which.
Deliberately not done: scheduling.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from dayzero.core.plan import Layout, TimeEstimate
from dayzero.core.target import Target
from dayzero.core.units import DTYPE_BITS
from dayzero.plan.formats import FLOATS
from dayzero.plan.ledger import Evaluator
from dayzero.plan.links import Links, Seconds
from dayzero.plan.traffic import Traffic
from dayzero.plan.trust import doubtful, links_measured
from dayzero.plan.work import Batch, KindWork, Operator, Work

# Only to order layouts where a card publishes nothing; never shown as a time.
NOMINAL_FLOPS_PER_S, NOMINAL_BYTES_PER_S = 3e14, 1.5e12
# A rate stands for another where a card states only one of them. 4-bit products run at 8-bit rates without 4-bit units.
SAME_RATE = {
    "bfloat16": ("bfloat16", "float16"), "float16": ("float16", "bfloat16"), "float32": ("float32",),
    "float8_e4m3fn": ("float8_e4m3fn",), "int8": ("int8",),
    "float4_e2m1": ("float4_e2m1", "float8_e4m3fn"),
}  # fmt: skip

# What a release says of its activations -> the rate its products run at.
ACTIVATION_RATES = (("fp8", "float8_e4m3fn"), ("int8", "int8"), ("fp4", "float4_e2m1"), ("w8a8", "int8"))
# Without it: formats whose presets quantize activations too. Others widen weights first.
PRESET_RATES = {"fp8": "float8_e4m3fn", "int8": "int8", "nvfp4": "float4_e2m1"}


@dataclass(frozen=True, slots=True)
class Shares:
    """What is reached of the stated rates: at best, and at worst."""

    compute: tuple[float, float]
    memory: tuple[float, float]
    link: tuple[float, float]
    launch_s: tuple[float, float]
    hidden: tuple[float, float]  # of the transfers, as far as there is work to hide them behind
    note: str
    step_s: tuple[float, float] = (0.0, 0.0)


# Kernels reach 35-85% of a published matrix rate and 50-92% of a published bandwidth; links 40-90%. A measured figure is a
# kernel's own result already. Starting operators is the engine's (`StepModel`).
PUBLISHED = Shares((0.85, 0.35), (0.92, 0.5), (0.9, 0.4), (1.5e-6, 12e-6), (0.7, 0.0), "published rates")
MEASURED = replace(PUBLISHED, compute=(1.0, 0.7), memory=(1.0, 0.75), note="measured rates")
# Of a measured link, as of a measured matrix rate, and as far as its own points lie from the line through them. Not where a
# published network may carry part of the bytes.
MEASURED_LINK = (1.0, 0.7)
# Of those shares again, at best and at worst. Attention over a cache reads pages a few heads at a time. Experts' products are
# many small ones. Weights that are widened first are unpacked in the inner loop.
ATTENTION, EXPERTS, WIDENED = (0.92, 0.3), (0.92, 0.6), (0.7, 0.33)
# An empty message at best and at worst, over what the fastest libraries take; of a measured link, over what was measured.
START_UP, MEASURED_START_UP = (1.0, 3.0), (1.0, 2.0)
DOUBT = 0.6  # further share that an unverified figure may fall short by, and 1 / 0.8 that it may exceed


@dataclass(frozen=True, slots=True)
class Rates:
    flops_per_s: float
    bytes_per_s: float
    published: bool  # compute and memory rates both


def rates_of(target: Target, dtype: str) -> Rates:
    stated = target.card.flops_per_s
    flops = next((stated[name] for name in SAME_RATE.get(dtype, (dtype,)) if name in stated), None)
    bandwidth = target.card.memory_bytes_per_s
    published = flops is not None and bandwidth is not None
    return Rates(flops or NOMINAL_FLOPS_PER_S, bandwidth or NOMINAL_BYTES_PER_S, published)


def shares_of(target: Target, dtype: str) -> Shares:
    """The range by what the figures are worth."""
    shares = MEASURED if target.confidence == "measured" else PUBLISHED
    fields = {"compute": f"card.flops_per_s.{dtype}", "memory": "card.memory_bytes_per_s", "link": "node.link_bytes_per_s"}
    linked = links_measured(target) and (target.network_bytes_per_s is None or target.node.topology == "shared memory")
    if linked:
        most, least = Links(target).spread()
        span = max(MEASURED_LINK[0], most), min(MEASURED_LINK[1], least)
        shares = replace(shares, link=span, note=f"{shares.note}, links measured")
    wide = [name for name, field in fields.items() if doubtful(target, field) and not (linked and name == "link")]
    compute, memory, link = (
        (span[0] / 0.8, span[1] * DOUBT) if name in wide else span
        for name, span in (("compute", shares.compute), ("memory", shares.memory), ("link", shares.link))
    )
    shares = replace(shares, compute=compute, memory=memory, link=link)
    spans = ", ".join(f"{name} {getattr(shares, name)[1]:.0%}-{getattr(shares, name)[0]:.0%}" for name in fields)
    told = f"{shares.note}: {spans} of them reached, {shares.hidden[1]:.0%}-{shares.hidden[0]:.0%} of transfers hidden"
    return replace(shares, note=told + (f"; unverified: {', '.join(fields[name] for name in wide)}" if wide else ""))


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of one step through all stages, by part; `low_s`, `high_s` before collectives. What a pipeline cut balances: the
    seconds of each layer in the middle of the range, and of what is outside them."""

    compute_s: float
    memory_s: float
    low_s: float
    high_s: float
    launches: float
    layers_s: tuple[float, ...]
    outside_s: float


class Roofline:
    """Times of layouts of one model on one target."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator, self.model = evaluator, evaluator.model
        self.dtype = evaluator.request.compute_dtype
        self.rates = rates_of(evaluator.target, self.dtype)
        steps, shares = evaluator.engine.steps, shares_of(evaluator.target, self.dtype)
        told = (f"{shares.note}; of those {ATTENTION[1]:.0%}-{ATTENTION[0]:.0%} over caches, {EXPERTS[1]:.0%}-{EXPERTS[0]:.0%} "
                f"by experts, {WIDENED[1]:.0%}-{WIDENED[0]:.0%} where weights are widened first; "
                f"{steps.operator_s[0] * 1e6:.3g}-{steps.operator_s[1] * 1e6:.3g} us an operator and "
                f"{steps.step_s[0] * 1e3:.3g}-{steps.step_s[1] * 1e3:.3g} ms a step in {evaluator.engine.name}")  # fmt: skip
        self.shares = replace(shares, launch_s=steps.operator_s, step_s=steps.step_s, note=told)
        self.start_up = MEASURED_START_UP if links_measured(evaluator.target) else START_UP
        self.work = Work(evaluator)
        self.links = Links(evaluator.target)
        self.traffic = Traffic(self.model, self.links, DTYPE_BITS[self.dtype] // 8)
        self._rates: dict[tuple[str, ...], float] = {}
        self._spans: dict[tuple[Operator, ...], tuple[float, ...]] = {}
        self._steps: dict[object, Step] = {}

    @cached_property
    def activations(self) -> dict[str, str]:
        """Scheme of a stored group -> the dtype its products run in ("" : the weights are widened first)."""
        found = {}
        for group in self.model.quantization_groups:
            said = (group.activations or "").lower()
            found[group.scheme] = next((dtype for word, dtype in ACTIVATION_RATES if word in said), "")
        return found

    def flops_per_s(self, formats: tuple[str, ...]) -> float:
        """The rate of a product with weights in these formats: their activations' dtype where it has a rate of its own."""
        if formats not in self._rates:
            dtype = self.product_dtype(formats)
            stated = self.evaluator.target.card.flops_per_s
            known = next((stated[other] for other in SAME_RATE.get(dtype, ()) if other in stated), None)
            self._rates[formats] = known or self.rates.flops_per_s
        return self._rates[formats]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes whose stated rates the times rest on."""
        stated = self.evaluator.target.card.flops_per_s
        used = {self.dtype, *(name for name, rate in stated.items() if rate in self._rates.values())}
        return (self.dtype, *sorted(used - {self.dtype, "float16" if self.dtype == "bfloat16" else "bfloat16"}))

    def _operator(self, operator: Operator) -> tuple[float, float, float, float]:
        rate = self.flops_per_s(operator.formats)
        compute, memory, shares = operator.flops / rate, operator.num_bytes / self.rates.bytes_per_s, self.shares
        ends = []
        for index, uneven in enumerate((1.0, operator.uneven)):
            widened = WIDENED[index] if self.widens(operator.formats) else 1.0
            kernel = {"mixer": ATTENTION[index], "expert": EXPERTS[index]}.get(operator.name, 1.0) * widened
            ends.append(max(uneven * compute / shares.compute[index] / widened, memory / shares.memory[index] / kernel))
        return compute, memory, ends[0], ends[1]

    def widens(self, formats: tuple[str, ...]) -> bool:
        """Whether products with weights in these formats unpack them to the dtype of the computation first."""
        return bool(formats) and formats[0] not in FLOATS and not self.product_dtype(formats)

    def product_dtype(self, formats: tuple[str, ...]) -> str:
        """The quantized dtype that products with such weights run in; "" where none is said to be."""
        name = formats[0] if formats else ""
        return self.activations.get(name, PRESET_RATES.get(name, ""))

    def _kind(self, work: KindWork) -> tuple[float, ...]:
        """(compute, memory, low, high) seconds of one layer."""
        compute = memory = low = high = 0.0
        for operators in filter(None, work.parts):
            if (span := self._spans.get(operators)) is None:
                span = self._spans[operators] = tuple(map(sum, zip(*map(self._operator, operators), strict=True)))
            compute, memory, low, high = compute + span[0], memory + span[1], low + span[2], high + span[3]
        return compute, memory, low, high

    def step(self, layout: Layout, batch: Batch) -> Step:
        """One step through all stages before collectives. Cached: placements, cuts and searches of one model share it."""
        key = (layout.tp, layout.cp, layout.cp_in_tp, layout.ep, layout.dp, layout.sp, layout.redundant_experts, batch)
        if (found := self._steps.get(key)) is None:
            found = self._steps[key] = self._summed(self.work.kinds(layout, batch))
        return found

    def _summed(self, works: tuple[KindWork, ...]) -> Step:
        compute = memory = low = high = launches = 0.0
        times, start_s = [0.0] * self.model.dimensions.num_layers, sum(self.shares.launch_s)
        ones = [self._kind(work) for work in works]
        for work, one in zip(works, ones, strict=True):
            compute, memory = compute + work.num_layers * one[0], memory + work.num_layers * one[1]
            low, high = low + work.num_layers * one[2], high + work.num_layers * one[3]
            launches += work.num_layers * work.launches
        for kind, work, one in zip(self.model.layer_kinds, works, ones, strict=False):
            seconds = (one[2] + one[3]) / 2 + work.launches * start_s / 2
            for layer in kind.layers:
                times[layer] = seconds
        return Step(compute, memory, low, high, launches, tuple(times), sum(ones[-1][2:]) / 2)

    def at_least_s(self, layout: Layout, batch: Batch) -> float:
        """A bound from below on the middle of a step's range, from a few sums: reading and computing what the rank holds, in
        whichever is longer, collectives inside one domain, and starting its operators."""
        weights, experts, flops, expert_flops = self.work.sums(layout)
        tokens = batch.tokens if batch.decodes else batch.tokens / layout.cp_devices
        everyone = tokens * layout.dp * layout.cp_devices
        share = self.work.chosen_of(layout)
        touched = 1.0 - (1.0 - min(1.0, share)) ** everyone if experts else 0.0
        rows = batch.sequences if batch.decodes else 1
        cached = rows * self.work.cached_bytes(layout, batch)
        computed = (flops * tokens + expert_flops * everyone * share) / self._fastest
        reduced = self.traffic.layers_at_best(layout, tokens)
        total, shares = 0.0, self.shares
        for index in (0, 1):
            read = weights + experts * touched / EXPERTS[index] + cached / ATTENTION[index]
            work = max(computed / shares.compute[index], read / self.rates.bytes_per_s / shares.memory[index])
            exposed = (1.0 - shares.hidden[index]) * reduced.beta / shares.link[index]
            total += work + exposed + reduced.alpha * self.start_up[index] + shares.step_s[index]
            total += self.work.least_launches * shares.launch_s[index]
        return total / 2

    @cached_property
    def _fastest(self) -> float:
        return max([self.rates.flops_per_s, *self.evaluator.target.card.flops_per_s.values()])

    def prefill_batch(self, num_tokens: int) -> tuple[Batch, int]:
        """One chunk of a prompt in the middle of it, and how many chunks there are."""
        steps = -(-num_tokens // self.evaluator.request.chunk_tokens)
        return Batch("prefill", num_tokens / steps, 1, num_tokens // 2 + 1), steps

    def prefill(self, layout: Layout, num_tokens: int) -> TimeEstimate:
        """One prompt of `num_tokens` on one replica, through all stages."""
        batch, steps = self.prefill_batch(num_tokens)
        return self._estimate(layout, batch, steps)

    def decode(self, layout: Layout, sequences: int, context: int, *, drafts: int = 0) -> TimeEstimate:
        """One step of `sequences` sequences on one replica, each with `context` tokens in its cache: a token for each, and
        `drafts` more that are verified beside it."""
        return self._estimate(layout, Batch("decode", sequences * (1 + drafts), sequences, context), 1)

    def _estimate(self, layout: Layout, batch: Batch, steps: int) -> TimeEstimate:
        step, shares = self.step(layout, batch), self.shares
        moved = self.traffic.step(layout, batch)
        low, high = self.ends(step, moved)
        return TimeEstimate(
            compute_s=steps * step.compute_s, memory_s=steps * step.memory_s,
            communication_s=steps * (moved.alpha + moved.beta), low_s=steps * low, high_s=steps * high,
            launch_s=steps * step.launches * shares.launch_s[0], note=shares.note,
        )  # fmt: skip

    def ends(self, step: Step, moved: Seconds) -> tuple[float, float]:
        """Seconds of one step with its collectives, at best and at worst."""
        shares, ends = self.shares, []
        for index, work in enumerate((step.low_s, step.high_s)):
            transfer = moved.beta / shares.link[index]
            exposed = transfer - shares.hidden[index] * min(transfer, work)
            started = step.launches * shares.launch_s[index] + shares.step_s[index]
            ends.append(work + exposed + moved.alpha * self.start_up[index] + started)
        return ends[0], ends[1]


def middle(estimate: TimeEstimate) -> float:
    return (estimate.low_s + estimate.high_s) / 2


def slower(estimate: TimeEstimate, factor: float) -> TimeEstimate:
    """The same where the slowest stage holds up the others."""
    return replace(estimate, low_s=estimate.low_s * factor, high_s=estimate.high_s * factor)
