# Everything runs in .venv, made from Python 3.12; a second run reinstalls nothing.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
AOT_VENV := .venv-aot
CLIENTS_VENV := .venv-clients
AIPERF_VENV := .venv-aiperf
DOCS_VENV := .venv-docs
LOWEST_VENV := .venv-lowest
RAY_VENV := .venv-ray
CPU := JAX_PLATFORMS=cpu
# Each process of a lane would compile all tests again, and each command that a test starts all of jdllm.
unexport PYTHONDONTWRITEBYTECODE
# A process takes up to 3 GB. Who waits for a process that died would wait for ever.
SPREAD := -n auto --maxprocesses 4 --max-worker-restart 0
# Tests of a directory share models, and long tests are handed out one by one.
SHARING := $(SPREAD) --dist loadscope
ONE_BY_ONE := $(SPREAD) --dist worksteal
ELSEWHERE := --ignore tests/aot --ignore tests/gpu --ignore tests/ray
# `make test-slow PART=2/3` runs the second of three parts that take about the same time; so do the other longer
# lanes. tests/parts.py says how the times are recorded.
PART ?= 1/1

.DEFAULT_GOAL := help
.PHONY: help demo serve test default-tests test-slow test-demo test-lowest test-clients test-ray test-aot test-gpu \
  test-triton bench docs lint format clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "jdllm needs Python 3.12 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,train,convert,plot,serve,otel]'
	@touch $@

