"""Bytes of weights per rank, from the same rule that the converter copies by (`core.sharding`).

Parameters that are alike (role, shape, rule, format) are priced once, and layers that hold the same ones are one class,
so that a thousand layouts of a thousand cards are summed in a second. What an engine pads or holds twice comes from its
memory model (`plan.engines`). Deliberately not done: choosing an engine's kernels.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Parameter, ShardRule
from dayzero.core.plan import Coordinates, Layout
from dayzero.core.sharding import EXPERT_ROLES, Box, box_elements, owns_layer, rank_boxes
from dayzero.core.units import DTYPE_BITS
from dayzero.plan.engines import WeightRules
from dayzero.plan.formats import Formats, WeightFormat

# How the ledger calls what belongs to no role of the model itself.
DRAFT, COPIES = "mtp", "attention copies"


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that cost the same on every rank. `parameter` is one of them."""

    parameter: Parameter
    format: WeightFormat
    absorbed: bool = False  # held a second time, multiplied out, in the dtype of the computation


@dataclass(frozen=True, slots=True)
class Cost:
    """Elements and bytes of one rank's part; of the bytes, what the engine holds beside the tensor itself."""

    elements: int
    num_bytes: int
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RoleCost:
    """One ledger line's worth: a role on one rank, with how its bytes come about."""

    num_bytes: int
    elements: int
    whole_elements: int  # of the same parameters, unsharded
    num_tensors: int
    formats: tuple[str, ...]


