# `make serve` sets everything up and serves deployments.yaml; `make test` sets everything up and tests.
SHELL := /bin/sh
BIN := .venv/bin
# The first Python on the path that is new enough (PYTHON=... to choose another).
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && exit; \
	done; echo python3)
SOURCES := serve_app tests benchmarks scripts

.PHONY: help install install-dev serve test test-unit check lint types format lock bench fuzz chaos soak clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

install:  ## Make .venv: locked dependencies, the Triton runtime, the sample models
	@$(PYTHON) scripts/bootstrap.py

install-dev:  ## The same, and what tests and checks need
	@$(PYTHON) scripts/bootstrap.py --dev

serve: install  ## Serve deployments.yaml on a local Ray until Ctrl-C
	@exec $(BIN)/serve-app up deployments.yaml

test: install-dev  ## All tests
	$(BIN)/pytest

test-unit: install-dev  ## Tests that need neither Ray nor Triton
	$(BIN)/pytest tests/unit

check: lint types  ## Format, lint and types

lint: install-dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

types: install-dev
	$(BIN)/mypy

format: install-dev  ## Put the code into the house's form
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

lock: install-dev  ## Resolve the versions anew (see CONTRIBUTING)
	sh scripts/lock.sh

bench: install-dev  ## Compare with other ways to serve the same model on this machine
	$(BIN)/python -m benchmarks

fuzz: install-dev  ## Tens of thousands of generated requests, and broken ones for the decoders (see CONTRIBUTING)
	$(BIN)/python -m tests.support.schema_fuzz --requests 10000
	$(BIN)/python -m benchmarks.fuzz_codecs --inputs 200000

chaos: install-dev  ## Faults under load, one after another, and a table of what callers saw
	$(BIN)/python -m tests.chaos

soak: install-dev  ## Twenty minutes of load with a fault every 20 s, and what the processes hold meanwhile
	$(BIN)/python -m tests.chaos --soak-min 20

clean:  ## Remove everything that install and the tools made
	rm -rf .venv .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
