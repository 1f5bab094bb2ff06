# SPDX-License-Identifier: Apache-2.0
# Each target makes .venv and installs what it needs by itself; all it asks for is a Python of 3.11 or newer.
#
#   make quickstart   train a small language model by reinforcement and report on it (no GPU, no downloads)
#   make test         the whole test suite
#   make test-gpu     what needs a GPU, and the kernels' tests on it
#   make check        ruff, pyright and the architecture tests
#   make bench        the CPU benchmark
#   make clean        remove .venv and caches, never runs or checkpoints
#
# Settings: PYTHON=/path/to/python     the interpreter to make .venv from
#           TORCH_ARGS="..."           more arguments for installing torch, such as the index of its CPU
#                                      builds where pip would fetch a CUDA build that you have no use for
#           TEST_PROCESSES=2           test processes that run side by side, each over whole files of tests
#           PYTEST_ARGS="..."          more arguments for pytest

PYTHON ?=
TORCH_ARGS ?=
TEST_PROCESSES ?= 2
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet install
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
SOURCES := tandem tests $(wildcard examples benchmarks)

# One thread a process: on busy cores more threads make small models many times slower.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: quickstart test test-gpu check bench clean
.DELETE_ON_ERROR:

quickstart: $(RUN_STAMP)
	@$(BIN)/tandem quickstart

test: $(DEV_STAMP)
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

test-gpu: $(DEV_STAMP)
	@$(BIN)/python -m pytest tests/gpu tests/unit/models/kernels tests/unit/rollout/paged $(PYTEST_ARGS)

check: $(DEV_STAMP)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/python -m pyright
	@$(BIN)/python -m pytest -q tests/arch

bench: $(RUN_STAMP)
	@$(BIN)/python benchmarks/cpu_tiny.py

clean:
	@rm -rf $(VENV) build dist .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3); do \
	    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    echo "Making $(VENV) with $$("$$python" --version) ($$(command -v "$$python"))"; \
	    if "$$python" -m venv $(VENV) >/dev/null && $(BIN)/python -m pip --version >/dev/null; then exit 0; fi; \
	    rm -rf $(VENV); found="$$found $$python"; \
	done; \
	if [ -n "$$found" ]; then \
	    echo "error:$$found cannot make a virtual environment. On Debian or Ubuntu: apt-get install python3-venv" >&2; \
	else \
	    echo "error: no Python of 3.11 or newer found. Install one, or name it: make PYTHON=/path/to/python" >&2; \
	fi; exit 1

# torch goes first and by its pin alone, so that a CPU build offered by pip's configuration is taken as it is.
$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing tandem and its dependencies into $(VENV) (a few minutes the first time)"
	@$(PIP) $(TORCH_ARGS) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) --constraint constraints.txt --editable .
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo "Installing what tests and checks need"
	@$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@
