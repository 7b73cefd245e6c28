"""The weights' round trip on a tiny checkpoint of every decoder type that transformers has, TP 1,2,4 x EP 1,2,4 x PP 1,2.

    python benchmarks/round_trip.py [TYPE ...]

Each type is converted for each legal layout, the artifact is proved against its source, and written back as a Hugging Face
folder whose tensors must equal the release's bit for bit. Prints a line a type, the tally, and one JSON line. Exit status 1
when any layout fails, or when transformers itself builds no checkpoint for more types than it did.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from dayzero.core.errors import DayZeroError
from dayzero.model.describe import describe
from tests.round_trip import DEGREES, Outcome, round_trips
from tests.tiny.build import DECODER_TYPES, make_tiny_checkpoint, make_tiny_model

# Memory, where there is such a folder: what is measured is no disk.
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


MAX_WITHOUT_CHECKPOINT = 4  # their configs do not build, or need libraries that are not there


def make_checkpoint(model_type: str, folder: Path) -> Path:
    """As `make_tiny_checkpoint`; for vocabularies that hold no byte-level tokenizer, the weights alone."""
    try:
        return make_tiny_checkpoint(model_type, folder)
    except AssertionError:
        make_tiny_model(model_type, dtype=torch.bfloat16).save_pretrained(folder)
        return folder


def outcomes(model_type: str, folder: Path) -> list[Outcome]:
    try:
        source = make_checkpoint(model_type, folder / model_type)
        model = describe(source)
        if errors := [problem.detail for problem in model.problems if problem.severity == "error"]:
            raise DayZeroError("the description has errors", got=errors[0], want="none", fix="see the detail")
    except Exception as error:  # the instance itself cannot be built or saved: transformers' own reason is the result
        return [Outcome(layout="", state="no checkpoint", detail=f"{type(error).__name__}: {' '.join(str(error).split())}")]
    found = list(round_trips(source, model, folder / "work"))
    shutil.rmtree(folder / model_type)
    return found


def main() -> None:
    torch.set_num_threads(1)
    started, tally, failed, reasons = time.monotonic(), Counter[str](), {}, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="round-trip-", dir=SCRATCH) as folder:
        for model_type in sys.argv[1:] or DECODER_TYPES:
            found = outcomes(model_type, Path(folder))
            tally.update(one.state for one in found)
            reasons.update(one.detail.split(":")[0] for one in found if one.state == "illegal")
            counts = Counter(one.state for one in found)
            bad = [one for one in found if one.state in ("failed", "no checkpoint")]
            if bad:
                failed[model_type] = {one.layout: one.detail for one in bad}
            told = f"{bad[0].layout} {bad[0].detail[:200]}" if bad else ""
            print(
                f"{model_type:32} exact {counts['exact']:2}  illegal {counts['illegal']:2}  failed {len(bad):2}  {told}",
                flush=True,
            )
    print(
        f"\n{dict(tally)} of {len(DEGREES)} layouts a type, {time.monotonic() - started:.0f} s; illegal: {dict(reasons.most_common(8))}"
    )
    print(json.dumps({"tally": dict(tally), "failed": failed, "seconds": round(time.monotonic() - started, 1)}))
    sys.exit(1 if tally["failed"] or tally["no checkpoint"] > MAX_WITHOUT_CHECKPOINT else 0)


if __name__ == "__main__":
    main()