$(AOT_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(AOT_VENV)
	$(AOT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,cuda13]'
	@touch $@

$(CLIENTS_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --upgrade pip  # an older one resolves for ten minutes
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --editable '.[dev,serve,clients,harness]'
	@touch $@

# It needs other versions of what the others need.
$(AIPERF_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(AIPERF_VENV)
	$(AIPERF_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(AIPERF_VENV)/bin/python -m pip install --quiet --disable-pip-version-check aiperf
	@touch $@

$(RAY_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,serve,ray]'
	@touch $@

# uv takes the lowest version of each requirement in pyproject.toml, and the highest of what these need.
$(LOWEST_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(LOWEST_VENV)/bin/uv pip install --quiet --python $(LOWEST_VENV)/bin/python --resolution lowest-direct \
	  --editable '.[dev,train,convert,plot,serve,otel]'
	@touch $@

# Of the package it needs the extra alone: building the pages imports nothing of jdllm.
$(DOCS_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

demo: $(VENV)/.ready  ## generate text with the bundled model on the CPU
	@$(CPU) $(BIN)/python -m jdllm.demo

serve: $(VENV)/.ready  ## serve the bundled model on the CPU: a page and OpenAI's API at port 8000
	@$(CPU) $(BIN)/jdllm serve --max-num-batched-tokens 512

# Threads of a NumPy product wait busily, and there is a process for each core already.
test test-slow test-demo test-aot: export OPENBLAS_NUM_THREADS = 1

# Pyright has one thread: beside the tests it costs half of its time.
test: $(VENV)/.ready  ## lint and the default tests, on the CPU
	@$(MAKE) --no-print-directory --jobs 2 lint default-tests

default-tests: $(VENV)/.ready
	$(CPU) $(BIN)/python -m pytest $(SHARING) $(ELSEWHERE) \
	  -m 'not slow and not demo and not aot and not gpu and not clients'

test-slow: $(VENV)/.ready  ## the longer tests, on the CPU; PART=2/3 is the second of three parts
	$(CPU) $(BIN)/python -m pytest $(ONE_BY_ONE) $(ELSEWHERE) --part $(PART) \
	  -m '(slow or demo) and not aot and not gpu and not clients'

test-demo: $(VENV)/.ready  ## quick tests of the bundled model and the benchmarks, which test-slow runs too
	$(CPU) $(BIN)/python -m pytest $(SHARING) -m 'demo and not slow' tests/demo tests/benchmarks

# What uses each dependency: files, tokenizers, models, recorded runs, commands, pictures, the server.
LOWEST_TESTS := $(addprefix tests/,test_package.py test_progress.py checkpoints convert models \
  decoding/test_trajectories.py cli/test_generate.py planning/test_report.py demo/test_train.py \
  harness/test_translation.py $(addprefix api/test_,completions.py chat.py schema.py metrics.py batch.py bodies.py \
  otel.py))
test-lowest: $(LOWEST_VENV)/.ready  ## a selection of tests with the lowest versions of the dependencies
	$(LOWEST_VENV)/bin/uv pip list --python $(LOWEST_VENV)/bin/python
	$(CPU) $(LOWEST_VENV)/bin/python -m pytest $(SPREAD) --dist loadfile -o cache_dir=$(LOWEST_VENV)/cache \
	  -m 'not slow and not aot and not gpu and not clients' $(LOWEST_TESTS)

# One after the other: they share a server, and measure what it holds.
# litellm leaves event loops and their sockets open. They are collected during another test, or after the last one.
test-clients: export AIPERF=$(AIPERF_VENV)/bin/aiperf
test-clients: $(CLIENTS_VENV)/.ready $(AIPERF_VENV)/.ready  ## others' packages against a real server, on the CPU; takes PART
	command -v chromium >/dev/null || (apt-get update --quiet && apt-get install --quiet --yes chromium)
	$(CPU) $(CLIENTS_VENV)/bin/python -m pytest tests/clients -m clients --part $(PART) \
	  -W ignore:unclosed:ResourceWarning

# One after the other: each test has two cores busy.
test-ray: $(RAY_VENV)/.ready  ## several replicas under Ray Serve, on the CPU
	$(CPU) $(RAY_VENV)/bin/python -m pytest tests/ray

test-aot: $(AOT_VENV)/.ready  ## compile for GPUs without one; takes PART
	$(CPU) $(AOT_VENV)/bin/python -m pytest $(ONE_BY_ONE) --part $(PART) -m aot tests/aot tests/models

# Budgets count what any process has on the card. Four processes share a card.
CARDS = $(shell nvidia-smi --query-gpu=index --format=csv,noheader)
ON_CARDS = python3 -m pytest -p no:benchmark -n $$((4 * $(words $(CARDS)))) --max-worker-restart 0 \
  --dist worksteal -m gpu --part $(PART)
test-gpu test-triton: export XLA_PYTHON_CLIENT_PREALLOCATE=false
test-gpu test-triton: export JDLLM_TEST_CARDS=$(CARDS)
# NumPy takes every core for a product, and so do many processes at a time.
test-gpu test-triton: export OPENBLAS_NUM_THREADS=4
test-gpu:  ## tests on cards; takes PART; uses the python on the path, which needs jax with CUDA and pytest-xdist
	$(ON_CARDS) --ignore tests/gpu/test_budget.py tests/gpu tests/pallas
	case $(PART) in 1/*) python3 -m pytest -m gpu tests/gpu/test_budget.py ;; esac

# The other tests on a card ask for a form.
test-triton:  ## what generates and scores on cards, through kernels in Triton; takes PART
	$(ON_CARDS) --kernels triton \
	  tests/gpu/test_{against_transformers,cached_runs,causal,engine,prefilling,recorded_runs,triton}.py

bench:  ## benchmarks on a card; uses the python on the path, which needs jax with CUDA
	python3 -m benchmarks rerun --record || true  # what the README quotes; it ends with how many moved
	for rows in 1024 4096; do python3 -m benchmarks profile --rows $$rows; done
	python3 -m benchmarks profile --cached 4096
	for operator in masked_logits attention split_attention grouped_matmul skinny_matmul torch_kernels; do \
	  python3 -m benchmarks $$operator; done
	for case in company convert; do python3 -m benchmarks $$case; done
	for part in lmax latency latency_exact average error cost lazy allocators; do \
	  python3 -m benchmarks plan --part $$part; done
	python3 -m benchmarks tiers --check --rows 32768 --layers 4 --groups 4
	for case in overhead traffic first_token prefilling; do python3 -m benchmarks $$case; done
	python3 -m benchmarks results

docs: $(DOCS_VENV)/.ready  ## the documents as a site, in site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build

lint: $(VENV)/.ready  ## ruff, import-linter and pyright
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright

format: $(VENV)/.ready  ## format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove the environments and caches
	rm -rf $(VENV) $(AOT_VENV) $(CLIENTS_VENV) $(AIPERF_VENV) $(DOCS_VENV) $(LOWEST_VENV) $(RAY_VENV) \
	  site .pytest_cache .ruff_cache .hypothesis
