# Every target works from a fresh clone with Python 3.11+ and make: a virtual environment is made where it is needed, and
# brought up to date whenever pyproject.toml or its constraints changed since (the stamp files below).
#
#   make demo    the demo, on the bundled pair            make test   everything CI runs
#   make setup   the development environment, .venv       make help   the other targets

PYTHON ?= python3
VENV := .venv
VENV_OLDEST := .venv-oldest
BIN := $(VENV)/bin
# Two processes of one torch thread each (tests/conftest.py): on models this small, threads only get in each other's way.
PYTEST_JOBS ?= 2
PYTEST_ARGS ?=
# Folders whose tests must also hold on the oldest Transformers.
OLDEST_TESTS ?= tests/parity tests/equality
KERNEL_TESTS := $(wildcard tests/kernels)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

PARALLEL := -n $(PYTEST_JOBS) --dist worksteal
CPU := -m "not gpu and not slow"

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo setup test lint format types architecture test-cpu test-kernels test-docs test-oldest toy bench clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 16

demo: $(VENV)/.stamp-demo  ## the bundled pair answers held-out prompts with and without its draft
	$(BIN)/dflash-hf demo

setup: $(VENV)/.stamp-dev  ## make or update .venv with everything the targets below need

test: lint types test-cpu test-kernels test-oldest  ## all checks, in the order in which they are cheap

lint: $(VENV)/.stamp-dev  ## ruff, rules and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.stamp-dev  ## let ruff rewrite the layout and what it can mend
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

types: $(VENV)/.stamp-dev  ## pyright, strict on src/ and kernels/
	$(BIN)/pyright --warnings

architecture: $(VENV)/.stamp-dev  ## the import order and the other budgets (a part of test-cpu)
	$(BIN)/python -m pytest tests/test_architecture.py $(PYTEST_ARGS)

test-cpu: $(VENV)/.stamp-dev  ## the CPU suite: architecture and documentation included, kernels not
	$(BIN)/python -m pytest tests --ignore=tests/kernels $(CPU) $(PARALLEL) $(PYTEST_ARGS)

test-docs: $(VENV)/.stamp-dev  ## the examples and links of README and docs/ (a part of test-cpu)
	$(BIN)/python -m pytest tests/docs $(PYTEST_ARGS)

test-kernels: $(VENV)/.stamp-dev  ## the kernels against their references, in Triton's interpreter
ifeq ($(KERNEL_TESTS),)
	@echo "test-kernels: no tests/kernels yet, as there is no kernel yet"
else
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(KERNEL_TESTS) $(CPU) $(PARALLEL) $(PYTEST_ARGS)
endif

test-oldest: $(VENV_OLDEST)/.stamp-test  ## the equality tests on the oldest supported Transformers
	@for path in $(OLDEST_TESTS); do test -e "$$path" || { \
	  echo "expected the tests of OLDEST_TESTS to exist, got no $$path; write it, or name other ones" >&2; exit 1; }; done
	$(VENV_OLDEST)/bin/python -m pytest $(OLDEST_TESTS) $(CPU) $(PARALLEL) $(PYTEST_ARGS)

toy: $(VENV)/.stamp-dev  ## train a pair like the bundled one from nothing, into build/toy (up to two hours)
	$(BIN)/python demos/toy/train_target.py --out build/toy/target
	$(BIN)/python demos/toy/train_draft.py --target build/toy/target --out build/toy/draft
	$(BIN)/python demos/toy/make_prompts.py --out build/toy/held_out.jsonl
	$(BIN)/dflash-hf demo --pair build/toy

bench: $(VENV)/.stamp-dev  ## time the bundled pair on this machine, next to the other ways of decoding it
	$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0
	$(BIN)/python benchmarks/decode.py

clean:  ## remove the environments and what tools left behind
	rm -rf $(VENV) $(VENV_OLDEST) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than what it was installed from. Two for .venv, so that `make demo` need not install the type checker.
$(VENV)/.stamp-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.stamp-demo

$(VENV_OLDEST)/.stamp-test: pyproject.toml constraints-oldest.txt | $(VENV_OLDEST)/bin/python
	$(VENV_OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[test]'
	@touch $@

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "expected Python 3.11 or newer, got $$($(PYTHON) --version 2>&1); name another one: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	$(PYTHON) -m venv $*
