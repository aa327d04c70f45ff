# Every target makes its own environment in .venv from pyproject.toml and constraints.txt, so that a machine with
# Python 3.11 or later and make needs nothing else.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first interpreter that is new enough; python3.11 leads because the pins were taken with it.
ifndef PYTHON
PYTHON := $(shell for python in python3.11 python3 python3.12 python3.13; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$python; break; fi; done)
endif
JOBS ?= 2
PYTEST_FLAGS ?=
SCREENSHOTS ?=
BENCH_FLAGS ?=
COVERAGE_FLAGS ?=
COVERAGE_RECORD ?= benchmarks/results/coverage.jsonl
GPU_PYTHON ?= python3
GPU_JOBS ?= 16
GPU_SECONDS ?= 0
RECORD ?= benchmarks/results/gpu-suite-cuda-nvidia-h200.json

VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt
# Two workers share the cores, so that each test computes with one thread. Bytecode is kept: without it each worker
# would rewrite the assertions of all tests anew, and each process that a test starts would compile polyhead.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: help demo examples test test-long test-fast test-gpu test-numerics test-cluster lint docs package bench coverage frontend system \
	system-python system-compiler \
	system-browser system-node clean

help: ## show the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: $(VENV)/.installed-demo ## see what every head of two models does, in the terminal and as pages
	@$(BIN)/polyhead inspect tiny --tokens 4096 --html polyhead-report-tiny.html
	@$(BIN)/polyhead inspect minilm --html polyhead-report.html
	@echo
	@echo "Next: open polyhead-report-tiny.html in a browser, then inspect a model of your own: $(BIN)/polyhead inspect FOLDER --text FILE --html report.html"

# Models this small gain nothing from a second thread.
examples: $(VENV)/.installed-dev ## run scripts and notebooks in full, and record their outputs in build/examples.json
	@OMP_NUM_THREADS=1 $(BIN)/python -m examples build/examples.json

# SCREENSHOTS=FOLDER keeps pictures of the pages that the browser tests open, which no test looks at.
test: $(VENV)/.installed-dev | system-compiler system-browser ## run the tests and the examples in docstrings
	@POLYHEAD_SCREENSHOTS=$(SCREENSHOTS) $(PYTEST) -m 'not long' $(PYTEST_FLAGS)

test-long: $(VENV)/.installed-dev | system-compiler system-browser ## run the tests that take long, which `make test` leaves out
	@POLYHEAD_SCREENSHOTS=$(SCREENSHOTS) $(PYTEST) -m long $(PYTEST_FLAGS)

test-fast: $(VENV)/.installed-dev ## two cases of each test that needs no compiler, browser or interpreter and is not slow
	@$(PYTEST) -m 'not (compile or interpreter or browser or slow or long)' --cases 2 $(PYTEST_FLAGS)

# With the interpreter that is there and what is installed beside it: a CUDA build of torch is not what .venv has.
test-gpu: ## run the tests that need a CUDA device, and write a record of the run
	@env -u PYTHONDONTWRITEBYTECODE PYTHONPATH=src:. $(GPU_PYTHON) -m pytest -p no:benchmark -p no:cacheprovider -p tests.gpu_suite \
		-o addopts="--import-mode=importlib --strict-markers" -q -n $(GPU_JOBS) --dist worksteal \
		--gpu-record $(RECORD) --gpu-seconds $(GPU_SECONDS) $(PYTEST_FLAGS) tests

# Whatever holds results to an error budget, and the share of it that each result uses. Needs no environment of its own:
# make test-numerics NUMERICS_PYTHON=python3 JOBS=16
NUMERICS_PYTHON ?= $(BIN)/python
BUDGETS ?= build/budgets.jsonl
test-numerics: ## run the tests of rounding errors; BUDGETS names the record of shares
	@mkdir -p $(dir $(BUDGETS))
	@POLYHEAD_BUDGETS=$(BUDGETS) $(NUMERICS_PYTHON) -m pytest -q -p no:benchmark -p no:cacheprovider -n $(JOBS) \
		--dist worksteal -m "numerics and not gpu" $(PYTEST_FLAGS) $$(grep -rl --include='test_*.py' mark.numerics tests)

# In an environment of its own, since Ray is large and nothing else needs it. The cluster has four workers on this machine.
test-cluster: $(VENV)-cluster/.installed-cluster ## run the tests that need Ray, with a local cluster
	@env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(VENV)-cluster/bin/python -m pytest $(PYTEST_FLAGS) tests/cluster

lint: $(VENV)/.installed-dev ## check style, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/mypy
	@$(BIN)/python -m tests.gpu_record

