"""Bytes of weights per rank, from the same rule that the converter copies by (`core.sharding`).

Parameters that are alike (role, shape, rule, format) are priced once, and layers that hold the same ones are one class,
so that a thousand layouts of a thousand cards are summed in a second. Deliberately not done: guessing what an engine
re-lays out after loading.
"""

from collections import Counter
from dataclasses import dataclass, replace

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Parameter, Role
from dayzero.core.plan import Coordinates, Layout
from dayzero.core.sharding import box_elements, local_shape, owns_layer, rank_boxes
from dayzero.plan.formats import Formats, WeightFormat


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that cost the same on every rank. `parameter` is one of them."""

    parameter: Parameter
    format: WeightFormat


@dataclass(frozen=True, slots=True)
class Cost:
    """Elements and bytes of one rank's part."""

    elements: int
    num_bytes: int


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

    def __init__(self, model: ModelDescription, weights_dtype: str, *, mtp: bool = False) -> None:
        self.formats = Formats(model, weights_dtype)
        self.num_layers = model.dimensions.num_layers
        self.groups: list[Group] = []
        self._ids: dict[object, int] = {}
        self._costs: dict[tuple[int, ...], Cost] = {}
        names = {parameter.name for parameter in model.parameters}
        self.loose: list[tuple[int, Parameter]] = []  # without a layer, tied, or beyond the last layer: owned one by one
        layers: list[Counter[int]] = [Counter() for _ in range(self.num_layers)]
        self.roots: dict[str, str] = {}
        tied_roots = {parameter.tied_to for parameter in model.parameters if parameter.tied_to in names}
        for parameter in model.parameters:
            if parameter.role == "mtp" and not mtp:
                continue
            group = self._group(parameter)
            tied = parameter.tied_to is not None or parameter.name in tied_roots
            self.roots[parameter.name] = parameter.tied_to or parameter.name
            if parameter.layer is None or parameter.layer >= self.num_layers or tied:
                self.loose.append((group, parameter))
            else:
                layers[parameter.layer][group] += 1
        classes: dict[tuple[tuple[int, int], ...], int] = {}
        self.layer_class = [classes.setdefault(tuple(sorted(counts.items())), len(classes)) for counts in layers]
        self.classes = list(classes)
        self.class_groups = [tuple(group for group, _ in counts) for counts in self.classes]

    def _group(self, parameter: Parameter) -> int:
        weight_format = self.formats.of(parameter)
        key = (parameter.role, parameter.shape, parameter.shard, weight_format)
        if key not in self._ids:
            self._ids[key] = len(self.groups)
            self.groups.append(Group(parameter, weight_format))
        return self._ids[key]

    def cost(self, group: int, layout: Layout, place: Coordinates) -> Cost:
        """One parameter of the group on the rank at `place`. Raises DayZeroError when the cut is illegal."""
        key = (group, layout.tp, layout.ep, layout.expert_tp, place.tp, place.ep, place.expert_tp)
        if key not in self._costs:
            parameter, weight_format = self.groups[group].parameter, self.groups[group].format
            boxes = rank_boxes(parameter, layout, place)
            num_bytes = weight_format.bytes_of(local_shape(boxes, parameter.shard.tensor_dim)) if boxes else 0
            self._costs[key] = Cost(box_elements(boxes), num_bytes)
        return self._costs[key]

    def layer_bytes(self, layout: Layout, place: Coordinates) -> list[int]:
        """Bytes of each layer on a rank at `place` of whichever stage holds it (tied parameters apart)."""
        by_class = [sum(self.cost(group, layout, place).num_bytes * count for group, count in counts)
                    for counts in self.classes]  # fmt: skip
        return [by_class[index] for index in self.layer_class]

    def loose_bytes(self, layout: Layout, place: Coordinates, stage: int) -> int:
        """Bytes of the parameters outside the layers (and the tied ones) that `stage` stores, each tied group once."""
        return sum(self.cost(group, layout, place).num_bytes for group, _ in self._loose_of(layout, stage))

    def cut_costs(self, layout: Layout, place: Coordinates) -> tuple[list[int], int, int]:
        """What a pipeline cut weighs: bytes per layer, and what the first and the last stage carry beside their layers.

        A tensor that several layers share is weighed at the first of them; the ledger then counts it on every stage.
        """
        layers = self.layer_bytes(layout, place)
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        seen: set[str] = set()
        for group, parameter in self.loose:
            root, num_bytes = self.roots[parameter.name], self.cost(group, layout, place).num_bytes
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

    def by_role(self, layout: Layout, place: Coordinates, stage: int) -> dict[Role, RoleCost]:
        """What the rank at `place` of `stage` stores, by role."""
        first, stop = layout.stages[stage] if layout.stages else (0, self.num_layers)
        counts: Counter[int] = Counter()
        for index, number in Counter(self.layer_class[first:stop]).items():
            for group, count in self.classes[index]:
                counts[group] += count * number
        counts.update(group for group, _ in self._loose_of(layout, stage))
        roles: dict[Role, RoleCost] = {}
        for group, count in counts.items():
            parameter, cost = self.groups[group].parameter, self.cost(group, layout, place)
            old = roles.get(parameter.role, RoleCost(0, 0, 0, 0, ()))
            name = self.groups[group].format.name
            roles[parameter.role] = RoleCost(
                old.num_bytes + cost.num_bytes * count, old.elements + cost.elements * count,
                old.whole_elements + parameter.num_elements * count, old.num_tensors + count,
                old.formats if name in old.formats else (*old.formats, name),
            )  # fmt: skip
        return roles

    def largest_part(self, layout: Layout, place: Coordinates, stage: int) -> tuple[int, str]:
        """The largest single tensor a rank of the stage loads, and the role it has."""
        first, stop = layout.stages[stage] if layout.stages else (0, self.num_layers)
        groups = {group for index in set(self.layer_class[first:stop]) for group in self.class_groups[index]}
        groups |= {group for group, _ in self._loose_of(layout, stage)}
        sizes = [(self.cost(group, layout, place).num_bytes, self.groups[group].parameter.role) for group in groups]
        return max(sizes, default=(0, "other"))

    def illegal(self, layout: Layout) -> str | None:
        """The one reason why some parameter cannot be cut this way, or None.

        Quantization blocks count: each segment of a fused tensor (gate and up apart) must be cut at a block's border, in
        the dimension that is cut, or scales would belong to two ranks.
        """
        for group in self.groups:
            parameter, rule, block = group.parameter, group.parameter.shard, group.format.block
            is_expert = parameter.role == "expert" and rule.expert_dim is not None
            degree = layout.expert_tp if is_expert else layout.tp
            if parameter.role == "expert" and rule.expert_dim is None and layout.ep > 1:
                return f"{parameter.name}: experts are separate modules, which expert parallelism cannot divide"
            if rule.expert_dim is not None and is_expert and layout.ep > parameter.shape[rule.expert_dim]:
                return f"ep={layout.ep} exceeds the {parameter.shape[rule.expert_dim]} experts"
            if rule.tensor_dim is None or degree == 1:
                continue
            # The sharding rule could deal out heads unevenly; attention kernels and the output projection cannot.
            if parameter.role == "attention" and not rule.replicable and any(
                units % degree and units != parameter.shape[rule.tensor_dim] for units in rule.units
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