class Weights:
    """Prices of one model's parameters under one weights dtype."""

    def __init__(
        self, model: ModelDescription, weights_dtype: str, *, mtp: bool = False, rules: WeightRules | None = None
    ) -> None:
        self.rules = rules or WeightRules()
        self.formats = Formats(model, weights_dtype, self.rules.padding)
        self.num_layers = model.dimensions.num_layers
        self.num_heads = model.dimensions.num_attention_heads
        self.compute_bits = DTYPE_BITS[model.dtype]
        self.latent_widths = _latent_widths(model) if self.rules.absorbed_latents else frozenset()
        self.groups: list[Group] = []
        self._ids: dict[object, int] = {}
        self._spread: list[bool] = []  # per group: whether experts' degrees cut it, and not TP
        self._costs: list[dict[tuple[int, ...], Cost]] = []  # per group, by the degrees that cut it
        self._layer_bytes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._tensors: dict[tuple[int, ...], tuple[tuple[int, str, int], ...]] = {}
        names = {parameter.name for parameter in model.parameters}
        self.loose: list[tuple[int, Parameter]] = []  # without a layer, tied, or beyond the last layer: owned one by one
        layers: list[Counter[int]] = [Counter() for _ in range(self.num_layers)]
        self.roots: dict[str, str] = {}
        tied_roots = {parameter.tied_to for parameter in model.parameters if parameter.tied_to in names}
        for listed in model.parameters:
            if listed.role == "mtp" and not mtp:
                continue
            parameter = self._with_wide_rule(listed)
            group = self._group(parameter)
            tied = parameter.tied_to is not None or parameter.name in tied_roots
            self.roots[parameter.name] = parameter.tied_to or parameter.name
            if parameter.layer is None or parameter.layer >= self.num_layers or tied:
                self.loose.append((group, parameter))
            else:
                layers[parameter.layer][group] += 1
        # Whether no degree that cuts other roles cuts an expert.
        self.experts_apart = all(spread or group.parameter.role not in EXPERT_ROLES
                                 for group, spread in zip(self.groups, self._spread, strict=True))  # fmt: skip
        # Whether layers share a tensor, so that what a stage holds depends on which layers it has.
        self.shared_layers = any(p.layer is not None and p.layer < self.num_layers for _, p in self.loose)
        classes: dict[tuple[tuple[int, int], ...], int] = {}
        self.layer_class = [classes.setdefault(tuple(sorted(counts.items())), len(classes)) for counts in layers]
        self.classes = list(classes)

    def _with_wide_rule(self, parameter: Parameter) -> Parameter:
        """The parameter, with a rule of the engine's where it divides what the description leaves whole."""
        if parameter.role not in self.rules.wide_roles or parameter.shard.tensor_dim is not None or len(parameter.shape) < 2:
            return parameter
        wide = [dim for dim in (0, len(parameter.shape) - 1) if parameter.shape[dim] >= self.formats.hidden]
        if parameter.shape == (self.formats.hidden, parameter.shape[-1]) and len(wide) == 1:
            wide = []  # out of something narrow, into the model's width: a latent's expansion has no heads
        if parameter.shape[-1] == self.formats.hidden and len(wide) == 1 and wide[0] == len(parameter.shape) - 1:
            wide = []  # from the model's width into something narrow
        if not wide:
            return parameter
        dim = wide[-1] if parameter.shape[0] == self.formats.hidden else wide[0]
        size = parameter.shape[dim]
        return replace(parameter, shard=ShardRule(tensor_dim=dim, segments=(size,), units=(size,)))

    def _group(self, parameter: Parameter) -> int:
        weight_format = self.formats.of(parameter)
        absorbed = parameter.role == "attention" and (parameter.layer, parameter.shape[-1]) in self.latent_widths and (
            len(parameter.shape) == 2 and parameter.shard.tensor_dim == 0
        )  # fmt: skip
        pieces = parameter.sources if weight_format.storage is not None else ()
        form = tuple(sorted(name.rpartition(".")[2] + "*" * ("*" in name) for name in pieces))
        leaf = tuple(parameter.name.rsplit(".", 2)[-2:])
        key = (parameter.role, parameter.shape, parameter.shard, weight_format, leaf, form, absorbed)
        if key not in self._ids:
            self._ids[key] = len(self.groups)
            self.groups.append(Group(parameter, weight_format, absorbed))
            self._spread.append(parameter.role in EXPERT_ROLES and parameter.shard.expert_dim is not None)
            self._costs.append({})
        return self._ids[key]

    def costs(self, layout: Layout, place: Coordinates) -> Callable[[int], Cost]:
        """One parameter of a group on the rank at `place`, by group. What is returned raises DayZeroError when the cut is
        illegal."""
        whole = (layout.tp, place.tp)
        spread = (layout.ep, layout.expert_tp, place.ep, place.expert_tp, layout.redundant_experts)

        def cost(group: int) -> Cost:
            known, key = self._costs[group], spread if self._spread[group] else whole
            if (found := known.get(key)) is None:
                found = known[key] = self._priced(group, layout, place)
            return found

        return cost

    def _priced(self, group: int, layout: Layout, place: Coordinates) -> Cost:
        parameter, weight_format = self.groups[group].parameter, self.groups[group].format
        boxes = self._boxes(parameter, layout, place)
        num_bytes = weight_format.bytes_of(parameter, boxes, hidden=self.formats.hidden, experts=self.formats.experts)
        copied = box_elements(boxes) * self.compute_bits // 8 if self.groups[group].absorbed else 0
        return Cost(box_elements(boxes), num_bytes + copied, copied)

    def _boxes(self, parameter: Parameter, layout: Layout, place: Coordinates) -> tuple[Box, ...]:
        """The rank's boxes; a vocabulary that the engine pads is dealt out in equal parts, the last ones beyond its end."""
        rule, step = parameter.shard, self.rules.vocabulary_multiple
        if layout.redundant_experts and parameter.role in EXPERT_ROLES and rule.expert_dim is not None:
            return _with_copies(parameter, layout, place)
        if step == 1 or parameter.role not in ("embedding", "head") or rule.tensor_dim != 0:
            return rank_boxes(parameter, layout, place)
        padded = -(-parameter.shape[0] // step) * step
        rows = -(-padded // layout.tp)
        return (((place.tp * rows, (place.tp + 1) * rows), *((0, size) for size in parameter.shape[1:])),)

    def layer_bytes(self, layout: Layout, place: Coordinates) -> tuple[int, ...]:
        """Bytes of each layer on a rank at `place` of whichever stage holds it (tied parameters apart)."""
        key = (layout.tp, layout.ep, layout.expert_tp, place.tp, place.ep, place.expert_tp, layout.redundant_experts)
        if key not in self._layer_bytes:
            cost = self.costs(layout, place)
            by_class = [sum(cost(group).num_bytes * count for group, count in counts) for counts in self.classes]
            self._layer_bytes[key] = tuple(by_class[index] for index in self.layer_class)
        return self._layer_bytes[key]

    def loose_bytes(self, layout: Layout, place: Coordinates, stage: int) -> int:
        """Bytes of the parameters outside the layers (and the tied ones) that `stage` stores, each tied group once."""
        cost = self.costs(layout, place)
        return sum(cost(group).num_bytes for group, _ in self._loose_of(layout, stage))

    def cut_costs(self, layout: Layout, place: Coordinates) -> tuple[list[int], int, int]:
        """What a pipeline cut weighs: bytes per layer, and what the first and the last stage carry beside their layers.

        A tensor that several layers share is weighed at the first of them; the ledger then counts it on every stage.
        """
        layers, cost = list(self.layer_bytes(layout, place)), self.costs(layout, place)
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        seen: set[str] = set()
        for group, parameter in self.loose:
            root, num_bytes = self.roots[parameter.name], cost(group).num_bytes
            if parameter.layer is not None and parameter.layer < self.num_layers:
                layers[parameter.layer] += 0 if root in seen else num_bytes
                seen.add(root)
            elif parameter.layer is None and owns_layer(parameter, layout, 0):
                first[root] = num_bytes
            if (parameter.layer is None or parameter.layer >= self.num_layers) and (
                parameter.layer is not None or owns_layer(parameter, layout, layout.pp - 1)
            ):
                last[root] = num_bytes
        return layers, sum(first.values()), sum(last.values())

    def _loose_of(self, layout: Layout, stage: int) -> list[tuple[int, Parameter]]:
        owned: dict[str, tuple[int, Parameter]] = {}
        for group, parameter in self.loose:
            if owns_layer(parameter, layout, stage):
                owned.setdefault(self.roots[parameter.name], (group, parameter))
        return list(owned.values())

    def by_role(self, layout: Layout, place: Coordinates, stage: int) -> dict[str, RoleCost]:
        """What the rank at `place` of `stage` stores, by role."""
        roles: dict[str, RoleCost] = {}
        cost_of = self.costs(layout, place)
        for group, role, count in self.tensors(layout, stage):
            parameter, cost = self.groups[group].parameter, cost_of(group)
            old = roles.get(role, RoleCost(0, 0, 0, 0, ()))
            name = self.groups[group].format.name
            if cost.copied_bytes:
                twin = roles.get(COPIES, RoleCost(0, 0, 0, 0, ()))
                roles[COPIES] = RoleCost(twin.num_bytes + cost.copied_bytes * count, twin.elements + cost.elements * count,
                                         twin.whole_elements + parameter.num_elements * count, twin.num_tensors + count,
                                         (f"{self.compute_bits}-bit copies",))  # fmt: skip
            roles[role] = RoleCost(
                old.num_bytes + (cost.num_bytes - cost.copied_bytes) * count, old.elements + cost.elements * count,
                old.whole_elements + parameter.num_elements * count, old.num_tensors + count,
                old.formats if name in old.formats else (*old.formats, name),
            )  # fmt: skip
        return roles

    def tensors(self, layout: Layout, stage: int) -> tuple[tuple[int, str, int], ...]:
        """What each rank of a stage has a part of: group, ledger line, and how many."""
        first, stop = layout.stages[stage] if layout.stages else (0, self.num_layers)
        key = (first, stop, stage == 0, stage == layout.pp - 1, layout.stages[-1][1] if layout.stages else 0)
        if key not in self._tensors:
            counts: Counter[tuple[int, str]] = Counter()
            for index, number in Counter(self.layer_class[first:stop]).items():
                for group, count in self.classes[index]:
                    counts[group, self.groups[group].parameter.role] += count * number
            counts.update((group, self._line_of(parameter)) for group, parameter in self._loose_of(layout, stage))
            self._tensors[key] = tuple((group, line, count) for (group, line), count in counts.items())
        return self._tensors[key]

    def _line_of(self, parameter: Parameter) -> str:
        """The ledger line a parameter is counted in: its role, and one line for all of a draft block."""
        beyond = parameter.layer is not None and parameter.layer >= self.num_layers
        return DRAFT if beyond else parameter.role

    def layer_experts_bytes(self, layout: Layout, place: Coordinates) -> int:
        """The experts of one layer on a rank, in the layer where they take most."""
        cost, sizes = self.costs(layout, place), [0]
        for counts in self.classes:
            sizes.append(sum(cost(group).num_bytes * count for group, count in counts if self._spread[group]))
        return max(sizes)

    def largest_part(self, layout: Layout, place: Coordinates, stage: int) -> tuple[int, str]:
        """The largest single tensor a rank of the stage loads, and the role it has."""
        cost = self.costs(layout, place)
        sizes = [(cost(group).num_bytes, self.groups[group].parameter.role) for group, _, _ in self.tensors(layout, stage)]
        return max(sizes, default=(0, "other"))

    def illegal(self, layout: Layout) -> str | None:
        """The one reason why some parameter cannot be cut this way, or None.

        Quantization blocks count: each segment of a fused tensor (gate and up apart) must be cut at a block's border, in
        the dimension that is cut, or scales would belong to two ranks.
        """
        if self.rules.wide_roles and self.num_heads and self.num_heads % layout.tp:
            return f"{self.num_heads} attention heads are not divisible by tp={layout.tp}, as the engine demands"
        for group in self.groups:
            parameter, rule, block = group.parameter, group.parameter.shard, group.format.block
            is_expert = parameter.role == "expert" and rule.expert_dim is not None
            degree = layout.expert_tp if is_expert else layout.tp
            if parameter.role == "expert" and rule.expert_dim is None and layout.ep > 1:
                return f"{parameter.name}: experts are separate modules, which expert parallelism cannot divide"
            if rule.expert_dim is not None and is_expert:
                experts, copies = parameter.shape[rule.expert_dim], layout.redundant_experts
                if layout.ep > experts + copies:
                    return f"ep={layout.ep} exceeds the {experts} experts" + (f" and {copies} copies" if copies else "")
                if experts + copies > experts * layout.ep:
                    return f"{copies} copies: more than one of each of {experts} experts on each of ep={layout.ep} ranks"
            if rule.tensor_dim is None or degree == 1:
                continue
            # The sharding rule could deal out heads unevenly; attention kernels and the output projection cannot.
            if (
                parameter.role == "attention"
                and not rule.replicable
                and any(units % degree and units != parameter.shape[rule.tensor_dim] for units in rule.units)
            ):
                return f"{parameter.name}: {' + '.join(map(str, rule.units))} heads are not divisible by tp={degree}"
            segments = rule.segments or (parameter.shape[rule.tensor_dim],)
            from_end = len(parameter.shape) - rule.tensor_dim  # 1: columns, 2: rows
            # Blocks of an estimated tensor are not where the real ones are: its size is known, its shape is not.
            step = block[2 - from_end] if block and from_end <= 2 and rule.proof != "none" else 1
            for size, units in zip(segments, rule.units or segments, strict=True):
                parts = min(degree, units) if rule.replicable else degree
                if step > 1 and (size % parts or size // parts % step):
                    return (f"{parameter.name}: {size} / {degree} = {size / degree:g} is not a multiple of the "
                            f"quantization block {step}")  # fmt: skip
        return None

    def legal_tp(self, layout: Layout, limit: int) -> list[int]:
        """Tensor-parallel degrees up to `limit` at which every parameter can be cut."""
        found = []
        for degree in range(1, limit + 1):
            try:
                candidate = replace(layout, tp=degree, stages=())
                if self.illegal(candidate) is None:
                    self.layer_bytes(candidate, candidate.coordinates(0))
                    found.append(degree)
            except DayZeroError:
                continue
        return found


def _with_copies(parameter: Parameter, layout: Layout, place: Coordinates) -> tuple[Box, ...]:
    """Boxes of as many experts as the rank has places for, at most all of them. Which ones the copies are is a matter of load;
    all experts of a tensor take the same."""
    dim = parameter.shard.expert_dim
    assert dim is not None, parameter.name
    held = min(len(layout.expert_places(parameter.shape[dim], place.ep)), parameter.shape[dim])
    alone = Layout(tp=layout.expert_tp)
    boxes = rank_boxes(parameter, alone, alone.coordinates(place.expert_tp))
    return tuple((*box[:dim], (0, held), *box[dim + 1 :]) for box in boxes) if held else ()


def _latent_widths(model: ModelDescription) -> frozenset[tuple[int | None, int]]:
    """(layer, width of its cached latent): a matrix that expands such a latent to heads is what engines multiply out."""
    return frozenset(
        (layer, spec.elements_per_token)
        for kind in model.layer_kinds
        for spec in kind.cache
        if spec.kind == "latent"
        for layer in kind.layers
    )
