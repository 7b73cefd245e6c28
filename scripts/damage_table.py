"""Harm small checkpoints in every known way, ask DayZero and today's tools, and write docs/damage.md.

    .venv/bin/python scripts/damage_table.py            the table (some minutes)
    .venv/bin/python scripts/damage_table.py --sound    sound tiny releases of every decoder type: is anything said?
    .venv/bin/python scripts/damage_table.py --faults 300    random corruptions of a sound release, with and without digests

The kinds of damage are those of tests/damage. The document depends on the versions of the tools alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
for _name, _value in {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error",
                      "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}.items():  # fmt: skip
    os.environ.setdefault(_name, _value)

from tests.damage.baselines import TOOLS, attempt  # noqa: E402
from tests.damage.bases import BASES  # noqa: E402  (after the path and the environment)
from tests.damage.damages import ALL, LAYERS, Damage  # noqa: E402
from tests.damage.faults import fault_run  # noqa: E402
from tests.damage.outcomes import Outcome, dayzero, warnings_of, write_digests  # noqa: E402
from tests.damage.sound import alarms  # noqa: E402
from tests.tiny.build import DECODER_TYPES, make_tiny_checkpoint  # noqa: E402

DOCUMENT = ROOT / "docs" / "damage.md"
COLUMNS = (*TOOLS, "DayZero", "with digests")
WHO = {
    "container": "the file by itself: size, header, what it is",
    "index": "the index against the files and their headers",
    "schema": "names, shapes, dtypes and settings against the model",
    "values": "the tensors' bytes against what such tensors hold",
    "digests": "nothing but the publisher's digests: a sound checkpoint of another model",
}


def rows(root: Path) -> tuple[list[tuple[Damage, dict[str, str]]], list[str]]:
    """The table, and why a tool's cells are empty."""
    sound = {base: make(root / "sound" / base) for base, make in BASES.items()}
    ours = {base: warnings_of(folder, root / "out") for base, folder in sound.items()}
    theirs = {(tool, base): attempt(tool, folder) for tool in TOOLS for base, folder in sound.items()}
    notes = [f"{tool} does not load the sound {base} checkpoint where this was made: {lines[0].splitlines()[0]}."
             for (tool, base), (verdict, lines) in theirs.items() if verdict == "refused"]  # fmt: skip
    found = []
    for damage in ALL:
        cells = {}
        for column in COLUMNS:
            folder = Path(shutil.copytree(sound[damage.base], root / "damaged"))
            if column == "with digests":
                write_digests(folder)
            touched = damage.apply(folder)
            if column in TOOLS:
                verdict, known = theirs[column, damage.base]
                cells[column] = "-" if verdict == "refused" else attempt(column, folder, known)[0]
            else:
                cells[column] = cell(dayzero(folder, root / "out", ours[damage.base]), touched)
            for left in root.glob("damaged*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        print(f"{damage.layer:10} {damage.name:50} {' '.join(f'{cells[column]:14}' for column in COLUMNS)}", flush=True)
        found.append((damage, cells))
    return found, notes


def cell(outcome: Outcome, touched: set[str]) -> str:
    return outcome.verdict if outcome.verdict == "silent" or outcome.names(touched) else f"{outcome.verdict}, unnamed"


INTRODUCTION = """# Damaged checkpoints

{number} kinds of damage to small generated checkpoints of several shards (dense, tied, biased, with experts, FP8), made by
`tests/damage`, given to safetensors {safetensors} alone (each file loaded), transformers {transformers} (`from_pretrained` of
tokenizer and model) and DayZero (`inspect`, then `convert`). Remade by `scripts/damage_table.py`.

- **refused**: it stops. DayZero's words name a file, tensor or key that was damaged, else it says *unnamed*.
- **warned**: it goes on, and says something that it does not say of the sound checkpoint. DayZero names what is wrong.
- **silent**: loaded as if nothing were. **hangs**: it never ends.
- **with digests**: a `SHA256SUMS` of the sound files lies beside them.

Who can tell, were it perfect:

{who}

Kinds that pass (silently + with a warning, of those that apply):

"""


def document(found: list[tuple[Damage, dict[str, str]]], notes: list[str]) -> str:
    def passing(column: str, layer: str) -> str:
        cells = [cells[column] for damage, cells in found if layer in ("all", damage.layer) and cells[column] != "-"]
        return f"{cells.count('silent')} + {sum(one.startswith('warned') for one in cells)} of {len(cells)}"

    def line(*cells: str) -> str:
        return f"| {' | '.join(cells)} |\n"

    text = INTRODUCTION.format(
        number=len(found), safetensors=version("safetensors"), transformers=version("transformers"),
        who="\n".join(f"- {layer}: {meaning}" for layer, meaning in WHO.items()),
    )  # fmt: skip
    text += line("who can tell", *COLUMNS) + f"|---|{'---|' * len(COLUMNS)}\n"
    for layer in (*LAYERS, "all"):
        text += line(layer, *(passing(column, layer) for column in COLUMNS))
    text += "\n" + "".join(f"**-**: {note}\n\n" for note in notes)
    text += line("kind", "who can tell", *COLUMNS) + f"|---|---|{'---|' * len(COLUMNS)}\n"
    for damage, cells in found:
        text += line(damage.name, damage.layer, *(cells[column] for column in COLUMNS))
    return text


def sound_types(root: Path) -> int:
    clean, unbuilt, alarming = 0, [], 0
    for model_type in DECODER_TYPES:
        folder = root / model_type
        try:
            make_tiny_checkpoint(model_type, folder)
        except Exception as error:  # a type that cannot be made small
            unbuilt.append(f"{model_type} ({type(error).__name__})")
            continue
        said = alarms(folder)
        clean, alarming = clean + (not said), alarming + bool(said)
        for line in said:
            print(f"{model_type}: {line[:500]}", flush=True)
        shutil.rmtree(folder)
    print(f"{clean} of {len(DECODER_TYPES)} types clean, {alarming} with an alarm, not built: {', '.join(unbuilt) or 'none'}")
    return int(alarming > 0)


def random_faults(root: Path, count: int) -> int:
    sound, other = BASES["dense"](root / "sound"), BASES["dense"](root / "other", seed=1)
    missed_with_digests = 0
    for digests in (True, False):
        work = root / f"digests-{digests}"
        work.mkdir()
        faults = fault_run(sound, other, work, count=count, seed=20260, digests=digests)
        missed = Counter(fault.kind for fault in faults if not fault.found)
        print(f"{'with' if digests else 'without'} digests: {count - missed.total()} of {count} found and named; missed: "
              f"{dict(missed) or 'none'}")  # fmt: skip
        missed_with_digests += missed.total() if digests else 0
    return int(missed_with_digests > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sound", action="store_true", help="look for false alarms on every decoder type instead")
    parser.add_argument("--faults", type=int, metavar="N", help="N random corruptions instead")
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="damage-") as scratch:
        if arguments.sound:
            return sound_types(Path(scratch))
        if arguments.faults:
            return random_faults(Path(scratch), arguments.faults)
        arguments.out.write_text(document(*rows(Path(scratch))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
