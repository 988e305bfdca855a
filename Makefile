# make demo, make test: each sets up .venv first; run again, it is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test test-timed test-loaded test-examples test-matrix test-gpu test-mutations test-faults lint hooks docs bench clean
.DEFAULT_GOAL := test

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 10) else "lightning-gpuopt needs Python 3.10 or later, this is %d.%d; try: make PYTHON=python3.11" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# .venv with this package and all that its tests and linters need.
setup: $(READY)

demo: $(READY)
	$(BIN)/lightning-gpuopt demo

# The tests are in lanes, each test in one of them. .ci/run calls all but the last three.
#   test           the core lane: what a developer wants to know within minutes, however busy the machine is
#   test-timed     figures of real time, on the machine as it is
#   test-examples  the examples and the demo, as people run them
#   test-matrix    what takes longest, and every combination of what the core lane shows with a few
#   test-gpu       what needs an NVIDIA GPU
#   test-loaders   loaders of libraries, in an environment that has them
#   test-engines   engines whose workers build an LMDB, in an environment that has them
# Two processes share a lane's tests. A process that dies ends the lane, with the name of its test: another in its place
# would wait for ever for more tests than are left. Tests that fail are run once more, alone and in a new process: real
# processes, signals and clocks are in nearly every lane, and what a fixture measured is then measured again, too.
PARALLEL ?= -n 2 --max-worker-restart 0
# A part of the matrix lane, such as 2/4; CI runs another one for each commit.
PART ?= 1/1
lane = $(1)/bin/python -m pytest -q -o cache_dir=.pytest_cache/$@ $(2)
run-lane = $(call lane,$(1),$(2)) $(PARALLEL) --cache-clear || { test $$? -eq 1 && \
	echo 'make $@: those that failed, once more, alone' && $(call lane,$(1),$(2)) -n 0 --last-failed --last-failed-no-failures none; }

test: $(READY)
	$(call run-lane,$(VENV))

test-timed: $(READY)
	$(call run-lane,$(VENV),-m timed)

# The core lane beside four busy processes: what fails here only for want of time belongs into test-timed.
test-loaded: $(READY)
	$(BIN)/python -m tests.loaded 4 $(BIN)/python -m pytest -q $(PARALLEL) $(ARGS)

test-examples: $(READY)
	$(call run-lane,$(VENV),-m example)

test-matrix: $(READY)
	$(call run-lane,$(VENV),-m matrix --part $(PART))

test-gpu: $(READY)
	$(BIN)/python -m pytest -q -m gpu tests/gpu

# Faults in the package, each of which a test of its room has to show; an hour or less.
test-mutations: $(READY)
	$(BIN)/python -m tests.mutate $(ARGS)

test-faults: $(READY)
	$(BIN)/python -m evaluation --markdown docs/fault-suite.md

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m tests.prose

# The same before each commit; see .pre-commit-config.yaml.
hooks: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pre-commit>=3.7'
	$(BIN)/pre-commit install

# The pages of docs/, in site/; strict: a link that leads nowhere is an error. Nothing is loaded from the network to build
# them once mkdocs is installed.
DOCS_READY := $(VENV)/.docs-ready

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/storage.py
	$(BIN)/python benchmarks/dali.py
	$(BIN)/python benchmarks/workers.py
	$(BIN)/python benchmarks/watch.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/growth.py

clean:
	rm -rf $(VENV) demo-data demo-run site

# The oldest that is promised, and the newest there is, each in an environment of its own with the whole suite; fewer
# tests with, for example, `make test-floor ARGS=tests/loading`.
ARGS ?=
FLOOR_PYTHON ?= $(call found,3.10)
NEWEST_PYTHON ?= $(call found,3.13)
# An interpreter of this version: on the PATH, or one of pyenv's.
found = $(shell for python in python$(1) "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$(1).*/bin/python; do \
	"$$python" -c '' 2>/dev/null && echo "$$python" && break; done)
needs = test -n '$($(3))' || { echo 'make $(1) needs Python $(2), and found none: install it, or say where it is: make $(1) $(3)=/path/to/python$(2)' >&2; exit 1; }

LOADERS_PYTHON ?= $(call found,3.11)
ENGINES_PYTHON ?= $(call found,3.11)
LIBRARIES := litdata mosaicml-streaming webdataset datasets torchdata
ENGINES := dask distributed

# The wheel in fresh environments of the oldest and the newest Python, without the source tree: the demo trains from it.
.PHONY: check-release check-release-floor check-release-newest
check-release: check-release-floor check-release-newest

dist/.built: pyproject.toml $(shell find lightning_gpuopt -type f -not -name '*.pyc')
	rm -rf dist && $(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist . && touch $@

check-release-floor check-release-newest: check-release-%: dist/.built
	rm -rf dist/$* && $($(if $(filter floor,$*),FLOOR,NEWEST)_PYTHON) -m venv dist/$*
	dist/$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints$(if $(filter floor,$*),-floor).txt "$$(ls dist/*.whl)[demo]"
	cd dist/$* && bin/lightning-gpuopt demo --images 256 --epochs 1

.PHONY: floor-python test-floor test-floor-all test-newest test-loaders test-engines

floor-python:
	@echo $(FLOOR_PYTHON)

# Without what touches little of torch, Lightning, NumPy or Pillow, and without the files about this project itself.
FLOOR := $(addprefix --ignore=tests/,cli demo diagnosis doctor measurements postmortem telemetry \
	test_architecture.py test_benchmarks.py test_benchmark_imports.py test_docs.py test_figures.py test_mutations.py)

test-floor: .venv-floor/.ready
	$(call run-lane,.venv-floor,$(if $(ARGS),$(ARGS),$(FLOOR)))

test-floor-all: .venv-floor/.ready
	$(call run-lane,.venv-floor)

test-newest: .venv-newest/.ready
	$(call run-lane,.venv-newest,$(ARGS))

test-loaders: .venv-loaders/.ready
	.venv-loaders/bin/python -m pytest -q -n 0 -m loaders $(ARGS)

test-engines: .venv-engines/.ready
	.venv-engines/bin/python -m pytest -q -n 0 -m engines $(ARGS)

.venv-floor/.ready: pyproject.toml constraints-floor.txt
	@$(call needs,test-floor,3.10,FLOOR_PYTHON)
	test -x .venv-floor/bin/python || $(FLOOR_PYTHON) -m venv .venv-floor
	.venv-floor/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-floor.txt -e '.[dev]'
	touch $@

.venv-loaders/.ready: pyproject.toml constraints-loaders.txt
	@$(call needs,test-loaders,3.11,LOADERS_PYTHON)
	test -x .venv-loaders/bin/python || $(LOADERS_PYTHON) -m venv .venv-loaders
	.venv-loaders/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-loaders.txt -e '.[dev]' $(LIBRARIES)
	touch $@

.venv-engines/.ready: pyproject.toml constraints.txt constraints-engines.txt
	@$(call needs,test-engines,3.11,ENGINES_PYTHON)
	test -x .venv-engines/bin/python || $(ENGINES_PYTHON) -m venv .venv-engines
	.venv-engines/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c constraints-engines.txt -e '.[dev]' $(ENGINES)
	touch $@

.venv-newest/.ready: pyproject.toml
	@$(call needs,test-newest,3.13,NEWEST_PYTHON)
	test -x .venv-newest/bin/python || $(NEWEST_PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[dev]'
	touch $@
