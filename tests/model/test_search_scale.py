"""1,024 cards, 2.8 trillion parameters, a context of a million tokens: planned from the record in a process of its own."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dayzero.core.records import record_json
from dayzero.model.provisional import provisional
from dayzero.model.release import open_release

RELEASES = json.loads(gzip.decompress((Path(__file__).parents[1] / "data" / "published_configs.json.gz").read_bytes()))
MEASURED = """
import sys, time
from pathlib import Path
from dayzero.core.model import ModelDescription
from dayzero.core.records import read_record
from dayzero.core.target import Workload
from dayzero.devices.targets import load_target
from dayzero.plan import PlanOptions, make_plan

model, target = read_record(ModelDescription, Path(sys.argv[1])), load_target(sys.argv[2])
work = Workload(context_tokens=1_048_576, concurrency=64, input_tokens=8192, output_tokens=1024, prefill_chunk_tokens=8192)
seconds = []
for _ in range(2):  # the better one: other tests run beside this one
    start = time.process_time()
    plan = make_plan(model, target, work, PlanOptions(devices=1024))
    seconds.append(time.process_time() - start)
peak = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
assert plan.feasible and plan.devices == 1024 and plan.context_tokens == 1_048_576
# Not ru_maxrss: that begins with the size of the process that started this one.
print(plan.layout.spelled(), min(seconds), int(peak) / 1024)
"""


@pytest.mark.parametrize("target", ["ascend-950dt-144g", "nvidia-h100-sxm"])
def test_under_two_seconds_and_500_mb(tmp_path: Path, target: str) -> None:
    name = "Kimi-K3"
    (tmp_path / "config.json").write_text(json.dumps(RELEASES[name]["config"]))
    record = tmp_path / "1_model.json"
    record.write_text(json.dumps(record_json(provisional(open_release(tmp_path)))))
    done = subprocess.run([sys.executable, "-c", MEASURED, str(record), target], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    layout, seconds, megabytes = done.stdout.split()
    print(f"{name} on 1024 x {target}: {layout} in {seconds} s, {megabytes} MB", file=sys.stderr)
    assert float(seconds) < 2.0 and float(megabytes) < 500
