# What this project does, by name. Everything runs in .venv, which is made on first use and again when pyproject.toml
# changes.
#   make test                        lint and all tests but the full matrices
#   make demo                        train a small Llama on real text, resume it, let it write
#   make test TORCH="torch==2.12.*"  with another torch; options of pip may stand in it too

PYTHON ?= python3
# Installed first and only where no torch of MINIMUM is: left to itself, pip may choose a build of several gigabytes.
TORCH ?= torch==2.13.0
MINIMUM := (2, 11)

BIN := .venv/bin
# A process per rank and a thread per process: more threads than cores only wait for each other.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test prove lint bench docs clean
.DEFAULT_GOAL := test

demo: .venv/installed
	$(BIN)/python tools/demo.py

test: lint
	$(BIN)/pytest -m "not prove"

prove: .venv/installed
	$(BIN)/pytest -m prove

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python benchmarks/train_throughput.py

docs: .venv/installed
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'from importlib.metadata import version; v = version("torch").split("."); \
	    raise SystemExit((int(v[0]), int(v[1])) < $(MINIMUM))' 2>/dev/null || $(BIN)/pip install $(TORCH)
	$(BIN)/pip install -e '.[dev]'
	touch $@
