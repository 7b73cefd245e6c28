"""The parameters the subject computes with against the release's, bit for bit.

Of the subject only digests are kept, so that it can be gone before the reference is loaded. Optional: an engine which has
repacked its weights cannot show them, and conversion is proven by its own ledger.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from dayzero.core.reports import Check
from dayzero.validate.checks import not_shown
from dayzero.validate.subject import HasParameters, Reference, Subject

NAME = "parameters_bitwise"
BLOCK = 4096  # values a digest
DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Digest:
    """A parameter's shape, and the digests of its float32 values in blocks, one after the other."""

    shape: tuple[int, ...]
    blocks: bytes


def digest_of(values: np.ndarray) -> Digest:
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    parts = (flat[start : start + BLOCK] for start in range(0, flat.size, BLOCK))
    return Digest(shape=values.shape, blocks=b"".join(hashlib.sha256(part.data).digest()[:DIGEST_BYTES] for part in parts))


def digests_of(subject: Subject) -> dict[str, Digest] | None:
    """None where the subject does not show its parameters."""
    if not isinstance(subject, HasParameters):
        return None
    return {name: digest_of(values) for name, values in subject.parameters()}


def check_parameters(held: dict[str, Digest] | None, dtype: str, reference: Reference) -> Check:
    """Every parameter of the reference once, none beside them; each the release's value rounded to the subject's dtype, or
    unrounded (some parameters stay in float32 whatever the dtype). Not required where it cannot be shown; a wrong one is."""
    if held is None:
        return not_shown(NAME, "the subject does not show its parameters", required=False)
    wrong, seen = [], set()
    for name, values in reference.parameters():
        seen.add(name)
        if name not in held:
            wrong.append(f"{name}: not held by the subject")
        elif held[name] != (want := digest_of(rounded(values, dtype))) and held[name] != digest_of(values):
            wrong.append(f"{name}: {_difference(held[name], want)}")
    wrong += [f"{name}: not a parameter of the class" for name in held if name not in seen]
    return Check(name=NAME, verdict="fail" if wrong else "pass", value=len(wrong), limit=0, required=bool(wrong),
                 where=wrong[0].split(":")[0] if wrong else "",
                 detail="; ".join(wrong[:5]) or f"{len(seen)} parameters equal at {dtype}")  # fmt: skip


def _difference(got: Digest, want: Digest) -> str:
    if got.shape != want.shape:
        return f"shape {got.shape} instead of {want.shape}"
    starts = range(0, len(want.blocks), DIGEST_BYTES)
    bad = [start // DIGEST_BYTES for start in starts if got.blocks[start:][:DIGEST_BYTES] != want.blocks[start:][:DIGEST_BYTES]]
    size = int(np.prod(want.shape, dtype=np.int64))
    first, last = (np.unravel_index(at, want.shape) for at in (bad[0] * BLOCK, min(size, (bad[0] + 1) * BLOCK) - 1))
    ends = [tuple(int(i) for i in index) for index in (first, last)]
    return f"{len(bad)} of {len(starts)} blocks of values differ, the first from {ends[0]} to {ends[1]} of {want.shape}"


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 rounded to a dtype and widened again (nearest, ties to even). Values must be finite."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32)
    return values
