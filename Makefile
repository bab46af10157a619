# Every target works from a fresh clone with Python 3.11+ and make: a virtual environment is made where it is needed, and
# brought up to date whenever pyproject.toml or its constraints changed since (the stamp files below).
#
#   make demo    the demo, on the bundled pair            make test   everything CI runs
#   make setup   the development environment, .venv       make help   the other targets

PYTHON ?= python3
VENV := .venv
VENV_OLDEST := .venv-oldest
VENV_LATEST := .venv-latest
BIN := $(VENV)/bin
# Two processes of one torch thread each (tests/conftest.py): on models this small, threads only get in each other's way.
PYTEST_JOBS ?= 2
PYTEST_ARGS ?=
CHAT_ARGS ?=
# make real-draft: a folder with gsm8k/ and mt_bench/ for machines without the Hub, and other options of `dflash-hf train`.
DATA_DIR ?=
TRAIN_ARGS ?=
REAL_ARGS ?=
# make fuzz: how long, from which seed, which kinds, how many cases of each at most (0: as many as there is time for).
SECONDS ?= 120
SEED ?=
KIND ?= text,images,interrupts,hostile
CASES ?= 0
# What must also hold on the oldest Transformers and on the newest of everything, and what a user meets first there.
OLDEST_TESTS ?= tests/parity tests/equality
EXAMPLES := tests/docs/test_readme.py::test_python_examples_run
FIRST_TESTS ?= '$(EXAMPLES)[README.md]' '$(EXAMPLES)[docs/generate.md]' \
  tests/pair/test_pair.py::test_the_demo_command_compares_and_succeeds \
  tests/training/test_trainer.py::test_a_run_leaves_records_and_the_target_as_it_was

# The newest torch that the index has a build for CPUs of: a bare `torch` is a CUDA build of 6.6 GB.
LATEST_TORCH ?= torch==2.13.0
# z-lab's package, to compare with (tests/parity, tests/bench, make bench). Its pins of datasets and tqdm are not ours, so
# that no extra can ask for it; where no index has it, those comparisons are left out.
ZLAB := dflash==0.1.0
# An environment without constraints that is never renewed is a pinned one: its stamp is good for a day.
TODAY := $(shell date +%F)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without compiled files every process of the tests rewrites and compiles all of them anew: nine seconds of a processor.
unexport PYTHONDONTWRITEBYTECODE

# Most of the 20,000 files of an environment are never imported. Compiling all of them takes 30 to 45 s of a processor, and
# Python compiles a file when it is first imported.
PIP_INSTALL := pip install --quiet --no-compile

PARALLEL := -n $(PYTEST_JOBS) --dist worksteal
CPU := -m "not gpu and not slow"
CPU_RELEASE := -m "not gpu and not slow and not same_on_every_release"

# Ends the recipe unless these files exist: with several processes pytest leaves out what does not.
need = @for path in $(1); do test -e "$${path%%::*}" || { \
  echo "expected the tests of this target to exist, got no $$path; write it, or name other ones" >&2; exit 1; }; done

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo chat setup test lint format types architecture test-cpu test-browser chromium screenshots
.PHONY: fuzz docs release-check test-types-browser-kernels test-kernels test-docs test-oldest test-latest versions
.PHONY: environments toy toy-vision toy-hybrid real real-draft bench clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 16

demo: $(VENV)/.stamp-demo  ## the bundled pairs answer held-out prompts, texts and pictures, with and without a draft
	$(BIN)/dflash-hf demo

chat: $(VENV)/.stamp-dev  ## a web page, on this machine only: SmolLM2 after make real, else a toy (CHAT_ARGS: --port, --pair ...)
	$(BIN)/python demos/app.py $(CHAT_ARGS)

setup: $(VENV)/.stamp-dev  ## make or update .venv with everything the targets below need

test: environments lint test-types-browser-kernels test-cpu test-oldest test-latest  ## all checks

# pip has one thread: two environments are made beside the first one, which the next checks need.
environments:
	@$(MAKE) $(VENV_OLDEST)/.stamp-test $(VENV_LATEST)/.stamp-$(TODAY) & others=$$!; \
	trap 'kill $$others; exit 130' INT TERM; \
	$(MAKE) $(VENV)/.stamp-dev; failed=$$?; \
	wait $$others || failed=1; \
	exit $$failed

# Pyright has one thread, and the browser tests wait half of the time. The kernels' tests compute in what these leave idle,
# at the lowest priority, so that they keep no page waiting. What they say is shown at the end.
test-types-browser-kernels: $(VENV)/.stamp-dev
	@log=$$(mktemp); \
	nice -n 19 $(MAKE) test-kernels >"$$log" 2>&1 & kernels=$$!; \
	$(MAKE) types & types=$$!; \
	trap 'kill $$kernels $$types; rm -f "$$log"; exit 130' INT TERM; \
	$(MAKE) test-browser; failed=$$?; \
	wait $$types || failed=1; \
	wait $$kernels || failed=1; \
	cat "$$log"; rm "$$log"; exit $$failed

