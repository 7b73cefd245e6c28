"""A target with some of its figures replaced: `--set card.memory_bytes=96GiB`.

Goes in: a target and texts by dotted name. Comes out: the target, whose stated figures count as given by the user: no longer
unverified. Deliberately not done: judging whether a figure is plausible.
"""

import difflib
import re
from dataclasses import replace
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.records import from_dict, to_dict
from dayzero.core.target import Target
from dayzero.core.units import canonical_dtype
from dayzero.plan.trust import doubtful

UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
         "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}  # fmt: skip
PARTS = ("card", "node", "software")
RATES = "card.flops_per_s"


def figure_names(target: Target) -> list[str]:
    """Every figure that can be set, by its dotted name."""
    data = to_dict(target)
    names = [f"{part}.{name}" for part in PARTS for name in data[part] if f"{part}.{name}" != RATES]
    return [*names, *(f"{RATES}.{dtype}" for dtype in data["card"]["flops_per_s"]), "network_bytes_per_s"]


def with_figures(target: Target, figures: dict[str, str]) -> Target:
    """Raises DayZeroError naming the nearest figure for a name nobody knows, and for a value that is none."""
    data, names = to_dict(target), figure_names(target)
    trusted = [name for name in names if not doubtful(target, name)]
    given: list[str] = []
    for asked, text in figures.items():
        name = _known(asked, names)
        *path, last = name.split(".") if not name.startswith(RATES + ".") else ["card", "flops_per_s", name[len(RATES) + 1 :]]
        place: Any = data
        for part in path:
            place = place[part]
        place[last] = _value(name, text, place.get(last))
        given.append(name)
    if "card.memory_bytes" in given and "card.usable_memory_bytes" not in given:
        data["card"]["usable_memory_bytes"] = None  # it belonged to the figure that was replaced
        trusted.append("card.usable_memory_bytes")
    if "node.link_bytes_per_s" in given:
        data["links"] = []  # what is stated now replaces what was measured
    found = from_dict(Target, data, source="--set")
    # What is given is no longer in doubt; everything else is worth what it was worth.
    unverified = tuple(name for name in names if name not in trusted and name not in given)
    confidence = "medium" if target.confidence in ("low", "unverified") else target.confidence
    told = "; ".join(filter(None, [target.notes, "set by the user: " + ", ".join(given)]))
    return replace(found, unverified_fields=unverified, confidence=confidence, notes=told) if given else target


def _known(asked: str, names: list[str]) -> str:
    if asked in names:
        return asked
    if asked.startswith(RATES + "."):
        try:
            return f"{RATES}.{canonical_dtype(asked[len(RATES) + 1 :])}"
        except KeyError:
            pass  # told below, with the nearest name
    near = difflib.get_close_matches(asked, names, n=1, cutoff=0.3)
    ends = [name for name in names if name.rpartition(".")[2] == asked]
    raise DayZeroError(f"a target has no figure {asked!r}", got=asked, want=", ".join(names),
                       fix=f"did you mean {(ends or near)[0]!r}?" if ends or near else "give one of these")  # fmt: skip


def _value(name: str, text: str, old: object) -> object:
    """A number with or without a unit, `null`, or a word where the figure is one."""
    text = text.strip()
    if text.lower() in ("null", "none"):
        return None
    found = re.fullmatch(r"([0-9._]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*?)(?:/s)?", text)
    if found and found[2].upper() in (*UNITS, "B", ""):
        number = float(found[1].replace("_", "")) * UNITS.get(found[2].upper(), 1)
        whole = name.endswith(("memory_bytes", "num_cards", "scaleup_domain"))
        if whole and number != int(number):
            raise DayZeroError(f"{name} is a whole number", got=text, want="a whole number", fix="correct --set")
        return int(number) if whole else number
    if name.startswith("software.") or name == "node.topology":
        return tuple(part.strip() for part in text.split(",")) if isinstance(old, (list, tuple)) else text
    if name == "card.native_dtypes":
        return tuple(part.strip() for part in text.split(","))
    raise DayZeroError(f"{name} is not set to {text!r}", got=text, want="a number, such as 96GiB, 4.8e12 or 450GB/s",
                       fix="correct --set")  # fmt: skip