# The root of the repository is the source folder, so that links are the same on GitHub. A warning is an error.
docs: $(VENV)/.installed-dev ## build the documentation site: build/docs/index.html
	@$(BIN)/python -m sphinx --builder html --conf-dir docs --doctree-dir build/doctrees --fail-on-warning --keep-going --quiet \
		. build/docs

# The wheel is built from the sdist and used in an environment of its own, outside this folder; see tests/clean_install.py.
package: $(VENV)/.installed-dev ## build the sdist and the wheel in dist/, and use the wheel without extras
	@$(BIN)/python -m tests.clean_install dist

bench: $(VENV)/.installed-dev | system-compiler ## measure against the contenders
	@$(BIN)/python -m benchmarks layers $(BENCH_FLAGS)

# In an environment of its own, since torchvision, which timm imports, is not built for every torch: without its requirements.
COVERAGE_VENV := .venv-coverage
coverage: | system-python ## judge what is observed of every model family, and write docs/coverage.md; COVERAGE_FLAGS="--only bloom"
	@.ci/environment $(COVERAGE_VENV) $(PYTHON) coverage
	@OMP_NUM_THREADS=1 $(COVERAGE_VENV)/bin/python -m benchmarks coverage --output $(COVERAGE_RECORD) $(COVERAGE_FLAGS)

# What is built is committed, so that nobody needs Node to use, install or test the package.
frontend: | system-node ## build the page and the viewer from frontend/
	@cd frontend && npm ci --no-fund --no-audit --loglevel=error && npm run build

clean: ## remove the environment and everything that was built
	@rm -rf $(VENV) $(VENV)-cluster $(VENV)-coverage $(VENV)*.lock build dist frontend/node_modules polyhead-report*.html \
		.pytest_cache .mypy_cache .ruff_cache .hypothesis

# Killed in the middle, an installation starts over: see .ci/environment.
$(VENV)/.installed-%: $(SOURCES) $(wildcard $(VENV)/.installing) | system-python
	@.ci/environment $(VENV) $(PYTHON) $*

$(VENV)-cluster/.installed-%: $(SOURCES) $(wildcard $(VENV)-cluster/.installing) | system-python
	@.ci/environment $(VENV)-cluster $(PYTHON) $*

# System packages: each is looked for first, and installed only where it is missing.

define require_packages
	install() { \
		if ! command -v apt-get >/dev/null; then \
			echo "missing: $$*. There is no apt-get here; install them with this system's package manager" >&2; exit 1; \
		fi; \
		local root=(); \
		if [ "$$(id -u)" -ne 0 ]; then \
			if ! command -v sudo >/dev/null; then \
				echo "missing: $$*. Install them as root: apt-get install $$*" >&2; exit 1; \
			fi; \
			root=(sudo); \
		fi; \
		echo "installing the system packages $$*"; \
		"$${root[@]}" apt-get update -qq >/dev/null; \
		"$${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$$@" >/dev/null; \
	};
endef

system: system-python system-compiler system-browser ## install the system packages that are missing

# Debian ships Python without ensurepip, and the virtual environment needs it.
system-python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "polyhead needs Python 3.11 or later; none was found. Name one with make PYTHON=/path/to/python" >&2; exit 1; \
	fi
	@$(require_packages) \
	if ! [ -x $(BIN)/python ] && ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		install "$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"; \
	fi

# torch.compile builds C++ that includes Python.h.
system-compiler: | system-python
	@$(require_packages) \
	missing=(); \
	if ! command -v $${CXX:-g++} >/dev/null; then missing+=(g++); fi; \
	if ! $(PYTHON) -c 'import pathlib, sys, sysconfig; sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())'; then \
		missing+=("$$($(PYTHON) -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')"); \
	fi; \
	if [ $${#missing[@]} -gt 0 ]; then install "$${missing[@]}"; fi

# The tests of the page and of the viewer run in a real browser, and look at both in Chinese as well.
system-browser: | system-python
	@$(require_packages) \
	missing=(); \
	if ! command -v chromium-headless-shell >/dev/null && ! command -v chromium >/dev/null; then \
		if [ -n "$$(apt-cache show chromium-headless-shell 2>/dev/null)" ]; then missing+=(chromium-headless-shell); \
		else missing+=(chromium); fi; \
	fi; \
	if ! command -v fc-list >/dev/null || [ -z "$$(fc-list :lang=zh)" ]; then missing+=(fontconfig fonts-wqy-microhei); fi; \
	if [ $${#missing[@]} -gt 0 ]; then install "$${missing[@]}"; fi

system-node:
	@if ! node -e 'process.exit(Number(process.versions.node.split(".")[0]) < 20 ? 1 : 0)' 2>/dev/null || ! command -v npm >/dev/null; then \
		echo "the page is built with Node.js 20 or later and npm; none was found" >&2; exit 1; \
	fi
