# Everything runs in .venv, which `setup` makes. A machine with Python 3.11 or newer and pip is enough; a C++ compiler
# makes the CPU kernels (without one the engine runs on plain PyTorch, and says so).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup test check lint types unit demo sweep round-trip damage bench bench-convert clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,gguf,quantize,remote,dev]'
	$(BIN)/python -m dayzero.ops.cpu
	@touch $@

# All tests: unit, model, device and e2e; two files at a time, each with one thread.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# What a commit must pass, in under a minute: style, types, layers, unit tests. The parts run side by side.
check: $(READY)
	@$(MAKE) --no-print-directory -j 2 lint types unit

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks scripts

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit -n 2 --dist worksteal -m "not slow"

# From nothing to a served, validated model and an acceptance report.
demo: $(READY)
	$(BIN)/python scripts/demo.py

# The engine's equality check on every decoder type transformers has (tiny instances).
sweep: $(READY)
	$(BIN)/python benchmarks/sweep.py

# Every decoder type through rank shards of every legal layout and back, bit for bit.
round-trip: $(READY)
	$(BIN)/python benchmarks/round_trip.py

# docs/damage.md again: what each kind of damage does here and in other tools.
damage: $(READY)
	$(BIN)/python scripts/damage_table.py

bench: $(READY)
	$(BIN)/python benchmarks/engine.py

bench-convert: $(READY)
	$(BIN)/python benchmarks/convert.py

clean:
	rm -rf $(VENV) build runs models
