"""`make demo`: fetch a small real model, adapt it to this machine, show where the report is and three answers.

The same verbs as on the command line, one after the other; nothing here that a user could not type.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

MODEL, RUNS = Path("models/smollm2"), Path("runs")


def run(*arguments: str) -> dict[str, object]:
    """One verb with --json; its progress goes to the terminal. The object it printed."""
    print(f"$ dayzero {' '.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "dayzero", *arguments, "--json"], stdout=subprocess.PIPE, text=True)
    answer = json.loads(done.stdout)
    if "error" in answer or done.returncode not in (0, 1):
        sys.exit(done.returncode or 2)
    return answer | {"status": done.returncode}


def main() -> None:
    run("fetch", "smollm2", "--out", str(MODEL))
    started = time.monotonic()
    acceptance = run("adapt", str(MODEL), "--target", "cpu-local", "--runs", str(RUNS))
    seconds = time.monotonic() - started
    folder = Path(str(acceptance["run"]))
    numerics = json.loads((folder / "6_numerics.json").read_text())
    print(f"\nadapted in {seconds:.0f} s; verdict: {acceptance['verdict']}")
    for dimension in acceptance["dimensions"]:
        print(f"  {dimension['name']:<26} {dimension['verdict']}")
    print(f"report: {folder / 'acceptance.html'}")
    print(f"serve it again with: .venv/bin/dayzero serve {folder}\n")
    for sample in numerics["samples"][:3]:
        print(f"> {sample['prompt']}\n{sample['answer'].strip()}\n")
    failed = [dimension["name"] for dimension in acceptance["dimensions"] if dimension["verdict"] == "fail"]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