lint: $(VENV)/.stamp-dev  ## ruff, rules and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.stamp-dev  ## let ruff rewrite the layout and what it can fix
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

types: $(VENV)/.stamp-dev  ## pyright, strict on src/ and kernels/
	$(BIN)/pyright --warnings

architecture: $(VENV)/.stamp-dev  ## the import order and the other budgets (a part of test-cpu)
	$(BIN)/python -m pytest tests/test_architecture.py tests/test_imports.py $(PYTEST_ARGS)

test-cpu: $(VENV)/.stamp-dev  ## the CPU suite: architecture and documentation included, kernels and browser not
	@$(BIN)/python .ci/versions.py
	$(BIN)/python -m pytest tests --ignore=tests/kernels --ignore=tests/browser $(CPU) $(PARALLEL) $(PYTEST_ARGS)

# In one process: a second one would load everything, and start the browser and the servers, once more, for 70 seconds of a
# processor.
test-browser: $(VENV)/.stamp-dev chromium  ## the chat in a real browser
	$(BIN)/python -m pytest tests/browser $(CPU) $(PYTEST_ARGS)

screenshots: $(VENV)/.stamp-dev chromium  ## docs/images anew, from the bundled pair
	$(BIN)/python -m pytest tests/browser/screenshots.py $(PYTEST_ARGS)

# The shell without a window, which Playwright starts by default where it brings its own browser: it takes two thirds of
# the processor time of a whole Chromium, and fewer packages. Any of them will do.
chromium:  ## the browser of test-browser; installed where there is none, and where apt and its rights are there
	@for name in "$$CHROMIUM" chromium-headless-shell chromium chromium-browser google-chrome; do \
	  command -v "$$name" >/dev/null && exit; done; \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	  { apt-get install -y -qq --no-install-recommends chromium-headless-shell >/dev/null 2>&1 || \
	    apt-get install -y -qq --no-install-recommends chromium >/dev/null; }; } || { echo \
	  "expected Chromium for the browser tests, got none; install it (Debian: apt-get install chromium-headless-shell)" \
	  "or set CHROMIUM to its path" >&2; exit 1; }

fuzz: $(VENV)/.stamp-dev  ## random cases against plain generate and the other promises (SECONDS, SEED, KIND, CASES)
	PYTHONPATH=tests $(BIN)/python -m fuzz --seconds '$(SECONDS)' --seed '$(SEED)' --kind '$(KIND)' --cases '$(CASES)' \
	  --jobs $(PYTEST_JOBS) $(FUZZ_ARGS)

test-docs: $(VENV)/.stamp-dev  ## the examples and links of README and docs/ (a part of test-cpu)
	$(BIN)/python -m pytest tests/docs $(PYTEST_ARGS)

test-kernels: $(VENV)/.stamp-dev  ## the kernels against their references, in Triton's interpreter
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels $(CPU) $(PARALLEL) $(PYTEST_ARGS)

docs: $(VENV)/.stamp-dev  ## the site of docs/ into build/site, links checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release-check: $(BIN)/python  ## build; install and use the wheel as a user does, torch with CUDA (RELEASE_REQUIREMENTS)
	$(BIN)/python .ci/release_check.py

test-oldest: $(VENV_OLDEST)/.stamp-test  ## the equality tests on the oldest supported Transformers
	$(call need,$(OLDEST_TESTS))
	@$(VENV_OLDEST)/bin/python .ci/versions.py
	$(VENV_OLDEST)/bin/python -m pytest $(OLDEST_TESTS) $(CPU_RELEASE) $(PARALLEL) $(PYTEST_ARGS)

test-latest: $(VENV_LATEST)/.stamp-$(TODAY) $(VENV)/.stamp-dev  ## on the newest of everything: what a user meets first, and the same tests
	$(call need,$(FIRST_TESTS) $(OLDEST_TESTS))
	@$(VENV_LATEST)/bin/python .ci/versions.py
	$(VENV_LATEST)/bin/python -m pytest $(FIRST_TESTS) $(CPU) $(PARALLEL) $(PYTEST_ARGS)
	@if $(VENV_LATEST)/bin/python .ci/versions.py --same-as $(BIN)/python; then \
	  echo "the newest releases are those of constraints.txt, with which test-cpu runs $(OLDEST_TESTS)"; else \
	  set -x; $(VENV_LATEST)/bin/python -m pytest $(EXAMPLES) $(OLDEST_TESTS) $(CPU_RELEASE) $(PARALLEL) $(PYTEST_ARGS); fi

