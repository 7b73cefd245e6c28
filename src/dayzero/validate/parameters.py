"""The parameters the subject computes with against the release's, bit for bit at the subject's dtype.

Optional: an engine which has repacked its weights cannot show them, and conversion is proven by its own ledger.
"""

import numpy as np

from dayzero.core.reports import Check
from dayzero.validate.checks import not_shown
from dayzero.validate.compare import compare
from dayzero.validate.subject import HasParameters, Reference, Subject

NAME = "parameters_bitwise"


def check_parameters(subject: Subject, reference: Reference) -> Check:
    """Every parameter of the reference once, none beside them; each the release's value, or that rounded to the subject's
    dtype (some parameters stay in float32 whatever the dtype)."""
    if not isinstance(subject, HasParameters):
        return not_shown(NAME, "the subject does not show its parameters", required=False)
    want, seen, wrong = dict(reference.parameters()), set(), []
    for name, got in subject.parameters():
        if name not in want:
            wrong.append(f"{name}: not a parameter of the class")
            continue
        seen.add(name)
        found = compare(got, want[name], exact=True)
        if not found.passed:
            found = compare(got, rounded(want[name], subject.info.dtype), exact=True)
        if not found.passed:
            wrong.append(f"{name}: {found.describe()}")
    wrong += [f"{name}: not held by the subject" for name in want if name not in seen]
    return Check(name=NAME, verdict="fail" if wrong else "pass", value=len(wrong), limit=0, required=False,
                 where=wrong[0].split(":")[0] if wrong else "",
                 detail="; ".join(wrong[:5]) or f"{len(seen)} parameters equal at {subject.info.dtype}")  # fmt: skip


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 rounded to a dtype and widened again (nearest, ties to even). Values must be finite."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32)
    return values
