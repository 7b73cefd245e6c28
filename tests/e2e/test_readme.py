"""README is true: its commands run as written and print what it shows, its file tree is the tree."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Run by `.ci/run` itself, or minutes long; each is checked below to be what the tree really has.
RUN_BY_CI = ("make test", "make demo")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands():
    """(command, the output shown below it) of every console block."""
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command.strip(), output.rstrip()


def test_the_first_commands_are_the_makefile_targets_that_ci_runs():
    assert [command for command, _ in commands()][: len(RUN_BY_CI)] == list(RUN_BY_CI)
    script = (ROOT / ".ci" / "run").read_text()
    assert all(command in script for command in RUN_BY_CI)


def lines_that_must_appear(output):
    """Lines of shown output without those that differ from run to run (marked with an ellipsis)."""
    return [line.strip() for line in output.splitlines() if line.strip() and "..." not in line]


def needs_the_demo_model(command):
    return any(word in command for word in ("models/", "runs/", "artifact"))


HERE = [pair for pair in commands() if pair[0] not in RUN_BY_CI and not needs_the_demo_model(pair[0])]


@pytest.mark.parametrize(("command", "output"), HERE)
def test_a_command_prints_what_is_shown(command, output):
    words = shlex.split(command)
    assert words[0] == "dayzero", command
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in lines_that_must_appear(output):
        assert " ".join(line.split()) in printed, f"not printed: {line}\n{done.stdout}"


def test_commands_on_the_demo_model_are_those_of_the_demo():
    """The ones that need models/smollm2 are run by `make demo`; here only that verbs and options exist."""
    helped = {}
    for command, _ in commands():
        words = shlex.split(command)
        if words[0] != "dayzero" or not needs_the_demo_model(command):
            continue
        verb = words[1]
        if verb not in helped:
            done = subprocess.run([sys.executable, "-m", "dayzero", verb, "--help"], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            helped[verb] = done.stdout
        for option in (word for word in words if word.startswith("--")):
            assert option in helped[verb], f"{verb} has no {option}"


def test_the_file_tree_is_the_tree():
    tree = next(block for block in blocks("text") if "src/dayzero/" in block)
    shown = set()
    for line in tree.splitlines():
        found = re.match(r"^(\s*)([\w./-]+)\s{2,}\S", line)
        if found and len(found[1]) >= 2:
            shown.add(found[2].rstrip("/"))
    packages = {path.parent.name for path in (ROOT / "src" / "dayzero").glob("*/__init__.py")}
    modules = {path.name for path in (ROOT / "src" / "dayzero").glob("*.py")} - {"__init__.py", "__main__.py"}
    assert shown == packages | modules