versions:  ## run the tests of all three environments, then write into docs/tested.md with which versions they passed
	$(MAKE) test-cpu test-oldest test-latest PYTEST_ARGS=
	$(BIN)/python .ci/versions.py --passed constraints.txt
	$(VENV_OLDEST)/bin/python .ci/versions.py --passed constraints-oldest.txt
	$(VENV_LATEST)/bin/python .ci/versions.py --passed 'make test-latest'

toy: $(VENV)/.stamp-dev  ## train a pair like the bundled one from nothing, into build/toy (up to two hours)
	$(BIN)/python demos/toy/train_target.py --out build/toy/target
	$(BIN)/python demos/toy/train_draft.py --target build/toy/target --out build/toy/draft
	$(BIN)/python demos/toy/make_prompts.py --out build/toy/held_out.jsonl
	$(BIN)/dflash-hf demo --pair build/toy

toy-vision: $(VENV)/.stamp-dev  ## train a vision pair like the bundled one from nothing, into build/toy/vision (hours)
	$(BIN)/python demos/toy/train_vision_target.py --out build/toy/vision/target
	$(BIN)/python demos/toy/train_draft.py --pair vision --steps 2800 --target build/toy/vision/target \
	  --out build/toy/vision/draft
	$(BIN)/python demos/toy/make_prompts.py --pair vision --per-kind 8 --out build/toy/vision/held_out.jsonl

toy-hybrid: $(VENV)/.stamp-dev  ## train a hybrid pair like the bundled one from nothing, into build/toy/hybrid (an hour)
	$(BIN)/python demos/toy/train_target.py --pair hybrid --steps 320 --pool 24 --micro 12 --warmup 20 \
	  --out build/toy/hybrid/target
	$(BIN)/python demos/toy/train_draft.py --pair hybrid --prompts 1000 --steps 1100 --batch 4 --anchors 24 \
	  --no-bf16 --loss dpace --target build/toy/hybrid/target \
	  --out build/toy/hybrid/draft
	$(BIN)/python demos/toy/make_prompts.py --pair hybrid --out build/toy/hybrid/held_out.jsonl

real: $(VENV)/.stamp-dev  ## SmolLM2-135M-Instruct into build/smollm2/target and target-bf16 (REAL_ARGS: --hub)
	$(BIN)/python demos/real/fetch.py $(REAL_ARGS)

real-draft: $(VENV)/.stamp-dev  ## train a draft for SmolLM2 into build/smollm2/mixture (hours; run again it goes on) (DATA_DIR, TRAIN_ARGS)
	[ -d build/smollm2/target ] || $(BIN)/python demos/real/fetch.py $(REAL_ARGS)
	[ -f build/smollm2/data/gsm8k-train.jsonl ] || \
	  $(BIN)/dflash-hf bench prepare gsm8k-train $(if $(DATA_DIR),--data-dir $(DATA_DIR)) --out build/smollm2/data
	$(BIN)/dflash-hf train --config demos/smollm2/train.yaml $(if $(DATA_DIR),--bench-data-dir $(DATA_DIR)) $(TRAIN_ARGS)
	$(BIN)/python demos/smollm2/prompts.py --out build/smollm2/data
	$(BIN)/dflash-hf train --config demos/smollm2/mixture.yaml $(if $(DATA_DIR),--bench-data-dir $(DATA_DIR)) $(TRAIN_ARGS)

bench: $(VENV)/.stamp-dev  ## time the bundled pairs on this machine, next to the other ways of decoding
	-$(BIN)/python -m $(PIP_INSTALL) --no-deps $(ZLAB)
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/decode.py --pair vision

clean:  ## remove the environments and what tools left behind
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_LATEST) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than what it was installed from. Two for .venv, so that `make demo` need not install the type checker.
$(VENV)/.stamp-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m $(PIP_INSTALL) --constraint constraints.txt --editable '.[vlm]'
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m $(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	-$(BIN)/python -m $(PIP_INSTALL) --no-deps $(ZLAB)
	@touch $@ $(VENV)/.stamp-demo

$(VENV_OLDEST)/.stamp-test: pyproject.toml constraints-oldest.txt | $(VENV_OLDEST)/bin/python
	$(VENV_OLDEST)/bin/python -m $(PIP_INSTALL) --constraint constraints-oldest.txt --editable '.[test]'
	@touch $@

$(VENV_LATEST)/.stamp-$(TODAY): pyproject.toml | $(VENV_LATEST)/bin/python
	$(VENV_LATEST)/bin/python -m $(PIP_INSTALL) --upgrade --upgrade-strategy eager $(LATEST_TORCH) \
	  --editable '.[bench,kernels,test,vlm]'
	@rm -f $(VENV_LATEST)/.stamp-*
	@touch $@

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "expected Python 3.11 or newer, got $$($(PYTHON) --version 2>&1); name another one: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	$(PYTHON) -m venv $*
