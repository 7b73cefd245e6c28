"""A release's quantization settings in, what is doubtful about them out, as problems: warnings, since headers may know more.

Told are settings that are not read (another form than an object), a format whose bytes cannot be told, what is assumed, and
places that say something else than the one that is read. Settings are compared by what they store, not by their words: the
same format is spelt in several ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dayzero.core.model import Problem
from dayzero.model.stored.quantization import BESIDE, Quantization, Rule, read_settings, settings_parts, stated_settings

MAX_SHOWN = 80


def quantization_doubts(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> list[Problem]:
    """`beside`: the content of the file `BESIDE`, where there is one."""
    found = [
        _told("quantization_unread", place, f"{place} is {_shown(value)}, not an object: nothing of it is read")
        for place, value in settings_parts(config)
        if not isinstance(value, Mapping)
    ]
    if beside is not None and not (isinstance(beside.get("quantization"), Mapping) and beside["quantization"]):
        value = f"`quantization` in it is {_shown(beside.get('quantization'))}"
        found.append(_told("quantization_unread", BESIDE, f"{BESIDE}: {value}, not an object with settings: it is not read"))
    stated = stated_settings(config, beside)
    if not stated:
        return found
    (used, settings), others = stated[0], stated[1:]
    read = read_settings(used, settings, config)
    told = dict.fromkeys([*(rule.unknown for rule in _rules(read) if rule.storage is None), *read.notes])
    found += [_told("quantization", used, f"{used}: {text}") for text in told]
    for place, other in others:
        second = read_settings(place, other, config)
        ours, theirs = _formats(read), _formats(second)
        # One of them may list more, such as experts of another format; what neither holds of the other is a contradiction.
        if not (ours <= theirs or theirs <= ours):
            said = f"{used} says {', '.join(sorted(ours))}, {place} says {', '.join(sorted(theirs))}: {used} is used"
            found.append(_told("quantization_differs", place, said))
        elif ours == theirs and not read.listed and not second.listed and set(read.ignored) != set(second.ignored):
            names = sorted(set(read.ignored) ^ set(second.ignored))
            more = ", ..." * (len(names) > 4)
            said = f"{used} and {place} except other modules ({', '.join(names[:4])}{more}): {used} is used"
            found.append(_told("quantization_differs", place, said))
    return found


def _rules(quantization: Quantization) -> list[Rule]:
    return [*(quantization.listed or {}).values(), *quantization.rules]


def _formats(quantization: Quantization) -> set[str]:
    made = set()
    for rule in _rules(quantization):
        storage = rule.storage
        block = f" {storage.block[0]}x{storage.block[1]}" if storage and storage.scheme == "fp8-block" else ""
        made.add(storage.scheme + block if storage else f"{rule.name!r} (not known)")
    return made or {"nothing quantized"}


def _told(kind: str, place: str, detail: str) -> Problem:
    return Problem(kind=kind, severity="warning", file=BESIDE if place == BESIDE else "config.json", detail=detail)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
