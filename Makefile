# make demo, make test: each sets up .venv first; run again, it is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-gpu test-faults lint bench clean
.DEFAULT_GOAL := test

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v < (3, 14) else "lightning-gpuopt needs Python 3.10 to 3.13, this is %d.%d; try: make PYTHON=python3.11" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/lightning-gpuopt demo

test: $(READY)
	$(BIN)/python -m pytest -q

test-gpu: $(READY)
	$(BIN)/python -m pytest -q -m gpu tests/gpu

test-faults: $(READY)
	$(BIN)/python -m tests.faults --markdown docs/fault-suite.md

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/storage.py
	$(BIN)/python benchmarks/dali.py
	$(BIN)/python benchmarks/workers.py

clean:
	rm -rf $(VENV) demo-data demo-run
