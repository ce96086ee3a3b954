# The commands of hocket: each sets up .venv itself when it is missing or when a pin has changed.
# Needs Python 3.11 or newer and make, nothing else. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
.SILENT:

# The interpreter that makes .venv; `make PYTHON=python3.12 test` picks another.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.hocket-stamp

# Two workers: many tests are groups of small processes that wait for each other most of the time.
WORKERS     ?= 2
PYTEST_ARGS ?=
TRAIN_ARGS  ?=
BENCH_ARGS  ?=
NPROC       ?= 2

.PHONY: help setup train test lint docs bench format clean
# `make -j test` must still end with pytest.
.NOTPARALLEL:

help:  ## list the targets
	echo "hocket: pipeline-parallel training for PyTorch"
	echo
	grep -E '^[a-z]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 16
	echo
	echo "options: TRAIN_ARGS='--schedule zero_bubble_v --steps 50'  NPROC=2  PYTEST_ARGS='-k loss'  WORKERS=2  PYTHON=python3.12"

setup: $(STAMP)  ## make .venv with the pinned versions

$(STAMP): pyproject.toml constraints.txt
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "hocket needs Python 3.11 or newer, but '$(PYTHON)' is older or missing; try: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	if [ ! -x $(BIN)/python ]; then
	  echo "== setup: making $(VENV) with $$($(PYTHON) --version)"
	  "$(PYTHON)" -m venv $(VENV)
	fi
	echo "== setup: installing torch and the tools at the versions of constraints.txt (a few minutes the first time)"
	export PIP_DISABLE_PIP_VERSION_CHECK=1
	# torch first and alone: an exact pin is the request that lets pip take a local CPU build where there is one.
	$(BIN)/python -m pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	# No build isolation: the pinned hatchling is used, and nothing is fetched twice.
	$(BIN)/python -m pip install --quiet -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

train: $(STAMP)  ## train a small GPT on the source of Python's library, on two pipeline ranks
	echo "== train: torchrun --nproc-per-node $(NPROC) examples/train_gpt.py $(TRAIN_ARGS)"
	# --standalone: a free port, so that two runs can share a machine.
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) \
	  examples/train_gpt.py $(TRAIN_ARGS)

lint: $(STAMP)  ## ruff, its formatter in check mode, types and import contracts
	echo "== lint: ruff check"
	$(BIN)/ruff check .
	echo "== lint: ruff format --check"
	$(BIN)/ruff format --check .
	echo "== lint: pyrefly check"
	$(BIN)/pyrefly check
	echo "== lint: import contracts"
	$(BIN)/lint-imports

docs: $(STAMP)  ## build the documentation into site/, warnings are errors
	echo "== docs: mkdocs build --strict"
	$(BIN)/mkdocs build --strict --quiet --site-dir site

# pytest comes last, so that its closing line is the last thing a reader (or a CI) sees.
test: lint docs  ## lint, types, import contracts, docs and all tests
	echo "== test: pytest on $(WORKERS) workers"
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

bench: $(STAMP)  ## the benchmarks, written to benchmarks/results
	echo "== bench: benchmarks $(BENCH_ARGS)"
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv and everything that runs left behind
	rm -rf $(VENV) site build dist .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
