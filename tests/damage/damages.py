"""All kinds of damage, in the order of the layer that can tell."""

from __future__ import annotations

from tests.damage import file_damages, schema_damages, value_damages
from tests.damage.kinds import DAMAGES, Damage

LAYERS = ("container", "index", "schema", "values", "digests")
assert file_damages and schema_damages and value_damages  # imported for what they register
ALL: tuple[Damage, ...] = tuple(sorted(DAMAGES, key=lambda one: LAYERS.index(one.layer)))
assert len({one.name for one in ALL}) == len(ALL), "two kinds of damage have one name"
